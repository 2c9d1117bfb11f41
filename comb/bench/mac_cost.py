"""`comb bench mac-cost`: what a token of one layer costs, with exact attention and with MAC where every head hits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from tqdm import tqdm
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from comb.bench.report import TextTable, ratio, short_milliseconds
from comb.evaluation.run import Timing
from comb.mac import MacConfig
from comb.mac.breakeven import AttentionShape, Costs, least_context
from comb.mac.interface import AttentionCall
from comb.mac.measure import at_length, measure_costs, reusing, seconds, shape_of
from comb.mac.rotation import LayerQueries
from comb.mac.rule import HIT_RATE


@dataclass(frozen=True)
class CostPoint:
    """One context length.

    Args:
        exact_s, mac_s: per token and layer. speedup: exact over MAC, within a repeat.
        pays: what the break-even rule says.
    """

    context: int
    exact_s: Timing
    mac_s: Timing
    speedup: Timing
    pays: bool

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class LayerCosts:
    """All contexts, the rule's constants, and the least context at which it takes MAC (None: at none)."""

    points: tuple[CostPoint, ...]
    costs: Costs
    pays_from: int | None


@torch.no_grad()
def measure_layer(
    shape: AttentionShape,
    config: MacConfig,
    contexts: Sequence[int],
    *,
    rows: int = 1,
    repeats: int = 5,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    progress: bool = True,
) -> LayerCosts:
    """Times of attention alone, by context, both ways in turn: torch's SDPA, and a step of MAC that finds its match.

    Raises:
        ValueError: for a context that is no longer than what a hit reads.
    """
    if min(contexts) <= config.hit_keys():
        raise ValueError(f"a hit reads up to {config.hit_keys()} keys: give longer contexts than {min(contexts)}")
    call, queries = _call(shape, rows, dtype, device), LayerQueries(nn.Identity())
    costs = measure_costs(call, queries, config)
    pays_from = least_context(rows, HIT_RATE, shape_of(call), config, costs)
    points = []
    for context in tqdm(contexts, "contexts", disable=not progress, leave=False):
        whole = at_length(call, context)
        reuse = reusing(whole, queries, config)
        taken = [(seconds(whole.exact, call.query.device), seconds(reuse, call.query.device)) for _ in range(repeats)]
        exact, mac, speedup = (
            Timing.over(values) for values in ([e for e, _ in taken], [m for _, m in taken], [e / m for e, m in taken])
        )
        points.append(CostPoint(context, exact, mac, speedup, pays_from is not None and context >= pays_from))
    return LayerCosts(tuple(points), costs, pays_from)


def cost_table(found: LayerCosts) -> TextTable:
    """One line per context."""
    lines = tuple(
        (
            f"{point.context:,}",
            short_milliseconds(point.exact_s),
            short_milliseconds(point.mac_s),
            ratio(point.speedup),
            "MAC" if point.pays else "exact",
        )
        for point in found.points
    )
    rule = "at no length" if found.pays_from is None else f"from {found.pays_from:,} tokens on"
    remarks = (
        "Per token and layer, attention alone; median ±half the distance of the quartiles, ratios within a repeat with "
        f"their quartiles. MAC: every head hits. The break-even rule, counting on {100 * HIT_RATE:g}% hits per head, "
        f"takes MAC {rule}.",
    )
    return TextTable("One layer", ("context", "exact ms", "MAC ms", "exact/MAC", "the rule takes"), lines, remarks)


def _call(shape: AttentionShape, rows: int, dtype: torch.dtype, device: str) -> AttentionCall:
    module = nn.Identity()
    module.num_key_value_groups, module.is_causal = shape.heads // shape.kv_heads, True  # type: ignore[assignment]
    query = torch.zeros(rows, shape.heads, 1, shape.width, dtype=dtype, device=device)
    keys = torch.zeros(rows, shape.kv_heads, 1, shape.width, dtype=dtype, device=device)
    return AttentionCall(sdpa_attention_forward, module, query, keys, keys, None, None, 0.0, {})

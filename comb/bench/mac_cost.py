"""`comb bench mac-cost`: what a token of one layer costs, with exact attention and with MAC where every head hits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated

import torch
import typer
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from comb.backbones.attention_calls import AttentionCall
from comb.bench.harness import BenchmarkReport, benchmark, in_turns, ratios
from comb.bench.options import DeviceOptions, Lengths, Repeats, integers
from comb.evaluation.plot import Lines, Panel
from comb.evaluation.run import Timing
from comb.evaluation.table import Column, Row, TextTable, ms, spread
from comb.mac import MacConfig
from comb.mac.breakeven import AttentionShape, least_context
from comb.mac.measure import at_length, measure_costs, reusing, seconds, shape_of
from comb.mac.rotation import LayerQueries
from comb.mac.rule import HIT_RATE


@dataclass(frozen=True)
class MacCostOptions(DeviceOptions):
    """Of `comb bench mac-cost`."""

    config: Annotated[str, typer.Option(help="a preset of MAC and parameters")] = "generation"
    contexts: Lengths = "4096,16384,49152"
    heads: Annotated[int, typer.Option(min=1, help="query heads of the layer")] = 32
    kv_heads: Annotated[int, typer.Option(min=1, help="its key/value heads")] = 8
    head_dim: Annotated[int, typer.Option(min=1, help="channels of a head")] = 128
    repeats: Repeats = 5


def tables(rows: Sequence[Row]) -> list[TextTable]:
    """One line per context."""
    columns = (
        Column("context", "context", "{:,}".format, names=True),
        Column("exact ms", "exact_s", ms, "per token and layer, attention alone, median ±half the quartiles' distance"),
        Column("MAC ms", "mac_s", ms, "every head hits"),
        Column("exact/MAC", "speedup", spread, "within a repeat, with quartiles"),
        Column("the rule takes", lambda row: "MAC" if row["pays"] else "exact"),
    )
    least = next((row["pays_from"] for row in rows), None)
    taken = "at no length" if least is None else f"from {least:,} tokens on"
    rule = f"The break-even rule, counting on {100 * HIT_RATE:g}% hits per head, takes MAC {taken}."
    return [TextTable("One layer", columns, rows, [rule])]


def panels(rows: Sequence[Row]) -> list[Panel]:
    """Times over context length."""
    return [
        Lines(rows, "context", {"exact": "exact_s", "MAC": "mac_s"}, "context", "ms per token", scale=1000, log="xy")
    ]


@benchmark("mac-cost", tables, panels)
def mac_cost(options: MacCostOptions, report: BenchmarkReport) -> None:
    """What a token of one layer costs on this machine, exact and with MAC where every head hits."""
    dtype, device = options.place()
    heads = f"{options.heads} query and {options.kv_heads} key/value heads of {options.head_dim} channels"
    report.heading = f"{heads}, {dtype}, {device}"
    for row in measure_layer(options, report):
        report.add(row)


@torch.no_grad()
def measure_layer(options: MacCostOptions, report: BenchmarkReport) -> Iterator[Row]:
    """Times of attention alone, by context, both ways in turn: torch's SDPA, and a step of MAC that finds its match.

    Raises:
        ValueError: for a context that is no longer than what a hit reads, or heads that can't share keys.
    """
    contexts, config = integers(options.contexts, "--contexts"), MacConfig.parse(options.config)
    if options.heads % options.kv_heads:
        raise ValueError(f"--heads {options.heads} is no multiple of --kv-heads {options.kv_heads}")
    if min(contexts) <= config.hit_keys():
        raise ValueError(f"a hit reads up to {config.hit_keys()} keys: give longer contexts than {min(contexts)}")
    dtype, device = options.place()
    shape = AttentionShape(options.heads, options.kv_heads, options.head_dim)
    call, queries = attention_call(shape, 1, dtype, device), LayerQueries(nn.Identity())
    costs = measure_costs(call, queries, config)
    report.facts["costs"] = asdict(costs)
    pays_from = report.facts["pays_from"] = least_context(1, HIT_RATE, shape_of(call), config, costs)
    for context in contexts:
        whole = at_length(call, context)
        exact = partial(seconds, whole.exact, call.query.device)
        mac = partial(seconds, reusing(whole, queries, config), call.query.device)
        taken = in_turns({"exact": exact, "mac": mac}, options.repeats)
        yield {
            "context": context,
            "exact_s": Timing.of(taken["exact"]),
            "mac_s": Timing.of(taken["mac"]),
            "speedup": ratios(taken["exact"], taken["mac"]),
            "pays": pays_from is not None and context >= pays_from,
            "pays_from": pays_from,
        }


def attention_call(shape: AttentionShape, rows: int, dtype: torch.dtype, device: str) -> AttentionCall:
    """A call of a layer's attention for one token, as transformers makes it."""
    module = nn.Identity()
    module.num_key_value_groups, module.is_causal = shape.heads // shape.kv_heads, True  # type: ignore[assignment]
    query = torch.zeros(rows, shape.heads, 1, shape.width, dtype=dtype, device=device)
    keys = torch.zeros(rows, shape.kv_heads, 1, shape.width, dtype=dtype, device=device)
    return AttentionCall(sdpa_attention_forward, module, query, keys, keys, None, None, 0.0, {})

"""`comb bench kernels --part seams`: attention of recomputed tokens in all ways of comb's; new lengths in decoding.

The mask is transformers' way: keys repeated for each query head. The others are the product's own
(`comb.linking.recomputed`), each checked against the mask in float32 before any is timed, and what the product would
choose is marked. Beside them the plain product of as much, without any mask.

Queries of every other head look at their own key and the one behind it, so that an end that is off by one shows; those
of the others are noise, so that a tile of keys that is left out does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from comb.backbones.attention_calls import AttentionCall, choose_attention, seconds_of_lengths
from comb.bench.harness import BenchmarkReport, or_refused
from comb.bench.work.kernel_cases import BOUNDS, TILE, relative_error, seconds_of
from comb.evaluation.table import Column, Row, TextTable, Timing
from comb.linking.cache import ScatteredRows
from comb.linking.recomputed import GroupedAttention, VarlenAttention, chosen

HEADS, GROUPS, WIDTH = 32, 8, 128
WAYS = {"grouped": GroupedAttention, "varlen": VarlenAttention}
_OWN = 0.8  # how much of its own key is in a query: a fifth of the weights go there, of 16,000 keys


@dataclass(frozen=True)
class SeamCase:
    """So many runs of so many neighbouring tokens, spread evenly over the keys; the last one ends the prompt."""

    runs: int
    tokens: int
    keys: int


CASES = (
    SeamCase(8, 128, 8192), SeamCase(8, 128, 32768), SeamCase(16, 16, 8192), SeamCase(64, 16, 32768),
    SeamCase(256, 1, 8192), SeamCase(1024, 1, 32768),
)  # fmt: skip
_TINY = (SeamCase(3, 4, 80), SeamCase(6, 1, 40))


def tables(rows: Sequence[Row]) -> list[TextTable]:
    """A line per number of runs, rows and keys."""

    def us(timing: Timing) -> str:
        return f"{1e6 * timing.median:.0f}"

    columns = (
        Column("runs", "runs", names=True), Column("rows", "rows", names=True), Column("keys", "keys", names=True),
        *(Column(f"{way} us", f"{way}_s", us) for way in ("mask", *WAYS, "unmasked")), Column("chosen", "chosen"),
        Column("error", "error", "{:.2g}".format, "the largest of all ways, relative, of vectors"),
        Column("a wrong one", "least_wrong", "{:.2g}".format, "at least"),
    )  # fmt: skip
    return [TextTable("One layer's attention of recomputed tokens", columns, rows)]


def measure(device: torch.device, report: BenchmarkReport, *, tiny: bool) -> None:
    """A row per case, and what a new length costs in decoding."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if device.type == "cuda":
        report.facts["planned_length_s"], _ = seconds_of_lengths(device, 2000)  # as torch comes
        choose_attention(device)
        report.facts["new_length_s"], report.facts["same_length_s"] = seconds_of_lengths(device, 3000)
    report.heading = f"{HEADS} heads over {GROUPS}, width {WIDTH}, {dtype}"
    for case in _TINY if tiny else CASES:
        row: Row = {"runs": case.runs, "rows": case.runs * case.tokens, "keys": case.keys}
        with or_refused(row), torch.inference_mode():
            _measured(case, dtype, device, row)
        report.add(row)


def _measured(case: SeamCase, dtype: torch.dtype, device: torch.device, row: Row) -> None:
    """Fills `row`. Raises ValueError if a way is wrong, or wrong answers wouldn't be noticed: then nothing is timed."""
    ends = torch.linspace(case.keys / case.runs, case.keys, case.runs).long()
    rows = ScatteredRows(case.keys, (ends[:, None] - torch.arange(case.tokens, 0, -1)).flatten())
    draw = torch.Generator().manual_seed(0)
    shapes = (HEADS, len(rows.positions)), (GROUPS, rows.visible + 1), (GROUPS, rows.visible + 1)
    query, keys, values = (torch.randn(1, *shape, WIDTH, generator=draw).to(device) for shape in shapes)
    at, places = rows.on(device), torch.arange(rows.visible, device=device)
    own = (keys[:, :, at] + keys[:, :, at + 1]).repeat_interleave(HEADS // GROUPS, 1)
    query[:, ::2] += _OWN * own[:, ::2]
    mask = (places <= at[:, None])[None, None]
    module = nn.Module()
    module.num_key_value_groups = HEADS // GROUPS  # type: ignore[assignment]  # as a layer of transformers says it
    query, keys, values = (tensor.to(dtype) for tensor in (query, keys[:, :, :-1], values[:, :, :-1]))
    call = AttentionCall(sdpa_attention_forward, module, query, keys, values, mask, WIDTH**-0.5, 0.0, {})

    exact = replace(call, query=query.float(), keys=keys.float(), values=values.float())
    wanted, bound, tile = exact.exact()[0], BOUNDS[dtype], min(TILE, rows.visible // 8)
    masks = {
        "an end one key too early": mask & (places < at[:, None].clamp_min(1)),
        "an end one key too late": mask | (places == at[:, None] + 1),
        "a tile left out": mask & ~((places >= tile) & (places < 2 * tile)),
    }
    wrong = {name: relative_error(replace(exact, mask=other).exact()[0], wanted) for name, other in masks.items()}
    way = chosen(rows, device.type)
    name = next((name for name, each in WAYS.items() if each is way), "mask")
    row |= {"bound": bound, "least_wrong": min(wrong.values()), "chosen": name}
    if unseen := [name for name, error in wrong.items() if not error > 2 * bound]:
        raise ValueError(f"the check would hardly notice {', '.join(unseen)}: nothing is timed")

    def answered(way: GroupedAttention | VarlenAttention) -> Tensor:
        if (found := way.mixed(call, mask, None)) is None:
            raise RuntimeError("left to the mask: no kernel here takes it")
        return found

    ways: dict[str, Callable[[], Tensor]] = {"mask": lambda: call.exact()[0]}
    ways |= {name: partial(answered, make(rows, [(mask, None)])) for name, make in WAYS.items()}
    errors = {}
    for name in tuple(ways):
        try:
            errors[name] = relative_error(ways[name](), wanted)
        except RuntimeError as error:  # not taken, or not compiled: the others are measured all the same
            row[f"{name}_refused"] = str(error).partition("\n")[0]
            del ways[name]
    row |= {"errors": errors, "error": max(errors.values())}
    if faults := [f"{name} is off by {error:.2g}" for name, error in errors.items() if not error < bound]:
        raise ValueError(f"{', '.join(faults)}: nothing is timed")
    ways["unmasked"] = lambda: F.scaled_dot_product_attention(query, keys, values, enable_gqa=True)
    row |= {f"{name}_s": seconds_of(way, device) for name, way in ways.items()}

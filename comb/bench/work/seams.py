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
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from comb.backbones.attention_calls import AttentionCall, choose_attention, seconds_of_lengths
from comb.bench.harness import BenchmarkReport, or_refused
from comb.bench.work.kernel_cases import BOUNDS, TILE
from comb.evaluation.table import Column, Row, TextTable, Timing
from comb.linking.cache import ScatteredRows
from comb.linking.recomputed import GroupedAttention, VarlenAttention, chosen

Clock = Callable[[Callable[[], object], torch.device], Timing]
HEADS, GROUPS, WIDTH = 32, 8, 128
WAYS = {"grouped": GroupedAttention, "varlen": VarlenAttention}
_OWN = 0.8  # how much of its own key is in a query: a fifth of the weights go there, of 16,000 keys


@dataclass(frozen=True)
class SeamCase:
    """So many runs of so many neighbouring tokens, spread evenly over the keys; the last one ends the prompt."""

    runs: int
    tokens: int
    keys: int

    @property
    def rows(self) -> ScatteredRows:
        """Of the pass."""
        ends = torch.linspace(self.keys / self.runs, self.keys, self.runs).long()
        positions = (ends[:, None] - torch.arange(self.tokens, 0, -1)).flatten()
        return ScatteredRows(self.keys, positions)


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


def measure(device: torch.device, report: BenchmarkReport, seconds_of: Clock, *, tiny: bool) -> None:
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
            measured(case, dtype, device, row, seconds_of)
        report.add(row)


def measured(case: SeamCase, dtype: torch.dtype, device: torch.device, row: Row, seconds_of: Clock) -> None:
    """Fills `row`.

    Raises:
        ValueError: if a way is wrong, or wrong answers wouldn't be noticed: then nothing is timed.
    """
    rows = case.rows
    call = _call(rows, dtype, device)
    assert call.mask is not None
    wanted = _in_float32(call, call.mask)
    bound = BOUNDS[dtype]
    wrong = {name: distance(_in_float32(call, mask), wanted) for name, mask in _wrong(rows, call.mask).items()}
    way = chosen(rows, device.type)
    name = next((name for name, each in WAYS.items() if each is way), "mask")
    row |= {"bound": bound, "least_wrong": min(wrong.values()), "chosen": name}
    unseen = [name for name, error in wrong.items() if not error > 2 * bound]
    if unseen:
        raise ValueError(f"the check would hardly notice {', '.join(unseen)}: nothing is timed")
    ways: dict[str, Callable[[], Tensor]] = {"mask": lambda: call.exact()[0]}
    for name, make in WAYS.items():
        ways[name] = partial(_answered, make(rows, [(call.mask, None)]).mixed, call, call.mask, None)
    errors = {}
    for name in tuple(ways):
        try:
            errors[name] = distance(ways[name](), wanted)
        except RuntimeError as error:  # not taken, or not compiled: the others are measured all the same
            row[f"{name}_refused"] = str(error).partition("\n")[0]
            del ways[name]
    row |= {"errors": errors, "error": max(errors.values())}
    if faults := [f"{name} is off by {error:.2g}" for name, error in errors.items() if not error < bound]:
        raise ValueError(f"{', '.join(faults)}: nothing is timed")
    ways["unmasked"] = lambda: F.scaled_dot_product_attention(call.query, call.keys, call.values, enable_gqa=True)
    row |= {f"{name}_s": seconds_of(way, device) for name, way in ways.items()}


def distance(found: Tensor, wanted: Tensor) -> float:
    """The largest difference of two vectors, relative to the second's length."""
    found = found.float()
    return float(((found - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max())


def _answered(mixed: Callable[..., Tensor | None], *given: Any) -> Tensor:
    if (found := mixed(*given)) is None:
        raise RuntimeError("left to the mask: no kernel here takes it")
    return found


def _call(rows: ScatteredRows, dtype: torch.dtype, device: torch.device) -> AttentionCall:
    draw = torch.Generator().manual_seed(0)
    shapes = (HEADS, len(rows.positions)), (GROUPS, rows.visible + 1), (GROUPS, rows.visible + 1)
    query, keys, values = (torch.randn(1, *shape, WIDTH, generator=draw).to(device) for shape in shapes)
    at = rows.on(device)
    own = (keys[:, :, at] + keys[:, :, at + 1]).repeat_interleave(HEADS // GROUPS, 1)
    query[:, ::2] += _OWN * own[:, ::2]
    mask = (torch.arange(rows.visible, device=device) <= at[:, None])[None, None]
    module = nn.Module()
    module.num_key_value_groups = HEADS // GROUPS  # type: ignore[assignment]  # as a layer of transformers says it
    query, keys, values = (tensor.to(dtype) for tensor in (query, keys[:, :, :-1], values[:, :, :-1]))
    return AttentionCall(sdpa_attention_forward, module, query, keys, values, mask, WIDTH**-0.5, 0.0, {})


def _in_float32(call: AttentionCall, mask: Tensor) -> Tensor:
    query, keys, values = (tensor.float() for tensor in (call.query, call.keys, call.values))
    return replace(call, query=query, keys=keys, values=values, mask=mask).exact()[0]


def _wrong(rows: ScatteredRows, mask: Tensor) -> dict[str, Tensor]:
    """Masks that are wrong on purpose: a row sees one key too few or too many, or none of a tile of keys."""
    at, places = rows.on(mask.device)[:, None], torch.arange(mask.shape[-1], device=mask.device)
    tile = min(TILE, mask.shape[-1] // 8)
    return {
        "an end one key too early": mask & (places < at.clamp_min(1)),
        "an end one key too late": mask | (places == at + 1),
        "a tile left out": mask & ~((places >= tile) & (places < 2 * tile)),
    }

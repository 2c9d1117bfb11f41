"""`comb bench kernels`: Triton's kernels, and attention of recomputed tokens, on a GPU: checked, then timed.

Cases are data (`comb.kernels.cases`): some are compared, others compared and timed; nothing is timed if a
comparison fails, or wouldn't notice answers that are wrong on purpose. What is timed is captured in a CUDA graph, as in
a serving engine's decode, behind an overwritten cache: in a model, another layer's keys come in between. Keys are
noise: times are measured, never fidelity. `scripts/bench-gpu` runs it where comb isn't installed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated

import typer

from comb.bench.harness import BenchmarkReport, OutOptions, benchmark
from comb.evaluation.table import Column, Row, TextTable, Timing, fixed, or_refused, us

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from comb.kernels.cases import MacCase, PagedCase

HEADS, GROUPS, WIDTH = 32, 8, 128
WAYS = ("grouped", "varlen")
_OWN = 0.8  # how much of its own key is in a query: a fifth of the weights go there, of 16,000 keys


@dataclass(frozen=True)
class SeamCase:
    """So many runs of so many neighbouring tokens, spread evenly over the keys; the last one ends the prompt."""

    runs: int
    tokens: int
    keys: int


SEAMS = (
    SeamCase(8, 128, 8192), SeamCase(8, 128, 32768), SeamCase(16, 16, 8192), SeamCase(64, 16, 32768),
    SeamCase(256, 1, 8192), SeamCase(1024, 1, 32768),
)  # fmt: skip
_TINY_SEAMS = (SeamCase(3, 4, 80), SeamCase(6, 1, 40))


@dataclass(frozen=True)
class GpuOptions(OutOptions):
    part: Annotated[str, typer.Option(help="paged, mac, or seams: recomputed tokens")] = "paged"
    device: Annotated[str, typer.Option(help="cuda, cuda:1, or cpu with TRITON_INTERPRET=1")] = "cuda"
    tiny: Annotated[bool, typer.Option("--tiny", help="a few small sizes, to see that everything runs")] = False


def tables(rows: Sequence[Row]) -> list[TextTable]:
    """The comparisons, then the times."""

    def rate(bytes_per_s: float) -> str:
        return f"{bytes_per_s / 1e9:.4g}"

    case = Column("case", "case", names=True)
    times = (
        case, Column("kernel us", "kernel_s", us), Column("rival us", "rival_s", us),
        Column("rival/kernel", "speedup", fixed(2)),
        Column("GB/s", "bytes_per_s", rate, "keys and values that it must read, each once"),
        Column("rival GB/s", "rival_bytes_per_s", rate),
    )  # fmt: skip
    errors = {"error": "kernel", "rival_error": "rival", "bound": "bound", "least_wrong": "a wrong one, at least"}
    checks = (case, *(Column(title, name, "{:.2g}".format) for name, title in errors.items()))
    timed = [row for row in rows if "kernel_s" in row]
    found = [TextTable("Relative errors, of vectors, against the plain way", checks, rows)]
    return [*found, TextTable("One layer's attention of a step", times, timed)]


def seam_tables(rows: Sequence[Row]) -> list[TextTable]:
    """A line per number of runs, rows and keys."""
    columns = (
        Column("runs", "runs", names=True), Column("rows", "rows", names=True), Column("keys", "keys", names=True),
        *(Column(f"{way} us", f"{way}_s", us) for way in ("mask", *WAYS, "unmasked")), Column("chosen", "chosen"),
        Column("error", "error", "{:.2g}".format, "the largest of all ways, relative, of vectors"),
        Column("a wrong one", "least_wrong", "{:.2g}".format, "at least"),
    )  # fmt: skip
    return [TextTable("One layer's attention of recomputed tokens", columns, rows)]


@benchmark("kernels", tables)
def kernels(options: GpuOptions, report: BenchmarkReport) -> None:
    """The kernels on a GPU: checked, then timed beside the plain way (of MAC, torch's exact attention) and a copy."""
    if find_spec("triton") is None:
        raise ValueError("the kernels are Triton's, which isn't installed here: pip install triton, on Linux")
    import torch

    from comb.kernels.cases import CASES, TINY_CASES, seconds_of
    from comb.kernels.launch import INTERPRETED
    from comb.model.source import named_device

    device = torch.device(named_device(options.device))
    if options.part == "seams":
        report.tables = seam_tables
        _measure_seams(device, report, tiny=options.tiny)
        return
    if options.part not in CASES:
        raise ValueError(f"--part is paged, mac or seams, not {options.part!r}")
    checks, timed = (TINY_CASES if options.tiny else CASES)[options.part]
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    elif not INTERPRETED:
        raise ValueError(f"the kernels run on {device.type} only interpreted: set TRITON_INTERPRET=1")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu, interpreted: times mean nothing"
    # by a kernel: a copy of a graph's own reaches two thirds of it on an H200
    source, target = torch.ones(2, 2**28 if device.type == "cuda" else 2**14, device=device)
    copied = 2 * source.nbytes / Timing.of(seconds_of(partial(torch.neg, source, out=target), device)).median
    report.facts |= {"device": name, "copy_bytes_per_s": copied}
    report.heading = f"{name}; a device copy reads and writes {copied / 1e9:.4g} GB/s"
    del source, target
    with torch.inference_mode():
        for some, clock in ((checks, False), (timed, True)):
            for case in some:
                report.add(_checked(case, device, timed=clock))
            # sizes that are timed are checked, too: a fault may show only there
            if wrong := [f"{row['case']}: {row['fault']}" for row in report.rows if "fault" in row]:
                raise RuntimeError(f"kernels differ from the plain way and aren't timed: {'; '.join(wrong)}")


def _checked(case: MacCase | PagedCase, device: torch.device, *, timed: bool) -> Row:
    from comb.kernels.cases import label, seconds_of

    row: Row = {"case": label(case)}
    with or_refused(row):
        call = case.make(device)
        errors, fault = call.fault()
        row |= {**errors, "bound": call.bound, **({"fault": fault} if fault else {})}
        if timed and not fault:
            own, other = (Timing.of(seconds_of(run, device)) for run in (call.kernel, call.rival))
            row |= {
                "kernel_s": own, "bytes_per_s": call.nbytes / own.median, "speedup": other.median / own.median,
                "rival_s": other, "rival_bytes_per_s": call.rival_nbytes / other.median,
            }  # fmt: skip
    return row


def _measure_seams(device: torch.device, report: BenchmarkReport, *, tiny: bool) -> None:
    """Attention of recomputed tokens in all ways of comb's, a row per case; and what a new length costs in decoding.

    The mask is transformers' way: keys repeated for each query head. The others are the product's own
    (`comb.linking.recomputed`), and what the product would choose is marked. Beside them the plain product of as much,
    without any mask.
    """
    import torch

    from comb.backbones.attention_calls import choose_attention, seconds_of_lengths

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if device.type == "cuda":
        report.facts["planned_length_s"], _ = seconds_of_lengths(device, 2000)  # as torch comes
        choose_attention(device)
        report.facts["new_length_s"], report.facts["same_length_s"] = seconds_of_lengths(device, 3000)
    report.heading = f"{HEADS} heads over {GROUPS}, width {WIDTH}, {dtype}"
    for case in _TINY_SEAMS if tiny else SEAMS:
        row: Row = {"runs": case.runs, "rows": case.runs * case.tokens, "keys": case.keys}
        with or_refused(row), torch.inference_mode():
            _measured_seam(case, dtype, device, row)
        report.add(row)


def _measured_seam(case: SeamCase, dtype: torch.dtype, device: torch.device, row: Row) -> None:
    """Fills `row`. Raises ValueError if a way is wrong, or wrong answers wouldn't be noticed: then nothing is timed."""
    import torch
    from torch import nn
    from torch.nn import functional as F
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    from comb.backbones.attention_calls import AttentionCall
    from comb.kernels.cases import BOUNDS, TILE, relative_error, seconds_of
    from comb.linking.cache import ScatteredRows
    from comb.linking.recomputed import GroupedAttention, ScatteredAttention, VarlenAttention, chosen

    ends = torch.linspace(case.keys / case.runs, case.keys, case.runs).long()
    rows = ScatteredRows(case.keys, (ends[:, None] - torch.arange(case.tokens, 0, -1)).flatten())
    draw = torch.Generator().manual_seed(0)
    shapes = (HEADS, len(rows.positions)), (GROUPS, rows.visible + 1), (GROUPS, rows.visible + 1)
    query, keys, values = (torch.randn(1, *shape, WIDTH, generator=draw).to(device) for shape in shapes)
    at, places = rows.on(device), torch.arange(rows.visible, device=device)
    # queries of every other head look at their own key and the one behind it, so that an end that is off by one shows;
    # those of the others are noise, so that a tile of keys that is left out does
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
    kinds = dict(zip(WAYS, (GroupedAttention, VarlenAttention), strict=True))
    name = next((name for name, each in kinds.items() if each is way), "mask")
    row |= {"bound": bound, "least_wrong": min(wrong.values()), "chosen": name}
    if unseen := [name for name, error in wrong.items() if not error > 2 * bound]:
        raise ValueError(f"the check would hardly notice {', '.join(unseen)}: nothing is timed")

    def answered(way: ScatteredAttention) -> Tensor:
        if (found := way.mixed(call, mask, None)) is None:
            raise RuntimeError("left to the mask: no kernel here takes it")
        return found

    ways: dict[str, Callable[[], Tensor]] = {"mask": lambda: call.exact()[0]}
    ways |= {name: partial(answered, make(rows, [(mask, None)])) for name, make in kinds.items()}
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
    row |= {f"{name}_s": Timing.of(seconds_of(way, device)) for name, way in ways.items()}

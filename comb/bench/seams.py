"""`comb bench seams-gpu`: attention of recomputed tokens on a GPU, under a mask and grouped; new lengths in decoding.

The mask is transformers' way there: keys repeated for each query head. Grouped is what a CPU uses
(`comb.linking.grouped`). Beside them the plain product of as much, without any mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from comb.backbones.sdpa import seconds_of_lengths
from comb.bench.harness import BenchmarkReport, benchmark, or_refused
from comb.bench.kernels import GpuOptions, seconds_of
from comb.evaluation.run import Timing
from comb.evaluation.table import Column, Row, TextTable
from comb.linking.cache import ScatteredRows
from comb.linking.grouped import portions

HEADS, GROUPS, WIDTH = 32, 8, 128


def tables(rows: Sequence[Row]) -> list[TextTable]:
    """A line per number of rows and keys."""

    def us(timing: Timing) -> str:
        return f"{1e6 * timing.median:.0f}"

    columns = (
        Column("rows", "rows", names=True), Column("keys", "keys", names=True), Column("mask us", "mask_s", us),
        Column("grouped us", "grouped_s", us), Column("no mask us", "unmasked_s", us),
        Column("error", "error", "{:.2g}".format, "of grouped against the mask, relative"),
    )  # fmt: skip
    return [TextTable("One layer's attention of recomputed tokens", columns, rows)]


@benchmark("seams-gpu", tables)
def seams_gpu(options: GpuOptions, report: BenchmarkReport) -> None:
    """Attention of recomputed tokens on a GPU, under a mask and grouped; what a new length costs in decoding."""
    device = torch.device(options.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if device.type == "cuda":
        report.facts["new_length_s"], report.facts["same_length_s"] = seconds_of_lengths(device)
    report.heading = f"{HEADS} heads over {GROUPS}, width {WIDTH}, {dtype}"
    sizes = ((6, 40),) if options.tiny else ((256, 8192), (256, 32768), (1024, 8192), (1024, 32768))
    for count, keys in sizes:
        row: Row = {"rows": count, "keys": keys}
        with or_refused(row), torch.inference_mode():
            row |= _measured(count, keys, dtype, device)
        report.add(row)


def _measured(count: int, keys: int, dtype: torch.dtype, device: torch.device) -> Row:
    draw = torch.Generator().manual_seed(0)
    positions = torch.randperm(keys - 1, generator=draw)[: count - 1].sort().values
    rows = ScatteredRows(keys, torch.cat([positions, torch.tensor([keys - 1])]))
    shapes = ((HEADS, count), (GROUPS, keys), (GROUPS, keys))
    query, key, value = (torch.randn(1, *shape, WIDTH, generator=draw).to(device, dtype) for shape in shapes)
    mask = (torch.arange(keys, device=device) <= rows.on(device)[:, None])[None, None]
    repeated = HEADS // GROUPS

    def masked() -> Tensor:
        keys, values = key.repeat_interleave(repeated, 1), value.repeat_interleave(repeated, 1)
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask)

    parts = portions(rows, mask, repeated, most=count)

    def grouped() -> Tensor:
        [(_, _, allowed)] = parts
        mixed = F.scaled_dot_product_attention(
            query.unflatten(1, (-1, repeated)).flatten(2, 3), key, value, attn_mask=allowed
        )
        whole: Tensor = mixed.unflatten(2, (repeated, -1)).flatten(1, 2)
        return whole

    def plain() -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, enable_gqa=True)

    error = ((grouped() - masked()).norm() / masked().norm()).item()
    if error > 1e-2:
        raise ValueError(f"grouped attention is off by {error:.2g}: nothing is timed")
    times: dict[str, Callable[[], Tensor]] = {"mask_s": masked, "grouped_s": grouped, "unmasked_s": plain}
    return {"error": error, **{name: seconds_of(way, device) for name, way in times.items()}}

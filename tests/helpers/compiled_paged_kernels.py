"""Compiles the kernels of paged attention for a GPU where there is none; prints what each takes, by ptxas.

Run by test_compiled_kernels.py in a process of its own. Fails if a kernel of the usual sizes spills, keeps fewer than
two tiles of keys or values in flight, or takes more of a multiprocessor than `launch_for` counts on; those of float32
must not spill.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from comb.kernels.launch import Launch
from comb.kernels.paged.attention import FP8, BlockTable, PagedBatch, PagedLayer
from comb.kernels.paged.kernel import attend_paged
from comb.kernels.paged.plan import launch_for
from tests.helpers.compiled_mac_kernels import NoDevice, buffers, compile_only, compiled, resident, resources

wanted: list[tuple[Launch, int] | None] = []  # of each kernel in `compiled`


def launch(dtype: torch.dtype, *, shared: int, width: int, fp8: bool = False) -> None:
    groups, slots = 2, 4096
    sizes = launch_for(dtype, width, fp8=fp8)
    wanted.extend([(sizes.decode, width), (sizes.prefill, width), None])  # the merge is no part of the plan's geometry
    sizes = replace(sizes, decode=replace(sizes.decode, programs=528), prefill=replace(sizes.prefill, programs=264))
    stored = FP8 if fp8 else dtype
    keys, values = torch.zeros(2, slots, groups, width, dtype=torch.uint8).to(stored)
    scales = torch.zeros(slots, groups) if fp8 else None
    batch = PagedBatch((1, 200), (BlockTable([(3000, range(188))], 16), BlockTable([(5, (9,))], 16)))
    query = torch.zeros(201, groups * shared, width, dtype=dtype)
    attend_paged(query, PagedLayer(keys, values, 16, scales, scales), batch, sizes)


SPILLED = 16  # bytes: Triton 3.8 spills 8 and 12, versions before it nothing


def check(name: str, kernel: Any, expected: tuple[Launch, int] | None) -> None:
    registers, spilled = resources(kernel)
    shared, held = kernel.metadata.shared, resident(kernel, registers)
    print(name, registers, "registers,", spilled, "bytes spilled,", shared, "bytes shared,", held, "at once")
    assert spilled <= SPILLED, f"{name} spills {spilled} bytes"
    if expected is None:
        return
    launch, width = expected
    tiles = buffers(kernel, width, launch.key_tile)
    print("    keys of", launch.key_tile, "x", width, "in flight:", tiles)
    assert len(tiles) == 2 <= min(tiles), f"{name} keeps tiles {tiles} of keys and values"
    assert held >= launch.per_processor, f"{name}: {held} programs at once, not {launch.per_processor}"


if __name__ == "__main__":
    driver.set_active(NoDevice())
    JITFunction.run = compile_only
    bf16 = torch.bfloat16
    for width in (64, 128, 256):
        launch(bf16, shared=4, width=width)
        launch(bf16, shared=4, width=width, fp8=True)
    launch(torch.float16, shared=1, width=128, fp8=True)
    usual = len(compiled)
    for width in (128, 256):
        launch(torch.float32, shared=4, width=width)
    for number, ((name, kernel), chosen) in enumerate(zip(compiled, wanted, strict=True)):
        check(name, kernel, chosen if number < usual else None)
    print("triton", triton.__version__, len(compiled), "kernels")

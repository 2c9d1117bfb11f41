"""Compiles the kernels of paged attention for a GPU where there is none; prints registers and spilled bytes by ptxas.

Run by test_paged_attention.py in a process of its own. Fails if a kernel of the usual sizes spills; those that the
benchmark tries out may.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.nvidia.compiler import get_ptxas
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from comb.kernels.launch import Launch
from comb.kernels.paged.kernel import attend_paged
from comb.kernels.paged.layout import FP8, BlockTable, PagedBatch, PagedLayer
from comb.kernels.paged.plan import PagedLaunch, launch_for
from tests.helpers.compiled_mac_kernels import NoDevice, compile_only, compiled


def launch(dtype: torch.dtype, *, shared: int, width: int, fp8: bool = False, sizes: PagedLaunch | None = None) -> None:
    groups, slots = 2, 4096
    sizes = sizes or launch_for(dtype, width)
    sizes = replace(sizes, decode=replace(sizes.decode, programs=528), prefill=replace(sizes.prefill, programs=264))
    stored = FP8 if fp8 else dtype
    keys, values = torch.zeros(2, slots, groups, width, dtype=torch.uint8).to(stored)
    scales = torch.zeros(slots, groups) if fp8 else None
    batch = PagedBatch((1, 200), (BlockTable([(3000, range(188))], 16), BlockTable([(5, (9,))], 16)))
    query = torch.zeros(201, groups * shared, width, dtype=dtype)
    attend_paged(query, PagedLayer(keys, values, 16, scales, scales), batch, sizes)


def resources(kernel: Any) -> tuple[int, int]:
    """Registers of a thread, and bytes that are spilled."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(kernel.asm["ptx"])
        done = subprocess.run(
            [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", source, "-o", source.with_suffix(".cubin")],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        printed = done.stdout + done.stderr
        assert done.returncode == 0, printed
    (registers,) = re.findall(r"Used (\d+) registers", printed)
    return int(registers), sum(int(found) for found in re.findall(r"(\d+) bytes spill", printed))


if __name__ == "__main__":
    driver.set_active(NoDevice())
    JITFunction.run = compile_only
    usual = sys.maxsize
    launch(torch.bfloat16, shared=4, width=128)
    launch(torch.bfloat16, shared=4, width=128, fp8=True)
    if "--all" in sys.argv:
        launch(torch.float16, shared=5, width=80)
        launch(torch.float32, shared=1, width=64)
        launch(torch.bfloat16, shared=8, width=256)
        launch(torch.float16, shared=8, width=128, fp8=True)
        usual = len(compiled)
        for keys, warps in ((32, 4), (128, 4), (128, 8)):
            sizes = PagedLaunch(Launch(key_tile=keys, warps=warps), Launch(key_tile=keys, warps=warps))
            launch(torch.bfloat16, shared=4, width=128, sizes=sizes)
            launch(torch.bfloat16, shared=4, width=128, fp8=True, sizes=sizes)
    for number, (name, kernel) in enumerate(compiled):
        registers, spilled = resources(kernel)
        print(name, registers, "registers,", spilled, "bytes spilled,", kernel.metadata.shared, "bytes shared")
        assert spilled == 0 or number >= usual, f"{name} spills {spilled} bytes"
    print("triton", triton.__version__, len(compiled), "kernels")

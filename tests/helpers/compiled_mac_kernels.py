"""Compiles the kernels for a GPU where there is none, and prints what each takes.

The kernel is "launched" over tensors of the CPU, with the launch itself left out.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from comb.kernels.launch import Launch
from comb.kernels.mac.kernel import fused_step
from comb.kernels.mac.mac_config import MacConfig
from comb.kernels.mac.state import MacState


class NoDevice:
    """What triton asks a driver before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


compiled: list[tuple[str, Any]] = []
run = JITFunction.run


def compile_only(self: Any, *args: Any, **kwargs: Any) -> Any:
    kernel = run(self, *args, **{**kwargs, "warmup": True})
    compiled.append((self.__name__, kernel))
    return kernel


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


def resident(kernel: Any, registers: int) -> int:
    """Programs that a multiprocessor of an H100 or H200 holds: 65,536 registers, 227 KiB of shared memory, 64 warps."""
    warps = kernel.metadata.num_warps
    of_registers = 65_536 // (-(-registers // 8) * 8 * 32 * warps)
    return min(of_registers, 227 * 1024 // (kernel.metadata.shared + 1024), 64 // warps)


def buffers(kernel: Any, width: int, keys: int) -> list[int]:
    """How many tiles of keys, and of values, a program has room for, so that it computes on one while others come."""
    found = re.findall(r"ttg\.local_alloc.*-> !ttg\.memdesc<(\d+)x(\d+)x(\d+)x", kernel.asm["ttgir"])
    return [int(count) for count, *shape in found if {int(one) for one in shape} == {width, keys}]


if __name__ == "__main__":
    driver.set_active(NoDevice())
    JITFunction.run = compile_only
    launch, config = Launch(programs=264), MacConfig(ring_dtype="bfloat16")
    query, (keys, values) = torch.zeros(2, 8, 128).bfloat16(), torch.zeros(2, 2, 2, 64, 128).bfloat16()
    state = MacState.empty(2, 8, 128, 128, config, query)
    fused_step(state, query, query, keys, values, torch.zeros(2, dtype=torch.long), config, 1.0, launch)
    for name, kernel in compiled:
        assert len(kernel.asm["cubin"]) > 1000, name
        print(name, kernel.metadata.shared, "bytes shared", kernel.metadata.num_warps, "warps")
        registers, spilled = resources(kernel)
        tiles, held = buffers(kernel, 128, launch.key_tile), resident(kernel, registers)
        print("   ", registers, "registers,", spilled, "bytes spilled, tiles", tiles, held, "at once")
        assert spilled == 0
        if name == "_ranges_kernel":
            assert len(tiles) == 2
            assert min(tiles) >= 2
            assert held >= launch.per_processor
    print("triton", triton.__version__, len(compiled), "kernels")

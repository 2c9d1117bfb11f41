"""Compiles the kernels for a GPU where there is none, and prints what each takes. Run by test_mac_kernels.py.

The kernels are "launched" by a whole step over tensors of the CPU, with the launch itself left out.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from comb.kernels.launch import Launch, Pages
from comb.kernels.mac.config import MacConfig
from comb.kernels.mac.state import MacState
from comb.kernels.mac.step_kernel import mac_step_triton


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


def step(dtype: torch.dtype, *, shared: int, width: int, value_width: int, paged: bool, launch: Launch) -> None:
    config = MacConfig(window=1024, min_length=0, ring_dtype="bfloat16" if dtype == torch.bfloat16 else "auto")
    rows, groups, length = 2, 2, 64
    query = torch.zeros(rows, groups * shared, width, dtype=dtype)
    shape = (8, 16, groups) if paged else (rows, groups, length)
    pages = Pages(torch.zeros(rows, 4, dtype=torch.int32), torch.full((rows,), length)) if paged else None
    state = MacState.empty(rows, groups * shared, width, value_width, config, query)
    keys, values = torch.zeros(*shape, width, dtype=dtype), torch.zeros(*shape, value_width, dtype=dtype)
    start = torch.zeros(rows, dtype=torch.long)
    mac_step_triton(
        state, query.float(), query, keys, values, start, config, 1.0, write=True, pages=pages, launch=launch
    )


if __name__ == "__main__":
    driver.set_active(NoDevice())
    JITFunction.run = compile_only
    some, wide = Launch(programs=264), Launch(programs=264, key_tile=128)
    step(torch.bfloat16, shared=4, width=128, value_width=128, paged=False, launch=some)
    if "--all" in sys.argv:
        step(
            torch.bfloat16, shared=8, width=128, value_width=128, paged=False, launch=Launch(programs=264, key_tile=128)
        )
        step(torch.float16, shared=5, width=80, value_width=96, paged=True, launch=some)
        step(torch.float32, shared=3, width=72, value_width=40, paged=False, launch=some)
        step(torch.float32, shared=1, width=192, value_width=128, paged=True, launch=some)
    for name, kernel in compiled:
        assert len(kernel.asm["cubin"]) > 1000, name
        print(name, kernel.metadata.shared, "bytes shared", kernel.metadata.num_warps, "warps")
    print("triton", triton.__version__, len(compiled), "kernels")

"""Compiles the kernels of joint attention for a GPU where there is none; prints what each takes, by ptxas.

Run by test_joint_reading.py in a process of its own. Fails if a kernel spills, or if turning queries costs paged
attention a program at once in decoding, or more than one in prefill.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
import triton
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from comb.kernels.joint.batch import OwnKeys, ReadingRun, joint_batches
from comb.kernels.joint.kernel import join_by_kernels_
from comb.kernels.paged.kernel import attend_paged
from comb.kernels.paged.layout import FP8, BlockTable, PagedLayer
from comb.kernels.paged.plan import launch_for
from tests.helpers.compiled_mac_kernels import NoDevice, compile_only, compiled, resident, resources

wanted: list[int | None] = []  # of each kernel in `compiled`: programs at once


def launch(dtype: torch.dtype, *, shared: int, width: int, fp8: bool = False, window: int | None = None) -> None:
    groups, sizes = 2, launch_for(dtype, width, fp8=fp8)
    table = BlockTable([(3000, range(188))], 16)
    places = np.zeros(1, dtype=np.int64), np.full(1, 7)
    runs = [ReadingRun(0, 1, 0, 5000, *places, (table,)), ReadingRun(1, 200, 1, 0, *places, (table,))]
    (batch,) = joint_batches(runs, torch.device("cpu"))
    keys, values = torch.zeros(2, 4096, groups, width, dtype=torch.uint8).to(FP8 if fp8 else dtype)
    scales = torch.zeros(4096, groups) if fp8 else None
    query = torch.zeros(201, groups * shared, width, dtype=dtype)
    mass = torch.zeros(201, groups * shared)
    angles = torch.zeros(1, 201, width)
    turned = batch.turned(lambda _: (angles, angles), 1.0)
    parts = replace(sizes, decode=replace(sizes.decode, programs=528), prefill=replace(sizes.prefill, programs=264))
    layer = PagedLayer(keys, values, 16, scales, scales)
    read = attend_paged(query, layer, batch.batch, parts, mass=mass, turned=turned)
    wanted.extend([sizes.decode.per_processor, max(1, sizes.prefill.per_processor - 1), None])
    cache = torch.zeros(400, 16, groups, width, dtype=dtype)
    own = OwnKeys(torch.zeros(2, 400, dtype=torch.int32), 16, cache, lambda slots: slots, window)
    join_by_kernels_(query, query, own, read, mass, batch, 1.0)
    wanted.extend([4 if width <= 128 else 2, None])


if __name__ == "__main__":
    driver.set_active(NoDevice())
    JITFunction.run = compile_only
    for width in (64, 128, 256):
        launch(torch.bfloat16, shared=4, width=width)
        launch(torch.bfloat16, shared=4, width=width, fp8=True, window=1024)
    launch(torch.float16, shared=1, width=128)
    launch(torch.bfloat16, shared=8, width=128)
    for (name, kernel), least in zip(compiled, wanted, strict=True):
        registers, spilled = resources(kernel)
        held = resident(kernel, registers)
        print(name, registers, "registers,", spilled, "bytes spilled,", held, "at once")
        assert spilled == 0, f"{name} spills {spilled} bytes"
        assert least is None or held >= least, f"{name}: {held} programs at once, not {least}"
    print("triton", triton.__version__, len(compiled), "kernels")

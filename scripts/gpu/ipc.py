"""Two processes and one pool: what an encoder process writes the owner reads, also after its death.

`hand_over` is the owner. On a GPU the pool goes by CUDA IPC, on a CPU by shared memory. No vLLM takes part.
"""

from __future__ import annotations

import multiprocessing
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from comb_serving.pool.capability import PoolHandle
from comb_serving.pool.shared_pool import PoolLayout, SharedPool

LONGEST_SECONDS = 120.0  # of a writer, before it is taken to hang


def document(layout: PoolLayout, tokens: int, number: int) -> tuple[Tensor, Tensor, PoolHandle]:
    """Keys and values [C, tokens, H, D] of document `number`, the same in every process, and its place in the pool."""
    draw = torch.Generator().manual_seed(number)
    shape = 2, layout.cross_layers, tokens, layout.kv_heads, layout.head_dim
    keys, values = torch.randn(shape, generator=draw).to(layout.torch_dtype)
    count = layout.blocks_for(tokens)
    # every third block, backwards, so that no two of a document's are neighbours
    blocks = range(layout.num_blocks)[::-3][number * count : (number + 1) * count]
    return keys, values, PoolHandle(tokens, tuple(blocks))


def hand_over(folder: Path, layout: PoolLayout, device: torch.device, *, source: str, tokens: int) -> str:
    """A writer writes document 0, then document 1 over and over until it is killed; a second one writes document 2.

    Args:
        layout: of the pool, which gets as many blocks as three documents need.
        source: device of the keys and values before they are written.
        tokens: of one document.

    Returns:
        What was wrong, or "".
    """
    layout = replace(layout, num_blocks=9 * layout.blocks_for(tokens) + 3)
    with ExitStack() as stack:
        pool = SharedPool.create(folder / "pool-0", layout, device)
        stack.callback(pool.close)
        pool.memory.flat.fill_(0xFF)  # NaN in every dtype
        first = Writer(pool.path, source, tokens, 0)
        stack.callback(first.kill)
        first.next()
        failed = _differs(pool, tokens, 0, "what was written")
        first.next()  # from here on it writes without end
        time.sleep(0.1)
        first.kill()
        failed = failed or _differs(pool, tokens, 0, "what was written, after the writer was killed")
        second = Writer(pool.path, source, tokens, 2)
        stack.callback(second.kill)
        second.next()
        failed = failed or _differs(pool, tokens, 2, "what a second writer wrote")
        return failed or _differs(pool, tokens, 0, "what was written, after a second writer")


def _differs(pool: SharedPool, tokens: int, number: int, what: str) -> str:
    keys, values, handle = document(pool.layout, tokens, number)
    for layer in range(pool.layout.cross_layers):
        for found, wanted in zip(pool.read(layer, [handle]), (keys[layer], values[layer]), strict=True):
            away = float((found.float().cpu() - wanted.float()).abs().max())
            # e4m3 is off by at most 1/16 of a number, and the largest are below 6 here
            if not away <= (0.4 if pool.scales is not None else 0.0):
                return f"{what} differs by {away:.3g} in cross layer {layer}"
    return ""


class Writer:
    """The other process; arguments are those of `write`."""

    def __init__(self, *arguments: Any) -> None:
        spawn = multiprocessing.get_context("spawn")  # CUDA doesn't survive a fork
        self._told, tells = spawn.Pipe(duplex=False)
        self._process = spawn.Process(target=write, args=(tells, *arguments), daemon=True)
        self._process.start()
        tells.close()  # here, so that the pipe ends when the writer does

    def next(self) -> None:
        """Waits until it says that a document is written. Raises RuntimeError if it has ended or hangs."""
        try:
            if not self._told.poll(LONGEST_SECONDS):
                raise RuntimeError(f"the writer has said nothing for {LONGEST_SECONDS:.0f} s")
            self._told.recv()
        except EOFError:
            self._process.join()
            raise RuntimeError(f"the writer ended with status {self._process.exitcode}; see above") from None

    def kill(self) -> None:
        """SIGKILL; it is gone afterwards."""
        self._process.kill()
        self._process.join()


def write(tells: Any, path: Path, source: str, tokens: int, number: int) -> None:
    """The writer: says when document `number` is written; after 0 it writes 1 until it is killed."""
    pool = SharedPool.attach(path)
    for which in (number, 1):
        keys, values, handle = document(pool.layout, tokens, which)
        pool.write(handle, keys.to(source), values.to(source))
        pool.finish()
        tells.send(None)
        if number != 0:
            break
    owner = multiprocessing.parent_process()
    while owner is not None and owner.is_alive():  # nobody is left writing if the owner ends first
        if number == 0:
            pool.write(handle, keys.to(source), values.to(source))
            pool.finish()
        else:
            time.sleep(0.05)

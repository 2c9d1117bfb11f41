"""Two processes and one pool: what the encoder process writes the owner reads, also after the writer was killed.

`hand_over` is the owner; the writer is this module as a program. On a GPU the pool goes by CUDA IPC, on a CPU by
shared memory. Used by `scripts/bench-serving-gpu` and by a test.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from comb_serving.pool.handles import PoolHandle
from comb_serving.pool.pool import PoolLayout, SharedPool

LONGEST_SECONDS = 120.0  # of a writer, before it is taken to hang


@dataclass(frozen=True)
class HandOver:
    """What came of it.

    Args:
        source: device of the keys and values before they are written.
        tokens, nbytes: of one document.
        write_s, wait_s: median seconds until `write` returns, and that `finish` then waits.
        attach_s: that a writer needs to open the pool, without starting Python.
        failed: what was wrong; empty if all was right.
    """

    layout: PoolLayout
    source: str
    tokens: int
    nbytes: int
    write_s: float
    wait_s: float
    attach_s: float
    failed: str

    @property
    def bytes_per_second(self) -> float:
        """Of writing until others can read."""
        return self.nbytes / (self.write_s + self.wait_s)

    def to_dict(self) -> dict[str, object]:
        return {**asdict(self), "bytes_per_second": self.bytes_per_second}


def document(layout: PoolLayout, tokens: int, number: int) -> tuple[Tensor, Tensor, PoolHandle]:
    """Keys and values [C, tokens, H, D] of document `number`, the same in every process, and its place in the pool."""
    draw = torch.Generator().manual_seed(number)
    shape = 2, layout.cross_layers, tokens, layout.kv_heads, layout.head_dim
    keys, values = torch.randn(shape, generator=draw).to(layout.torch_dtype)
    count = layout.blocks_for(tokens)
    # every third block, backwards, so that no two of a document's are neighbours
    blocks = range(layout.num_blocks)[::-3][number * count : (number + 1) * count]
    return keys, values, PoolHandle(tokens, tuple(blocks))


def blocks_needed(layout: PoolLayout, tokens: int) -> int:
    """Blocks of a pool in which three documents have room."""
    return 9 * layout.blocks_for(tokens) + 3


def hand_over(
    folder: Path, layout: PoolLayout, device: torch.device, *, source: str, tokens: int, repeats: int = 10
) -> HandOver:
    """A writer writes document 0, then document 1 over and over until it is killed; a second one writes document 2."""
    pool = SharedPool.create(folder / "pool-0", layout, device)
    try:
        pool.memory.flat.fill_(0xFF)  # NaN in every dtype
        first = Writer(pool.path, source, tokens, repeats, 0)
        try:
            told = first.next()
            failed = _differs(pool, tokens, 0, "what was written")
            first.next()  # from here on it writes without end
            time.sleep(0.1)
        finally:
            first.kill()
        failed = failed or _differs(pool, tokens, 0, "what was written, after the writer was killed")
        second = Writer(pool.path, source, tokens, 1, 2)
        try:
            second.next()
            failed = failed or _differs(pool, tokens, 2, "what a second writer wrote")
            failed = failed or _differs(pool, tokens, 0, "what was written, after a second writer")
        finally:
            second.kill()
        nbytes = layout.bytes_per_token * tokens
        return HandOver(pool.layout, source, tokens, nbytes, told["write_s"], told["wait_s"], told["attach_s"], failed)
    finally:
        pool.close()


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
    """The other process, which says a line of JSON when it has done something."""

    def __init__(self, path: Path, source: str, tokens: int, repeats: int, number: int) -> None:
        arguments = [str(path), source, str(tokens), str(repeats), str(number)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "comb_serving.bench.gpu.handover", *arguments], stdout=subprocess.PIPE, text=True
        )
        self.timer = threading.Timer(LONGEST_SECONDS, self.process.kill)
        self.timer.daemon = True
        self.timer.start()

    def next(self) -> dict[str, float]:
        """Its next line. Raises RuntimeError if it has ended."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the writer ended with status {self.process.wait()}; see above")
        told: dict[str, float] = json.loads(line)
        return told

    def kill(self) -> None:
        """SIGKILL; it is gone afterwards."""
        self.timer.cancel()
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


def _timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def write(path: str, source: str, tokens: int, repeats: int, number: int) -> None:
    """The writer: says its times over `repeats` writes of document `number`; after 0 it writes 1 until it is killed."""
    if torch.device(source).type == "cuda":
        torch.zeros(1, device=source)  # starts CUDA, which isn't what is timed
    begun = time.perf_counter()
    pool = SharedPool.attach(path)
    attach_s = time.perf_counter() - begun
    keys, values, handle = document(pool.layout, tokens, number)
    on_source = keys.to(source), values.to(source)
    times = [
        (_timed(lambda: pool.write(handle, *on_source)), _timed(pool.finish)) for _ in range(repeats + 1)
    ]  # the first one starts things
    write_s, wait_s = (statistics.median(column) for column in zip(*times[1:], strict=True))
    print(json.dumps({"write_s": write_s, "wait_s": wait_s, "attach_s": attach_s}), flush=True)  # noqa: T201
    parent = os.getppid()
    if number == 0:
        keys, values, handle = document(pool.layout, tokens, 1)
        on_source = keys.to(source), values.to(source)
        pool.write(handle, *on_source)
        print("{}", flush=True)  # noqa: T201
    while os.getppid() == parent:  # nobody is left writing if the owner ends first
        if number == 0:
            pool.write(handle, *on_source)
            pool.finish()
        else:
            time.sleep(0.05)


if __name__ == "__main__":
    write(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))

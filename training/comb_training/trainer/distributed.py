"""Ranks under `torchrun`: who speaks, and what all must agree on, an early end too. With one process all is free."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist


def world_size() -> int:
    """Processes of this run, also before they have met."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """This process among them."""
    return int(os.environ.get("RANK", "0"))


def is_main() -> bool:
    """Whether this process prints and writes what exists once."""
    return rank() == 0


def launcher() -> list[str]:
    """How a command line of this run begins: with `torchrun` where that has started it, on as many processes."""
    if (local := os.environ.get("LOCAL_WORLD_SIZE")) is None:
        return ["comb", "train"]
    nodes = os.environ.get("GROUP_WORLD_SIZE", "1")
    where = ["--standalone"] if nodes == "1" else ["--nnodes", nodes]  # and how they meet, which isn't known here
    return ["torchrun", *where, "--nproc_per_node", local, "-m", "comb_training.train"]


class ProcessEndedError(RuntimeError):
    """Another process of this run has ended."""


@contextmanager
def noticing_ends() -> Iterator[None]:
    """Raises ProcessEndedError for what a collective raises when another process has ended."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo/" not in str(error):  # gloo has no class of its own
            raise
        raise ProcessEndedError(
            "another process of this run has ended, see its output; --resume auto goes on from the newest checkpoint"
        ) from error


@noticing_ends()
def _reduced(values: Sequence[float], operation: Any) -> list[float]:
    if world_size() == 1:
        return list(values)
    tensor = torch.tensor(values, dtype=torch.float64, device="cuda" if dist.get_backend() == "nccl" else "cpu")
    dist.all_reduce(tensor, operation)
    return tensor.tolist()


def all_true(value: bool) -> bool:
    """Whether it is true on every rank. Collective."""
    return bool(_reduced([value], dist.ReduceOp.MIN)[0])


def greatest(value: int) -> int:
    """The greatest of all ranks' values. Collective."""
    return int(_reduced([value], dist.ReduceOp.MAX)[0])


def summed(*values: float) -> list[float]:
    """Each value summed over all ranks. Collective."""
    return _reduced(values, dist.ReduceOp.SUM)


def agree_on_passes(wanted: int, possible: int) -> int:
    """As many as the neediest rank wants, if every rank can. Collective."""
    least, most = _reduced([possible, -wanted], dist.ReduceOp.MIN)
    return int(min(least, -most)) if world_size() > 1 else wanted


@noticing_ends()
def barrier() -> None:
    """Waits for every rank."""
    if world_size() > 1:
        dist.barrier()


def leave() -> None:
    """Ends this process's part of the group, so that ranks may finish at different times."""
    with suppress(ValueError, AssertionError):
        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()


_ASKED = b"\nCtrl-C: ending after this step, with a checkpoint; Ctrl-C again ends at once, without\n"


@contextmanager
def asked_to_stop() -> Iterator[Callable[[], str]]:
    """Yields a function that names the signal that came, on any rank, or "": all agree on the step. It is collective.

    SIGTERM (a scheduler's warning) and Ctrl-C end a run after the step under way, with a checkpoint and a last score; a
    second Ctrl-C does what it does elsewhere.
    """
    came = 0

    def ask(number: int, _: FrameType | None) -> None:
        nonlocal came
        came = number
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, before[signal.SIGINT])
            if is_main():
                os.write(2, _ASKED)  # print may be in the middle of a line

    before = {}
    if threading.current_thread() is threading.main_thread():  # Python allows handlers nowhere else
        for each in (signal.SIGTERM, signal.SIGINT):
            if signal.getsignal(each) is not signal.SIG_IGN:  # as in a shell's background
                before[each] = signal.signal(each, ask)
    try:
        yield lambda: signal.Signals(number).name if (number := greatest(came)) else ""
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)

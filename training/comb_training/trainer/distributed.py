"""Ranks under `torchrun`: who speaks, and what all of them must agree on. With one process all of it is free."""

from __future__ import annotations

import os
from contextlib import suppress

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


def all_true(value: bool) -> bool:
    """Whether it is true on every rank. Collective."""
    if world_size() == 1:
        return value
    flag = torch.tensor(float(value), device="cuda" if dist.get_backend() == "nccl" else "cpu")
    dist.all_reduce(flag, dist.ReduceOp.MIN)
    return bool(flag.item())


def any_true(value: bool) -> bool:
    """Whether it is true on some rank. Collective."""
    return not all_true(not value)


def summed(*values: float) -> list[float]:
    """Each value summed over all ranks. Collective."""
    if world_size() == 1:
        return list(values)
    total = torch.tensor(values, dtype=torch.float64, device="cuda" if dist.get_backend() == "nccl" else "cpu")
    dist.all_reduce(total)
    return total.tolist()


def agree_on_passes(wanted: int, possible: int) -> int:
    """As many as the neediest rank wants, if every rank can. Collective."""
    if world_size() == 1:
        return wanted
    numbers = torch.tensor([-wanted, possible], device="cuda" if dist.get_backend() == "nccl" else "cpu")
    dist.all_reduce(numbers, dist.ReduceOp.MIN)
    return min(-int(numbers[0]), int(numbers[1]))


def barrier() -> None:
    """Waits for every rank."""
    if world_size() > 1:
        dist.barrier()


def leave() -> None:
    """Ends this process's part of the group, so that ranks may finish at different times."""
    with suppress(ValueError, AssertionError):
        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()

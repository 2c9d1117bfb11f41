"""What tests of interpreted kernels share: memory that shows early reads, distances, wrong kernels, launches."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from runpy import run_path
from typing import Any

import pytest
import torch
from torch import Tensor

from comb.kernels.launch import INTERPRETED


@pytest.fixture(autouse=True)
def unwritten_memory_is_nan() -> Iterator[None]:
    assert INTERPRETED
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def distance(left: Tensor, right: Tensor) -> float:
    """Largest absolute difference; equal infinities are equal, NaN is as far as can be."""
    apart = (left.double() - right.double()).abs()
    apart = torch.where(left.double() == right.double(), torch.zeros_like(apart), apart)
    return float(torch.nan_to_num(apart, nan=math.inf).max())


def mutate(module: Any, name: str, old: str, new: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Puts a kernel with one place of its source changed into its module."""
    source = Path(module.__file__).read_text()
    assert source.count(old) == 1, f"{old!r} is no single place of {module.__name__}"
    path = tmp_path / "mutant.py"
    path.write_text(source.replace(old, new))
    monkeypatch.setattr(module, name, run_path(str(path))[name])


def watch_launches(monkeypatch: pytest.MonkeyPatch, *kernels: tuple[Any, str]) -> dict[str, list[Tensor | None]]:
    """By name of each kernel of (module, name): the tensor whose device was the current one at each launch."""
    inside: list[Tensor | None] = [None]
    launches: dict[str, list[Tensor | None]] = {name: [] for _, name in kernels}

    @contextmanager
    def device_of(tensor: Tensor) -> Iterator[None]:
        inside.append(tensor)
        yield
        inside.pop()

    class Watched:
        def __init__(self, name: str, kernel: Any) -> None:
            self.name, self.kernel = name, kernel

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            launches[self.name].append(inside[-1])
            return self.kernel[grid]

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    for module, name in kernels:
        monkeypatch.setattr(module, name, Watched(name, getattr(module, name)))
    return launches

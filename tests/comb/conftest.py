"""Fixtures shared by the library's tests: one tiny adapter on a tiny Llama, its gates open."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from comb import CombForCausalLM
from tests.helpers.families import open_gates, tiny


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Tiny matrices: more threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def model() -> CombForCausalLM:
    """A Llama of four layers with two encoder layers, cross blocks before layers 1 and 3, gates open."""
    torch.manual_seed(1)
    return open_gates(CombForCausalLM.from_backbone(tiny("llama"), num_encoder_layers=2))


@pytest.fixture
def query() -> torch.Tensor:
    """Two rows of nine random tokens."""
    return torch.randint(3, 100, (2, 9), generator=torch.Generator().manual_seed(5))

"""Matrices that vLLM packs for a CPU while it loads, and nobody can read afterwards."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig

from comb.backbones.identity import weights_fingerprint

pytest.importorskip("vllm")

SIZE = 64


def loaded(change: float | None = None, quantization: str | None = None) -> Any:
    """A model as a worker has it, of one matrix, a number of which was written."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    from comb_serving.vllm.fixed_weights import FixedWeights

    class Loads:
        def __init__(self, model: nn.Module) -> None:
            self.model = model
            config = SimpleNamespace(quantization=quantization, model="the/model")
            self.vllm_config = SimpleNamespace(model_config=config)

        def load_model(self) -> None:
            dispatch_cpu_unquantized_gemm(self.model[1], remove_weight=True)

        def get_model(self) -> nn.Module:
            return self.model

    class Worker(FixedWeights, Loads):
        pass

    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.LayerNorm(SIZE), nn.Linear(SIZE, SIZE, bias=False)).requires_grad_(False)
    model.config = LlamaConfig()
    if change is not None:
        model[1].weight[5, 7] = change
    Worker(model).load_model()
    assert model[1].weight.numel() == 0
    return model


@pytest.mark.parametrize("change", [math.nan, math.inf, -math.inf])
def test_they_are_of_numbers(change: float) -> None:
    with pytest.raises(ValueError, match=r"the/model has NaN or infinity in 1 weight \(1.weight\): .* download"):
        loaded(change)
    assert loaded(change, "int8")  # a quantiser's own


def test_documents_are_named_by_them() -> None:
    """A fine-tune may have the same embeddings and norms, and finds the other's documents on its disk."""
    names = [weights_fingerprint(loaded(change), settings=False) for change in (None, None, 0.5)]
    assert names[0] == names[1] != names[2]


def test_nothing_listens_behind_the_load() -> None:
    loaded()
    with pytest.raises(ValueError, match="NaN"):
        loaded(math.nan)
    module = nn.Linear(2, 2)
    module.weight = nn.Parameter(torch.empty(0))
    assert not list(module.buffers())

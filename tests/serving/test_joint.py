"""Joint attention inside vLLM, without an engine: which layers can have it. (Answers: test_plugin.py, "joint".)"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("vllm")

from vllm.v1.attention.backend import AttentionMetadataBuilder
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

from comb_serving.vllm import joint
from comb_serving.vllm.linking.cache_access import CacheReader

pytestmark = pytest.mark.vllm


class Metadata:
    """As FlashInfer's: plans, and no block table."""

    plan: object


class Wrapping(AttentionMetadataBuilder[Metadata]):  # type: ignore[type-var]
    pass


class Attending(nn.Module):
    """What is asked of vLLM's attention layer."""

    def __init__(self, **impl: Any) -> None:
        super().__init__()
        self.impl = SimpleNamespace(scale=0.25, alibi_slopes=None, logits_soft_cap=0, sinks=None, **impl)
        self.head_size, self.layer_name, self.kv_cache_dtype = 16, "layers.1.attn", "auto"
        self.attn_backend: Any = CPUAttentionBackend


@pytest.mark.parametrize("what", ["alibi_slopes", "logits_soft_cap", "sinks"])
def test_scores_that_are_more_than_a_product_are_refused(what: str) -> None:
    plain, other = Attending(), Attending()
    setattr(other.impl, what, torch.full((2,), 30.0))
    reader = joint.JointReader(plain, 0, None, "name", CacheReader(16))  # type: ignore[arg-type]
    assert reader.scale == 1.0
    with pytest.raises(ValueError, match=f"{what}: layers.1.attn has them"):
        joint.JointReader(other, 0, None, "name", CacheReader(16))  # type: ignore[arg-type]


def test_caches_that_cannot_be_read_are_refused() -> None:
    small, wrapped = Attending(), Attending()
    small.kv_cache_dtype = "fp8_e4m3"
    with pytest.raises(ValueError, match="fp8_e4m3 here: leave kv_cache_dtype alone"):
        joint.JointReader(small, 0, None, "name", CacheReader(16))  # type: ignore[arg-type]
    wrapped.attn_backend = SimpleNamespace(get_name=lambda: "FLASHINFER", get_builder_cls=lambda: Wrapping)
    with pytest.raises(ValueError, match="which FLASHINFER doesn't hand on"):
        joint.JointReader(wrapped, 0, None, "name", CacheReader(16))  # type: ignore[arg-type]


def test_a_layer_has_one_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joint, "Attention", Attending)
    one = Attending()
    assert joint.attention_of(nn.ModuleDict({"attn": one, "mlp": nn.Linear(2, 2)})) is one
    for modules in ({}, {"a": Attending(), "b": Attending()}):
        with pytest.raises(ValueError, match=f"which has {len(modules)}"):
            joint.attention_of(nn.ModuleDict(modules))

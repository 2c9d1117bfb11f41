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
from comb_serving.vllm.linking import cache_access
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
    reader = joint.JointReader(plain, 0, None, "name", CacheReader(16), None)  # type: ignore[arg-type]
    assert reader.scale == 1.0
    with pytest.raises(ValueError, match=f"{what}: layers.1.attn has them"):
        joint.JointReader(other, 0, None, "name", CacheReader(16), None)  # type: ignore[arg-type]


def test_caches_that_cannot_be_read_are_refused() -> None:
    small, wrapped = Attending(), Attending()
    small.kv_cache_dtype = "fp8_e4m3"
    with pytest.raises(ValueError, match="fp8_e4m3 here: leave kv_cache_dtype alone"):
        joint.JointReader(small, 0, None, "name", CacheReader(16), None)  # type: ignore[arg-type]
    wrapped.attn_backend = SimpleNamespace(get_name=lambda: "FLASHINFER", get_builder_cls=lambda: Wrapping)
    with pytest.raises(ValueError, match="which FLASHINFER doesn't hand on"):
        joint.JointReader(wrapped, 0, None, "name", CacheReader(16), None)  # type: ignore[arg-type]


class Cached(Attending):
    """A layer whose cache [blocks, 2, size, heads, dim] or [blocks, 2, heads, size, dim] is written as vLLM's are."""

    def __init__(self, *, heads_first: bool, packed: bool) -> None:
        super().__init__()
        self.num_kv_heads, self.packed = 3, packed
        made = torch.randn(4, 2, 3, 8, 16) if heads_first else torch.randn(4, 2, 8, 3, 16).transpose(2, 3)
        self.kv_cache = made.transpose(2, 3)  # [blocks, 2, size, heads, dim], strided as the backend has it
        self.impl.do_kv_cache_update = self.update

    def update(
        self, _: Any, keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor
    ) -> None:
        if self.packed:  # numbers of a key in an order of their own
            keys = keys[..., torch.randperm(16, generator=torch.Generator().manual_seed(1))]
        cache[slots // 8, 0, slots % 8] = keys
        cache[slots // 8, 1, slots % 8] = values


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("heads_first", [False, True])
def test_keys_are_found_in_whatever_layout(heads_first: bool, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_access, "MLAAttention", type(None))
    layer, reader = Cached(heads_first=heads_first, packed=packed), CacheReader(8)
    keys, values = torch.randn(5, 3, 16), torch.randn(5, 3, 16)
    slots = torch.tensor([3, 8, 31, 17, 0])
    cache_access.write(layer, keys, values, slots)
    assert torch.equal(reader.first(layer, slots), keys)
    assert torch.equal(reader.read(layer, slots), torch.cat((keys.flatten(1), values.flatten(1)), 1))
    ((_, _, strides),) = reader._places.values()
    assert bool(strides) is not packed
    assert not torch.equal(reader.first(layer, slots.flip(0)), keys)


def test_a_layer_has_one_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joint, "Attention", Attending)
    one = Attending()
    assert joint.attention_of(nn.ModuleDict({"attn": one, "mlp": nn.Linear(2, 2)})) is one
    for modules in ({}, {"a": Attending(), "b": Attending()}):
        with pytest.raises(ValueError, match=f"which has {len(modules)}"):
            joint.attention_of(nn.ModuleDict(modules))

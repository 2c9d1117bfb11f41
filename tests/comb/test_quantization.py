"""PICaches in eight and four bits: the error stays within its bound, bytes shrink, and every method goes on working."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from comb import CombForCausalLM, LinkTokensForCausalLM, PICEngine, methods
from comb.cache.picache import DecoderPICache, PICacheError, deserialize, serialize
from comb.cache.quantization import GROUP, SCHEMES, QuantizedPICache, dequantize, quantize, quantize_picache
from comb.cache.store import PICacheStore
from tests.helpers.byte_text import byte_llama, byte_tokenizer
from tests.helpers.families import open_gates, tiny

DOCUMENTS = [list(range(3, 14)), list(range(50, 61))]
QUERY = [90, 17, 33]
TOKENS = 60


def decoder(dtype: torch.dtype, head_dim: int = 64) -> DecoderPICache:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(2, TOKENS, head_dim, generator=generator).to(dtype) for _ in range(6)]
    return DecoderPICache("fp", tuple(tensors[:3]), tuple(tensors[3:]), torch.arange(TOKENS))


@pytest.mark.parametrize("scheme", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_error_stays_within_its_bound(scheme: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    tensor = (torch.randn(3, 17, 40, generator=generator) * torch.logspace(-3, 3, 17)[:, None]).to(dtype)
    data, scale = quantize(tensor, scheme)
    assert data.dtype == SCHEMES[scheme][0]
    assert scale.shape == (3, 17, 1)
    again = dequantize(data, scale, torch.float64)
    largest = tensor.double().abs().amax(-1, keepdim=True)
    # half a step of int8, plus what the scale's own rounding moves; fp8 has three bits behind the point
    bound = (
        largest / 254 * (1 + 2**-9) + largest * 2**-10
        if scheme == "int8"
        else tensor.double().abs() / 16 * 1.01 + largest / 448 / 512
    )
    assert bool(((again - tensor.double()).abs() <= bound).all())
    # the control: scales of other tokens are far outside of it
    shuffled = dequantize(data, scale.roll(1, dims=1), torch.float64)
    assert not bool(((shuffled - tensor.double()).abs() <= bound).all())


@pytest.mark.parametrize("dim", [1, -1])
@pytest.mark.parametrize("tokens", [1, GROUP - 1, GROUP, 2 * GROUP + 5])
def test_four_bits_stay_within_half_a_step_of_their_group(dim: int, tokens: int) -> None:
    generator = torch.Generator().manual_seed(1)
    tensor = torch.randn(3, tokens, 130, generator=generator) * torch.logspace(-3, 3, 130)
    data, ranges = quantize(tensor, "int4", dim)
    assert (data.dtype, data.shape) == (torch.uint8, (3, tokens, 65))
    groups = list(tensor.shape)
    groups[dim] = -(-groups[dim] // GROUP)
    assert ranges.shape == (*groups, 2)
    again = dequantize(data, ranges, torch.float64, dim)
    steps, largest = torch.zeros(2, *tensor.shape, dtype=torch.float64)
    for first in range(0, tensor.shape[dim], GROUP):  # the plain twin of the groups
        here = [slice(None)] * 3
        here[dim] = slice(first, first + GROUP)
        part = tensor[tuple(here)].double()
        steps[tuple(here)] = (part.amax(dim, keepdim=True) - part.amin(dim, keepdim=True)) / 15
        largest[tuple(here)] = part.abs().amax(dim, keepdim=True)
    bound = steps * 0.51 + largest * 2**-9  # lowest number and step are rounded to 16 bits
    assert bool(((again - tensor.double()).abs() <= bound).all())
    other = dequantize(data, ranges.flip(dim if groups[dim] > 1 else 0), torch.float64, dim)  # another group's
    assert not bool(((other - tensor.double()).abs() <= bound).all())


def test_four_bits_want_pairs_of_channels() -> None:
    with pytest.raises(ValueError, match="two channels in a byte, and heads have 5: use int8"):
        quantize(torch.ones(1, 2, 5), "int4")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_extremes(scheme: str) -> None:
    for factor in (0.0, 1e-30, 1e-8, 1e30):
        tensor = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0)) * factor
        data, scale = quantize(tensor, scheme)
        again = dequantize(data, scale, torch.float32)
        assert torch.isfinite(again).all()
        assert float((again - tensor).abs().max()) <= 0.07 * float(tensor.abs().max())
    for bad in (torch.inf, torch.nan):
        with pytest.raises(ValueError, match="NaN or infinity"):
            quantize(torch.tensor([[1.0, bad]]), scheme)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_bytes_shrink_and_the_disk_keeps_them(scheme: str) -> None:
    for dtype, share in ((torch.bfloat16, 0.53), (torch.float32, 0.27)):
        picache, share = decoder(dtype), share * (0.6 if scheme == "int4" else 1)
        small = quantize_picache(picache, scheme, "fp/q")
        assert small.nbytes < share * picache.nbytes
        again = small.dequantize("fp").tensors()
        pairs = [(again[n].double(), t.double()) for n, t in picache.tensors().items() if t.is_floating_point()]
        error = sum((a - b).square().sum() for a, b in pairs) / sum(b.square().sum() for _, b in pairs)
        assert 1e-4 < error**0.5 < {"int8": 0.01, "fp8": 0.04, "int4": 0.12}[scheme]
        assert {small.data[name].dtype for name in small.scales} == {SCHEMES[scheme][0]}
        assert (small.num_tokens, small.inner) == (TOKENS, "decoder")
        loaded = deserialize(serialize(small, "k"), "k")
        assert isinstance(loaded, QuantizedPICache)
        assert all(
            torch.equal(loaded.tensors()[n].view(torch.uint8), t.contiguous().view(torch.uint8))
            for n, t in small.tensors().items()
        )
        opened = loaded.dequantize("fp")
        assert isinstance(opened, DecoderPICache)
        assert opened.keys[0].dtype == dtype
        assert torch.equal(opened.token_ids, picache.token_ids)  # type: ignore[arg-type]
    data = bytearray(serialize(small, "k"))
    data[-1] ^= 1
    with pytest.raises(PICacheError):
        deserialize(bytes(data), "k")


@pytest.mark.parametrize("name", [name for name in methods.names() if not methods.get(name).unquantizable])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_method(name: str, scheme: str) -> None:
    torch.manual_seed(0)
    model = tiny("llama", std=0.1)
    if name == "comb":
        model = open_gates(CombForCausalLM.from_backbone(model, num_encoder_layers=2))
    elif name == "linktokens":
        model = LinkTokensForCausalLM.from_backbone(model, num_link_tokens=3)
    given = {"front": [5, 6, 7]} if name == "primed" else {}
    plain, small = methods.create(name, model, **given), methods.create(f"{name}:quantize={scheme}", model, **given)
    assert (small.name, small.uses_encoder, small.batches) == (plain.name, plain.uses_encoder, plain.batches)
    assert small.max_segment_tokens == plain.max_segment_tokens
    reference = plain.link(plain.compile(DOCUMENTS), QUERY).logits
    got = small.link(small.compile(DOCUMENTS), QUERY).logits
    error = float((got - reference).abs().max() / reference.abs().max())
    assert 0 < error < (0.5 if scheme == "int4" else 0.15)
    with pytest.raises(ValueError, match="links what it compiled itself"):
        small.link(plain.compile(DOCUMENTS), QUERY)
    other = methods.create(f"{name}:quantize={'fp8' if scheme == 'int8' else 'int8'}", model, **given)
    with pytest.raises(ValueError, match="links what it compiled itself"):
        small.link(other.compile(DOCUMENTS), QUERY)


def test_the_engine_stores_the_small_ones(tmp_path: Path) -> None:
    model, tokenizer = byte_llama(hidden_size=64, num_attention_heads=1), byte_tokenizer()

    def ask(store: PICacheStore, **options: Any) -> Any:
        engine = PICEngine(model, tokenizer, store=store, **options)
        return engine.ask("who?", documents=["The mill burnt down."], max_new_tokens=3).report

    plain = ask(PICacheStore(), method="legolink:2")
    store = PICacheStore(disk_path=tmp_path)
    small = ask(store, method="legolink", k=2, quantize="int8")
    assert small.cache_bytes < 0.3 * plain.cache_bytes
    assert small.documents[0].state == "compiled"
    assert ask(store, method="naive:quantize=int8").documents[0].state == "hit"
    assert ask(store, method="naive:quantize=fp8").documents[0].state == "compiled"
    assert ask(store, method="naive").documents[0].state == "compiled"
    store.flush()
    again = ask(PICacheStore(disk_path=tmp_path), method="naive:quantize=int8").documents[0]
    assert (again.state, again.tier) == ("hit", "disk")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("naive:quantize=int3", "one of int8, fp8, int4, not 'int3'"),
        ("full:quantize=int8", "keeps token ids only"),
        ("prefix:quantize=int8", "promises what full recompute gives"),
    ],
)
def test_refusals(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        methods.create(spec, tiny("llama"))
    assert methods.create("naive:quantize=none", tiny("llama")).fingerprint

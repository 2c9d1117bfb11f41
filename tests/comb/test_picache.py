"""PICache types, content keys and files: what goes in comes out, also in few bits; damage is noticed at every byte."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from comb import CombForCausalLM, LinkTokensForCausalLM, PICEngine, methods
from comb.cache.picache import (
    CrossPICache,
    DecoderPICache,
    PICache,
    PICacheError,
    TokenPICache,
    compiled_key,
    content_key,
    deserialize,
    document_key,
    document_of,
    register_kind,
    serialize,
)
from comb.cache.quantization import GROUP, SCHEMES, QuantizedPICache, dequantize, quantize, quantize_picache
from comb.cache.store import PICacheStore
from tests.helpers.byte_text import byte_llama, byte_tokenizer
from tests.helpers.families import open_gates, tiny
from tests.helpers.stores import same, with_metadata

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2]


def random_tensor(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(sum(shape))) * 50


BUFFER = random_tensor(2, 8, 2, 4)
# as of latent attention: values of another width than their keys
DECODER = DecoderPICache(
    "fp", (random_tensor(1, 3, 6), random_tensor(2, 3, 4)), (random_tensor(1, 3, 5), random_tensor(2, 3, 4))
)
CONTENT = serialize(DECODER, "key")


# ---- types ----


@pytest.mark.parametrize(
    "make",
    [
        lambda: CrossPICache("fp", torch.zeros(2, 3, 4), torch.zeros(2, 3, 4)),
        lambda: CrossPICache("fp", torch.zeros(2, 3, 4, 5), torch.zeros(2, 4, 4, 5)),
        lambda: CrossPICache("fp", torch.zeros(2, 0, 4, 5), torch.zeros(2, 0, 4, 5)),
        lambda: TokenPICache("fp", torch.zeros(3)),
        lambda: TokenPICache("fp", torch.zeros(0, dtype=torch.int64)),
        lambda: DecoderPICache("fp", (), ()),
        lambda: DecoderPICache("fp", (torch.zeros(1, 3, 4),), ()),
        lambda: DecoderPICache("fp", (torch.zeros(1, 3, 4),), (torch.zeros(2, 3, 4),)),
        lambda: DecoderPICache(
            "fp", (torch.zeros(1, 3, 4), torch.zeros(1, 2, 4)), (torch.zeros(1, 3, 4), torch.zeros(1, 2, 4))
        ),
    ],
)
def test_wrong_shapes_are_refused_with_what_came(make: Callable[[], PICache]) -> None:
    with pytest.raises(ValueError, match="expects"):
        make()


def test_standalone_lets_go_of_the_batch_and_of_gradients() -> None:
    batch = torch.rand(2, 10, 2, 4, requires_grad=True)
    part = CrossPICache("fp", batch[:, :3], batch[:, 3:6])
    own = part.standalone()
    assert same([part], [own])
    for tensor in own.tensors().values():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        assert not tensor.requires_grad
    assert own.standalone() is own


# ---- content key ----

BASE = {"fingerprint": "fp", "method": "comb", "dtype": torch.float16, "salt": ""}


def test_key_covers_everything_and_only_that() -> None:
    key = content_key([1, 2, 3], **BASE)
    others = [
        content_key([1, 2], **BASE),
        content_key([3, 2, 1], **BASE),
        *(content_key([1, 2, 3], **(BASE | {name: "other"})) for name in BASE),
    ]
    assert len({key, *others}) == len(others) + 1
    assert content_key(torch.tensor([1, 2, 3]), **(BASE | {"dtype": "float16"})) == key
    assert content_key((1, 2, 3), **BASE) == key
    of_document = [other for other in others if document_of(other) == document_of(key)]
    assert len(of_document) == 3  # other weights, method and dtype
    assert document_of(key) == document_key([1, 2, 3]) == document_of(compiled_key(key, "a LoRA"))
    assert len({key, *(compiled_key(one, how) for one in (key, *of_document) for how in ("a LoRA", "another"))}) == 9
    # recorded: a change of the encoding must change KEY_VERSION too, or old files are taken for new content
    assert document_of(key) == "388c22dd117fa1afd2f0d2c990878724b0c5cbe1c12130f20cb41d66ed12d124"
    assert key == f"{document_of(key)}-b7eb940d9249c95a6eef94580b422342"


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text(max_size=4), min_size=8, max_size=8))
def test_fields_do_not_run_into_each_other(fields: list[str]) -> None:
    def key(fingerprint: str, method: str, dtype: str, salt: str) -> str:
        return content_key([1], fingerprint=fingerprint, method=method, dtype=dtype, salt=salt)

    first, second = fields[:4], fields[4:]
    assert (key(*first) == key(*second)) == (first == second)
    assert key("a" + first[0], first[1], "d", "") != key("a", first[0] + first[1], "d", "") or not first[0]


@pytest.mark.parametrize("ids", [[], [1.5], [-1], [2**70], ["a"]])
def test_key_refuses_what_are_no_token_ids(ids: list[object]) -> None:
    with pytest.raises(ValueError, match="content_key expects"):
        content_key(ids, **BASE)  # type: ignore[arg-type]


# ---- files ----


@pytest.mark.parametrize(
    "pic",
    [
        *(CrossPICache("fp", BUFFER.to(dtype), BUFFER.flip(1).to(dtype)) for dtype in DTYPES),
        DECODER,
        TokenPICache("fp", torch.tensor([5, 6])),
        DecoderPICache("fp", (torch.zeros(1, 2, 3),) * 12, (torch.ones(1, 2, 3),) * 12),
        CrossPICache("fp", BUFFER[:, ::2], BUFFER[:, 1::2]),  # views of one buffer
        CrossPICache("fp", BUFFER, BUFFER),
    ],
    ids=repr,
)
def test_every_kind_and_dtype_comes_back(pic: PICache) -> None:
    assert same([pic], [deserialize(serialize(pic, "key"), "key")])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: b"", "truncated"),
        (lambda data: data[:100], "truncated"),
        (lambda data: data[:-1], "truncated"),
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "checksum"),
        (lambda data: with_metadata(data, format_version="2"), "format version 1 expected, got 2"),
        (lambda data: with_metadata(data, key="other"), "key 'key' expected, the file holds 'other'"),
        (lambda data: with_metadata(data, kind="strange"), "unknown PICache kind 'strange'; known: cross, decoder"),
        (lambda data: with_metadata(data, fingerprint="another model"), "checksum"),
        (lambda data: with_metadata(data, expires_at="9e9"), "metadata .* expected, got .*'expires_at'"),
        (lambda data: b"\x02\0\0\0\0\0\0\0{}", "not a PICache file"),
        (lambda data: b"\xff" * 64, "truncated"),
        (lambda data: b"PK\x03\x04" + bytes(200), "truncated"),
        (lambda data: safetensors.torch.save({"keys": torch.zeros(1)}), "not a PICache file"),
    ],
)
def test_unusable_files_say_why(damage: Callable[[bytes], bytes], message: str) -> None:
    with pytest.raises(PICacheError, match=message):
        deserialize(damage(serialize(TokenPICache("fp", torch.tensor([1, 2, 3])), "key")), "key")


@settings(max_examples=550, deadline=None)
@given(st.data(), st.booleans() | st.just(False))
def test_any_changed_byte_and_any_cut_is_noticed_or_harmless(data: st.DataObject, cut: bool) -> None:
    offset = data.draw(st.integers(0, len(CONTENT) - 1))
    if cut:
        with pytest.raises(PICacheError):
            deserialize(CONTENT[:offset], "key")
        return
    changed = CONTENT[:offset] + bytes([data.draw(st.integers(0, 255))]) + CONTENT[offset + 1 :]
    try:
        loaded = deserialize(changed, "key")
    except PICacheError:
        return
    assert same([DECODER], [loaded])


def test_a_new_kind_is_one_class_and_one_registration() -> None:
    @register_kind
    class StatePICache(TokenPICache):
        kind = "test-states"

    loaded = deserialize(serialize(StatePICache("fp", torch.tensor([1, 2])), "key"), "key")
    assert type(loaded) is StatePICache
    with pytest.raises(ValueError, match="registered already"):
        register_kind(type("Other", (TokenPICache,), {"kind": "test-states"}))


# ---- eight and four bits: the error stays within its bound, bytes shrink, and every method goes on working ----


DOCUMENTS = [list(range(3, 14)), list(range(50, 61))]
QUERY = [90, 17, 33]
TOKENS = 60


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
    numbers = torch.randn(6, 2, TOKENS, 64, generator=torch.Generator().manual_seed(0))
    for dtype, share in ((torch.bfloat16, 0.53), (torch.float32, 0.27)):
        keys, values = numbers.to(dtype).chunk(2)
        picache = DecoderPICache("fp", tuple(keys), tuple(values), torch.arange(TOKENS))
        small = quantize_picache(picache, scheme, "fp/q")
        assert small.nbytes < share * (0.6 if scheme == "int4" else 1) * picache.nbytes
        again = small.dequantize("fp").tensors()
        pairs = [(again[n].double(), t.double()) for n, t in picache.tensors().items() if t.is_floating_point()]
        error = sum((a - b).square().sum() for a, b in pairs) / sum(b.square().sum() for _, b in pairs)
        assert 1e-4 < error**0.5 < {"int8": 0.01, "fp8": 0.04, "int4": 0.12}[scheme]
        assert {small.data[name].dtype for name in small.scales} == {SCHEMES[scheme][0]}
        assert (small.num_tokens, small.inner) == (TOKENS, "decoder")
        loaded = deserialize(serialize(small, "k"), "k")
        assert same([loaded], [small])
        assert isinstance(loaded, QuantizedPICache)
        opened = loaded.dequantize("fp")
        assert isinstance(opened, DecoderPICache)
        assert opened.keys[0].dtype == dtype
        assert torch.equal(opened.token_ids, picache.token_ids)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [name for name in methods.names() if not methods.get(name).unquantizable])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_method(name: str, scheme: str) -> None:
    torch.manual_seed(0)
    model = tiny("llama", std=0.1)
    if name == "comb":
        model = open_gates(CombForCausalLM.from_backbone(model, num_encoder_layers=2, front=[5, 6, 7]))
    elif name == "linktokens":
        model = LinkTokensForCausalLM.from_backbone(model, num_link_tokens=3)
    given = {"front": [5, 6, 7]} if name == "primed" else {}
    plain, small = methods.create(name, model, **given), methods.create(f"{name}:quantize={scheme}", model, **given)
    assert (small.name, small.uses_encoder, small.batches) == (plain.name, plain.uses_encoder, plain.batches)
    assert (small.max_segment_tokens, small.sink_tokens) == (plain.max_segment_tokens, plain.sink_tokens)
    assert isinstance(small, methods.Method)
    assert copy.copy(small).fingerprint == small.fingerprint != plain.fingerprint
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

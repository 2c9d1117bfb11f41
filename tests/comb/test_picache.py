"""PICache types, content keys and files: what goes in comes out, and damage is noticed at every byte."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from comb.cache.picache import (
    CrossPICache,
    DecoderPICache,
    PICache,
    PICacheError,
    TokenPICache,
    content_key,
    deserialize,
    register_kind,
    serialize,
)
from tests.helpers.stores import with_metadata

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2]


def random_tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.rand(shape, generator=torch.Generator().manual_seed(sum(shape))) * 50).to(dtype)


def cross(tokens: int = 5, dtype: torch.dtype = torch.float32) -> CrossPICache:
    return CrossPICache("fp", random_tensor(2, tokens, 2, 4, dtype=dtype), random_tensor(2, tokens, 2, 4, dtype=dtype))


def decoder(tokens: int = 3) -> DecoderPICache:
    keys = (random_tensor(1, tokens, 6), random_tensor(2, tokens, 4))
    values = (random_tensor(1, tokens, 5), random_tensor(2, tokens, 4))  # MLA-like: other head_dim than the keys
    return DecoderPICache("fp", keys, values)


def tokens(*ids: int) -> TokenPICache:
    return TokenPICache("fp", torch.tensor(ids, dtype=torch.int64))


def assert_same(left: PICache, right: PICache) -> None:
    assert type(left) is type(right)
    assert left.fingerprint == right.fingerprint
    assert left.tensors().keys() == right.tensors().keys()
    for name, tensor in left.tensors().items():
        other = right.tensors()[name]
        assert tensor.dtype == other.dtype
        assert tensor.shape == other.shape
        assert torch.equal(tensor.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)), name


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
    assert_same(part, own)
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
    assert len(key) == 64
    # recorded: a change of the encoding must change KEY_VERSION too, or old files are taken for new content
    assert key == "45b60e06296215605f998093f373370f8dfba46d870cad5dabb74dbc5b080087"


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


BUFFER = random_tensor(2, 8, 2, 4)


@pytest.mark.parametrize(
    "pic",
    [
        *(cross(dtype=dtype) for dtype in DTYPES),
        decoder(),
        tokens(5, 6),
        DecoderPICache("fp", (torch.zeros(1, 2, 3),) * 12, (torch.ones(1, 2, 3),) * 12),
        CrossPICache("fp", BUFFER[:, ::2], BUFFER[:, 1::2]),  # views of one buffer
        CrossPICache("fp", BUFFER, BUFFER),
    ],
    ids=repr,
)
def test_every_kind_and_dtype_comes_back(pic: PICache) -> None:
    assert_same(pic, deserialize(serialize(pic, "key"), "key"))


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
        deserialize(damage(serialize(tokens(1, 2, 3), "key")), "key")


@cache
def sample() -> tuple[PICache, bytes]:
    pic = decoder()
    return pic, serialize(pic, "key")


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_any_changed_byte_is_noticed_or_harmless(data: st.DataObject) -> None:
    pic, content = sample()
    offset = data.draw(st.integers(0, len(content) - 1))
    value = data.draw(st.integers(0, 255))
    changed = content[:offset] + bytes([value]) + content[offset + 1 :]
    try:
        loaded = deserialize(changed, "key")
    except PICacheError:
        return
    assert_same(pic, loaded)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_cut_is_noticed(data: st.DataObject) -> None:
    _, content = sample()
    length = data.draw(st.integers(0, len(content) - 1))
    with pytest.raises(PICacheError):
        deserialize(content[:length], "key")


def test_a_new_kind_is_one_class_and_one_registration() -> None:
    @register_kind
    class StatePICache(TokenPICache):
        kind = "test-states"

    loaded = deserialize(serialize(StatePICache("fp", torch.tensor([1, 2])), "key"), "key")
    assert type(loaded) is StatePICache
    with pytest.raises(ValueError, match="registered already"):
        register_kind(type("Other", (TokenPICache,), {"kind": "test-states"}))

"""The PICache store: each rule and each error. Sequences of operations are in test_store_stateful.py."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from comb.cache.index import IntegrityError
from comb.cache.picache import DecoderPICache, serialize
from comb.cache.store import PICacheStore, PICacheTooLargeError, StoreFullError
from comb.cache.tiers import SUFFIX
from tests.helpers.stores import NBYTES, TOKENS, Clock, Compiler, acquire, fail, files, hold, pic, use, with_metadata

# ---- lookup, references, pins ----


def test_misses_are_compiled_in_one_batch_and_hit_afterwards() -> None:
    store, compiler = PICacheStore(), Compiler()
    with acquire(store, ["k1", "k2", "k1", "k3"], compiler) as held:
        assert list(held) == compiler.compiled == ["k1", "k2", "k3"]
        assert [(ref.key, ref.tier, ref.hit) for ref in held.values()] == [(key, "compiled", False) for key in held]
        assert store.stats().in_use == 3
    with acquire(store, ["k4", "k2"], compiler) as held:
        assert (held["k4"].tier, held["k2"].tier, held["k2"].hit) == ("compiled", "device", True)
    assert compiler.compiled == ["k1", "k2", "k3", "k4"]
    assert store.stats().in_use == 0
    assert (store.stats().hits, store.stats().misses) == (1, 4)
    assert not acquire(store, [], fail)


def test_release_is_idempotent_and_ends_use() -> None:
    store = PICacheStore()
    first, second = hold(store, "k1"), hold(store, "k1")
    first.release()
    first.release()
    store.check_integrity()
    assert store.stats().in_use == 1
    with pytest.raises(KeyError, match="k1 is not held: it is missing, or was released"):
        _ = first["k1"]
    assert second["k1"].picache.num_tokens == TOKENS
    with second:
        pass
    assert store.stats().in_use == 0


def test_in_use_and_pinned_are_never_evicted() -> None:
    store = PICacheStore(device_bytes=3 * NBYTES)
    with hold(store, "k1"):
        use(store, "k2")
        assert store.pin("k2")
        use(store, "k3")
        use(store, "k4")
        assert [store.lookup(key) for key in ("k1", "k2", "k3", "k4")] == ["device", "device", None, "device"]
        with pytest.raises(StoreFullError, match=f"no room for {2 * NBYTES} bytes"):
            use(store, "k5", "k6")
        assert store.lookup("k4") == "device"  # nothing is evicted in vain
        assert store.stats().in_use == 1
    use(store, "k5", "k6")
    assert [store.lookup(key) for key in ("k1", "k2", "k5")] == [None, "device", "device"]


@pytest.mark.parametrize("key", ["", "a/b", "../k1", ".hidden", "x" * 129, "k 1", "k\n", 7])
def test_a_key_must_be_a_file_name(key: str) -> None:
    store = PICacheStore()
    with pytest.raises(ValueError, match="a key expects"):
        store.acquire([key])
    if isinstance(key, str):
        assert store.lookup(key) is None
        assert not store.remove(key)


def test_numbers_that_make_no_sense_are_refused() -> None:
    for name in ("device_bytes", "host_bytes", "disk_bytes"):
        with pytest.raises(ValueError, match=f"{name} expects a number of bytes >= 0, got -1"):
            PICacheStore(**{name: -1})
    for ttl_s in (0, -1, float("nan")):
        with pytest.raises(ValueError, match="ttl_s expects seconds > 0"):
            use(PICacheStore(), "k1", ttl_s=ttl_s)


# ---- failing compiles ----


@pytest.mark.parametrize("result", [[], [pic("k1")] * 3, [pic("k1"), "no PICache"]])
def test_a_compile_that_returns_something_else_is_refused(result: list[object]) -> None:
    store = PICacheStore()
    with pytest.raises(ValueError, match="one PICache for each of 2 missing keys"):
        acquire(store, ["k1", "k2"], lambda keys: result)
    assert store.stats().tiers["device"].entries == 0
    store.check_integrity()


def test_larger_than_the_budget_says_both_numbers_and_leaves_nothing() -> None:
    store = PICacheStore(device_bytes=2 * NBYTES, host_bytes=10 * NBYTES)
    use(store, "k1")
    with pytest.raises(PICacheTooLargeError, match=rf"has {9 * 8} bytes.*budget is {2 * NBYTES}; raise device_bytes"):
        acquire(store, ["k1", "k2"], Compiler(tokens=9))
    store.check_integrity()
    assert (store.lookup("k1"), store.lookup("k2")) == ("device", None)
    assert store.stats().in_use == 0
    assert issubclass(PICacheTooLargeError, ValueError)
    assert issubclass(StoreFullError, RuntimeError)


def test_who_compiles_may_use_the_store_but_not_for_the_same_key() -> None:
    store = PICacheStore(device_bytes=2 * NBYTES)

    with store.acquire(["k1"]) as held:
        assert held.missing() == ["k1"]
        assert use(store, "k2") == ["compiled"]
        with pytest.raises(RuntimeError, match="which it is compiling itself"):
            use(store, "k3", "k1")
        assert use(store, "k3") == ["compiled"]  # its claim was dropped with the error
        held.add([pic("k1")])
        assert held.missing() == []
    store.check_integrity()


# ---- time to live ----


@pytest.mark.parametrize("pinned", [False, True])
def test_expired_is_a_miss(pinned: bool) -> None:
    clock = Clock()
    store = PICacheStore(device_bytes=2 * NBYTES, clock=clock)
    use(store, "k1", ttl_s=10)
    use(store, "k2")
    if pinned:
        store.pin("k1")
    clock.now += 9.9
    assert use(store, "k1", ttl_s=100) == ["device"]  # a hit does not renew
    clock.now += 0.1
    assert store.lookup("k1") is None
    assert store.stats().expired == 1
    assert store.stats().pinned == 0
    assert use(store, "k1", "k2") == ["compiled", "device"]
    store.set_expiry("k1", 1)
    assert not pinned or store.pin("k1")
    clock.now += 1
    assert use(store, "k3", "k2") == ["compiled", "device"]  # what has expired makes room, pinned or not


def test_what_expires_is_on_no_disk(tmp_path: Path) -> None:
    store = PICacheStore(device_bytes=2 * NBYTES, disk_path=tmp_path)
    use(store, "k1", ttl_s=10)
    use(store, "k2")
    assert store.flush() == 1
    assert store.set_expiry("k2", 10)
    assert files(tmp_path) == []
    use(store, "k3", "k4")
    assert files(tmp_path) == []
    with pytest.raises(ValueError, match="ttl_s expects seconds > 0"):
        store.set_expiry("k3", 0)
    # files of earlier versions had an end
    (tmp_path / f"k5{SUFFIX}").write_bytes(with_metadata(serialize(pic("k5"), "k5"), expires_at="1e9"))
    assert use(PICacheStore(disk_path=tmp_path), "k5") == ["compiled"]


# ---- tiers ----


def test_gone_when_the_disk_is_full_too(tmp_path: Path) -> None:
    size = len(serialize(pic("k1"), "k1"))
    store = PICacheStore(device_bytes=NBYTES, disk_path=tmp_path, disk_bytes=2 * size)
    for key in ("k1", "k2", "k3", "k4"):
        use(store, key)
    assert files(tmp_path) == ["k2", "k3"]
    assert store.lookup("k1") is None
    assert store.stats().tiers["disk"].evictions == 1
    assert use(store, "k2") == ["disk"]
    use(store, "k5")  # k4, k2 go down; k2's file is there and was just used, so k3 goes
    assert files(tmp_path) == ["k2", "k4"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_to_host_to_disk_and_back(tmp_path: Path) -> None:
    store = PICacheStore(device="cuda", device_bytes=NBYTES, host_bytes=NBYTES, disk_path=tmp_path)
    assert use(store, "k1") + use(store, "k2") + use(store, "k3") == ["compiled"] * 3
    for key, tier in (("k2", "host"), ("k1", "disk")):
        with hold(store, key) as held:
            assert held[key].tier == tier
            assert held[key].picache.token_ids.device.type == "cuda"
            assert held[key].picache.token_ids.tolist() == pic(key).token_ids.tolist()


def test_another_device_holds_its_own_copies() -> None:
    keys, ids = torch.zeros(1, TOKENS, 2), torch.arange(TOKENS)
    made = DecoderPICache("fp", (keys,), (keys,), ids)
    store = PICacheStore(device="meta", device_bytes=made.nbytes, host_bytes=made.nbytes)
    with acquire(store, ["k1"], lambda missing: [made]) as held:
        found = held["k1"].picache
        assert found.keys[0].device.type == found.values[0].device.type == "meta"
        assert found.token_ids is ids  # read by the host, so they stay there


# ---- check_integrity can fail ----


def spoil_claim(store: PICacheStore) -> None:
    thread = threading.Thread(target=lambda: store._index.claim("k9", threading.current_thread()))
    thread.start()
    thread.join()


@pytest.mark.parametrize(
    ("spoil", "invariant"),
    [
        (lambda store: setattr(store._device.entries["k1"], "value", pic("k1", 9)), "k1 counted as 32 bytes, has 72"),
        (spoil_claim, "no key in flight without an owner: .*k9"),
        (lambda store: store._index.add("host", replace(store._device.entries["k1"])), "no key on device and host"),
    ],
)
def test_check_integrity_names_the_broken_invariant(spoil: Callable[[PICacheStore], None], invariant: str) -> None:
    store = PICacheStore(host_bytes=1000)
    use(store, "k1")
    spoil(store)
    with pytest.raises(IntegrityError, match=invariant):
        store.check_integrity()

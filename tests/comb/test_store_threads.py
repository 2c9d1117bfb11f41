"""The store between threads."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from comb.cache.picache import TokenPICache
from comb.cache.store import PICacheStore
from tests.helpers.stores import NBYTES, Compiler, acquire, files, pic, use


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """Runs `work(0..count-1)` at once; raises the first error; fails if a thread hangs."""
    errors: list[BaseException] = []
    barrier = threading.Barrier(count)

    def run(index: int) -> None:
        try:
            barrier.wait(10)
            work(index)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(15)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    if errors:
        raise errors[0]


def test_sixteen_threads_compile_each_key_once() -> None:
    store, compiler = PICacheStore(), Compiler()
    names = [f"k{index}" for index in range(8)]

    def work(index: int) -> None:
        keys = names[index % 8 :] + names[: index % 8]  # everyone starts elsewhere
        with acquire(store, keys, compiler) as held:
            for key in keys:
                assert held[key].picache.token_ids[0] == int(key[1:])

    in_threads(16, work)
    assert sorted(compiler.compiled) == names
    assert store.stats().in_use == 0
    assert (store.stats().misses, store.stats().hits) == (8, 16 * 8 - 8)
    store.check_integrity()


def test_a_failing_thread_hands_over_to_a_waiting_one() -> None:
    store, compiler = PICacheStore(), Compiler()
    compiling, go = threading.Event(), threading.Event()

    def slow_and_failing(keys: list[str]) -> list[TokenPICache]:
        compiling.set()
        assert go.wait(10)
        raise RuntimeError("compile failed")

    def work(index: int) -> None:
        if index == 0:
            with pytest.raises(RuntimeError, match="compile failed"):
                acquire(store, ["k1"], slow_and_failing)
            return
        assert compiling.wait(10)
        threading.Timer(0.05, go.set).start()
        with acquire(store, ["k1"], compiler) as held:
            assert held["k1"].picache.token_ids[0] == 1

    in_threads(5, work)
    assert compiler.compiled == ["k1"]
    store.check_integrity()


@pytest.mark.parametrize("forget", ["remove", "clear"])
def test_removed_while_being_compiled_is_not_stored(forget: str) -> None:
    store = PICacheStore()

    with store.acquire(["k1"]) as held:
        assert held.missing() == ["k1"]
        if forget == "clear":
            store.clear()
        else:
            assert store.remove("k1")
        held.add([pic("k1")])
        assert held["k1"].picache.token_ids[0] == 1
        assert store.lookup("k1") is None
        store.check_integrity()
    assert store.stats().tiers["device"].bytes == 0


def test_removed_while_being_written_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = PICacheStore(device_bytes=NBYTES, disk_path=tmp_path)
    use(store, "k1")
    sync = os.fsync
    monkeypatch.setattr("os.fsync", lambda descriptor: (store.remove("k1"), sync(descriptor)))
    use(store, "k2")
    assert files(tmp_path) == []
    assert store.lookup("k1") is None


def test_what_is_given_an_end_while_being_written_is_on_no_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = PICacheStore(disk_path=tmp_path)
    use(store, "k1")
    sync = os.fsync
    monkeypatch.setattr("os.fsync", lambda descriptor: (store.set_expiry("k1", 10), sync(descriptor)))
    assert store.flush() == 0
    assert files(tmp_path) == []
    assert store.lookup("k1") == "device"


def test_many_threads_with_small_budgets_stay_consistent(tmp_path: Path) -> None:
    store = PICacheStore(device_bytes=12 * NBYTES, host_bytes=2 * NBYTES, disk_path=tmp_path, disk_bytes=2000)

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for step in range(40):
            keys = [f"k{i}" for i in torch.randperm(16, generator=generator)[:2].tolist()]
            if step % 7 == 6:
                store.remove(keys[0])
            if step % 11 == 10:
                store.flush()
            with acquire(store, keys, Compiler(), 0.02 if step % 5 == 0 else None) as held:
                for key in keys:
                    assert set(held[key].picache.token_ids.tolist()) == {int(key[1:])}
                store.check_integrity()

    in_threads(6, work)
    store.check_integrity()
    assert store.stats().in_use == store.stats().removed_in_use == 0
    assert store.stats().tiers["disk"].damaged == store.stats().tiers["disk"].write_errors == 0
    assert not store._index.claims

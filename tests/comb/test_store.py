"""The PICache store, its index and its disk: each rule and error that test_store_stateful.py doesn't come by."""

from __future__ import annotations

import errno
import logging
import os
import stat
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from comb.cache.index import CacheIndex, IndexEntry, Tier
from comb.cache.picache import DecoderPICache, TokenPICache, serialize
from comb.cache.store import PICacheStore
from comb.cache.tiers import SUFFIX
from tests.helpers.stores import NBYTES, TOKENS, Compiler, acquire, check_store, files, hold, pic, use, with_metadata

# ---- lookup, references, pins ----


def test_misses_are_compiled_in_one_batch_and_hit_afterwards() -> None:
    store, compiler = PICacheStore(), Compiler()
    with acquire(store, ["k1", "k2", "k1", "k3"], compiler) as held:
        assert list(held) == compiler.compiled == ["k1", "k2", "k3"]
    with acquire(store, ["k4", "k2"], compiler) as held:
        pass
    assert (store.stats().hits, store.stats().misses) == (1, 4)
    assert not acquire(store, [], pytest.fail)
    with pytest.raises(KeyError, match="k4 is not held: it is missing, or was released"):
        _ = held["k4"]


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
        with pytest.raises(ValueError, match=f"{name} expects a number of bytes >= 0, got '1GB'"):
            PICacheStore(**{name: "1GB"})
    store = PICacheStore()
    use(store, "k2")
    for ttl_s in (0, -1, float("nan")):
        with pytest.raises(ValueError, match="ttl_s expects seconds > 0"):
            use(store, "k1", ttl_s=ttl_s)
        with pytest.raises(ValueError, match="ttl_s expects seconds > 0"):
            store.set_expiry("k2", ttl_s)


# ---- failing compiles ----


@pytest.mark.parametrize("result", [[], [pic("k1")] * 3, [pic("k1"), "no PICache"]])
def test_a_compile_that_returns_something_else_is_refused(result: list[object]) -> None:
    store = PICacheStore()
    with pytest.raises(ValueError, match="one PICache for each of 2 missing keys"):
        acquire(store, ["k1", "k2"], lambda keys: result)
    assert store.stats().tiers["device"].entries == 0
    check_store(store)


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
    check_store(store)


# ---- time to live ----


@pytest.mark.parametrize("pinned", [False, True])
def test_what_has_expired_makes_room(pinned: bool) -> None:
    now = [100.0]
    store = PICacheStore(device_bytes=2 * NBYTES, clock=lambda: now[0])
    use(store, "k1", ttl_s=10)
    use(store, "k2")
    assert not pinned or store.pin("k1")
    now[0] += 10
    assert use(store, "k3", "k2") == ["compiled", "device"]
    assert (store.stats().expired, store.stats().pinned) == (1, 0)


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


# ---- the index, and the check of both ----


def test_what_is_freed_is_freed_once_and_when_nobody_uses_it() -> None:
    freed: list[str] = []
    pool: Tier[str] = Tier(3)
    index = CacheIndex({"pool": pool}, clock=lambda: 0.0, freed=lambda entry: freed.append(entry.key))
    entries = {key: IndexEntry(key, 1, key, references=int(key == "used")) for key in ("old", "used", "new")}
    for one in entries.values():
        index.add("pool", one)
    assert index.pin("old")
    assert index.make_room("pool", 2) is None
    assert [victim.key for victim in index.make_room("pool", 1) or ()] == ["new"]
    assert index.drop("used")
    assert index.drop("old")
    assert freed == ["new", "old"]
    assert not index.unpin("old")
    index.release(entries["used"])
    assert freed == ["new", "old", "used"]
    assert index.tiers["pool"].used == 0
    new = replace(entries["new"])
    index.add("pool", new)
    assert index.make_room("pool", 4) is None
    assert index.make_room("pool", 3) == [new]


# ---- the disk: restarts, damage, full disks, foreign folders ----


def test_a_new_store_finds_the_files_in_their_order_of_use(tmp_path: Path) -> None:
    first = PICacheStore(disk_path=tmp_path)
    use(first, "k1", "k2", "k3")
    assert first.flush() == 3
    assert first.flush() == 0
    size = len(serialize(pic("k1"), "k1"))
    for age, key in enumerate(("k2", "k3", "k1")):  # k1 is the oldest
        os.utime(tmp_path / f"{key}{SUFFIX}", (1e9 - age, 1e9 - age))
    again = PICacheStore(disk_path=tmp_path, disk_bytes=2 * size)
    assert [again.lookup(key) for key in ("k1", "k2", "k3")] == [None, "disk", "disk"]
    assert files(tmp_path) == ["k2", "k3"]
    assert use(again, "k2", "k1") == ["disk", "compiled"]


@pytest.mark.parametrize("cut", [0, 1, 7, 8, 60, 200, -1])
@pytest.mark.parametrize("restart", [False, True])
def test_a_half_written_file_is_a_miss_said_once(
    cut: int, restart: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = PICacheStore(device_bytes=NBYTES, disk_path=tmp_path)
    use(store, "k1")
    use(store, "k2")
    path = tmp_path / f"k1{SUFFIX}"
    path.write_bytes(path.read_bytes()[:cut])
    with caplog.at_level(logging.WARNING):
        store = PICacheStore(device_bytes=NBYTES, disk_path=tmp_path) if restart else store
        assert use(store, "k1") == ["compiled"]
        assert use(store, "k1") == ["device"]
    assert [str(path) in record.message for record in caplog.records] == [True]
    assert store.stats().tiers["disk"].damaged == 1
    assert not path.exists()
    use(store, "k2")  # k1 is written anew
    assert use(store, "k1") == ["disk"]


def test_a_file_name_is_not_trusted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = PICacheStore(disk_path=tmp_path)
    use(store, "k1")
    store.flush()
    (tmp_path / f"k1{SUFFIX}").rename(tmp_path / f"k2{SUFFIX}")
    # files of earlier versions had an end
    (tmp_path / f"k5{SUFFIX}").write_bytes(with_metadata(serialize(pic("k5"), "k5"), expires_at="1e9"))
    assert use(PICacheStore(disk_path=tmp_path), "k2", "k5") == ["compiled", "compiled"]
    assert "the file holds 'k1'" in caplog.text


@pytest.mark.parametrize("function", ["os.fsync", "pathlib.Path.replace", "comb.files.os.open"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES])
def test_a_full_disk_is_said_once_and_service_goes_on(
    function: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = PICacheStore(device_bytes=NBYTES, disk_path=tmp_path)

    def full(*arguments: object) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as broken:
        broken.setattr(function, full)
        for key in ("k1", "k2", "k3"):
            assert use(store, key) == ["compiled"]
    assert store.stats().tiers["disk"].write_errors == 2
    assert [os.strerror(code) in record.message for record in caplog.records] == [True]
    assert files(tmp_path) == []  # no partial file
    assert store.lookup("k1") is None
    use(store, "k4")  # the disk works again
    assert use(store, "k3") == ["disk"]


def test_left_over_temporary_files_are_deleted_after_a_day(tmp_path: Path) -> None:
    for name, age in ((".tmp-new", 80_000), (".tmp-old", 90_000), ("other", 90_000)):
        (tmp_path / name).write_bytes(b"half")
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    PICacheStore(disk_path=tmp_path)
    assert files(tmp_path) == [".tmp-new", "other"]


def test_the_folder_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    old_mask = os.umask(0)
    try:
        PICacheStore(disk_path="~/new/cache")
        for name in ("empty", "served", "home"):
            (tmp_path / name).mkdir(mode=0o755)
        for name in ("served", "home"):
            (tmp_path / name / "private").mkdir(mode=0o700)
        for name in ("empty", "served"):
            PICacheStore(disk_path=tmp_path / name)
    finally:
        os.umask(old_mask)
    for name in ("new/cache", "empty", "served"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o700
    (tmp_path / "home" / "letter.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"mode 0755 and holds 'letter\.txt'; give an empty or new folder"):
        PICacheStore(disk_path=tmp_path / "home")
    assert stat.S_IMODE((tmp_path / "home").stat().st_mode) == 0o755
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(ValueError, match=r"can't be kept in .*: give a folder that can be made and read"):
        PICacheStore(disk_path=tmp_path / "file")


def test_other_files_in_the_folder_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"someone's weights")
    store = PICacheStore(disk_path=tmp_path)
    use(store, "k1")
    store.flush()
    store.clear()
    assert files(tmp_path) == ["model.safetensors"]


def test_a_file_that_can_neither_be_read_nor_deleted_is_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / f"k1{SUFFIX}").mkdir()  # reading and deleting a folder as a file fail for everyone, root too
    store = PICacheStore(device_bytes=NBYTES, disk_path=tmp_path)
    assert use(store, "k1") == ["compiled"]
    use(store, "k2")  # k1 can't be written either
    assert store.stats().tiers["disk"].write_errors == 1
    assert use(store, "k1") == ["compiled"]
    assert caplog.text.count("dropping the unusable file") == 1


def test_a_name_without_a_file_is_a_miss(tmp_path: Path) -> None:
    (tmp_path / f"k1{SUFFIX}").symlink_to("nowhere")
    store = PICacheStore(device_bytes=NBYTES, disk_path=tmp_path)
    assert use(store, "k1") == ["compiled"]
    use(store, "k2")
    assert use(store, "k1") == ["disk"]  # written in its place


def test_a_folder_deleted_under_us_is_no_crash(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    store = PICacheStore(device_bytes=NBYTES, disk_path=folder)
    use(store, "k1")
    with hold(store, "k2"):
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
    assert use(store, "k1") == ["compiled"]
    assert store.stats().tiers["disk"].write_errors == 1
    check_store(store)


def test_trouble_while_moving_down_loses_an_entry_not_a_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = PICacheStore(device_bytes=NBYTES, disk_path=tmp_path)
    use(store, "k1")
    with monkeypatch.context() as broken:
        broken.setattr("comb.cache.tiers.serialize", lambda *arguments, **options: 1 / 0)
        assert use(store, "k2") == ["compiled"]
    assert "could not move the PICache k1" in caplog.text
    assert use(store, "k1") == ["compiled"]


# ---- between threads ----


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """Runs `work(0..count-1)` at once; raises the first error, or that a thread hangs."""
    barrier, pool = threading.Barrier(count), ThreadPoolExecutor(count)
    try:
        deque(pool.map(lambda index: (barrier.wait(10), work(index)), range(count), timeout=15))
    finally:
        pool.shutdown(wait=False)


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
    check_store(store)


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
    check_store(store)


@pytest.mark.parametrize(
    "forget",
    [lambda store: store.remove("k1"), lambda store: store.remove_document("k1"), lambda store: store.clear()],
)
def test_removed_while_being_compiled_is_not_stored(forget: Callable[[PICacheStore], object]) -> None:
    store = PICacheStore()
    with store.acquire(["k1"]) as held:
        assert held.missing() == ["k1"]
        assert forget(store) is not False
        held.add([pic("k1")])
        assert held["k1"].picache.token_ids[0] == 1
        assert store.lookup("k1") is None
        check_store(store)
    assert store.stats().tiers["device"].bytes == 0


def test_a_document_is_removed_whatever_has_compiled_it(tmp_path: Path) -> None:
    store = PICacheStore(host_bytes=2**20, disk_path=tmp_path)
    keys = ["k1-one", "k1-two", "k2-one"]
    with store.acquire(keys) as held:
        assert held.missing() == keys
        held.add([pic(key.partition("-")[0]) for key in keys])
    store.flush()
    store.remove_document("k2-two")  # one key alone, which isn't here
    store.remove_document("k1")
    assert [store.lookup(key) for key in keys] == [None, None, "device"]
    assert [path.name.partition(".")[0] for path in tmp_path.iterdir()] == ["k2-one"]
    check_store(store)


@pytest.mark.parametrize(
    ("write", "change", "left"),
    [
        (lambda store: use(store, "k2"), lambda store: store.remove("k1"), None),
        (lambda store: store.flush(), lambda store: store.set_expiry("k1", 10), "device"),
    ],
)
def test_removed_or_given_an_end_while_being_written_leaves_no_file(
    write: Callable[[PICacheStore], object], change: Callable[[PICacheStore], object], left: str | None,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    store = PICacheStore(device_bytes=NBYTES, disk_path=tmp_path)
    use(store, "k1")
    sync = os.fsync
    monkeypatch.setattr("os.fsync", lambda descriptor: (change(store), sync(descriptor)))
    write(store)
    assert files(tmp_path) == []
    assert store.lookup("k1") == left


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
                check_store(store)

    in_threads(6, work)
    check_store(store)
    assert store.stats().in_use == store.stats().removed_in_use == 0
    assert store.stats().tiers["disk"].damaged == store.stats().tiers["disk"].write_errors == 0
    assert not store._index.claims

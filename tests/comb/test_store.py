"""The PICache store: each rule, each error, and threads. The stateful test is in test_store_stateful.py."""

from __future__ import annotations

import errno
import logging
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import comb.cache.atomic
import comb.cache.store
from comb.cache.disk import SUFFIX
from comb.cache.picache import TokenPICache
from comb.cache.picache_file import serialize
from comb.cache.store import IntegrityError, PICacheStore, PICacheTooLargeError, StoreFullError

TOKENS = 4
NBYTES = 8 * TOKENS


class Clock:
    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class Compiler:
    """Compiles key "k7" to a PICache full of sevens, and remembers what it was asked for."""

    def __init__(self, tokens: int = TOKENS) -> None:
        self.tokens = tokens
        self.compiled: list[str] = []

    def __call__(self, keys: Sequence[str]) -> Callable[[list[int]], list[TokenPICache]]:
        def compile(indices: list[int]) -> list[TokenPICache]:
            self.compiled += [keys[index] for index in indices]
            return [pic(keys[index], self.tokens) for index in indices]

        return compile


def pic(key: str, tokens: int = TOKENS) -> TokenPICache:
    return TokenPICache("fp", torch.full((tokens,), int(key[1:]), dtype=torch.int64))


def use(store: PICacheStore, *keys: str, ttl_s: float | None = None) -> list[str]:
    """Acquires and releases; returns the tiers. Checks the contents and the store."""
    with store.acquire(keys, Compiler()(keys), ttl_s=ttl_s) as handles:
        for key, handle in zip(keys, handles, strict=True):
            assert handle.picache.token_ids.tolist() == pic(key).token_ids.tolist()
            assert handle.hit == (handle.tier != "compiled")
        tiers = [handle.tier for handle in handles]
    store.check_integrity()
    return tiers


def hold(store: PICacheStore, *keys: str):
    return store.acquire(keys, Compiler()(keys))


def fail(indices: list[int]) -> list[TokenPICache]:
    raise RuntimeError("compile failed")


def files(folder: Path) -> list[str]:
    return sorted(path.name.removesuffix(SUFFIX) for path in folder.iterdir())


# ---- lookup, references, pins ----


def test_misses_are_compiled_in_one_batch_and_hit_afterwards() -> None:
    store, compiler = PICacheStore(), Compiler()
    keys = ["k1", "k2", "k1", "k3"]
    with store.acquire(keys, compiler(keys)) as handles:
        assert [handle.key for handle in handles] == keys
        assert [handle.tier for handle in handles] == ["compiled"] * 4
        assert compiler.compiled == ["k1", "k2", "k3"]
        assert store.stats().in_use == 3
    keys = ["k4", "k2"]
    with store.acquire(keys, compiler(keys)) as handles:
        assert [handle.hit for handle in handles] == [False, True]
        assert handles[1].tier == "device"
    assert compiler.compiled == ["k1", "k2", "k3", "k4"]
    assert store.stats().in_use == 0
    assert (store.stats().hits, store.stats().misses) == (1, 4)
    assert store.acquire([], fail) == []


def test_release_is_idempotent_and_ends_use() -> None:
    store = PICacheStore()
    first, second = hold(store, "k1", "k1")
    first.release()
    first.release()
    store.check_integrity()
    assert store.stats().in_use == 1
    with pytest.raises(RuntimeError, match="after its reference was released"):
        _ = first.picache
    assert second.picache.num_tokens == TOKENS
    with second:
        pass
    assert store.stats().in_use == 0


def test_an_expiry_can_be_set_anew(tmp_path: Path) -> None:
    now = [0.0]
    clocks = {"clock": lambda: now[0], "wall_clock": lambda: now[0]}
    store = PICacheStore(disk_path=tmp_path / "store", **clocks)
    use(store, "k1", "k2")
    store.flush()
    assert store.set_expiry("k1", 5.0)
    assert not store.set_expiry("k9", 5.0)
    with pytest.raises(ValueError, match="ttl_s expects seconds > 0"):
        store.set_expiry("k1", 0)
    store.flush()
    now[0] = 6.0
    assert store.lookup("k1") is None
    again = PICacheStore(disk_path=tmp_path / "store", **clocks)
    assert [again.lookup(key) for key in ("k1", "k2")] == [None, "disk"]
    store.check_integrity()


def test_least_recently_used_goes_first() -> None:
    store = PICacheStore(device_bytes=3 * NBYTES)
    use(store, "k1", "k2", "k3")
    use(store, "k1")
    use(store, "k4")
    assert [store.lookup(key) for key in ("k1", "k2", "k3", "k4")] == ["device", None, "device", "device"]
    stats = store.stats().tiers["device"]
    assert (stats.evictions, stats.entries, stats.bytes) == (1, 3, 3 * NBYTES)


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


def test_pins_are_counted() -> None:
    store = PICacheStore(device_bytes=NBYTES)
    assert not store.pin("k1")
    assert not store.unpin("k1")
    use(store, "k1")
    assert store.pin("k1")
    assert store.pin("k1")
    assert store.unpin("k1")
    with pytest.raises(StoreFullError):
        use(store, "k2")
    assert store.unpin("k1")
    assert not store.unpin("k1")
    assert use(store, "k2") == ["compiled"]


def test_removed_in_use_disappears_at_once_and_is_freed_at_the_last_release() -> None:
    store = PICacheStore(device_bytes=2 * NBYTES)
    handle, other = hold(store, "k1", "k1")
    assert store.pin("k1")
    assert store.remove("k1")
    assert not store.remove("k1")
    assert store.lookup("k1") is None
    assert store.stats().pinned == 0
    assert handle.picache.token_ids.tolist() == [1] * TOKENS
    assert use(store, "k1") == ["compiled"]  # a second one beside the removed one
    assert store.stats().tiers["device"].bytes == 2 * NBYTES
    handle.release()
    assert store.stats().removed_in_use == 1
    other.release()
    assert store.stats().tiers["device"].bytes == NBYTES
    store.check_integrity()


def test_clear_empties_every_tier(tmp_path: Path) -> None:
    store = PICacheStore(device_bytes=NBYTES, host_bytes=NBYTES, disk_path=tmp_path)
    use(store, "k1")
    use(store, "k2")
    use(store, "k3")
    store.pin("k3")
    with hold(store, "k3") as handles:
        store.clear()
        assert handles[0].picache.num_tokens == TOKENS
        store.check_integrity()
    assert [store.lookup(key) for key in ("k1", "k2", "k3")] == [None] * 3
    assert all(tier.bytes == 0 for tier in store.stats().tiers.values())
    assert files(tmp_path) == []


@pytest.mark.parametrize("key", ["", "a/b", "../k1", ".hidden", "x" * 129, "k 1", "k\n", 7])
def test_a_key_must_be_a_file_name(key: str) -> None:
    store = PICacheStore()
    with pytest.raises(ValueError, match="a key expects"):
        store.acquire([key], fail)
    if isinstance(key, str):
        assert store.lookup(key) is None
        assert not store.remove(key)


def test_remove_does_not_lead_out_of_the_folder(tmp_path: Path) -> None:
    outside = tmp_path / f"k1{SUFFIX}"
    outside.write_text("keep")
    store = PICacheStore(disk_path=tmp_path / "cache")
    assert not store.remove("../k1")
    assert outside.exists()


@pytest.mark.parametrize("name", ["device_bytes", "host_bytes", "disk_bytes"])
def test_negative_budgets_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} expects a number of bytes >= 0, got -1"):
        PICacheStore(**{name: -1})


# ---- failing compiles ----


def test_a_failed_compile_leaves_no_reference_and_no_entry() -> None:
    store = PICacheStore(device_bytes=2 * NBYTES)
    use(store, "k1")
    with pytest.raises(RuntimeError, match="compile failed"):
        store.acquire(["k1", "k2"], fail)
    store.check_integrity()
    assert store.stats().in_use == 0
    assert (store.lookup("k1"), store.lookup("k2")) == ("device", None)
    assert use(store, "k2", "k3") == ["compiled", "compiled"]


@pytest.mark.parametrize("result", [[], [pic("k1")] * 3, [pic("k1"), "no PICache"]])
def test_a_compile_that_returns_something_else_is_refused(result: list[object]) -> None:
    store = PICacheStore()
    with pytest.raises(ValueError, match="one PICache for each of 2 indices"):
        store.acquire(["k1", "k2"], lambda indices: result)  # type: ignore[arg-type,return-value]
    assert store.stats().tiers["device"].entries == 0
    store.check_integrity()


def test_larger_than_the_budget_says_both_numbers_and_leaves_nothing() -> None:
    store = PICacheStore(device_bytes=2 * NBYTES, host_bytes=10 * NBYTES)
    use(store, "k1")
    with pytest.raises(PICacheTooLargeError, match=rf"has {9 * 8} bytes.*budget is {2 * NBYTES}; raise device_bytes"):
        store.acquire(["k1", "k2"], Compiler(tokens=9)(["k1", "k2"]))
    store.check_integrity()
    assert (store.lookup("k1"), store.lookup("k2")) == ("device", None)
    assert store.stats().in_use == 0
    assert issubclass(PICacheTooLargeError, ValueError)
    assert issubclass(StoreFullError, RuntimeError)


def test_compile_may_use_the_store_but_not_for_its_own_key() -> None:
    store = PICacheStore(device_bytes=2 * NBYTES)

    def compile(indices: list[int]) -> list[TokenPICache]:
        assert use(store, "k2") == ["compiled"]
        with pytest.raises(RuntimeError, match="which it is compiling itself"):
            use(store, "k3", "k1")
        assert use(store, "k3") == ["compiled"]  # its claim was dropped with the error
        return [pic("k1")]

    store.acquire(["k1"], compile)[0].release()
    store.check_integrity()


def test_the_store_keeps_its_own_memory_only() -> None:
    batch = torch.arange(100)
    store = PICacheStore()
    with store.acquire(["k1"], lambda indices: [TokenPICache("fp", batch[10:14])]) as handles:
        assert handles[0].picache.token_ids.untyped_storage().nbytes() == NBYTES
        assert handles[0].picache.token_ids.tolist() == [10, 11, 12, 13]


# ---- time to live ----


@pytest.mark.parametrize("pinned", [False, True])
def test_expired_is_a_miss(pinned: bool) -> None:
    clock = Clock()
    store = PICacheStore(clock=clock)
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


def test_expired_in_use_stays_valid_for_its_holder() -> None:
    clock = Clock()
    store = PICacheStore(clock=clock)
    handle = store.acquire(["k1"], Compiler()(["k1"]), ttl_s=1)[0]
    clock.now += 1
    assert store.sweep() == 1
    assert store.lookup("k1") is None
    assert handle.picache.num_tokens == TOKENS
    store.check_integrity()
    handle.release()
    assert store.stats().tiers["device"].bytes == 0


def test_expired_pins_make_room_instead_of_an_error() -> None:
    clock = Clock()
    store = PICacheStore(device_bytes=NBYTES, clock=clock)
    use(store, "k1", ttl_s=1)
    store.pin("k1")
    clock.now += 1
    assert use(store, "k2") == ["compiled"]


def test_expired_entries_are_not_moved_down(tmp_path: Path) -> None:
    clock = Clock()
    store = PICacheStore(device_bytes=NBYTES, host_bytes=NBYTES, disk_path=tmp_path, clock=clock)
    use(store, "k1", ttl_s=1)
    clock.now += 1
    use(store, "k2")
    assert store.stats().tiers["host"].entries == 0
    assert files(tmp_path) == []


def test_expiry_survives_a_restart_on_the_wall_clock(tmp_path: Path) -> None:
    store = PICacheStore(disk_path=tmp_path, clock=Clock(5), wall_clock=Clock(1000))
    use(store, "k1", ttl_s=10)
    use(store, "k2", ttl_s=20)
    use(store, "k3")
    assert store.flush() == 3
    clock, wall_clock = Clock(77777), Clock(1009)
    again = PICacheStore(disk_path=tmp_path, clock=clock, wall_clock=wall_clock)
    assert use(again, "k1") == ["disk"]
    clock.now += 1
    wall_clock.now += 1
    assert [again.lookup(key) for key in ("k1", "k2", "k3")] == [None, "disk", "disk"]
    assert files(tmp_path) == ["k2", "k3"]
    late = PICacheStore(disk_path=tmp_path, clock=Clock(0), wall_clock=Clock(1e6))
    assert use(late, "k2", "k3") == ["compiled", "disk"]


@pytest.mark.parametrize("ttl_s", [0, -1, float("nan")])
def test_ttl_must_be_positive(ttl_s: float) -> None:
    with pytest.raises(ValueError, match="ttl_s expects seconds > 0"):
        use(PICacheStore(), "k1", ttl_s=ttl_s)


# ---- tiers ----


def test_down_device_host_disk_and_up_again(tmp_path: Path) -> None:
    store = PICacheStore(device_bytes=NBYTES, host_bytes=NBYTES, disk_path=tmp_path)
    for key in ("k1", "k2", "k3"):
        use(store, key)
    assert [store.lookup(key) for key in ("k1", "k2", "k3")] == ["disk", "host", "device"]
    assert use(store, "k2") == ["host"]
    assert use(store, "k1") == ["disk"]
    assert [store.lookup(key) for key in ("k1", "k2", "k3")] == ["device", "host", "disk"]
    tiers = store.stats().tiers
    assert (tiers["host"].hits, tiers["disk"].hits, tiers["device"].evictions) == (1, 1, 4)
    assert store.stats().misses == 3


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


def test_pinned_are_kept_in_the_lower_tiers_too(tmp_path: Path) -> None:
    store = PICacheStore(device_bytes=NBYTES, host_bytes=NBYTES, disk_path=tmp_path)
    for key in ("k1", "k2", "k3"):
        use(store, key)
    assert store.pin("k2")
    use(store, "k4")  # k3 finds the host tier taken by a pin
    assert [store.lookup(key) for key in ("k2", "k3", "k4")] == ["host", "disk", "device"]


def test_another_device_holds_its_own_copies() -> None:
    store = PICacheStore(device="meta", device_bytes=NBYTES, host_bytes=NBYTES)
    with hold(store, "k1") as handles:
        assert handles[0].picache.token_ids.device.type == "meta"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_to_host_to_disk_and_back(tmp_path: Path) -> None:
    store = PICacheStore(device="cuda", device_bytes=NBYTES, host_bytes=NBYTES, disk_path=tmp_path)
    for key in ("k1", "k2", "k3"):
        use(store, key)
    for key, tier in (("k2", "host"), ("k1", "disk")):
        with hold(store, key) as handles:
            assert handles[0].tier == tier
            assert handles[0].picache.token_ids.device.type == "cuda"
            assert handles[0].picache.token_ids.tolist() == pic(key).token_ids.tolist()


# ---- the disk tier ----


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


def test_without_a_disk_flush_does_nothing() -> None:
    store = PICacheStore()
    use(store, "k1")
    assert store.flush() == 0


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
    assert use(PICacheStore(disk_path=tmp_path), "k2") == ["compiled"]
    assert "the file holds the key 'k1'" in caplog.text


def test_two_stores_share_a_folder(tmp_path: Path) -> None:
    ours, theirs = (PICacheStore(device_bytes=NBYTES, disk_path=tmp_path) for _ in range(2))
    use(theirs, "k1")
    theirs.flush()
    assert ours.lookup("k1") is None  # unknown until asked for or swept
    assert use(ours, "k1") == ["disk"]
    use(theirs, "k2")
    theirs.flush()
    ours.sweep()
    assert ours.lookup("k2") == "disk"
    assert theirs.remove("k2")
    with pytest.raises(IntegrityError, match=r"disk index equals the folder: k2: [0-9]+ bytes listed, None on disk"):
        ours.check_integrity()
    ours.check_integrity(shared_folder=True)
    assert use(ours, "k2") == ["compiled"]  # vanished under us
    assert ours.stats().tiers["disk"].damaged == 0
    theirs.clear()
    ours.sweep()
    assert ours.lookup("k1") is None
    ours.check_integrity()


@pytest.mark.parametrize("function", ["os.fsync", "pathlib.Path.replace", "comb.cache.atomic.os.open"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS])
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


def test_a_disk_that_fills_up_half_way_leaves_no_partial_file(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource", reason="needs file size limits (POSIX)")
    store = PICacheStore(disk_path=tmp_path)
    use(store, "k1")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))  # write() stores 100 bytes, then fails
    try:
        assert store.flush() == 0
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert store.stats().tiers["disk"].write_errors == 1
    assert files(tmp_path) == []
    assert use(store, "k1") == ["device"]
    assert store.flush() == 1


def test_left_over_temporary_files_of_a_dead_process_are_deleted(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    alive, ours, other = f"1-x-{'0' * 8}", f"{os.getpid()}-{comb.cache.atomic._PROCESS}-x", f"{dead.pid}-x-x"
    names = {f".tmp-{comb.cache.atomic._HOST}-{name}": name == other for name in (alive, ours, other)}
    names[f".tmp-{comb.cache.atomic._HOST}-{os.getpid()}-before-x"] = True  # our id, an earlier process
    names[".tmp-elsewhere-1-x-new"] = False
    names[".tmp-elsewhere-1-x-old"] = True
    names[".tmp-something else"] = False
    for name in names:
        (tmp_path / name).write_bytes(b"half")
    os.utime(tmp_path / ".tmp-elsewhere-1-x-old", (1, 1))
    store = PICacheStore(disk_path=tmp_path)
    assert set(files(tmp_path)) == {name for name, deleted in names.items() if not deleted}
    store.check_integrity()


def test_the_folder_is_private(tmp_path: Path) -> None:
    old_mask = os.umask(0)
    try:
        PICacheStore(disk_path=tmp_path / "new" / "cache")
        (tmp_path / "empty").mkdir(mode=0o755)
        PICacheStore(disk_path=tmp_path / "empty")
        (tmp_path / "home").mkdir(mode=0o755)
    finally:
        os.umask(old_mask)
    assert stat.S_IMODE((tmp_path / "new" / "cache").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "empty").stat().st_mode) == 0o700
    (tmp_path / "home" / "letter.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"mode 0755 and holds 'letter\.txt'; give an empty or new folder"):
        PICacheStore(disk_path=tmp_path / "home")
    assert stat.S_IMODE((tmp_path / "home").stat().st_mode) == 0o755
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(ValueError, match="disk_path expects a folder that can be made and read"):
        PICacheStore(disk_path=tmp_path / "file")


def test_other_files_in_the_folder_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"someone's weights")
    store = PICacheStore(disk_path=tmp_path)
    use(store, "k1")
    store.flush()
    store.sweep()
    store.clear()
    assert files(tmp_path) == ["model.safetensors"]


def test_a_file_that_can_neither_be_read_nor_deleted_is_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / f"k1{SUFFIX}").mkdir()  # reading and deleting a folder as a file fail for everyone, root too
    store = PICacheStore(device_bytes=NBYTES, disk_path=tmp_path)
    assert store.lookup("k1") is None
    assert use(store, "k1") == ["compiled"]
    use(store, "k2")  # k1 can't be written either
    assert store.stats().tiers["disk"].write_errors == 1
    assert use(store, "k1") == ["compiled"]
    assert caplog.text.count("dropping the unusable cache file") == 1


def test_a_folder_deleted_under_us_is_no_crash(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    store = PICacheStore(device_bytes=NBYTES, disk_path=folder)
    use(store, "k1")
    with hold(store, "k2"):
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
    with store.acquire(["k1"], Compiler()(["k1"])) as handles:
        assert handles[0].tier == "compiled"
    store.sweep()
    assert store.lookup("k2") is None
    assert store.stats().tiers["disk"].write_errors == 1
    store.check_integrity()


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


# ---- threads ----


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
        with store.acquire(keys, compiler(keys)) as handles:
            for key, handle in zip(keys, handles, strict=True):
                assert handle.picache.token_ids[0] == int(key[1:])

    in_threads(16, work)
    assert sorted(compiler.compiled) == names
    assert store.stats().in_use == 0
    assert (store.stats().misses, store.stats().hits) == (8, 16 * 8 - 8)
    store.check_integrity()


def test_overlapping_requests_that_each_compile_a_part_do_not_deadlock() -> None:
    store = PICacheStore(wait_s=10)
    started = [threading.Event(), threading.Event()]

    def work(index: int) -> None:
        keys = ["k0", "k1"] if index == 0 else ["k1", "k0"]

        def compile(indices: list[int]) -> list[TokenPICache]:
            started[index].set()
            started[1 - index].wait(0.3)
            return [pic(keys[i]) for i in indices]

        store.acquire(keys, compile).release()

    in_threads(2, work)
    store.check_integrity()


def test_a_failing_thread_hands_over_to_a_waiting_one() -> None:
    store, compiler = PICacheStore(), Compiler()
    compiling, go = threading.Event(), threading.Event()

    def slow_and_failing(indices: list[int]) -> list[TokenPICache]:
        compiling.set()
        assert go.wait(10)
        raise RuntimeError("compile failed")

    def work(index: int) -> None:
        if index == 0:
            with pytest.raises(RuntimeError, match="compile failed"):
                store.acquire(["k1"], slow_and_failing)
            return
        assert compiling.wait(10)
        threading.Timer(0.05, go.set).start()
        with store.acquire(["k1"], compiler(["k1"])) as handles:
            assert handles[0].picache.token_ids[0] == 1

    in_threads(5, work)
    assert compiler.compiled == ["k1"]
    store.check_integrity()


def test_waiting_is_bounded() -> None:
    store = PICacheStore(wait_s=0.05)
    compiling, go = threading.Event(), threading.Event()

    def slow(indices: list[int]) -> list[TokenPICache]:
        compiling.set()
        assert go.wait(10)
        return [pic("k1")]

    def work(index: int) -> None:
        if index == 0:
            store.acquire(["k1"], slow).release()
            return
        assert compiling.wait(10)
        try:
            with pytest.raises(TimeoutError, match=r"k1 for over 0\.05 s"):
                store.acquire(["k0", "k1"], Compiler()(["k0", "k1"]))
            assert store.stats().in_use == 0
        finally:
            go.set()

    in_threads(2, work)
    assert use(store, "k0", "k1") == ["device", "device"]


@pytest.mark.parametrize("forget", ["remove", "clear"])
def test_removed_while_being_compiled_is_not_stored(forget: str) -> None:
    store = PICacheStore()

    def compile(indices: list[int]) -> list[TokenPICache]:
        if forget == "clear":
            store.clear()
        else:
            assert store.remove("k1")
        return [pic("k1")]

    with store.acquire(["k1"], compile) as handles:
        assert handles[0].picache.token_ids[0] == 1
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


def test_many_threads_with_small_budgets_stay_consistent(tmp_path: Path) -> None:
    store = PICacheStore(
        device_bytes=12 * NBYTES, host_bytes=2 * NBYTES, disk_path=tmp_path, disk_bytes=2000, wait_s=10
    )

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for step in range(40):
            keys = [f"k{i}" for i in torch.randperm(16, generator=generator)[:2].tolist()]
            if step % 7 == 6:
                store.remove(keys[0])
            if step % 11 == 10:
                store.flush()
            if step % 13 == 12:
                store.sweep()
            with store.acquire(keys, Compiler()(keys), ttl_s=0.02 if step % 5 == 0 else None) as handles:
                for key, handle in zip(keys, handles, strict=True):
                    assert set(handle.picache.token_ids.tolist()) == {int(key[1:])}
                store.check_integrity()

    in_threads(6, work)
    store.check_integrity()
    assert store.stats().in_use == store.stats().removed_in_use == 0
    assert store.stats().tiers["disk"].damaged == store.stats().tiers["disk"].write_errors == 0
    assert not store._index.claims


def test_stores_fighting_over_one_folder_never_answer_wrongly(tmp_path: Path) -> None:
    stores = [PICacheStore(device_bytes=3 * NBYTES, disk_path=tmp_path, disk_bytes=2000, wait_s=10) for _ in range(4)]

    def work(index: int) -> None:
        generator = torch.Generator().manual_seed(index)
        for step in range(60):
            key = f"k{torch.randint(12, (), generator=generator)}"
            with hold(stores[index], key) as handles:
                assert handles[0].picache.token_ids.tolist() == pic(key).token_ids.tolist()
            if step % 9 == 8:
                stores[index].remove(key)
            if step % 10 == 9:
                stores[index].sweep()
            stores[index].check_integrity(shared_folder=True)

    in_threads(len(stores), work)
    for store in stores:
        store.sweep()
        store.check_integrity()
        disk = store.stats().tiers["disk"]
        assert disk.damaged == disk.write_errors == 0
    assert sum(store.stats().tiers["disk"].hits for store in stores) > 0


# ---- check_integrity can fail ----


def spoil_size(store: PICacheStore) -> None:
    store._device.entries["k1"].value = pic("k1", 9)


def spoil_claim(store: PICacheStore) -> None:
    thread = threading.Thread(target=lambda: store._claim("k9"))
    thread.start()
    thread.join()


def spoil_tiers(store: PICacheStore) -> None:
    store._index.add("host", replace(store._device.entries["k1"]))


@pytest.mark.parametrize(
    ("spoil", "invariant"),
    [
        (lambda store: setattr(store._device, "used", 33), "device: 33 counted as used equal the sum of entries 32"),
        (spoil_size, "k1 counted as 32 bytes, has 72"),
        (spoil_claim, "no key in flight without an owner: .*k9"),
        (spoil_tiers, "no key on device and host at once"),
    ],
)
def test_check_integrity_names_the_broken_invariant(spoil: Callable[[PICacheStore], None], invariant: str) -> None:
    store = PICacheStore(host_bytes=1000)
    use(store, "k1")
    spoil(store)
    with pytest.raises(IntegrityError, match=invariant):
        store.check_integrity()

"""The store's disk tier: restarts, damage, full disks, times to live, folders that are foreign or gone."""

from __future__ import annotations

import errno
import logging
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import comb.files
from comb.cache.picache import serialize
from comb.cache.store import PICacheStore
from comb.cache.tiers import SUFFIX
from tests.helpers.stores import NBYTES, files, hold, pic, use


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
    assert use(PICacheStore(disk_path=tmp_path), "k2") == ["compiled"]
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


def test_left_over_temporary_files_of_a_dead_process_are_deleted(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    alive, ours, other = f"1-x-{'0' * 8}", f"{os.getpid()}-{comb.files._PROCESS}-x", f"{dead.pid}-x-x"
    names = {f".tmp-{comb.files._HOST}-{name}": name == other for name in (alive, ours, other)}
    names[f".tmp-{comb.files._HOST}-{os.getpid()}-before-x"] = True  # our id, an earlier process
    names[".tmp-elsewhere-1-x-new"] = False
    names[".tmp-elsewhere-1-x-old"] = True
    names[".tmp-something else"] = False
    for name in names:
        (tmp_path / name).write_bytes(b"half")
    os.utime(tmp_path / ".tmp-elsewhere-1-x-old", (1, 1))
    PICacheStore(disk_path=tmp_path)
    assert set(files(tmp_path)) == {name for name, deleted in names.items() if not deleted}


def test_a_folder_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    PICacheStore(disk_path="~/pics")
    assert (tmp_path / "pics").is_dir()


def test_the_folder_is_private(tmp_path: Path) -> None:
    old_mask = os.umask(0)
    try:
        PICacheStore(disk_path=tmp_path / "new" / "cache")
        (tmp_path / "empty").mkdir(mode=0o755)
        PICacheStore(disk_path=tmp_path / "empty")
        (tmp_path / "served").mkdir(mode=0o755)
        (tmp_path / "served" / "private").mkdir(mode=0o700)
        PICacheStore(disk_path=tmp_path / "served")
        (tmp_path / "home").mkdir(mode=0o755)
    finally:
        os.umask(old_mask)
    assert stat.S_IMODE((tmp_path / "new" / "cache").stat().st_mode) == 0o700
    for name in ("empty", "served"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o700
    (tmp_path / "home" / "letter.txt").write_text("mine")
    (tmp_path / "home" / "private").mkdir(mode=0o700)
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

"""The shared pool and the handles that point into it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from comb_serving.pool.capability import PoolHandle, pack, unpack
from comb_serving.pool.shared_pool import PoolLayout, SharedPool

LAYOUT = PoolLayout(cross_layers=2, kv_heads=3, head_dim=5, num_blocks=6, block_size=4)


def test_handles_survive_the_wire_and_nonsense_is_refused() -> None:
    handles = [PoolHandle(5, (3, 1)), PoolHandle(4, (0,))]
    assert pack(handles) == [5, 2, 3, 1, 4, 1, 0]
    assert unpack(pack(handles), num_blocks=6, block_size=4) == handles
    assert unpack([], num_blocks=6, block_size=4) == []
    for wrong in ([5, 2, 3], [5, 1, 3], [5, 2, 3, 6], [5, 2, 3, -1], [0, 0], [5], [4, -1]):
        with pytest.raises(ValueError, match="documents:"):
            unpack(wrong, num_blocks=6, block_size=4)


def test_another_process_reads_what_is_written(tmp_path: Path) -> None:
    pool = SharedPool.create(tmp_path / "pool", LAYOUT)
    pool.tensor.fill_(float("nan"))
    first, second = PoolHandle(5, (3, 1)), PoolHandle(4, (0,))
    keys, values = torch.randn(2, 2, 9, 3, 5).unbind()
    pool.write(first, keys[:, :5], values[:, :5])
    pool.write(second, keys[:, 5:], values[:, 5:])
    found = pool.read(1, [first, second])
    assert torch.equal(found[0], keys[1])
    assert torch.equal(found[1], values[1])
    assert not torch.equal(pool.read(1, [second, first])[0], keys[1])
    code = (
        "import sys\n"
        "from comb_serving.pool.shared_pool import SharedPool; from comb_serving.pool.capability import PoolHandle\n"
        "print(SharedPool.attach(sys.argv[1]).read(0, [PoolHandle(5, (3, 1))])[1].sum().item())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "pool")], capture_output=True, text=True, check=True
    )
    assert float(done.stdout) == pytest.approx(values[0, :5].sum().item(), abs=1e-5)
    assert (tmp_path / "pool").stat().st_mode & 0o077 == 0
    with pytest.raises(FileExistsError):
        SharedPool.create(tmp_path / "pool", LAYOUT)
    SharedPool.attach(tmp_path / "pool").close()
    assert (tmp_path / "pool").exists()
    pool.close()
    assert not list(tmp_path.iterdir())


def test_a_rank_holds_its_heads(tmp_path: Path) -> None:
    layout = PoolLayout(cross_layers=2, kv_heads=1, head_dim=5, num_blocks=2, block_size=4, dtype="bfloat16")
    pool = SharedPool.create(tmp_path / "pool", layout)
    keys, values = torch.randn(2, 2, 6, 3, 5).unbind()
    pool.write(PoolHandle(6, (1, 0)), keys, values, heads=slice(2, 3))
    torch.testing.assert_close(pool.read(0, [PoolHandle(6, (1, 0))])[0], keys[0, :, 2:3].bfloat16())
    assert layout.bytes_per_token == 2 * 2 * 1 * 5 * 2
    assert layout.nbytes == (tmp_path / "pool").stat().st_size == 8 * layout.bytes_per_token


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(OSError, match="no room for a pool of"):
        SharedPool.create(tmp_path / "pool", LAYOUT)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="num_blocks must be at least 1"):
        PoolLayout(1, 1, 1, 0)

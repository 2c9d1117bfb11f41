"""The shared pool and the handles that point into it: in eight bits, on a GPU, and between two processes."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from comb_serving.config.serve_options import INSTANCE_DIR
from comb_serving.pool import memory
from comb_serving.pool.capability import PoolHandle, pack, unpack
from comb_serving.pool.memory import CannotShareError, DeviceMemory
from comb_serving.pool.shared_pool import PoolLayout, SharedPool
from comb_serving.vllm.decoder_pool import create_pool
from scripts.gpu import ipc

LAYOUT = PoolLayout(cross_layers=2, kv_heads=3, head_dim=5, num_blocks=6, block_size=4)
FP8 = PoolLayout(cross_layers=2, kv_heads=3, head_dim=20, num_blocks=6, block_size=4, dtype="bfloat16", stored="fp8")
UUID = "00000000-aaaa"


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def test_handles_survive_the_wire_and_nonsense_is_refused() -> None:
    handles = [PoolHandle(5, (3, 1)), PoolHandle(4, (0,))]
    assert pack(handles) == [5, 2, 3, 1, 4, 1, 0]
    assert unpack(pack(handles), LAYOUT) == handles
    assert unpack([], LAYOUT) == []
    for wrong in ([5, 2, 3], [5, 1, 3], [5, 2, 3, 6], [5, 2, 3, -1], [0, 0], [5], [4, -1]):
        with pytest.raises(ValueError, match="documents:"):
            unpack(wrong, LAYOUT)


def test_what_is_written_is_read_in_the_order_asked_for_and_files_are_the_owners(tmp_path: Path) -> None:
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


def test_fp8_takes_its_bytes_and_is_near(tmp_path: Path) -> None:
    pool = SharedPool.create(tmp_path / "pool", FP8)
    assert FP8.bytes_per_token == 2 * 2 * 3 * (20 + 4)
    assert FP8.nbytes == (tmp_path / "pool").stat().st_size == 24 * FP8.bytes_per_token
    # what a head_dim of 128 saves
    wide = PoolLayout(8, 8, 128, 1, dtype="bfloat16")
    assert PoolLayout(8, 8, 128, 1, dtype="bfloat16", stored="fp8").bytes_per_token / wide.bytes_per_token == 132 / 256
    pool.memory.flat.fill_(0xFF)
    assert pool.tensor.float().isnan().all()
    handle = PoolHandle(6, (3, 1))
    keys, values = (torch.randn(2, 2, 6, 5, 20) * torch.logspace(-6, 3, 6)[:, None, None]).unbind()
    pool.write(handle, keys, values, heads=slice(1, 4))
    for layer in range(2):
        for found, wanted in zip(pool.read(layer, [handle]), (keys, values), strict=True):
            assert found.dtype == torch.bfloat16
            own = wanted[layer, :, 1:4]
            # e4m3's half step, bfloat16's, and its smallest number under a scale of the largest / 448
            bound = own.abs() * (1 / 16 + 1 / 128) + own.abs().amax(-1, keepdim=True) / 448 * 2**-9
            error = (found.float() - own).abs()
            assert (error <= bound).all()
            assert error.max() > 0  # eight bits
    again = SharedPool.attach(tmp_path / "pool")
    assert torch.equal(again.read(1, [handle])[0], pool.read(1, [handle])[0])
    assert pool.scales is not None
    with pytest.raises(ValueError, match="NaN or infinity"):
        pool.write(handle, keys * float("inf"), values)
    with pytest.raises(ValueError, match="auto or fp8, not"):
        PoolLayout(1, 1, 1, 1, stored="fp4")


class Storage:
    """A GPU's storage as far as it is exported."""

    def __init__(self, kind: bytes = b"c") -> None:
        self.kind = kind

    def untyped_storage(self) -> Storage:
        return self

    def _share_cuda_(self) -> tuple[Any, ...]:
        return 1, b"\x02" + self.kind + b"\x00\xff", 64, 512, b"/torch_1", 3, b"event\x00", True


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Two GPUs, of which only names exist; returns what was opened."""
    opened: list[Any] = []

    def new_shared(*given: Any) -> torch.UntypedStorage:
        opened.append(given)
        return torch.UntypedStorage(64)

    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    properties = {0: SimpleNamespace(uuid="other"), 1: SimpleNamespace(uuid=UUID)}
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties.__getitem__)
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", new_shared, raising=False)
    return opened


def test_a_handle_survives_its_file_and_finds_its_gpu(gpus: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    uuid, *values = ast.literal_eval(repr(memory.export(Storage())))  # type: ignore[arg-type]
    assert uuid == UUID
    opened = memory.open_exported(uuid, *values)
    assert (opened.dtype, opened.shape) == (torch.uint8, (64,))
    assert gpus == [Storage()._share_cuda_()]
    # the same GPU under another number
    here = {0: SimpleNamespace(uuid=UUID), 1: SimpleNamespace(uuid="other")}
    monkeypatch.setattr(torch.cuda, "get_device_properties", here.__getitem__)
    memory.open_exported(uuid, *values)
    assert [given[0] for given in gpus] == [1, 0]
    with pytest.raises(CannotShareError, match=r"is on GPU another, .*CUDA_VISIBLE_DEVICES"):
        memory.open_exported("another", *values)

    def gone(*_: Any) -> None:
        raise RuntimeError("invalid resource handle")

    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", gone, raising=False)
    with pytest.raises(CannotShareError, match="can't be opened: invalid resource handle"):
        memory.open_exported(uuid, *values)


def test_memory_that_has_no_handle_is_refused(gpus: list[Any]) -> None:
    with pytest.raises(CannotShareError, match="expandable_segments:True out of PYTORCH_ALLOC_CONF, or"):
        memory.export(Storage(b"e"))  # type: ignore[arg-type]
    with pytest.raises(CannotShareError, match="--comb-pool-memory host"):
        memory.export(torch.zeros(3))  # of a CPU: torch refuses it


def test_a_pool_of_a_gpu_is_a_handle_under_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a handle that leads to a tensor of this process."""
    made: dict[str, torch.Tensor] = {}

    def empty(nbytes: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        assert device == torch.device("cuda:0")
        return torch.zeros(nbytes, dtype=dtype)

    def export(tensor: torch.Tensor) -> tuple[str]:
        made["it"] = tensor
        return ("it",)

    monkeypatch.setattr(memory, "torch", SimpleNamespace(**{**vars(torch), "empty": empty}))
    monkeypatch.setattr(memory, "export", export)
    monkeypatch.setattr(memory, "open_exported", made.__getitem__)
    monkeypatch.setattr(DeviceMemory, "writing", lambda self, source: contextlib.nullcontext())
    pool = SharedPool.create(tmp_path / "pool", LAYOUT, "cuda:0")
    assert pool.layout.memory == "cuda"
    assert (tmp_path / "pool").read_text() == "('it',)"
    assert all(file.stat().st_mode & 0o077 == 0 for file in tmp_path.iterdir())
    there = SharedPool.attach(tmp_path / "pool")
    keys, values = torch.randn(2, 2, 4, 3, 5).unbind()
    there.write(PoolHandle(4, (2,)), keys, values)
    there.finish()
    assert torch.equal(pool.read(1, [PoolHandle(4, (2,))])[0], keys[1])
    with pytest.raises(FileExistsError):
        SharedPool.create(tmp_path / "pool", LAYOUT, "cuda:0")
    pool.close()
    assert not list(tmp_path.iterdir())

    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(memory, "torch", SimpleNamespace(**{**vars(torch), "empty": full}))
    with pytest.raises(OSError, match=r"no room for a pool of .* on cuda:0: make --comb-pool-bytes smaller"):
        SharedPool.create(tmp_path / "pool", LAYOUT, "cuda:0")
    assert not list(tmp_path.iterdir())


def test_writes_come_after_the_encoder_and_before_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    own = SimpleNamespace(wait_stream=lambda other: told.append(f"waits for {other}"))
    event = SimpleNamespace(record=lambda _: told.append("recorded"), synchronize=lambda: told.append("awaited"))

    @contextlib.contextmanager
    def on(stream: Any) -> Iterator[None]:
        assert stream is own
        told.append("on the stream")
        yield
        told.append("off the stream")

    made = {"Stream": lambda device: told.append(f"stream on {device}") or own, "Event": lambda: event, "stream": on}
    for name, value in {**made, "current_stream": str}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    found = DeviceMemory(SimpleNamespace(device=torch.device("cuda:0")))  # type: ignore[arg-type]
    found.finish()
    assert told == []  # nothing was written
    with found.writing(torch.device("cuda:1")):
        told.append("write")
    assert sorted(told[:3]) == ["stream on cuda:0", "waits for cuda:0", "waits for cuda:1"]
    assert told[3:] == ["on the stream", "write", "off the stream"]
    told.clear()
    with found.writing(torch.device("cpu")):
        pass
    assert told == ["waits for cuda:0", "on the stream", "off the stream"]
    found.finish()
    assert told[-2:] == ["recorded", "awaited"]


def layout_for(dtype: str, stored: str) -> PoolLayout:
    return PoolLayout(2, 2, 16, 1, 4, dtype=dtype, stored=stored)


@pytest.mark.slow
@pytest.mark.parametrize("stored", ["auto", "fp8"])
def test_a_pool_outlives_its_writer(tmp_path: Path, stored: str) -> None:
    cpu = torch.device("cpu")
    assert ipc.hand_over(tmp_path, layout_for("float32", stored), cpu, source="cpu", tokens=9) == ""
    assert not list(tmp_path.iterdir())


def test_a_hand_over_that_goes_wrong_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ipc, "Writer", lambda *_: SimpleNamespace(next=lambda: None, kill=lambda: None))
    wrong = ipc.hand_over(tmp_path, layout_for("float32", "auto"), torch.device("cpu"), source="cpu", tokens=9)
    assert wrong.startswith("what was written differs by nan")


def test_a_writer_that_ends_early_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="the writer ended with status 1"):
        ipc.hand_over(tmp_path, layout_for("float32", "auto"), torch.device("cpu"), source="nowhere", tokens=9)
    assert not list(tmp_path.iterdir())


@pytest.mark.gpu
@pytest.mark.parametrize("stored", ["auto", "fp8"])
@pytest.mark.parametrize("source", ["cuda:0", "cpu"])
def test_a_gpus_pool_goes_to_another_process_and_outlives_it(tmp_path: Path, source: str, stored: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    layout, device = layout_for("bfloat16", stored), torch.device("cuda:0")
    assert ipc.hand_over(tmp_path, layout, device, source=source, tokens=300) == ""


def test_a_decoder_without_an_instance_says_that_documents_are_dropped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM's own HTTP front knows no `documents`, and answers without them."""
    distributed = pytest.importorskip("vllm.distributed", reason="needs vllm", exc_type=ImportError)
    monkeypatch.delenv(INSTANCE_DIR, raising=False)
    for name, found in (("rank", 0), ("world_size", 1)):
        monkeypatch.setattr(distributed, f"get_tensor_model_parallel_{name}", lambda found=found: found)
    assert create_pool(None, None) is None
    assert "drops `documents` of requests; `comb serve`" in caplog.text

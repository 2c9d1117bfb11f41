"""Pools in eight bits, pools of a GPU, and a pool between two processes."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from comb.kernels.dispatch import attend
from comb.kernels.paged.attention import BlockTable, PagedBatch
from comb_serving.pool import memory
from comb_serving.pool.capability import PoolHandle
from comb_serving.pool.memory import CannotShareError, DeviceMemory
from comb_serving.pool.shared_pool import PoolLayout, SharedPool
from scripts.gpu import ipc

FP8 = PoolLayout(cross_layers=2, kv_heads=3, head_dim=20, num_blocks=6, block_size=4, dtype="bfloat16", stored="fp8")
UUID = "00000000-aaaa"


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


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


def test_attention_over_an_fp8_pool_is_near(tmp_path: Path) -> None:
    keys, values = torch.randn(2, 2, 11, 3, 20).unbind()
    query, handle = torch.randn(5, 6, 20), PoolHandle(11, (5, 0, 2))
    batch = PagedBatch((5,), (BlockTable([(11, handle.blocks)], 4),))
    found = {}
    for stored in ("auto", "fp8"):
        layout = PoolLayout(2, 3, 20, num_blocks=6, block_size=4, stored=stored)
        pool = SharedPool.create(tmp_path / stored, layout)
        pool.memory.flat.fill_(0xFF)
        pool.write(handle, keys, values)
        found[stored] = attend(query, pool.layer(1), batch)
    error = (found["fp8"] - found["auto"]).square().mean().sqrt() / found["auto"].square().mean().sqrt()
    assert 0.001 < error < 0.06
    assert (found["fp8"].roll(1, 0) - found["auto"]).abs().max() > 0.2


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


def test_a_handle_survives_json_and_finds_its_gpu(gpus: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    fields = memory.export(Storage())  # type: ignore[arg-type]
    assert fields["device"] == UUID
    fields = json.loads(json.dumps(fields))
    opened = memory.open_exported(fields)
    assert (opened.dtype, opened.shape) == (torch.uint8, (64,))
    assert gpus == [Storage()._share_cuda_()]  # bytes are bytes again, in torch's order
    # the same GPU under another number
    here = {0: SimpleNamespace(uuid=UUID), 1: SimpleNamespace(uuid="other")}
    monkeypatch.setattr(torch.cuda, "get_device_properties", here.__getitem__)
    memory.open_exported(fields)
    assert [given[0] for given in gpus] == [1, 0]
    with pytest.raises(CannotShareError, match=r"is on GPU another, .*CUDA_VISIBLE_DEVICES"):
        memory.open_exported({**fields, "device": "another"})

    def gone(*_: Any) -> None:
        raise RuntimeError("invalid resource handle")

    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", gone, raising=False)
    with pytest.raises(CannotShareError, match="can't be opened: invalid resource handle"):
        memory.open_exported(fields)


def test_memory_that_has_no_handle_is_refused(gpus: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CannotShareError, match="expandable"):
        memory.export(Storage(b"e"))  # type: ignore[arg-type]
    with pytest.raises(CannotShareError, match="--comb-pool-memory host"):
        memory.export(torch.zeros(3))  # of a CPU: torch refuses it
    memory.check_shareable()
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64, expandable_segments: True")
    with pytest.raises(CannotShareError, match="PYTORCH_CUDA_ALLOC_CONF has expandable_segments:True"):
        memory.check_shareable()
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False")
    memory.check_shareable()


def test_a_pool_of_a_gpu_is_a_handle_under_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a handle that leads to a tensor of this process."""
    made: dict[str, torch.Tensor] = {}

    def empty(nbytes: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        assert device == torch.device("cuda:0")
        return torch.zeros(nbytes, dtype=dtype)

    def export(tensor: torch.Tensor) -> dict[str, Any]:
        made["it"] = tensor
        return {"device": "it"}

    monkeypatch.setattr(memory, "torch", SimpleNamespace(**{**vars(torch), "empty": empty}))
    monkeypatch.setattr(memory, "export", export)
    monkeypatch.setattr(memory, "open_exported", lambda fields: made[fields["device"]])
    monkeypatch.setattr(DeviceMemory, "writing", lambda self, source: contextlib.nullcontext())
    layout = PoolLayout(2, 3, 5, num_blocks=6, block_size=4)
    pool = SharedPool.create(tmp_path / "pool", layout, "cuda:0")
    assert pool.layout.memory == "cuda"
    assert json.loads((tmp_path / "pool").read_text()) == {"device": "it"}
    assert all(file.stat().st_mode & 0o077 == 0 for file in tmp_path.iterdir())
    there = SharedPool.attach(tmp_path / "pool")
    keys, values = torch.randn(2, 2, 4, 3, 5).unbind()
    there.write(PoolHandle(4, (2,)), keys, values)
    there.finish()
    assert torch.equal(pool.read(1, [PoolHandle(4, (2,))])[0], keys[1])
    with pytest.raises(FileExistsError):
        SharedPool.create(tmp_path / "pool", layout, "cuda:0")
    pool.close()
    assert not list(tmp_path.iterdir())

    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(memory, "torch", SimpleNamespace(**{**vars(torch), "empty": full}))
    with pytest.raises(OSError, match=r"no room for a pool of .* on cuda:0: make --comb-pool-bytes smaller"):
        SharedPool.create(tmp_path / "pool", layout, "cuda:0")
    assert not list(tmp_path.iterdir())


def test_writes_come_after_the_encoder_and_before_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []

    class Stream:
        def __init__(self, device: torch.device) -> None:
            told.append(("stream on", str(device)))

        def wait_stream(self, other: str) -> None:
            told.append(("waits for", other))

    class Event:
        def record(self, stream: Stream) -> None:
            told.append("event recorded")

        def synchronize(self) -> None:
            told.append("event awaited")

    @contextlib.contextmanager
    def on(stream: Stream) -> Iterator[None]:
        told.append("on the stream")
        yield
        told.append("off the stream")

    for name, value in (("Stream", Stream), ("Event", Event), ("stream", on)):
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda, "current_stream", str)
    found = DeviceMemory(SimpleNamespace(device=torch.device("cuda:0")))  # type: ignore[arg-type]
    found.finish()
    assert told == []  # nothing was written
    with found.writing(torch.device("cuda:1")):
        told.append("write")
    assert set(told[1:3]) == {("waits for", "cuda:0"), ("waits for", "cuda:1")}
    assert told[3:] == ["on the stream", "write", "off the stream"]
    told.clear()
    with found.writing(torch.device("cpu")):
        pass
    assert told == [("waits for", "cuda:0"), "on the stream", "off the stream"]
    found.finish()
    assert told[-2:] == ["event recorded", "event awaited"]


def layout_for(dtype: str, stored: str) -> PoolLayout:
    return PoolLayout(2, 2, 16, 1, 4, dtype=dtype, stored=stored)


@pytest.mark.slow
def test_a_pool_outlives_its_writer(tmp_path: Path) -> None:
    cpu = torch.device("cpu")
    assert ipc.hand_over(tmp_path, layout_for("float32", "fp8"), cpu, source="cpu", tokens=9) == ""
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

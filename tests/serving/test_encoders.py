"""Encoder processes over a real pool with the nano backbone; and a small program in their place that dies or hangs."""

from __future__ import annotations

import asyncio
import os
import queue
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from comb import CombForCausalLM
from comb.cache.store import PICacheStore
from comb.model.modeling import ENCODE_BATCH_TOKENS
from comb_serving.config.serve_options import ServeOptions, pool_path
from comb_serving.encoding import supervisor
from comb_serving.encoding.process import EncoderWorker, batches, drop_decoder, receive
from comb_serving.encoding.protocol import EncodeJob, EncoderError, decode_message, encode_message
from comb_serving.encoding.supervisor import ENCODER, EncoderProcess
from comb_serving.manager.leases import WantedDocument
from comb_serving.manager.manager import PICManager
from comb_serving.pool.capability import PoolHandle
from comb_serving.pool.shared_pool import PoolLayout, SharedPool
from tests.helpers.fakes import until
from tests.helpers.families import tiny
from tests.helpers.stores import check_manager

BLOCKS = 64
DIES, HANGS, LIES = 666, 777, 888
PROGRAM = f"""
import os, pathlib, socket, sys, threading
from comb_serving.encoding.protocol import decode_message, encode_message
folder = pathlib.Path(sys.argv[1])
if (folder / "broken").exists(): sys.exit(1)
starts = folder / "starts"
count = len(starts.read_bytes()) if starts.exists() else 0
with starts.open("ab") as file: file.write(b"x")
connection = socket.socket(fileno=int(sys.argv[-1]))
name = "changed" if (folder / "change").exists() else "same"
hello = {{"fingerprint": name, "dtype": "float32", "max_document_tokens": 9, "vocab_size": 9}}
connection.sendall(encode_message(hello))
for line in connection.makefile('rb'):
    job = decode_message(line)
    token = job["token_ids"][0]
    if token == {DIES}: os._exit(1)
    if token == {HANGS}: threading.Event().wait()
    if token == {LIES}: connection.sendall(b"\\xff" * 8)
    connection.sendall(encode_message({{"job": job["job"], "tier": "encoded", "seconds": 0.0}}))
"""


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(supervisor, "FIRST_BACKOFF_S", 0.01)
    with tempfile.TemporaryDirectory(prefix="comb-test-") as name:
        yield Path(name)


@pytest.fixture
def program(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In place of encoders; it looks what to do in this folder."""
    monkeypatch.setattr(supervisor, "ENCODER", [sys.executable, "-c", PROGRAM, str(folder)])
    return folder


@pytest.fixture(scope="module")
def adapter(nano_adapter: Path) -> CombForCausalLM:
    return CombForCausalLM.from_pretrained(nano_adapter, dtype=torch.float32)


def make_pools(adapter: CombForCausalLM, folder: Path, ranks: int = 1) -> list[SharedPool]:
    config = adapter.encoder.config
    heads = max(1, config.num_key_value_heads // ranks)
    shape = len(adapter.cross_blocks), heads, config.head_dim
    layout = PoolLayout(*shape, num_blocks=BLOCKS, block_size=8, sink_tokens=config.sink_tokens)
    return [SharedPool.create(pool_path(folder, rank), layout) for rank in range(ranks)]


@asynccontextmanager
async def running(
    nano_adapter: Path, folder: Path, pool: SharedPool, **more: Any
) -> AsyncIterator[tuple[PICManager, EncoderProcess]]:
    options = ServeOptions(str(nano_adapter), **more)
    with mock.patch.dict(os.environ, options.environment(folder)):
        encoders = start()
        try:
            yield PICManager(pool.layout, encoders), encoders
        finally:
            await encoders.stop()


def document(number: int, tokens: int = 20) -> tuple[int, ...]:
    return tuple((7 * number + 3 * index) % 900 + 5 for index in range(tokens))


def job(number: int, ids: Sequence[int], *blocks: int) -> EncodeJob:
    return EncodeJob(number, f"{number:064d}", tuple(ids), PoolHandle(len(ids), blocks))


async def wanted(manager: PICManager, numbers: range, tokens: int = 20) -> list[WantedDocument]:
    ids = [document(number, tokens) for number in numbers]
    return [WantedDocument(key, one) for key, one in zip(await manager.keys(ids, ""), ids, strict=True)]


def check_content(adapter: CombForCausalLM, pool: SharedPool, handle: PoolHandle, ids: tuple[int, ...]) -> None:
    (expected,) = adapter.encode([ids])
    for layer in range(pool.layout.cross_layers):
        keys, values = pool.read(layer, [handle])
        torch.testing.assert_close(keys, expected.keys[layer], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(values, expected.values[layer], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
async def test_the_pool_holds_what_encode_gives_bit_for_bit(
    nano_adapter: Path, adapter: CombForCausalLM, folder: Path, tmp_path: Path
) -> None:
    pools = make_pools(adapter, folder)
    pools[0].tensor.fill_(float("nan"))
    tiers = {"host_bytes": 2**20, "disk_path": str(tmp_path / "disk")}
    async with running(nano_adapter, folder, pools[0], **tiers) as (manager, encoders):
        assert (await encoders.identity()).fingerprint == adapter.fingerprint
        for number in range(3):
            (one,) = await wanted(manager, range(number, number + 1), 13 + number)
            lease = await manager.acquire([one])
            (expected,) = adapter.encode([one.token_ids])
            for layer in range(pools[0].layout.cross_layers):
                keys, values = pools[0].read(layer, lease.handles)
                assert torch.equal(keys, expected.keys[layer])
                assert torch.equal(values, expected.values[layer])
                assert not torch.equal(keys, adapter.encode([one.token_ids[::-1]])[0].keys[layer])
            lease.release()
        # what has left the pool comes back by copy, the same bits
        before = pools[0].read(0, lease.handles)[0].clone()
        entry = manager.index.pop("pool", one.key)
        assert entry is not None
        manager.index.freed(entry)
        pools[0].tensor.fill_(float("nan"))
        lease = await manager.acquire([one])
        assert lease.documents[0].tier == "host"
        assert torch.equal(pools[0].read(0, lease.handles)[0], before)
        with pytest.raises(ValueError, match="another model's tokenizer"):
            await manager.keys([(10**6,)], "")
        with pytest.raises(ValueError, match="split it"):
            await manager.keys([(5,) * 10**6], "")
        lease.release()
        check_manager(manager)


@pytest.mark.slow
async def test_the_disk_tier_survives_and_forgets_what_is_removed(
    nano_adapter: Path, adapter: CombForCausalLM, folder: Path, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"

    async def tiers(*, removed: bool = False) -> list[str]:
        (pool,) = make_pools(adapter, folder)
        pool.tensor.fill_(float("nan"))
        async with running(nano_adapter, folder, pool, disk_path=str(disk)) as (manager, _):
            everything = await wanted(manager, range(5))
            lease = await manager.acquire(everything)
            for handle, one in zip(lease.handles, everything, strict=True):
                check_content(adapter, pool, handle, one.token_ids)
            lease.release()
            files = [disk / f"{one.key}.picache.safetensors" for one in everything]
            await until(lambda: all(file.exists() for file in files))
            if removed:
                assert manager.remove(everything[0].key)
                await until(lambda: not files[0].exists())
                assert all(file.exists() for file in files[1:])
        pool.path.unlink()
        return [document.tier for document in lease.documents]

    assert await tiers() == ["encoded"] * 5
    assert await tiers(removed=True) == ["disk"] * 5
    assert len(list(disk.iterdir())) == 4
    assert await tiers() == ["encoded", *["disk"] * 4]


def test_what_does_not_fit_the_store_is_encoded_once_all_the_same(adapter: CombForCausalLM, folder: Path) -> None:
    pools = make_pools(adapter, folder)
    each = 21 * pools[0].layout.bytes_per_token  # the sink, too
    for budget, kept in ((each * 2, 2), (each - 1, 0)):
        worker = EncoderWorker(adapter, pools, PICacheStore(device="cpu", device_bytes=budget))
        asked: list[int] = []
        compile = worker.method.compile
        worker.method.compile = lambda ids, asked=asked, compile=compile: asked.append(len(ids)) or compile(ids)
        jobs = [job(n, document(n), 3 * n, 3 * n + 1, 3 * n + 2) for n in range(3)]
        assert [answer["tier"] for answer in worker.run(jobs)] == ["encoded"] * 3
        assert asked == [3]
        for each in jobs:
            check_content(adapter, pools[0], each.handle, each.token_ids)
        assert sum(answer["tier"] == "host" for answer in worker.run(jobs[::-1])) == kept


def test_ranks_get_their_heads_and_one_bad_document_harms_nobody(adapter: CombForCausalLM, folder: Path) -> None:
    pools = make_pools(adapter, folder, ranks=2)
    worker = EncoderWorker(adapter, pools)
    jobs = [job(0, document(1), 0, 1, 2), job(1, [10**6], 3), job(2, document(2), 4, 5, 6)]
    answers = worker.run(jobs)
    assert [answer.get("tier") for answer in answers] == ["encoded", None, "encoded"]
    assert "1000000" in answers[1]["error"]
    expected = adapter.encode([document(2)])[0].keys[0]
    found = torch.cat([pool.read(0, [jobs[2].handle])[0] for pool in pools], dim=1)
    assert torch.equal(found, expected)
    wrong = PoolLayout(9, pools[0].layout.kv_heads, pools[0].layout.head_dim, 1)
    with pytest.raises(ValueError, match="different checkpoints"):
        EncoderWorker(adapter, [SharedPool.create(folder / "wrong", wrong)])


def test_a_write_that_fails_is_waited_for_before_anybody_hears_of_it(
    adapter: CombForCausalLM, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU the keys may still be under way when the values turn out to be broken."""
    (pool,) = make_pools(adapter, folder)
    told: list[str] = []
    write = pool.write

    def broken(handle: PoolHandle, *given: Any) -> None:
        told.append(f"write {handle.tokens}")
        write(handle, *given)
        if handle.tokens == 8:
            raise ValueError("NaN")

    monkeypatch.setattr(pool, "write", broken)
    monkeypatch.setattr(pool, "finish", lambda: told.append("finish"))
    jobs = [job(n, document(n)[:size], 2 * n, 2 * n + 1) for n, size in enumerate((9, 8, 15))]
    assert ["error" in answer for answer in EncoderWorker(adapter, [pool]).run(jobs)] == [False, True, False]
    assert told == ["write 9", "write 8", "finish", "write 9", "finish", "write 8", "finish", "write 15", "finish"]


def test_answers_say_what_is_kept_outside_the_pool(adapter: CombForCausalLM, folder: Path, tmp_path: Path) -> None:
    store = PICacheStore(device="cpu", device_bytes=2**20, disk_path=tmp_path / "kept")
    worker = EncoderWorker(adapter, make_pools(adapter, folder), store)
    assert worker.hello()["kept"] == {"host": 0, "disk": 0, "host_size": 2**20}
    (answer,) = worker.run([job(0, document(1), 0, 1, 2)])
    assert answer["kept"]["host"] == adapter.encode([document(1)])[0].nbytes
    (again,) = worker.run([job(0, document(1), 3, 4, 5)])
    assert (again["tier"], again["kept"]) == ("host", answer["kept"])


@pytest.mark.slow
def test_the_process_ends_with_the_other_end_of_its_socket() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = [*ENCODER, "--socket", str(theirs.fileno())]
        environment = {**os.environ, **ServeOptions("nano").environment(Path("/nowhere"))}
        process = subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()])
    assert process.wait(60) in (0, 1)  # 1: it hasn't even found its pools


def test_batches_stay_within_the_budget_and_nothing_is_left_behind() -> None:
    budget = ENCODE_BATCH_TOKENS
    sizes = [budget // 4, budget // 4, budget // 2, 10, budget, 2 * budget, 1, 1]
    waiting: queue.Queue[EncodeJob | str | None] = queue.Queue()
    for number, size in enumerate(sizes):
        waiting.put(job(number, [5] * size))
    waiting.put(None)
    found = [[len(each.token_ids) for each in batch] for batch in batches(waiting)]
    assert found == [[budget // 4, budget // 4], [budget // 2, 10], [budget], [2 * budget], [1, 1]]
    jobs = [job(0, [5]), "0", job(1, [5])]
    for one in (*jobs, None):
        waiting.put(one)
    first, key, last = batches(waiting)
    assert [*first, key, *last] == jobs
    waiting.put(None)
    assert list(batches(waiting)) == []
    waiting.put(job(0, [5]))
    coming = batches(waiting)
    assert len(next(coming)) == 1  # without waiting for a second one


def test_lines_that_are_no_message_are_refused() -> None:
    assert decode_message(encode_message({"job": 1, "text": "ä\n"})) == {"job": 1, "text": "ä\n"}
    for line in (b"[1]\n", b"{\n", b"\xff\n", b"\n"):
        with pytest.raises(ValueError, match=r"an object, not|Expecting|can't decode"):
            decode_message(line)
    for cut in (b"", b'{"job": 1}'):
        with pytest.raises(ConnectionResetError, match="closed"):
            decode_message(cut)


@pytest.mark.parametrize("line", [b"{\n", b"[" * 50_000 + b"\n", b'{"job": 1}\n', b""])
def test_an_encoder_ends_over_what_is_no_message(line: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    status: list[int] = []
    monkeypatch.setattr(os, "_exit", status.append)
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            theirs.sendall(line)
        receive(ours, queue.Queue())
    assert status == [0]


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
def test_what_encoding_needs_is_kept_and_the_rest_is_freed(family: str) -> None:
    model = CombForCausalLM.from_backbone(tiny(family), num_encoder_layers=1)
    [whole], name, size = model.encode([(5, 6, 7)]), model.fingerprint, sum(p.numel() for p in model.parameters())
    drop_decoder(model)
    [rest] = model.encode([(5, 6, 7)])
    assert torch.equal(whole.keys, rest.keys)
    assert rest.fingerprint == name
    assert sum(p.numel() for p in model.parameters()) < 0.6 * size


def start() -> EncoderProcess:
    encoders = EncoderProcess()
    encoders.start()
    return encoders


def submit(encoders: EncoderProcess, token: int = 1, number: int = 0) -> Any:
    return encoders.submit(f"{number:064x}", [token], PoolHandle(1, (0,)))


@pytest.mark.parametrize("token", [DIES, HANGS, LIES])
async def test_a_document_that_takes_encoders_with_it_is_refused_its_neighbours_are_not(
    program: Path, token: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if token == HANGS:  # the others never do, however slow the machine
        monkeypatch.setattr(supervisor, "STALL_S", 2.0)
    encoders = start()
    good = [submit(encoders, number=number) for number in range(3)]
    bad = submit(encoders, token, 9)
    good += [submit(encoders, number=number) for number in range(3, 6)]
    results = await asyncio.gather(*good, bad, return_exceptions=True)
    assert [getattr(result, "tier", None) for result in results] == ["encoded"] * 6 + [None]
    assert isinstance(results[-1], EncoderError)
    assert "3 encoder processes ended over this document" in str(results[-1])
    assert encoders.waiting == 0
    assert (await submit(encoders)).tier == "encoded"
    await encoders.stop()
    with pytest.raises(EncoderError, match="shutting down"):
        await submit(encoders)


async def test_other_weights_after_a_restart_are_refused(program: Path) -> None:
    encoders = start()
    assert (await encoders.identity()).fingerprint == "same"
    (program / "change").touch()
    with pytest.raises(EncoderError, match="changed while serving"):
        await submit(encoders, DIES)
    with pytest.raises(EncoderError, match="changed while serving"):
        await encoders.identity()
    await encoders.stop()


async def test_encoders_that_do_not_start_are_a_fault_and_not_a_wait_until_one_does(
    program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "LAST_BACKOFF_S", 0.01)
    (program / "broken").touch()
    encoders = start()
    assert encoders.fault() == "no encoder is ready yet"
    for never_ran in (True, False):
        (program / "broken").touch()
        with pytest.raises(EncoderError, match="at their start"):
            await submit(encoders, DIES)  # no process has got as far as to hear of it, or the one that ran ends over it
        assert "at their start" in str(encoders.fault())
        with pytest.raises(EncoderError, match="at their start"):
            await submit(encoders, number=1)
        with pytest.raises(EncoderError, match="at their start") if never_ran else nullcontext():
            await encoders.identity()  # what is in the pool can be served still
        (program / "broken").unlink()
        await until(lambda: encoders.fault() is None)
    assert (await submit(encoders, number=1)).tier == "encoded"
    process = encoders.process
    process.kill()
    while encoders.restarts < 5:
        assert encoders.fault() is None  # being started again is none
        await asyncio.sleep(0.001)
        if encoders.process not in (None, process):
            break
    await encoders.stop()


async def test_nothing_runs_after_the_end(program: Path) -> None:
    encoders = start()
    await encoders.identity()
    process = encoders.process
    hanging = submit(encoders, HANGS)
    await encoders.stop()
    assert process.returncode is not None
    with pytest.raises(EncoderError, match="shutting down"):
        await hanging

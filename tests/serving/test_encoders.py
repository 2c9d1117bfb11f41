"""What is done about encoder processes that die, hang or change, with a small program in their place."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from comb_serving.encoding import supervisor as module
from comb_serving.encoding.protocol import EncoderError
from comb_serving.encoding.supervisor import EncoderProcesses
from comb_serving.pool.capability import PoolHandle
from tests.helpers.fakes import until

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
    monkeypatch.setattr(module, "FIRST_BACKOFF_S", 0.01)
    with tempfile.TemporaryDirectory(prefix="comb-test-") as name:
        yield Path(name)


def start(folder: Path, **more: Any) -> EncoderProcesses:
    command = [sys.executable, "-c", PROGRAM, str(folder)]
    encoders = EncoderProcesses(dict(os.environ), command=command, start_seconds=30, **more)
    encoders.start()
    return encoders


@pytest.mark.parametrize("token", [DIES, HANGS, LIES])
async def test_a_document_that_takes_encoders_with_it_is_refused_its_neighbours_are_not(
    folder: Path, token: int
) -> None:
    # the others never hang, however slow the machine
    encoders = start(folder, stall_seconds=2.0 if token == HANGS else 300.0)
    good = [encoders.submit(f"{number:064x}", [1], PoolHandle(1, (0,))) for number in range(3)]
    bad = encoders.submit("f" * 64, [token], PoolHandle(1, (1,)))
    good += [encoders.submit(f"{number:064x}", [1], PoolHandle(1, (0,))) for number in range(3, 6)]
    results = await asyncio.gather(*good, bad, return_exceptions=True)
    assert [getattr(result, "tier", None) for result in results] == ["encoded"] * 6 + [None]
    assert isinstance(results[-1], EncoderError)
    assert "3 encoder processes ended over this document" in str(results[-1])
    assert encoders.waiting == 0
    assert (await encoders.submit("a" * 64, [1], PoolHandle(1, (0,)))).tier == "encoded"
    await encoders.stop()
    with pytest.raises(EncoderError, match="shutting down"):
        await encoders.submit("a" * 64, [1], PoolHandle(1, (0,)))


async def test_other_weights_after_a_restart_are_refused(folder: Path) -> None:
    encoders = start(folder)
    assert (await encoders.identity()).fingerprint == "same"
    (folder / "change").touch()
    with pytest.raises(EncoderError, match="changed while serving"):
        await encoders.submit("a" * 64, [DIES], PoolHandle(1, (0,)))
    with pytest.raises(EncoderError, match="changed while serving"):
        await encoders.identity()
    await encoders.stop()


async def test_an_encoder_that_cannot_start_is_an_error_and_not_a_wait(folder: Path) -> None:
    command = [sys.executable, "-c", "raise SystemExit(1)"]
    encoders = EncoderProcesses(dict(os.environ), command=command, start_seconds=30)
    waiting = encoders.submit("0" * 64, [1], PoolHandle(1, (0,)))
    encoders.start()
    with pytest.raises(EncoderError, match="at their start"):
        await encoders.identity()
    with pytest.raises(EncoderError, match="at their start"):
        await waiting
    with pytest.raises(EncoderError, match="at their start"):
        await encoders.submit("0" * 64, [1], PoolHandle(1, (0,)))
    await encoders.stop()


async def test_encoders_that_no_longer_start_are_a_fault_until_one_does(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LAST_BACKOFF_S", 0.01)
    encoders = start(folder)
    assert encoders.fault() == "no encoder is ready yet"
    await encoders.identity()
    assert encoders.fault() is None
    (folder / "broken").touch()
    waiting = encoders.submit("a" * 64, [DIES], PoolHandle(1, (0,)))
    with pytest.raises(EncoderError, match="at their start"):
        await waiting
    assert "at their start" in str(encoders.fault())
    with pytest.raises(EncoderError, match="at their start"):
        await encoders.submit("b" * 64, [1], PoolHandle(1, (0,)))
    await encoders.identity()  # what is in the pool can be served still
    (folder / "broken").unlink()
    await until(lambda: encoders.fault() is None)
    assert (await encoders.submit("b" * 64, [1], PoolHandle(1, (0,)))).tier == "encoded"
    process = encoders.watched[0].process
    assert process is not None
    process.kill()
    while encoders.restarts < 5:
        assert encoders.fault() is None  # being started again is none
        await asyncio.sleep(0.001)
        if encoders.watched[0].process not in (None, process):
            break
    await encoders.stop()


async def test_nothing_runs_after_the_end(folder: Path) -> None:
    encoders = start(folder)
    await encoders.identity()
    process = encoders.watched[0].process
    assert process is not None
    hanging = encoders.submit("a" * 64, [HANGS], PoolHandle(1, (0,)))
    await encoders.stop()
    assert process.returncode is not None
    with pytest.raises(EncoderError, match="shutting down"):
        await hanging

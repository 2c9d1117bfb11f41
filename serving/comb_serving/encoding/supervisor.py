"""Encoder processes as the manager sees them: started, watched, started again, and each document answered once."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from comb_serving.encoding import frames
from comb_serving.encoding.process import socket_path
from comb_serving.pool.handles import PoolHandle

logger = logging.getLogger(__name__)

FIRST_BACKOFF_S, LAST_BACKOFF_S = 0.2, 10.0
ENCODER = (sys.executable, "-m", "comb_serving.encoding.process")
MAX_ATTEMPTS = 3  # a document that has taken so many encoders with it is refused; so many failed starts are a fault


class EncoderError(RuntimeError):
    """A document could not be encoded."""


@dataclass(frozen=True)
class Identity:
    """What the encoder says about its weights; part of every content key."""

    fingerprint: str
    dtype: str
    max_document_tokens: int
    vocab_size: int

    @classmethod
    def parse(cls, hello: dict[str, Any]) -> Identity:
        return cls(*(hello[name] for name in ("fingerprint", "dtype", "max_document_tokens", "vocab_size")))


@dataclass(frozen=True)
class Encoded:
    """Where a document's keys and values came from ("encoded", "host" or "disk"), and in how many seconds."""

    tier: str
    seconds: float


def settle(future: asyncio.Future[Encoded], answer: dict[str, Any]) -> None:
    """Ends a document's future with what an encoder has answered."""
    if "error" in answer:
        future.set_exception(EncoderError(answer["error"]))
    else:
        future.set_result(Encoded(str(answer["tier"]), float(answer["seconds"])))


class Encoders(Protocol):
    """What the manager needs of them; tests have one without processes."""

    async def identity(self) -> Identity:
        """Waits for the first encoder. Raises EncoderError if none can be had."""

    def submit(self, key: str, token_ids: Sequence[int], handle: PoolHandle) -> asyncio.Future[Encoded]:
        """Asks for one document. The future ends when nobody writes to the handle's blocks any more."""


@dataclass(eq=False)
class _PendingJob:
    message: dict[str, Any]
    future: asyncio.Future[Encoded]
    attempts: int = 0


@dataclass(eq=False)
class _EncoderSlot:
    """One encoder process after the other, and the documents that wait for an answer."""

    index: int
    jobs: dict[int, _PendingJob] = field(default_factory=dict)
    process: asyncio.subprocess.Process | None = None
    writer: asyncio.StreamWriter | None = None
    failures: int = 0
    failed_starts: int = 0
    greeted: bool = False
    sent: set[int] = field(default_factory=set)
    kept: dict[str, int] = field(default_factory=dict)

    @property
    def down(self) -> bool:
        """Its processes don't get as far as their first word, one after the other; they are still tried."""
        return self.failed_starts >= MAX_ATTEMPTS


class EncoderProcesses:
    """Keeps `count` encoder processes running in an instance's folder.

    Args:
        environment: of the processes; holds the instance's folder and options.
        stall_seconds: without an answer for so long, a process that has work is killed and started again.
        start_seconds: longest wait for an encoder's first word.
        command: what a process runs, to which its number is added; for tests.
    """

    def __init__(
        self,
        folder: Path,
        environment: dict[str, str],
        *,
        count: int = 1,
        stall_seconds: float = 300.0,
        start_seconds: float = 600.0,
        command: Sequence[str] = ENCODER,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.command = tuple(command)
        self.folder, self.environment = folder, environment
        self.stall_seconds, self.start_seconds, self.clock = stall_seconds, start_seconds, clock
        self.places = [_EncoderSlot(index) for index in range(count)]
        self.restarts = 0
        self._known: Identity | None = None
        self._arrived = asyncio.Event()
        self._refused: str | None = None
        self._numbers = iter(range(sys.maxsize))
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Starts the processes and what watches them; returns at once."""
        self._tasks = [asyncio.create_task(self._keep(place)) for place in self.places]

    async def stop(self) -> None:
        """Ends the processes; documents under way fail."""
        self._refused = self._refused or "the server is shutting down"
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for place in self.places:
            self._fail(place, list(place.jobs), self._refused)
            socket_path(self.folder, place.index).unlink(missing_ok=True)

    async def identity(self) -> Identity:
        if self._known is None:
            try:
                await asyncio.wait_for(self._arrived.wait(), self.start_seconds)
            except TimeoutError:
                raise EncoderError(f"no encoder was ready within {self.start_seconds:.0f} s; see the log") from None
        if self._known is None or self._refused is not None:
            raise EncoderError(self.fault() or "no encoder")
        return self._known

    def submit(self, key: str, token_ids: Sequence[int], handle: PoolHandle) -> asyncio.Future[Encoded]:
        # the same document always goes to the same process, which may still have it in its host tier
        places = [place for place in self.places if not place.down] or self.places
        place = places[int(key[:8], 16) % len(places)]
        number = next(self._numbers)
        message = {"job": number, "key": key, "token_ids": list(token_ids), "blocks": list(handle.blocks)}
        job = _PendingJob(message, asyncio.get_running_loop().create_future())
        place.jobs[number] = job
        if self._refused is not None or place.down:
            self._fail(place, [number], self.fault())
        self._send_waiting(place)
        return job.future

    def fault(self) -> str | None:
        """Why no encoder is there and none is about to be; None while one works, or is just being started again."""
        if self._refused is not None:
            return self._refused
        if all(place.down for place in self.places):
            return f"encoder processes ended {self.places[0].failed_starts} times at their start; see the log"
        return "no encoder is ready yet" if self._known is None else None

    @property
    def waiting(self) -> int:
        """Documents without an answer yet."""
        return sum(len(place.jobs) for place in self.places)

    @property
    def kept_bytes(self) -> dict[str, int]:
        """Bytes in the encoders' own tiers, as they last said; of the disk folder, which they share, the most."""
        places = [place.kept for place in self.places]
        return {
            "host": sum(kept.get("host", 0) for kept in places),
            "disk": max(kept.get("disk", 0) for kept in places),
        }

    # ---- one place ----

    async def _keep(self, place: _EncoderSlot) -> None:
        """Runs a process until it ends, over and over; what it left is sent to the next one."""
        while self._refused is None:
            started, place.greeted = self.clock(), False
            try:
                await self._run(place)
            except (OSError, frames.FrameError, asyncio.IncompleteReadError, TimeoutError, KeyError) as error:
                logger.warning("encoder %d: %s: %s", place.index, type(error).__name__, error)
            finally:
                await self._end(place)
            place.failures = 1 if self.clock() - started > 60 else place.failures + 1
            place.failed_starts += not place.greeted
            self.restarts += 1
            if place.down:
                # nobody waits for it, but it is tried again: a process may have been killed, or be short of memory
                self._fail(place, list(place.jobs), self.fault() or f"encoder {place.index} doesn't start; see the log")
                self._arrived.set()
            worn = [number for number, job in place.jobs.items() if job.attempts >= MAX_ATTEMPTS]
            self._fail(place, worn, f"{MAX_ATTEMPTS} encoder processes ended over this document")
            await asyncio.sleep(min(FIRST_BACKOFF_S * 2 ** min(place.failures - 1, 20), LAST_BACKOFF_S))
        self._fail(place, list(place.jobs), self._refused)

    async def _run(self, place: _EncoderSlot) -> None:
        path = socket_path(self.folder, place.index)
        path.unlink(missing_ok=True)
        arguments = [*self.command, "--index", str(place.index)]
        place.process = await asyncio.create_subprocess_exec(
            *arguments, env=self.environment, stdin=asyncio.subprocess.PIPE
        )
        reader, writer = await self._connect(place.process, path)
        try:
            first = await asyncio.wait_for(frames.receive(reader), self.start_seconds)
            hello, place.kept = Identity.parse(first), first.get("kept", {})
            if self._known is not None and hello != self._known:
                # keys were made with the old weights: documents of both would be mixed
                self._refused = f"the checkpoint changed while serving ({hello} instead of {self._known}): restart"
                raise frames.FrameError(self._refused)
            self._known = hello
            self._arrived.set()
            place.greeted, place.failed_starts = True, 0
            place.writer = writer
            place.sent.clear()
            self._send_waiting(place)
            await self._answers(place, reader)
        finally:
            place.writer = None
            writer.close()

    async def _connect(
        self, process: asyncio.subprocess.Process, path: Path
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        deadline = self.clock() + self.start_seconds
        while True:
            if process.returncode is not None:
                raise ConnectionError(f"ended at start with status {process.returncode}")
            with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
                return await asyncio.open_unix_connection(str(path))
            if self.clock() > deadline:
                raise TimeoutError(f"not ready within {self.start_seconds:.0f} s")
            await asyncio.sleep(0.05)

    async def _answers(self, place: _EncoderSlot, reader: asyncio.StreamReader) -> None:
        receiving = asyncio.ensure_future(frames.receive(reader))
        quiet_since = self.clock()
        try:
            while True:
                done, _ = await asyncio.wait([receiving], timeout=min(1.0, self.stall_seconds / 4))
                if not done:
                    quiet_since = quiet_since if place.jobs else self.clock()
                    if self.clock() - quiet_since > self.stall_seconds:
                        raise TimeoutError(f"no answer for {self.stall_seconds:.0f} s, {len(place.jobs)} wait")
                    continue
                answer = receiving.result()
                receiving = asyncio.ensure_future(frames.receive(reader))
                quiet_since, place.failures = self.clock(), 0
                self._settle(place, answer)
                self._send_waiting(place)
        finally:
            receiving.cancel()
            await asyncio.gather(receiving, return_exceptions=True)

    def _settle(self, place: _EncoderSlot, answer: dict[str, Any]) -> None:
        place.kept = answer.get("kept", place.kept)
        job = place.jobs.pop(answer["job"], None)
        if job is not None and not job.future.done():
            settle(job.future, answer)

    def _send_waiting(self, place: _EncoderSlot) -> None:
        """Sends what hasn't been sent to this process. What was with one that died goes alone, to find the culprit."""
        under_way = place.sent & place.jobs.keys()
        for number, job in list(place.jobs.items()):
            suspect = job.attempts > (number in under_way)
            if place.writer is None or (suspect and under_way):
                return
            if number in under_way:
                continue
            place.sent.add(number)
            under_way.add(number)
            job.attempts += 1
            try:
                place.writer.write(frames.encode(job.message))
            except frames.FrameError as error:
                self._settle(place, {"job": number, "error": str(error)})
            if suspect:
                return

    async def _end(self, place: _EncoderSlot) -> None:
        """The process is gone for certain afterwards: its blocks can be written by another one."""
        process, place.process = place.process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()

    def _fail(self, place: _EncoderSlot, numbers: list[int], reason: str | None) -> None:
        for number in numbers:
            self._settle(place, {"job": number, "error": reason})

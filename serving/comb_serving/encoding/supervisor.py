"""Encoder processes as the manager sees them: started, watched, started again, and each document answered once."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from comb_serving.encoding.protocol import (
    Encoded,
    EncodeJob,
    EncoderError,
    EncoderIdentity,
    decode_message,
    encode_message,
)
from comb_serving.pool.capability import PoolHandle

logger = logging.getLogger(__name__)

FIRST_BACKOFF_S, LAST_BACKOFF_S = 0.2, 10.0
ENCODER = (sys.executable, "-m", "comb_serving.encoding.process")
MAX_ATTEMPTS = 3  # a document that has taken so many encoders with it is refused; so many failed starts are a fault


@dataclass(eq=False)
class PendingJob:
    job: EncodeJob
    future: asyncio.Future[Encoded]
    attempts: int = 0


@dataclass(eq=False)
class WatchedEncoder:
    """One encoder process after the other, and the documents that wait for an answer."""

    index: int
    jobs: dict[int, PendingJob] = field(default_factory=dict)
    process: asyncio.subprocess.Process | None = None
    writer: asyncio.StreamWriter | None = None
    failures: int = 0
    failed_starts: int = 0
    greeted: bool = False
    sent: set[int] = field(default_factory=set)
    kept: dict[str, int] = field(default_factory=dict)
    forgotten: list[str] = field(default_factory=list)  # keys that it isn't told of yet

    @property
    def down(self) -> bool:
        """Its processes don't get as far as their first word, one after the other; they are still tried."""
        return self.failed_starts >= MAX_ATTEMPTS


class EncoderProcesses:
    """Keeps `count` encoder processes running.

    Args:
        environment: of the processes; holds the instance's folder and options.
        stall_seconds: without an answer for so long, a process that has work is killed and started again.
        start_seconds: longest wait for an encoder's first word.
        command: what a process runs, to which its number and its socket are added; for tests.
    """

    def __init__(
        self,
        environment: dict[str, str],
        *,
        count: int = 1,
        stall_seconds: float = 300.0,
        start_seconds: float = 600.0,
        command: Sequence[str] = ENCODER,
    ) -> None:
        self.command, self.environment = tuple(command), environment
        self.stall_seconds, self.start_seconds = stall_seconds, start_seconds
        self.watched = [WatchedEncoder(index) for index in range(count)]
        self.restarts = 0
        self._known: EncoderIdentity | None = None
        self._arrived = asyncio.Event()
        self._refused: str | None = None
        self._numbers = itertools.count()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Starts the processes and what watches them; returns at once."""
        self._tasks = [asyncio.create_task(self._keep(encoder)) for encoder in self.watched]

    async def stop(self) -> None:
        """Ends the processes; documents under way fail."""
        self._refused = self._refused or "the server is shutting down"
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for encoder in self.watched:
            self._fail(encoder, list(encoder.jobs), self._refused)

    async def identity(self) -> EncoderIdentity:
        """What the encoders say of their weights. Raises EncoderError if none is ready within `start_seconds`."""
        if self._known is None:
            try:
                await asyncio.wait_for(self._arrived.wait(), self.start_seconds)
            except TimeoutError:
                raise EncoderError(f"no encoder was ready within {self.start_seconds:.0f} s; see the log") from None
        if self._known is None or self._refused is not None:
            raise EncoderError(self.fault() or "no encoder")
        return self._known

    def submit(
        self, key: str, token_ids: Sequence[int], handle: PoolHandle, lora: str = "", *, exact: bool = False
    ) -> asyncio.Future[Encoded]:
        """Asks for one document; should its encoder end, the next one is asked."""
        # the same document always goes to the same process, which may still have it in its host tier
        encoder = self._encoder_of(key, [encoder for encoder in self.watched if not encoder.down] or self.watched)
        job = EncodeJob(next(self._numbers), key, tuple(token_ids), handle)
        pending = encoder.jobs[job.number] = PendingJob(job, asyncio.get_running_loop().create_future())
        if self._refused is not None or encoder.down:
            self._fail(encoder, [job.number], self.fault())
        self._send_waiting(encoder)
        return pending.future

    def forget(self, key: str) -> None:
        """Has the encoder that may keep a document delete it, when it runs again if it doesn't now."""
        encoder = self._encoder_of(key, self.watched)
        encoder.forgotten.append(key)
        self._send_waiting(encoder)

    def fault(self) -> str | None:
        """Why no encoder is there and none is about to be; None while one works, or is just being started again."""
        if self._refused is not None:
            return self._refused
        if all(encoder.down for encoder in self.watched):
            return f"encoder processes ended {self.watched[0].failed_starts} times at their start; see the log"
        return "no encoder is ready yet" if self._known is None else None

    @property
    def waiting(self) -> int:
        """Documents without an answer yet."""
        return sum(len(encoder.jobs) for encoder in self.watched)

    @property
    def kept_bytes(self) -> dict[str, int]:
        """Bytes in the encoders' own tiers, as they last said (`kept.kept_bytes`)."""
        return dict(sum((Counter(encoder.kept) for encoder in self.watched), Counter()))

    # ---- one of them ----

    def _encoder_of(self, key: str, watched: Sequence[WatchedEncoder]) -> WatchedEncoder:
        return watched[int(key[:8], 16) % len(watched)]

    async def _keep(self, encoder: WatchedEncoder) -> None:
        """Runs a process until it ends, over and over; what it left is sent to the next one."""
        while self._refused is None:
            started, encoder.greeted = time.monotonic(), False
            try:
                await self._run(encoder)
            except (OSError, KeyError, ValueError) as error:
                logger.warning("encoder %d: %s: %s", encoder.index, type(error).__name__, error)
            finally:
                process, encoder.process = encoder.process, None
                if process is not None:
                    with contextlib.suppress(ProcessLookupError):
                        process.kill()
                    # gone for certain afterwards: its blocks can be written by another one
                    logger.info("encoder %d ended with status %d", encoder.index, await process.wait())
            encoder.failures = 1 if time.monotonic() - started > 60 else encoder.failures + 1
            encoder.failed_starts += not encoder.greeted
            self.restarts += 1
            if encoder.down:
                # nobody waits for it, but it is tried again: a process may have been killed, or be short of memory
                self._fail(
                    encoder, list(encoder.jobs), self.fault() or f"encoder {encoder.index} doesn't start; see the log"
                )
                self._arrived.set()
            worn = [number for number, job in encoder.jobs.items() if job.attempts >= MAX_ATTEMPTS]
            self._fail(encoder, worn, f"{MAX_ATTEMPTS} encoder processes ended over this document")
            await asyncio.sleep(min(FIRST_BACKOFF_S * 2 ** min(encoder.failures - 1, 20), LAST_BACKOFF_S))
        self._fail(encoder, list(encoder.jobs), self._refused)

    async def _run(self, encoder: WatchedEncoder) -> None:
        """Starts a process, hears who it is, and takes its answers until it ends, hangs or talks nonsense."""
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        try:
            with theirs:
                arguments = [*self.command, "--index", str(encoder.index), "--socket", str(theirs.fileno())]
                encoder.process = await asyncio.create_subprocess_exec(
                    *arguments, env=self.environment, stdin=asyncio.subprocess.DEVNULL, pass_fds=[theirs.fileno()]
                )
            first = decode_message(await asyncio.wait_for(reader.readline(), self.start_seconds))
            fields = ("fingerprint", "dtype", "max_document_tokens", "vocab_size")
            hello, encoder.kept = EncoderIdentity(*(first[name] for name in fields)), first.get("kept", {})
            if self._known is not None and hello != self._known:
                # keys were made with the old weights: documents of both would be mixed
                self._refused = f"the checkpoint changed while serving ({hello} instead of {self._known}): restart"
                raise ValueError(self._refused)
            self._known = hello
            self._arrived.set()
            encoder.greeted, encoder.failed_starts, encoder.writer = True, 0, writer
            encoder.sent.clear()
            self._send_waiting(encoder)
            quiet_since = time.monotonic()
            while True:
                try:
                    line = await asyncio.wait_for(reader.readline(), min(1.0, self.stall_seconds / 4))
                except TimeoutError:
                    quiet_since = quiet_since if encoder.jobs else time.monotonic()
                    if time.monotonic() - quiet_since > self.stall_seconds:
                        waiting = f"no answer for {self.stall_seconds:.0f} s, {len(encoder.jobs)} wait"
                        raise TimeoutError(waiting) from None
                    continue
                quiet_since, encoder.failures = time.monotonic(), 0
                answer = decode_message(line)
                encoder.kept = answer.get("kept", encoder.kept)
                if "error" in answer:
                    self._fail(encoder, [answer["job"]], answer["error"])
                elif (pending := encoder.jobs.pop(answer["job"], None)) is not None and not pending.future.done():
                    pending.future.set_result(Encoded(str(answer["tier"]), float(answer["seconds"])))
                self._send_waiting(encoder)
        finally:
            encoder.writer = None
            writer.close()

    def _send_waiting(self, encoder: WatchedEncoder) -> None:
        """Sends what hasn't been sent to this process. What was with one that died goes alone, to find the culprit."""
        while encoder.writer is not None and encoder.forgotten:
            encoder.writer.write(encode_message({"forget": encoder.forgotten.pop(0)}))
        under_way = encoder.sent & encoder.jobs.keys()
        for number, pending in list(encoder.jobs.items()):
            suspect = pending.attempts > (number in under_way)
            if encoder.writer is None or (suspect and under_way):
                return
            if number in under_way:
                continue
            encoder.sent.add(number)
            under_way.add(number)
            pending.attempts += 1
            encoder.writer.write(encode_message(pending.job.message()))
            if suspect:
                return

    def _fail(self, encoder: WatchedEncoder, numbers: Iterable[int], reason: str | None) -> None:
        for number in numbers:
            pending = encoder.jobs.pop(number, None)
            if pending is not None and not pending.future.done():
                pending.future.set_exception(EncoderError(reason))

"""The encoder process as the manager sees it: started, watched, started again, and each document answered once."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import socket
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

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
START_S = 600.0  # longest wait for an encoder's first word
STALL_S = 300.0  # without an answer for so long, a process that has work is killed and started again
ENCODER = (sys.executable, "-m", "comb_serving.encoding.process")
MAX_ATTEMPTS = 3  # a document that has taken so many encoders with it is refused; so many failed starts are a fault


@dataclass(eq=False)
class PendingJob:
    job: EncodeJob
    future: asyncio.Future[Encoded]
    attempts: int = 0


class EncoderProcess:
    """Keeps an encoder process running, one after the other, with the environment of now: it names the instance."""

    def __init__(self) -> None:
        self._environment = dict(os.environ)
        self.process: asyncio.subprocess.Process | None = None
        self.writer: asyncio.StreamWriter | None = None
        self.restarts = 0
        self.kept_bytes: dict[str, int] = {}
        self._jobs: dict[int, PendingJob] = {}  # that wait for an answer
        self._sent: set[int] = set()
        self._forgotten: list[str] = []  # names that it isn't told of yet
        self._failures = self._failed_starts = 0
        self._greeted = False
        self._known: EncoderIdentity | None = None
        self._arrived = asyncio.Event()
        self._refused: str | None = None
        self._numbers = itertools.count()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Starts the process and what watches it; returns at once."""
        self._task = asyncio.create_task(self._keep())

    async def stop(self) -> None:
        """Ends the process; documents under way fail."""
        self._refused = self._refused or "the server is shutting down"
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._fail(list(self._jobs), self._refused)

    async def identity(self) -> EncoderIdentity:
        """What the encoder says of its weights. Raises EncoderError if it isn't ready within `START_S`."""
        if self._known is None:
            try:
                await asyncio.wait_for(self._arrived.wait(), START_S)
            except TimeoutError:
                raise EncoderError(f"no encoder was ready within {START_S:.0f} s; see the log") from None
        if self._known is None or self._refused is not None:
            raise EncoderError(self.fault() or "no encoder")
        return self._known

    def submit(
        self, key: str, token_ids: Sequence[int], handle: PoolHandle, lora: str = "", *, exact: bool = False
    ) -> asyncio.Future[Encoded]:
        """Asks for one document; should the encoder end, the next one is asked."""
        job = EncodeJob(next(self._numbers), key, tuple(token_ids), handle)
        pending = self._jobs[job.number] = PendingJob(job, asyncio.get_running_loop().create_future())
        if self._refused is not None or self._down:
            self._fail([job.number], self.fault())
        self._send_waiting()
        return pending.future

    def forget(self, name: str) -> None:
        """Has the encoder delete what it may keep, when it runs again if it doesn't now."""
        self._forgotten.append(name)
        self._send_waiting()

    def fault(self) -> str | None:
        """Why no encoder is there and none is about to be; None while one works, or is just being started again."""
        if self._refused is not None:
            return self._refused
        if self._down:
            return f"encoder processes ended {self._failed_starts} times at their start; see the log"
        return "no encoder is ready yet" if self._known is None else None

    @property
    def waiting(self) -> int:
        """Documents without an answer yet."""
        return len(self._jobs)

    @property
    def _down(self) -> bool:
        """Its processes don't get as far as their first word, one after the other; they are still tried."""
        return self._failed_starts >= MAX_ATTEMPTS

    async def _keep(self) -> None:
        """Runs a process until it ends, over and over; what it left is sent to the next one."""
        while self._refused is None:
            started, self._greeted = time.monotonic(), False
            try:
                await self._run()
            except (OSError, KeyError, ValueError, RecursionError) as error:
                logger.warning("encoder: %s: %s", type(error).__name__, error)
            finally:
                process, self.process = self.process, None
                if process is not None:
                    with contextlib.suppress(ProcessLookupError):
                        process.kill()
                    # gone for certain afterwards: its blocks can be written by another one
                    logger.info("encoder ended with status %d", await process.wait())
            self._failures = 1 if time.monotonic() - started > 60 else self._failures + 1
            self._failed_starts += not self._greeted
            self.restarts += 1
            if self._down:
                # nobody waits for it, but it is tried again: a process may have been killed, or be short of memory
                self._fail(list(self._jobs), self.fault())
                self._arrived.set()
            worn = [number for number, job in self._jobs.items() if job.attempts >= MAX_ATTEMPTS]
            self._fail(worn, f"{MAX_ATTEMPTS} encoder processes ended over this document")
            await asyncio.sleep(min(FIRST_BACKOFF_S * 2 ** min(self._failures - 1, 20), LAST_BACKOFF_S))
        self._fail(list(self._jobs), self._refused)

    async def _run(self) -> None:
        """Starts a process, hears who it is, and takes its answers until it ends, hangs or talks nonsense."""
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        try:
            with theirs:
                arguments = [*ENCODER, "--socket", str(theirs.fileno())]
                self.process = await asyncio.create_subprocess_exec(
                    *arguments, env=self._environment, stdin=asyncio.subprocess.DEVNULL, pass_fds=[theirs.fileno()]
                )
            first = decode_message(await asyncio.wait_for(reader.readline(), START_S))
            fields = ("fingerprint", "dtype", "max_document_tokens", "vocab_size")
            hello, self.kept_bytes = EncoderIdentity(*(first[name] for name in fields)), first.get("kept", {})
            if self._known is not None and hello != self._known:
                # keys were made with the old weights: documents of both would be mixed
                self._refused = f"the checkpoint changed while serving ({hello} instead of {self._known}): restart"
                raise ValueError(self._refused)
            self._known = hello
            self._arrived.set()
            self._greeted, self._failed_starts, self.writer = True, 0, writer
            self._sent.clear()
            self._send_waiting()
            quiet_since = time.monotonic()
            while True:
                try:
                    line = await asyncio.wait_for(reader.readline(), min(1.0, STALL_S / 4))
                except TimeoutError:
                    quiet_since = quiet_since if self._jobs else time.monotonic()
                    if time.monotonic() - quiet_since > STALL_S:
                        waiting = f"no answer for {STALL_S:.0f} s, {len(self._jobs)} wait"
                        raise TimeoutError(waiting) from None
                    continue
                quiet_since, self._failures = time.monotonic(), 0
                answer = decode_message(line)
                self.kept_bytes = answer.get("kept", self.kept_bytes)
                if "error" in answer:
                    self._fail([answer["job"]], answer["error"])
                elif (pending := self._jobs.pop(answer["job"], None)) is not None and not pending.future.done():
                    pending.future.set_result(Encoded(str(answer["tier"]), float(answer["seconds"])))
                self._send_waiting()
        finally:
            self.writer = None
            writer.close()

    def _send_waiting(self) -> None:
        """Sends what hasn't been sent to this process. What was with one that died goes alone, to find the culprit."""
        while self.writer is not None and self._forgotten:
            self.writer.write(encode_message({"forget": self._forgotten.pop(0)}))
        under_way = self._sent & self._jobs.keys()
        for number, pending in list(self._jobs.items()):
            suspect = pending.attempts > (number in under_way)
            if self.writer is None or (suspect and under_way):
                return
            if number in under_way:
                continue
            self._sent.add(number)
            under_way.add(number)
            pending.attempts += 1
            self.writer.write(encode_message(pending.job.message()))
            if suspect:
                return

    def _fail(self, numbers: Iterable[int], reason: str | None) -> None:
        for number in numbers:
            pending = self._jobs.pop(number, None)
            if pending is not None and not pending.future.done():
                pending.future.set_exception(EncoderError(reason))

"""The encoder inside the process that asks it, for `comb_serving.LLM`; `supervisor` has it in processes of its own."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Sequence

from comb_serving.encoding.protocol import Encoded, EncodeJob, EncoderIdentity, settle
from comb_serving.encoding.worker import EncoderWorker, batches
from comb_serving.pool.handles import PoolHandle


class LocalEncoders:
    """The encoder in this process, as the manager wants it: what is asked for at one time is one batch."""

    def __init__(self, worker: EncoderWorker) -> None:
        self.worker = worker
        self._identity = EncoderIdentity.parse(worker.hello())
        self._waiting: queue.Queue[EncodeJob | None] = queue.Queue()
        self._open: dict[int, asyncio.Future[Encoded]] = {}
        self._count = 0

    async def identity(self) -> EncoderIdentity:
        """What the worker said of its weights."""
        return self._identity

    def submit(self, key: str, token_ids: Sequence[int], handle: PoolHandle) -> asyncio.Future[Encoded]:
        """Asks for one document, which is encoded when whoever asks lets the loop go on."""
        loop = asyncio.get_running_loop()
        self._count += 1
        future = self._open[self._count] = loop.create_future()
        self._waiting.put(EncodeJob(self._count, key, tuple(token_ids), handle))
        if len(self._open) == 1:
            loop.call_soon(self._work)
        return future

    def _work(self) -> None:
        self._waiting.put(None)
        for batch in batches(self._waiting):
            for answer in self.worker.run(batch):
                settle(self._open.pop(answer["job"]), answer)

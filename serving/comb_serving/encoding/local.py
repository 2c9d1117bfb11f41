"""The encoder inside the process that asks it, for `comb_serving.LLM`; `encoders.py` has it in processes of its own."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Sequence

from comb_serving.encoding.process import EncodeJob, EncoderWorker, take_batch
from comb_serving.encoding.supervisor import Encoded, Identity, settle
from comb_serving.pool.handles import PoolHandle


class LocalEncoders:
    """The encoder in this process, as the manager wants it: what is asked for at one time is one batch."""

    def __init__(self, worker: EncoderWorker) -> None:
        self.worker = worker
        self._identity = Identity.parse(worker.hello())
        self._waiting: queue.Queue[EncodeJob | None] = queue.Queue()
        self._open: dict[int, asyncio.Future[Encoded]] = {}
        self._count = 0

    async def identity(self) -> Identity:
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
        held: EncodeJob | None = None
        while held is not None or not self._waiting.empty():
            first = self._waiting.get() if held is None else held
            assert first is not None
            batch, held, _ = take_batch(first, self._waiting)
            for answer in self.worker.run(batch):
                settle(self._open.pop(answer["job"]), answer)

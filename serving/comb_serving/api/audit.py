"""How often linked documents lead to the words of a full recompute: a share of all requests is asked both ways again.

Linking is approximate, and how much that matters depends on the model and on what it is asked: so it is measured on the
requests that come. Both answers are greedy and begin where the client's did; nobody waits for them, and there is never
more than one such pair under way.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
from collections.abc import Callable
from itertools import takewhile
from typing import Any

from comb_serving.api.preprocessor import PreprocessedRequest, Preprocessor
from comb_serving.encoding.compiler import greedy
from comb_serving.manager.manager import NO_PLACE
from comb_serving.pool.capability import KEY

logger = logging.getLogger(__name__)

TOKENS = 32  # of each answer, at most


class Audit:
    """Asks the engine itself, beside the requests of clients.

    Args:
        share: of requests with linked documents, 0 to 1.
    """

    def __init__(
        self, share: float, preprocessor: Preprocessor, secret: bytes, draw: Callable[[], float] = random.random
    ) -> None:
        self.share, self._preprocessor, self._secret, self._draw = share, preprocessor, secret, draw
        self._running: asyncio.Task[None] | None = None

    def consider(self, request: PreprocessedRequest, tenant: str, engine: Any) -> None:
        """Asks a request again, if it is one of the share; returns at once."""
        busy = self._running is not None and not self._running.done()
        if engine is None or busy or not request.linked or len(request.prompts) != 1 or self._draw() >= self.share:
            return
        self._running = asyncio.create_task(self._compare(request, tenant, engine))

    def stop(self) -> None:
        """Ends what is under way."""
        if self._running is not None:
            self._running.cancel()

    async def _compare(self, request: PreprocessedRequest, tenant: str, engine: Any) -> None:
        try:
            lease = await self._preprocessor.acquire(request.segments, tenant, request.compiled_with)
        except NO_PLACE:
            return  # when it is that full, clients come first
        try:
            token = request.signed(lease, "", self._secret)
            lora = self._preprocessor.loras.get(request.lora)
            linked = await _tokens(engine, request.prompts[0], request.salt, lora, {KEY: token})
            # a salt of its own: what clients find in the prefix cache doesn't depend on audits
            full = await _tokens(engine, request.prompts[0], secrets.token_hex(16), lora, None)
        except Exception:
            logger.exception("a request could not be compared with its full recompute")
            return
        finally:
            lease.release()
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(linked, full, strict=False)))
        self._preprocessor.counters.count_audit(request.method.name, same, max(len(linked), len(full)))


async def _tokens(engine: Any, prompt: list[int], salt: str, lora: Any, extra: dict[str, Any] | None) -> list[int]:
    """Token ids of the likeliest answer."""
    name = f"audit-{secrets.token_hex(8)}"
    answer = await greedy(engine, prompt, salt, name, lora, max_tokens=TOKENS, detokenize=False, extra_args=extra)
    if answer.finish_reason not in ("length", "stop"):
        raise RuntimeError(f"the engine ended with {answer.finish_reason!r}")
    return list(answer.token_ids)

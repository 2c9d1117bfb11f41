"""A share of linked requests is asked again in full, with an engine that says what a test wants."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from comb_serving.api.preprocessor import PreprocessedRequest
from comb_serving.api.routes import CHAT, COMPLETIONS
from comb_serving.api.self_check import Audit
from comb_serving.linking.layout import LinkingLayout
from comb_serving.pool.capability import KEY, Capability
from tests.helpers.middleware_server import SECRET, Server, chat

pytestmark = pytest.mark.vllm

LAYOUT = LinkingLayout(8, 16, 24, "model", "float32", 64, 4096)
LINKED, FULL = [1, 2, 3, 4], [1, 2, 5, 4, 6]


class Engine:
    """Linked requests get `LINKED`, others `FULL`."""

    def __init__(self, reason: str = "stop") -> None:
        self.reason, self.gate, self.salts = reason, asyncio.Event(), list[Any]()

    async def generate(self, prompt: Any, parameters: Any, request_id: str, lora_request: Any) -> AsyncIterator[Any]:
        await self.gate.wait()
        token = (parameters.extra_args or {}).get(KEY)
        self.salts.append(prompt.get("cache_salt"))
        if token is not None:
            Capability.verify(token, SECRET).check(request_id, prompt.get("cache_salt"), prompt["prompt_token_ids"])
        ids = FULL if token is None else LINKED
        yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=ids, finish_reason=self.reason)])


async def prepared(server: Server, path: str = CHAT, **more: Any) -> PreprocessedRequest:
    return await server.app.front().preprocessor.preprocess(path, chat(**more), "")


async def ended(audit: Audit) -> None:
    task = audit._running
    if task is not None:
        await asyncio.wait([task])


async def test_words_are_compared_up_to_where_they_part() -> None:
    pytest.importorskip("vllm")
    server, engine = Server(method="legolink:4", layout=LAYOUT), Engine()
    audit = Audit(0.5, server.app.front().preprocessor, SECRET, draw=lambda: 0.4)
    audit.consider(await prepared(server), "", engine)
    audit.consider(await prepared(server), "", engine)  # one at a time
    engine.gate.set()
    await ended(audit)
    assert server.manager.counters.audits == {("legolink:4", "same"): 2, ("legolink:4", "parted"): 3}
    assert len(engine.salts) == 2
    assert engine.salts[1] is not None
    server.check_idle()


async def test_others_are_left_alone() -> None:
    pytest.importorskip("vllm")
    server, engine = Server(method="legolink:4", layout=LAYOUT), Engine("error")
    engine.gate.set()
    seldom = Audit(0.5, server.app.front().preprocessor, SECRET, draw=lambda: 0.6)
    audit = Audit(1.0, server.app.front().preprocessor, SECRET)
    for asked, request in (
        (seldom, await prepared(server)),
        (audit, await prepared(server, comb={"method": "full"})),
        (audit, await prepared(server, documents=[])),
        (audit, await prepared(server, COMPLETIONS, prompt=["a", "b"])),
        (audit, await prepared(server)),  # the engine fails
    ):
        asked.consider(request, "", engine)
        await ended(asked)
    assert not server.manager.counters.audits
    assert len(engine.salts) == 1
    server.check_idle()

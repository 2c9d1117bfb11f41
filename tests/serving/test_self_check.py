"""What a server looks at before it says that it is healthy, and what it asks again, with an engine as a test says."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from comb_serving.api.preprocessor import PreprocessedRequest
from comb_serving.api.routes import CHAT
from comb_serving.api.self_check import Audit, check_start
from comb_serving.linking.layout import LinkingLayout
from comb_serving.linking.methods import LinkMethod
from comb_serving.pool.capability import KEY, Capability, LinkReport, ReportSender, name_of
from tests.helpers.middleware_server import LINKING_LAYOUT, SECRET, Server, chat

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm


@dataclass
class Engine:
    """Its first token's log-probability is -1, over documents `more`; `noise` is added at every question.

    With a `sender` it links as the plan says (unless `links` is off, or `blind`, when no question looks), and adds
    `more` where something was linked. It ends after `ends` tokens.
    """

    more: float = 0.0
    sender: ReportSender | None = None
    noise: float = 0.0
    links: bool = True
    ends: int = 9
    blind: bool = False
    asked: int = 0

    async def generate(
        self, prompt: Any, parameters: Any, request_id: str, lora_request: Any, priority: int
    ) -> AsyncIterator[Any]:
        self.asked += 1
        ids, token, read = prompt["prompt_token_ids"], (parameters.extra_args or {}).get(KEY), False
        if token is not None:
            said = Capability.verify(token, SECRET)
            said.check(request_id, prompt["cache_salt"], ids)
            assert said.documents
            read = True
            if self.sender is not None:
                method = LinkMethod.parse(said.method)
                spans, paid = said.spans_in(ids), torch.ones(len(ids))
                chosen = () if self.blind else method.recomputed(spans, paid) or ()
                found = layout_for(method).plan(method, len(ids), spans, chosen)
                linked = sum(load.end - load.start for load in found.loads) if self.links else 0
                self.sender.send(name_of(token), LinkReport(0, linked, len(ids) - linked))
                read = linked > 0
        likely = -1 + self.noise * self.asked + (self.more if read else 0)
        answer = [7] * min(parameters.max_tokens, self.ends)
        logprobs = [{7: SimpleNamespace(logprob=likely)}] * len(answer)
        yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=answer, logprobs=logprobs, finish_reason="error")])


async def check(server: Server, engine: Engine, checkpoint: Path | str, reports: Any = None) -> None:
    await check_start(server.app.front().preprocessor, engine, SECRET, str(checkpoint), reports)


async def test_an_engine_that_reads_documents_is_believed_and_nothing_is_left(
    nano_adapter: Path, server: Server
) -> None:
    for engine in (Engine(0.5), Engine(-0.5, noise=0.01)):
        await check(server, engine, nano_adapter)
    assert not server.manager.pool.entries


async def test_an_engine_that_reads_none_ends_the_server(
    nano_adapter: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, server: Server
) -> None:
    for engine in (Engine(0.0), Engine(0.0, noise=0.01)):
        with pytest.raises(RuntimeError, match="a document changes log-probabilities by"):
            await check(server, engine, nano_adapter)
    with pytest.raises(RuntimeError, match="the engine ended with 'error'"):
        await check(server, Engine(0.5, ends=1), nano_adapter)
    server.check_idle()
    from comb import CombForCausalLM
    from comb_training.nano import CHECKPOINT

    CombForCausalLM.from_backbone(str(CHECKPOINT), num_encoder_layers=2).save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING):
        await check(server, Engine(0.0), tmp_path)
    assert "Is it trained?" in caplog.text


def layout_for(method: LinkMethod) -> LinkingLayout:
    return replace(LINKING_LAYOUT, front=() if method.front == "none" else (5, 6, 7), given=method.front == "adapter")


def plain(method: str = "legolink:16", *, blocks: int = 8, longest: int = 64) -> Server:
    layout = replace(layout_for(LinkMethod.parse(method)), num_blocks=blocks, max_document_tokens=longest)
    server = Server(method=method, layout=layout)
    server.encoders.known = replace(server.encoders.known, max_document_tokens=longest - len(layout.front))
    return server


@pytest.mark.parametrize("method", ["naive", "legolink:16", "legolink-0", "primed", "primed:4", "linktokens",
                                    "focus:0.1", "focus:0.1,front=prose"])  # fmt: skip
async def test_an_engine_that_links_is_believed_and_nothing_is_left(told: Any, method: str) -> None:
    server = plain(method)
    for more in ({}, {"more": 0.05, "noise": 0.01}):
        engine = Engine(sender=told[1], **more)
        await check(server, engine, "", told[0])
        assert engine.asked == {"linktokens": 1, "focus:0.1": 5, "focus:0.1,front=prose": 5}.get(method, 4)
    assert not server.manager.pool.entries
    server.check_idle()


async def test_an_engine_that_links_wrongly_or_not_at_all_ends_the_server(told: Any) -> None:
    for more, words in (
        ({"more": 0.05}, "change log-probabilities by 0.05 where they must change nothing"),
        ({"links": False}, "20 tokens must come from the pool, the engine says 0"),
    ):
        server = plain()
        with pytest.raises(RuntimeError, match=words):
            await check(server, Engine(sender=told[1], **more), "", told[0])
        server.check_idle()
    with pytest.raises(RuntimeError, match=r"focus:1\.0: 20 tokens must come from the pool, the engine says 39"):
        await check(plain("focus:0.1"), Engine(sender=told[1], blind=True), "", told[0])
    with pytest.raises(RuntimeError, match="no room to try linking two documents: the pool has 1 blocks"):
        await check(plain(blocks=1), Engine(sender=told[1]), "", told[0])


@pytest.mark.parametrize(("method", "longest"), [("legolink:16", 22), ("primed:4", 23)])  # the latter's front has three
async def test_a_small_pool_and_short_prompts_are_enough(told: Any, method: str, longest: int) -> None:
    await check(plain(method, blocks=2, longest=longest), Engine(sender=told[1]), "", told[0])


LINK = LinkReport(0, 4, 3)
LINKED, FULL = [1, 2, 3, 4], [1, 2, 5, 4, 6]


@dataclass
class AuditedEngine:
    """Linked requests get `LINKED`, others `FULL`."""

    reason: str = "stop"
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    salts: list[Any] = field(default_factory=list)

    async def generate(
        self, prompt: Any, parameters: Any, request_id: str, lora_request: Any, priority: int
    ) -> AsyncIterator[Any]:
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
    if audit._running is not None:
        await asyncio.wait([audit._running])


async def test_words_are_compared_up_to_where_they_part() -> None:
    server, engine = Server(method="legolink:4"), AuditedEngine()
    audit = Audit(0.5, server.app.front().preprocessor, SECRET, draw=lambda: 0.4)
    audit.consider(await prepared(server), LINK, "", engine)
    audit.consider(await prepared(server), LINK, "", engine)  # one at a time
    engine.gate.set()
    await ended(audit)
    assert server.manager.counters.audits == {("legolink:4", "same"): 2, ("legolink:4", "parted"): 3}
    assert len(engine.salts) == 2
    assert engine.salts[1] is not None
    await server.chat()
    await prepared(server)
    audit.consider(await prepared(server), LINK, "", engine)
    await ended(audit)
    assert server.manager.counters.documents["hit"] == 2  # the client's
    server.check_idle()


async def test_others_are_left_alone() -> None:
    server, engine = Server(method="legolink:4"), AuditedEngine("error")
    engine.gate.set()
    seldom = Audit(0.5, server.app.front().preprocessor, SECRET, draw=lambda: 0.6)
    audit = Audit(1.0, server.app.front().preprocessor, SECRET)
    for asked, link in (
        (seldom, LINK),
        (audit, None),  # nobody knows: several prompts, or none with documents
        (audit, LinkReport(7, 0, 2)),  # the prefix cache had all of it
        (audit, LINK),  # the engine fails
    ):
        asked.consider(await prepared(server), link, "", engine)
        await ended(asked)
    assert not server.manager.counters.audits
    assert len(engine.salts) == 1
    server.check_idle()

"""What a server looks at before it links documents in a plain model, with an engine that does as a test says."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from comb_serving.api.linking_check import check_linking
from comb_serving.linking.layout import LinkingLayout
from comb_serving.linking.methods import LinkMethod
from comb_serving.linking.reports import LinkReport, ReportReceiver, ReportSender, name_of
from comb_serving.pool.capability import KEY, Capability
from tests.helpers.middleware_server import SECRET, Server

pytestmark = pytest.mark.vllm
LAYOUT = LinkingLayout(8, 16, 24, "model", "float32", 64, 4096)


class Engine:
    """Links as the plan says; `wrong` is added to log-probabilities where something was, `noise` at every question."""

    def __init__(self, sender: ReportSender, *, wrong: float = 0.0, noise: float = 0.0, links: bool = True) -> None:
        self.sender, self.wrong, self.noise, self.links, self.asked = sender, wrong, noise, links, 0

    async def generate(self, prompt: Any, parameters: Any, request_id: str) -> AsyncIterator[Any]:
        pytest.importorskip("vllm")
        self.asked += 1
        ids, token, linked = prompt["prompt_token_ids"], (parameters.extra_args or {}).get(KEY), 0
        if token is not None:
            said = Capability.verify(token, SECRET)
            said.check(request_id, prompt["cache_salt"], ids)
            method = LinkMethod.parse(said.method)
            found = layout_for(method).plan(method, len(ids), said.spans_in(ids))
            linked = sum(load.end - load.start for load in found.loads) if self.links else 0
            self.sender.send(name_of(token), LinkReport(0, linked, len(ids) - linked))
        likely = -1 + self.noise * self.asked + (self.wrong if linked else 0)
        answer = [7] * parameters.max_tokens
        yield SimpleNamespace(
            outputs=[
                SimpleNamespace(
                    token_ids=answer, logprobs=[{7: SimpleNamespace(logprob=likely)}] * len(answer),
                    finish_reason="length",
                )
            ]
        )  # fmt: skip


@pytest.fixture
def told(tmp_path: Path) -> Iterator[tuple[ReportReceiver, ReportSender]]:
    receiver = ReportReceiver(tmp_path)
    yield receiver, ReportSender(tmp_path)
    receiver.close()


def layout_for(method: LinkMethod) -> LinkingLayout:
    return replace(LAYOUT, front=() if method.front == "none" else (5, 6, 7), given=method.front == "adapter")


def plain(method: str = "legolink:16", *, blocks: int = 8, longest: int = 64) -> Server:
    layout = replace(layout_for(LinkMethod.parse(method)), num_blocks=blocks, max_document_tokens=longest)
    return Server(method=method, layout=layout)


@pytest.mark.parametrize("method", ["naive", "legolink:16", "legolink-0", "primed", "primed:4", "linktokens"])
async def test_an_engine_that_links_is_believed_and_nothing_is_left(told: Any, method: str) -> None:
    pytest.importorskip("vllm")
    server = plain(method)
    for more in ({}, {"wrong": 0.05, "noise": 0.01}):
        engine = Engine(told[1], **more)
        await check_linking(server.app.front().preprocessor, engine, SECRET, told[0])
        assert engine.asked == (1 if method == "linktokens" else 4)
    assert not server.manager.pool.entries
    server.check_idle()


async def test_an_engine_that_links_wrongly_or_not_at_all_ends_the_server(told: Any) -> None:
    pytest.importorskip("vllm")
    for more, words in (
        ({"wrong": 0.05}, "change log-probabilities by 0.05 where they must change nothing"),
        ({"links": False}, "20 tokens must come from the pool, the engine says 0"),
    ):
        server = plain()
        with pytest.raises(RuntimeError, match=words):
            await check_linking(server.app.front().preprocessor, Engine(told[1], **more), SECRET, told[0])
        server.check_idle()
    with pytest.raises(RuntimeError, match="no room to try linking two documents: the pool has 1 blocks"):
        await check_linking(plain(blocks=1).app.front().preprocessor, Engine(told[1]), SECRET, told[0])


async def test_a_small_pool_and_short_prompts_are_enough(told: Any) -> None:
    pytest.importorskip("vllm")
    server = plain(blocks=2, longest=22)
    await check_linking(server.app.front().preprocessor, Engine(told[1]), SECRET, told[0])

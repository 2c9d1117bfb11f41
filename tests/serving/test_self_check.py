"""What the server looks at before it says that it is healthy, with an engine that does as a test says."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from comb_serving.api.self_check import check_engine
from comb_serving.pool.capability import KEY, Capability
from tests.helpers.middleware_server import SECRET, Server

pytestmark = pytest.mark.vllm


class Engine:
    """Its first token's log-probability is -1, with a document `read` more; `ends` after so many tokens."""

    def __init__(self, read: float, *, noise: float = 0.0, ends: int = 9) -> None:
        self.read, self.noise, self.ends, self.asked = read, noise, ends, 0

    async def generate(self, prompt: Any, parameters: Any, request_id: str) -> AsyncIterator[Any]:
        self.asked += 1
        token = (parameters.extra_args or {}).get(KEY)
        if token is not None:
            capability = Capability.verify(token, SECRET)
            capability.check(request_id, prompt["cache_salt"], prompt["prompt_token_ids"])
            assert capability.documents
        likely = -1 + self.noise * self.asked + (self.read if token is not None else 0)
        ids = [7] * min(parameters.max_tokens, self.ends)
        yield SimpleNamespace(
            outputs=[
                SimpleNamespace(
                    token_ids=ids, logprobs=[{7: SimpleNamespace(logprob=likely)}] * len(ids), finish_reason="error"
                )
            ]
        )


async def check(server: Server, engine: Engine, checkpoint: Path) -> None:
    await check_engine(server.app.front().preprocessor, engine, SECRET, str(checkpoint))


async def test_an_engine_that_reads_documents_is_believed_and_nothing_is_left(nano_adapter: Path) -> None:
    pytest.importorskip("vllm")
    server = Server()
    for engine in (Engine(0.5), Engine(-0.5, noise=0.01)):
        await check(server, engine, nano_adapter)
    assert not server.manager.pool.entries
    server.check_idle()


async def test_an_engine_that_reads_none_ends_the_server(
    nano_adapter: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("vllm")
    server = Server()
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

"""`comb serve` on a GPU: an encoder process hands documents to vLLM's by CUDA IPC, also after it was killed."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from comb_serving.config.serve_options import pool_path
from comb_serving.pool.shared_pool import manifest_of
from tests.helpers.gpu_engines import EngineDevice
from tests.helpers.library import Library
from tests.helpers.processes import wait_for
from tests.helpers.served import QUESTION, TEXTS, Served, serve

pytestmark = [pytest.mark.gpu, pytest.mark.vllm, pytest.mark.slow, pytest.mark.usefixtures("plugin")]

TOKENS = 8
NEW = ["Cy sleeps in the hall and dreams of the red ball.", "Nobody was in the hall."]


def ask(server: Served, texts: list[str]) -> tuple[list[int], list[float]] | None:
    """Token ids and their log-probabilities; None for a request that didn't end well."""
    status, body = server.chat(texts, max_tokens=TOKENS, ignore_eos=True, return_token_ids=True)
    if status != 200:
        return None
    (choice,) = body["choices"]
    return choice["token_ids"], [token["logprob"] for token in choice["logprobs"]["content"]]


def test_an_encoder_process_hands_documents_over(nano_adapter: Path, tmp_path: Path, device: EngineDevice) -> None:
    library, question = Library(nano_adapter, TOKENS), str(QUESTION[0]["content"])
    tolerance = device.tolerance("float32")

    def check(found: Any, texts: list[str]) -> None:
        assert found is not None
        assert library.apart(found, question, texts) < tolerance
        assert library.apart(found, question, NEW[1:]) > 3 * tolerance  # the control

    with serve(nano_adapter, tmp_path / "server", *device.flags()) as server:
        manifest = json.loads(manifest_of(pool_path(server.instance(), 0)).read_text())
        assert manifest["memory"] == {"cuda": "cuda", "cpu": "host"}[device.kind]
        for texts in (TEXTS, TEXTS[::-1], [], TEXTS[:1]):
            check(ask(server, texts), texts)
        killed = server.encoder_pid()
        assert killed is not None
        os.kill(killed, signal.SIGKILL)
        check(ask(server, TEXTS), TEXTS)  # what it has written stays
        answers: list[Any] = []
        # who comes while the next one starts is refused, or waits
        wait_for(lambda: answers.append(ask(server, NEW)) or answers[-1] is not None)
        check(answers[-1], NEW)
        assert server.encoder_pid() not in (None, killed)
        server.wait_until_idle()

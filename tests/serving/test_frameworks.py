"""LangChain and LlamaIndex, unchanged, against a server that finds segments."""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Iterator

import pytest

from comb_serving.api.routes import CHAT
from comb_training.nano import CHECKPOINT
from tests.helpers import frameworks
from tests.helpers.chunks import passage
from tests.helpers.processes import wait_for
from tests.helpers.served import Served, serve, text_of

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture(scope="module")
def server(plugin: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    options = ["--method", "legolink:4", "--comb-segments", "auto", "--comb-segment-tokens", "12"]
    with serve(CHECKPOINT, tmp_path_factory.mktemp("s"), *options, pool="4MiB") as found:
        yield found


@pytest.mark.parametrize("name", ["langchain", "llama_index"])
def test_a_framework_has_hits_and_the_answers_of_other_clients(server: Served, name: str) -> None:
    draw = random.Random(name)
    chunks = [passage(draw, 24) for _ in range(4)]

    def prompt(order: list[int], header: str) -> str:
        passages = "\n".join(f"Passage {n}: {chunks[at]}" for n, at in enumerate(order, 1))
        return f"{header}\n{passages}\n\nWhere is Ada?"

    def ask(*prompts: str) -> list[tuple[str, str, int]]:
        command = [frameworks.frameworks_python(), frameworks.__file__, server.url, "alice", name]
        found = subprocess.run(command, input=json.dumps(prompts), capture_output=True, text=True, check=False)
        assert found.returncode == 0, found.stderr
        return [(text, streamed, cached) for text, streamed, cached in json.loads(found.stdout)]

    before = server.metric("pool_documents")
    ask(prompt([0, 1, 2, 3], "It is eight."), prompt([2, 0, 3, 1], "It is nine."))
    wait_for(lambda: server.metric("pool_documents") >= before + 4)
    third = prompt([3, 1, 0, 2], "It is ten.")
    ((text, streamed, cached),) = ask(third)  # of the others, some stand between what is plain and what is linked
    assert cached >= 4 * (24 - 4)
    body = {"model": "nano", "temperature": 0, "max_tokens": 8,
            "messages": [{"role": "user", "content": third}]}  # fmt: skip
    answer = server.request("POST", CHAT, body)
    assert text == streamed == text_of(answer)
    assert len(answer[1]["comb"]["documents"]) == 4
    server.wait_until_idle()

"""`comb serve --comb-segments auto`: clients that send no documents, against the library over the same spans."""

from __future__ import annotations

import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from comb.documents.found import SegmentFinder, with_segments
from comb_serving.api.routes import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from comb_training.nano import CHECKPOINT
from tests.helpers.chunks import passage
from tests.helpers.plain import PlainLibrary
from tests.helpers.processes import wait_for
from tests.helpers.served import Served, logprobs, serve

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

METHOD, LEAST, BLOCK = "legolink:4", 12, 32
CLOSE = 1e-4
DRAW = random.Random(11)
USER = {"role": "user", "content": "So?"}
CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"place": "hall"}'}}
CALLED = [
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c", "content": "A"},
]


@pytest.fixture(scope="module")
def server(plugin: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    options = ["--method", METHOD, "--comb-segments", "auto", "--comb-segment-tokens", str(LEAST)]
    options += ["--max-model-len", "2048", "--max-num-batched-tokens", "2048"]
    # nano, with a template that shows more of what it is given
    folder = Path(shutil.copytree(CHECKPOINT, tmp_path_factory.mktemp("m") / "nano"))
    template = (CHECKPOINT / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").write_text(
        template.replace("{% else %}", "{% elif message.role == 'tool' %}{{ message.content }}{% else %}").replace(
            "{{ message['content'] }}<|end|>",
            "{{ message['content'] }}{% for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}"
            "<|end|>",
        )
        + "{% if mood is defined %}{{ mood }}{% endif %}"
    )
    with serve(folder, tmp_path_factory.mktemp("s"), *options, pool="4MiB") as found:
        yield found


@pytest.fixture(scope="module")
def library() -> PlainLibrary:
    return PlainLibrary()


def messages(chunks: list[str], question: str = "Where is Ada?") -> list[dict[str, str]]:
    passages = "\n".join(f"Passage {n}: {each}" for n, each in enumerate(chunks, 1))
    return [{"role": "user", "content": f"Read.\n{passages}\n\n{question}"}]


def ask(server: Served, asked: Any, key: str = "alice", **more: Any) -> Any:
    body = {"model": "nano", "messages": asked, "temperature": 0, "max_tokens": 8, "ignore_eos": True,
            "logprobs": True, **more}  # fmt: skip
    status, answer = server.request("POST", CHAT, body, key)
    assert status == 200, answer
    return answer


def found_segments(server: Served) -> dict[str, int]:
    """Of all prompts so far, by what was done with them."""
    series = re.findall(
        r'^comb:found_total{of="segments",state="(\w+)"} (\d+)', server.request("GET", "/metrics")[1], re.M
    )
    return {"cached": 0, **{state: int(count) for state, count in series}}


def compiled(server: Served, count: float) -> None:
    """Waits for what is compiled when nobody waits for an answer."""
    wait_for(lambda: server.metric("pool_documents") >= count and server.metric("requests_waiting") == 0)


def test_the_third_sight_links_what_stands_elsewhere_as_the_library_does(server: Served, library: PlainLibrary) -> None:
    chunks = [passage(DRAW, 24) for _ in range(4)]
    orders = [[0, 1, 2, 3], [2, 0, 3, 1], [3, 1, 0, 2]]
    first, second, third = (messages([chunks[at] for at in order]) for order in orders)
    before = server.metric("pool_documents")
    for asked in (first, second):  # plain vLLM's
        answer = ask(server, asked)
        assert "comb" not in answer
        full = library.logs(library.chat(asked), "full", 8)
        assert logprobs((200, answer)) == pytest.approx(full, abs=CLOSE)
    compiled(server, before + 4)
    answer = ask(server, third)
    report = answer["comb"]
    finder, ids = SegmentFinder(library.builder.tokenizer, least=LEAST), library.chat(first).flat
    held = {ids[start : start + tokens] for start, tokens in finder.find(ids)}
    assert len(held) == 4
    ids = library.chat(third).flat
    prompt = with_segments(ids, [(start, n) for start, n in finder.find(ids) if ids[start : start + n] in held])
    assert [document["state"] for document in report["documents"]] == ["hit"] * 4
    assert report["prefix_tokens"] + report["linked_tokens"] + report["computed_tokens"] == len(prompt.flat)
    assert report["linked_tokens"] == sum(len(segment) - 4 for segment in prompt.segments)
    assert answer["usage"]["prompt_tokens"] == len(library.chat(third).flat)
    details = answer["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] == report["prefix_tokens"] + report["linked_tokens"]  # recomputed ones aren't
    assert found_segments(server) == {"cached": 0, "linked": 4, "new": 8}
    found = logprobs((200, answer))
    assert found == pytest.approx(library.logs(prompt, METHOD, 8), abs=CLOSE)
    assert found != pytest.approx(library.logs(prompt, "full", 8), abs=1e-3)
    # a request may keep them out, and nobody else's tenant has them
    off = ask(server, third, comb={"segments": "off"})
    assert "comb" not in off
    assert logprobs((200, off)) == pytest.approx(library.logs(prompt, "full", 8), abs=CLOSE)
    assert "comb" not in ask(server, third, key="bob")
    server.wait_until_idle()


def test_what_the_prefix_cache_has_goes_first_and_stays_exact(server: Served, library: PlainLibrary) -> None:
    chunks = [passage(DRAW, 40) for _ in range(3)]
    for order in ([0, 1, 2], [1, 2, 0]):
        ask(server, messages([chunks[at] for at in order]))
    server.wait_until_idle()
    wait_for(lambda: server.metric("requests_waiting") == 0)
    # the first order again, with another question: its blocks are there, computed exactly
    asked = messages(chunks, "Who has the red ball, Ada or Bob or nobody at all?")
    wait_for(lambda: "comb" in ask(server, messages([chunks[2], chunks[1], chunks[0]])))
    before = found_segments(server)
    answer = ask(server, asked)
    ids = library.chat(asked).flat
    first = library.chat(messages(chunks)).flat
    common = next(at for at, pair in enumerate(zip(ids, first, strict=False)) if pair[0] != pair[1])
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= common // BLOCK * BLOCK
    assert answer["comb"]["linked_tokens"] == 0  # its segments are in the pool
    assert found_segments(server) == {
        **before,
        "cached": before["cached"] + 3,
        "new": before["new"] + 1,
    }  # the question
    assert logprobs((200, answer)) == pytest.approx(library.logs(library.chat(asked), "full", 8), abs=CLOSE)
    server.wait_until_idle()


def test_a_server_that_is_never_idle_compiles_beside_its_answers(server: Served) -> None:
    chunks = [passage(DRAW, 24) for _ in range(3)]
    with ThreadPoolExecutor(1) as beside:
        long = beside.submit(ask, server, messages([passage(DRAW, 8)]), "bob", max_tokens=1800, logprobs=False)
        for order in ([0, 1, 2], [1, 2, 0], [2, 1, 0], [0, 2, 1]):  # the ends of three answers after the second sight
            answer = ask(server, messages([chunks[at] for at in order]))
        wait_for(lambda: len(ask(server, messages(chunks))["comb"]["documents"]) == 3)
        assert not long.done(), long.exception()
    assert len(answer["comb"]["documents"]) >= 1
    server.wait_until_idle()


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES, MESSAGES])
def test_each_way_to_ask_has_hits(server: Served, path: str) -> None:
    chunks = [passage(DRAW, 24) for _ in range(3)]

    def body(order: list[int]) -> dict[str, Any]:
        (user,) = messages([chunks[at] for at in order])
        if path == COMPLETIONS:
            return {"prompt": user["content"], "max_tokens": 4}
        if path == RESPONSES:
            return {"input": user["content"], "max_output_tokens": 4, "store": False}
        return {"messages": [user], "max_tokens": 4, **({"n": 2} if path == CHAT else {})}

    before = server.metric("pool_documents")
    for order in ([0, 1, 2], [1, 2, 0]):
        status, answer = server.request("POST", path, {"model": "nano", **body(order)})
        assert status == 200, answer
        assert "comb" not in answer
    compiled(server, before + 3)
    status, answer = server.request("POST", path, {"model": "nano", **body([2, 1, 0])})
    assert status == 200, answer
    assert [document["state"] for document in answer["comb"]["documents"]] == ["hit"] * 3
    status, text = server.request("POST", path, {"model": "nano", **body([0, 2, 1]), "stream": True})
    assert status == 200
    assert '"comb"' in text
    server.wait_until_idle()


def test_a_salt_in_a_body_finds_what_came_under_it(server: Served) -> None:
    def hits() -> list[str]:
        lines = server.request("GET", "/metrics")[1].splitlines()
        return [line for line in lines if line.startswith("comb:documents_total") and 'state="hit"' in line]

    chunks = [passage(DRAW, 24) for _ in range(3)]
    before, said = server.metric("pool_documents"), hits()
    for order in ([0, 1, 2], [1, 2, 0]):
        assert "comb" not in ask(server, messages([chunks[at] for at in order]), cache_salt="one")
    compiled(server, before + 3)
    third = messages([chunks[at] for at in (2, 1, 0)])
    for other in ({"cache_salt": "two"}, {}):
        assert "comb" not in ask(server, third, **other)
    assert len(ask(server, third, cache_salt="one")["comb"]["documents"]) == 3
    assert len(said) == 1
    assert hits() == said  # found text is counted by itself
    server.wait_until_idle()


def test_what_can_not_be_linked_is_plain(server: Served) -> None:
    long = messages([passage(DRAW, 24) for _ in range(3)])
    for more in ({"echo": True}, {"truncate_prompt_tokens": 100}, {"prompt_logprobs": 1}):
        assert "comb" not in ask(server, long, **more)
    assert "comb" not in ask(server, [{"role": "user", "content": "Hi"}])
    server.wait_until_idle()


@pytest.mark.parametrize(
    ("turns", "more"),
    [
        ([], {"chat_template_kwargs": {"mood": "calm"}}),
        ([], {"chat_template_kwargs": {"mood": None}}),
        ([], {"chat_template_kwargs": {"mood": "auto"}}),
        (CALLED, {}),
        ([{"role": "user", "content": ["hi", "there"]}], {}),
        ([{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}], {}),
        ([{"role": "user", "content": [{"type": "output_text", "text": "hi"}]}], {}),
        ([{"role": "user", "content": [{"type": "thinking", "thinking": "hi"}]}], {}),
        ([{"role": "user", "content": [{"type": "refusal", "refusal": "hi"}]}], {}),
        ([{"role": "user", "content": [{"type": "text", "text": "hi"}]}], {}),
        ([{"role": "assistant", "content": [{"type": "thinking", "thinking": "hi"}]}, USER], {}),
        ([{"role": "assistant", "content": [{"type": "refusal", "refusal": "hi"}]}, USER], {}),
        ([{"role": "assistant", "content": ["hi"]}, USER], {}),
        ([{"role": "assistant", "content": [{"type": "thinking", "thinking": "hi", "closed": True}]}, USER], {}),
    ],
)
def test_a_prompt_is_vllms_own_whether_anything_in_it_is_linked(
    server: Served, turns: list[Any], more: dict[str, Any]
) -> None:
    chunks = [passage(random.Random(seed), 24) for seed in (5, 6, 7)]
    wait_for(lambda: "comb" in ask(server, messages(chunks)))
    body = {"model": "nano", "messages": [*messages([chunks[at] for at in (2, 1, 0)]), *turns], "max_tokens": 1,
            "return_token_ids": True, **more}  # fmt: skip
    status, linked = server.request("POST", CHAT, body)
    plain_status, plain = server.request("POST", CHAT, {**body, "comb": {"segments": "off"}})
    assert status == plain_status, (linked, plain)
    if status == 200:
        assert "comb" in linked
        assert linked["prompt_token_ids"] == plain["prompt_token_ids"]


def test_the_agent_of_the_examples_has_hits(server: Served) -> None:
    agent = Path(__file__).parents[2] / "examples" / "agent.py"
    command = [sys.executable, agent, "nano", f"{server.url}/v1", "alice"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    turns = [tuple(map(int, re.findall(r"\d+", line))) for line in found.stdout.splitlines()]
    assert [linked for _, _, linked in turns[:2]] == [0, 0]
    _, tokens, linked = turns[-1]
    assert linked > tokens / 2

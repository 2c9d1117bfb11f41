"""`comb serve MODEL --method legolink:4`: a plain model over HTTP, against the library's own methods."""

from __future__ import annotations

import json
import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import pytest

from comb.backbones.tokenizer import load_tokenizer
from comb_serving.api.routes import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from comb_training.nano import CHECKPOINT
from tests.helpers.plain import PlainLibrary
from tests.helpers.processes import gone, wait_for
from tests.helpers.served import QUESTION, TEXTS, Served, logprobs, serve, text_of

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

METHOD = "legolink:4"
TOKENIZER = load_tokenizer(CHECKPOINT)
METHODS = [METHOD, "naive", "legolink:9", "full"]
MORE = [*TEXTS, "Cy sleeps in the hall and dreams of the red ball.", "The garden is behind the kitchen."]
CLOSE = 1e-4  # of log-probabilities
DRAIN = 2.0


@pytest.fixture(scope="module")
def plain(plugin: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    options = ["--method", METHOD, "--audit", "0.2", "--comb-drain-seconds", str(DRAIN)]
    options += ["--max-num-seqs", "64"]
    with serve(CHECKPOINT, tmp_path_factory.mktemp("p"), *options, pool="512KiB") as server:
        yield server


@pytest.fixture(scope="module")
def library() -> PlainLibrary:
    return PlainLibrary()


def chat(server: Served, texts: Any = TEXTS, method: str | None = None, key: str = "alice", **more: Any) -> Any:
    comb = {} if method is None else {"comb": {"method": method}}
    return server.chat(texts, key, max_tokens=8, ignore_eos=True, **comb, **more)


def complete(server: Served, prompt: Any, texts: Any, method: str = METHOD, **more: Any) -> Any:
    body = {
        "model": "nano", "prompt": prompt, "documents": texts, "comb": {"method": method}, "temperature": 0,
        "max_tokens": 8, "ignore_eos": True, "logprobs": 0,
    }  # fmt: skip
    return server.request("POST", COMPLETIONS, {**body, **more})


def rows(answer: Any) -> list[list[float]]:
    """Log-probabilities of each choice of a completion."""
    assert answer[0] == 200, answer[1]
    return [choice["logprobs"]["token_logprobs"] for choice in answer[1]["choices"]]


@pytest.mark.parametrize("method", METHODS)
def test_answers_are_the_librarys(plain: Served, library: PlainLibrary, method: str) -> None:
    for texts in (TEXTS, MORE[::-1], TEXTS[:1], [TEXTS[0], TEXTS[0]]):
        found = chat(plain, texts, method)
        assert logprobs(found) == pytest.approx(library.logs(library.chat(QUESTION, texts), method, 8), abs=CLOSE)
        assert found[1]["comb"]["method"] == method
    prompts = ["Where is Ada?", "Who has the ball?"]
    expected = [library.logs(library.completion(prompt, TEXTS), method, 8) for prompt in prompts]
    for found, wanted in zip(rows(complete(plain, prompts, TEXTS, method)), expected, strict=True):
        assert found == pytest.approx(wanted, abs=CLOSE)
    plain.wait_until_idle()


@pytest.mark.parametrize(
    "more",
    [
        {"n": 2, "temperature": 1.0, "seed": 3},
        {"logprobs": 3},
        {"structured_outputs": {"choice": ["garden", "kitchen"]}, "ignore_eos": False},
        {"stop": ["e"], "ignore_eos": False},
        {"min_tokens": 2, "presence_penalty": 1.0},
    ],
)
def test_where_linking_is_exact_every_field_gives_what_plain_vllm_gives(plain: Served, more: dict[str, Any]) -> None:
    """One document at position zero: nothing stands in front of it, so its keys and values are those of the prompt."""
    prompt = f"Where is Ada, if {random.random()}?"
    found, full = [complete(plain, prompt, MORE[3:4], method, **more) for method in (METHOD, "full")]
    for one, other in zip(rows(found), rows(full), strict=True):
        assert one == pytest.approx(other, abs=CLOSE)
    for one, other in zip(found[1]["choices"], full[1]["choices"], strict=True):
        assert (one["text"], one["finish_reason"]) == (other["text"], other["finish_reason"])
    assert found[1]["comb"]["linked_tokens"] > 0 or found[1]["comb"]["prefix_tokens"] > 0
    assert found[1]["usage"]["prompt_tokens"] == full[1]["usage"]["prompt_tokens"]


STREAMED: dict[str, dict[str, Any]] = {
    "half characters": {"temperature": 1.0, "seed": 4},
    "a stop string, shown": {
        "temperature": 1.0, "seed": 5, "stop": ["é", " "], "ignore_eos": False, "include_stop_str_in_output": True,
    },
    "several, of words": {"temperature": 1.0, "seed": 6, "n": 2, "stop": ["the"], "ignore_eos": False},
}  # fmt: skip


def answers_of(found: Any) -> dict[int, tuple[str, list[str], Any]]:
    """By choice: the text, its tokens as log-probabilities name them, and why it ended; of an answer or its events."""
    texts: dict[int, tuple[str, list[str], Any]] = {}
    for event in found if isinstance(found, list) else [found]:
        for choice in event["choices"]:
            said = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
            logs = choice.get("logprobs") or {}
            tokens = [each["token"] for each in logs.get("content") or ()] + list(logs.get("tokens") or ())
            text, before, reason = texts.get(choice["index"], ("", [], None))
            reason = choice.get("finish_reason") or reason
            texts[choice["index"]] = text + (said.get("content") or ""), before + tokens, reason
    return texts


def events_of(stream: str) -> list[dict[str, Any]]:
    return [json.loads(line[5:]) for line in stream.splitlines() if line.startswith("data:") and "[DONE]" not in line]


@pytest.mark.parametrize("name", STREAMED)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_streams_pieces_are_its_answer(plain: Served, path: str, name: str) -> None:
    asks = {COMPLETIONS: {"prompt": "Where is Ada?", "logprobs": 0}, CHAT: {"messages": QUESTION, "logprobs": True}}
    asked: dict[str, Any] = asks[path]
    body = {"model": "nano", "documents": MORE, "max_tokens": 40, "ignore_eos": True, **asked, **STREAMED[name]}
    if "words" not in name:  # letters, and bytes of characters that take several tokens, or come out as half of one
        body["allowed_token_ids"] = TOKENIZER("é über dem 漢").input_ids
    status, whole = plain.request("POST", path, body)
    assert status == 200, whole
    status, stream = plain.request("POST", path, {**body, "stream": True, "stream_options": {"include_usage": True}})
    assert status == 200, stream
    events = events_of(stream)
    found, wanted = answers_of(events), answers_of(whole)
    assert found == wanted
    assert len(found) == body.get("n", 1)
    assert events[0]["comb"]["method"] == METHOD
    assert len(events[0]["comb"]["documents"]) == len(MORE)
    assert events[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    if "half" in name:
        assert "\N{REPLACEMENT CHARACTER}" in found[0][0]
        assert any(len(character.encode()) > 1 for character in found[0][0].replace("\N{REPLACEMENT CHARACTER}", ""))
    if "stop" in name:
        assert found[0][2] == "stop"
        assert found[0][0].endswith(("é", " ")) == ("shown" in name)


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
def test_streams_of_the_other_apis_are_their_answers(plain: Served, path: str) -> None:
    longest = "max_output_tokens" if path == RESPONSES else "max_tokens"
    asked = {"input": QUESTION[0]["content"]} if path == RESPONSES else {"messages": QUESTION}
    for more in ({}, {"stop_sequences": ["the"]} if path == MESSAGES else {"ignore_eos": True}):
        body = {"model": "nano", "documents": MORE, longest: 40, "temperature": 0, **asked, **more}
        (_, whole), (status, stream) = (plain.request("POST", path, {**body, **one}) for one in ({}, {"stream": True}))
        assert status == 200, stream
        deltas = [event.get("delta") for event in events_of(stream)]
        items = whole["output"] if path == RESPONSES else [whole]
        text = "".join(part["text"] for item in items for part in item["content"])
        said = [delta if path == RESPONSES else (delta or {}).get("text") for delta in deltas]
        assert "".join(delta for delta in said if isinstance(delta, str)) == text != ""
        if not more:  # and each other's
            assert text == text_of(plain.chat(MORE, max_tokens=40))
        assert whole["comb"]["method"] == METHOD


def test_documents_written_into_messages_are_linked_and_counted(plain: Served, library: PlainLibrary) -> None:
    text = "Ira hides behind the well."
    source = {"type": "content", "content": [{"type": "text", "text": text}]}
    parts = [{"type": "document", "source": source}, {"type": "text", "text": "Where is Ira?"}]
    asked = {"model": "nano", "messages": [{"role": "user", "content": parts}], "max_tokens": 8, "temperature": 0}
    segments = {"ira": [library.builder.segment(text)]}
    prompt = library.builder.build(
        [{"role": "user", "content": [{"type": "document", "id": "ira"}, parts[1]]}], [], segments
    )
    answers = [plain.request("POST", MESSAGES, asked)[1] for _ in range(2)]
    assert [answer["comb"]["documents"][0]["state"] for answer in answers] == ["compiled", "hit"]
    linked = answers[0]["comb"]["linked_tokens"]
    assert linked == len(segments["ira"][0]) - 4
    assert answers[0]["usage"]["cache_creation_input_tokens"] >= linked
    assert answers[0]["usage"]["cache_read_input_tokens"] == answers[0]["comb"]["prefix_tokens"]
    computed = [answer["comb"]["computed_tokens"] for answer in answers]
    assert [answer["usage"]["input_tokens"] for answer in answers] == computed
    assert answers[1]["usage"]["cache_creation_input_tokens"] == 0
    assert answers[1]["usage"]["cache_read_input_tokens"] >= linked
    for answer in answers:
        counted = [answer["usage"][name] for name in answer["usage"] if name.endswith("input_tokens")]
        assert sum(counted) == len(prompt.flat)
        assert answer["content"] == answers[0]["content"]
    plain.wait_until_idle()


@pytest.mark.parametrize("more", [{}, {"n": 2, "temperature": 1.0}])
def test_what_was_cached_is_counted_beside_what_is_new(plain: Served, more: dict[str, Any]) -> None:
    assert chat(plain, MORE[:2])[0] == 200
    _, answer = chat(plain, [f"News of {random.random()}: nobody slept.", MORE[0], MORE[0], MORE[1]], METHOD, **more)
    tokens = [document["tokens"] for document in answer["comb"]["documents"]]
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == sum(tokens[1:]) - 3 * 4
    assert answer["comb"]["linked_tokens"] == sum(tokens) - 4 * 4
    plain.wait_until_idle()


def test_eight_clients_of_two_tenants_get_no_wrong_answer(plain: Served, library: PlainLibrary) -> None:
    """The pool has room for a part of the documents; what finds none is computed whole, and says so."""
    texts = [f"{text} It was {day}." for text in MORE for day in ("Monday", "Friday")]

    @cache
    def expected(names: tuple[int, ...], method: str) -> list[float]:
        return library.logs(library.chat(QUESTION, [texts[name] for name in names]), method, 8)

    draw = random.Random(5)
    cases = [
        (tuple(draw.sample(range(len(texts)), draw.randint(0, 4))), draw.choice(METHODS), draw.choice(["alice", "bob"]))
        for _ in range(500)
    ]

    def ask(case: tuple[tuple[int, ...], str, str]) -> Any:
        names, method, key = case
        return chat(plain, [texts[name] for name in names], method if names else None, key)

    with ThreadPoolExecutor(8) as clients:
        answers = list(clients.map(ask, cases))
    wrong, methods = [], []
    for (names, method, _), answer in zip(cases, answers, strict=True):
        used = answer[1]["comb"]["method"] if names else "full"
        methods.append(used)
        error = max(abs(a - b) for a, b in zip(logprobs(answer), expected(names, used), strict=True))
        if error > CLOSE or used not in (method, "full"):
            wrong.append((names, method, used, error))
    assert not wrong
    assert set(methods) == set(METHODS)
    assert plain.metric("comb:evictions_total") > 0
    assert plain.metric("comb:audit_tokens_total") > 0
    plain.wait_until_idle()


def test_what_was_linked_is_said_of_every_request_of_a_burst(plain: Served) -> None:
    chat(plain)  # so that nothing is compiled meanwhile
    with ThreadPoolExecutor(40) as pool:
        found = list(pool.map(lambda seed: chat(plain, seed=seed), range(40)))
    assert [status for status, _ in found] == [200] * 40
    assert [body for _, body in found if "linked_tokens" not in body["comb"]] == []
    plain.wait_until_idle()


def test_told_to_end_it_lets_streams_run_cuts_them_off_with_an_error_and_is_gone(plain: Served) -> None:
    """The last test of this server."""
    plain.wait_until_idle()
    body = {"model": "nano", "messages": QUESTION, "max_tokens": 450, "ignore_eos": True, "documents": TEXTS}
    kinds = [{"stream": True}, {"stream": False}, {"stream": True, "max_tokens": 3}]
    instance, processes = plain.instance(), [pid for pid, *_ in plain.processes()]

    def ask(number: int) -> tuple[int, Any]:
        return plain.request("POST", CHAT, {**body, **kinds[number % 3]})

    with ThreadPoolExecutor(48) as clients:
        asked = [clients.submit(ask, number) for number in range(48)]
        wait_for(lambda: plain.references > 0)
        plain.process.send_signal(signal.SIGTERM)
        start = time.monotonic()
        wait_for(lambda: plain.request("GET", "/health")[0] == 503)
        assert "shutting down" in str(plain.chat(TEXTS))
        plain.process.wait(DRAIN + 20)
        assert plain.process.returncode == 0
        assert time.monotonic() - start < DRAIN + 10
        answers = [each.result() for each in asked]
    ends = {"whole": 0, "error": 0, "refused": 0}
    for status, answer in answers:
        stream = answer if isinstance(answer, str) else ""
        assert status == (200 if stream or "error" not in answer else 503), answer
        assert not stream or stream.endswith("data: [DONE]\n\n"), stream[-300:]
        ends["error" if '"error"' in stream else "refused" if status == 503 else "whole"] += 1
    assert ends["error"] > 0, ends
    assert not instance.exists()
    assert all(gone(pid) for pid in processes)

"""Encoders killed under load and clients that leave, on a real server: every request ends, and nothing stays held."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.library import Library
from tests.helpers.processes import wait_for
from tests.helpers.served import QUESTION, TEXTS, Served, logprobs, states

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

KILLS, CLIENTS, TOKENS = 4, 5, 4
LONG = {"model": "nano", "messages": QUESTION, "stream": True, "max_tokens": 400, "ignore_eos": True}


def kill_now_and_then(
    served: Served, draw: random.Random, answers: list[tuple[list[str], Any]], ended: threading.Event
) -> list[int]:
    """Kills the encoder several times, at its work, at rest or while it starts; returns whom.

    It ends when the server has recovered: then most of the answers that clients add to `answers` are good ones.
    """
    killed: list[int] = []
    deadline = time.monotonic() + 200
    try:
        while len(killed) < KILLS and time.monotonic() < deadline:
            time.sleep(draw.choice((0.05, 0.4, 5.0)) * draw.random())
            pid = served.encoder_pid()
            if pid is not None and pid not in killed:
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)
        wait_for(lambda: good(answers) > max(10, len(answers) / 2 + CLIENTS), 200)
    finally:
        ended.set()
    return killed


def good(answers: list[tuple[list[str], Any]]) -> int:
    return sum(status == 200 for _, (status, _) in answers)


def keep_asking(served: Served, seed: int, answers: list[tuple[list[str], Any]], ended: threading.Event) -> None:
    """Asks over documents that are mostly new until `ended`; adds what was asked, and the answer."""
    draw = random.Random(seed)
    while not ended.is_set():
        documents = [f"Box {seed} holds {draw.randrange(10**6)} balls." for _ in range(draw.randrange(1, 3))]
        documents += draw.sample(TEXTS, draw.randrange(2))
        answer = served.chat(documents, max_tokens=TOKENS, ignore_eos=True)
        answers.append((documents, answer))
        # who is refused comes back later, as the answer's Retry-After says
        time.sleep(0.1 * draw.random() if answer[0] == 200 else 1.0)


def test_encoders_killed_at_random_under_load(served: Served, nano_adapter: Path) -> None:
    served.chat(TEXTS)  # an encoder is there
    before, ended = served.metric("encoder_restarts"), threading.Event()
    answers: list[tuple[list[str], Any]] = []
    with ThreadPoolExecutor(CLIENTS + 1) as pool:
        clients = [pool.submit(keep_asking, served, seed, answers, ended) for seed in range(CLIENTS)]
        killed = pool.submit(kill_now_and_then, served, random.Random(4), answers, ended).result(500)
        for client in clients:
            client.result(300)
    assert len(killed) == KILLS
    right = [(documents, answer) for documents, answer in answers if answer[0] == 200]
    for _, (status, body) in answers:
        assert status in (200, 503)
        assert status == 200 or "could not be encoded" in body["error"]["message"], body
    assert len(right) > len(answers) / 2
    assert len(right) > 10
    check_against_the_library(right, nano_adapter)
    # and afterwards it is as it was
    assert states(served.chat(["After all of it."])) == ["encoded"]
    assert states(served.chat(["After all of it."])) == ["pool"]
    # counted when a process is known to be gone, some ms after its end: for certain before the next one encodes
    assert served.metric("encoder_restarts") == before + KILLS
    served.wait_until_idle()


def check_against_the_library(answers: list[tuple[list[str], Any]], adapter: Path) -> None:
    library, question = Library(adapter, TOKENS), QUESTION[0]["content"]
    for texts, answer in answers:
        assert logprobs(answer) == pytest.approx(library.answer(question, texts)[1], abs=1e-4), texts
        assert logprobs(answer) != pytest.approx(library.answer(question, [])[1], abs=1e-3)


def test_a_client_that_leaves_mid_stream_holds_nothing(served: Served) -> None:
    with served.asking({**LONG, "documents": TEXTS}) as client:
        assert client.recv(200)
        assert served.references == len(TEXTS)
    served.wait_until_idle()
    with served.asking({**LONG, "stream": False, "documents": TEXTS}):
        wait_for(lambda: served.references == len(TEXTS))
    served.wait_until_idle()


def test_a_client_that_leaves_while_its_document_is_encoded_holds_nothing(served: Served) -> None:
    served.chat(TEXTS)
    pid = served.encoder_pid()
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        body = {**LONG, "max_tokens": 2, "documents": [*TEXTS, "Nobody has read this."]}
        with served.asking(body):
            wait_for(lambda: served.metric("requests_waiting") == 1)
            assert served.references == len(TEXTS) + 1
            with served.asking(body):
                wait_for(lambda: served.metric("requests_waiting") == 2)
            wait_for(lambda: served.metric("requests_waiting") == 1)
        served.wait_until_idle()  # while the document is still under way
        assert states(served.chat(TEXTS)) == ["pool"] * 3  # who doesn't need the encoder notices nothing
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_for(lambda: states(served.chat(["Nobody has read this."])) == ["pool"])
    served.wait_until_idle()

"""Encoders killed, clients that leave, a pool far too small: every request ends, answers are right, nothing is held."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.library import Library
from tests.helpers.processes import wait_for
from tests.helpers.served import QUESTION, TEXTS, Served, logprobs, serve, states

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

KILLS, CLIENTS, TOKENS = 4, 5, 5
LONG = {"model": "nano", "messages": QUESTION, "stream": True, "max_tokens": 400, "ignore_eos": True}


@pytest.fixture(scope="module")
def library(nano_adapter: Path) -> Library:
    return Library(nano_adapter, TOKENS)


def check(library: Library, texts: list[str], answer: tuple[int, Any]) -> None:
    expected = library.answer(QUESTION[0]["content"], texts)[1]
    assert logprobs(answer) == pytest.approx(expected, abs=1e-4), texts


def kill_now_and_then(
    served: Served, draw: random.Random, answers: list[tuple[list[str], Any]], ended: threading.Event
) -> list[int]:
    """Kills the encoder several times, at its work, at rest or while it starts; returns whom.

    It ends when the server has recovered: then most of the answers that clients add to `answers` are good ones, and
    more of those since the last kill than were on their way then, with documents of the killed one.
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
        before = len(answers)

        def recovered() -> bool:
            good = [status == 200 for _, (status, _) in answers]
            return sum(good[before:]) > CLIENTS and sum(good) > max(10, len(good) / 2 + CLIENTS)

        wait_for(recovered, 200)
    finally:
        ended.set()
    return killed


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


def test_encoders_killed_at_random_under_load(served: Served, library: Library) -> None:
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
    for texts, answer in right:
        check(library, texts, answer)
        assert logprobs(answer) != pytest.approx(library.answer(QUESTION[0]["content"], [])[1], abs=1e-3)
    # and afterwards it is as it was
    assert states(served.chat(["After all of it."])) == ["encoded"]
    assert states(served.chat(["After all of it."])) == ["pool"]
    # counted when a process is known to be gone, some ms after its end: for certain before the next one encodes
    assert served.metric("encoder_restarts") == before + KILLS
    served.wait_until_idle()


def test_a_client_that_leaves_mid_stream_holds_nothing(served: Served) -> None:
    with served.asking({**LONG, "documents": TEXTS}) as client:
        assert client.recv(200)
        assert served.references == len(TEXTS)
    served.wait_until_idle()
    with served.asking({**LONG, "stream": False, "documents": TEXTS}):
        wait_for(lambda: served.references == len(TEXTS))
    served.wait_until_idle()


# ---- a small pool, and what lies below it ----

NAMES = ["Ada", "Bob", "Carl", "Dora", "Emil", "Frida", "Gil", "Hanna", "Ivo", "Jane", "Kim", "Lea"]
KEPT = [f"{name} has {11 + 7 * place} red balls in the {name} box." for place, name in enumerate(NAMES)]
POOL = "96KiB"  # of 1 KiB per token: four documents or so


@pytest.fixture(scope="module")
def small(plugin: None, nano_adapter: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with a small pool and a disk tier."""
    folder = tmp_path_factory.mktemp("small")
    options = ["--comb-disk", str(folder / "documents"), "--comb-pool-block", "4"]
    with serve(nano_adapter, folder, *options, pool=POOL) as server:
        yield server


def ask(served: Served, texts: list[str]) -> tuple[int, Any]:
    """An answer; a pool that is full right now is asked again, as its error says."""
    deadline = time.monotonic() + 60
    while (answer := served.chat(texts, max_tokens=TOKENS, ignore_eos=True))[0] == 429:
        assert "in use or pinned" in answer[1]["error"]["message"]
        assert time.monotonic() < deadline, "the pool stays full"
        time.sleep(0.05)
    return answer


def test_documents_come_and_go_and_answers_stay_the_same(small: Served, library: Library) -> None:
    draw, seen = random.Random(2), Counter[str]()
    wanted = [draw.sample(KEPT, draw.randrange(1, 3)) for _ in range(120)]
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda texts: ask(small, texts), wanted))
    for texts, answer in zip(wanted, answers, strict=True):
        check(library, texts, answer)
        seen.update(states(answer))
    assert seen["encoded"] == len(KEPT)  # each once: what has left the pool comes back by copy
    assert seen["host"] > 20
    assert seen["pool"] > 5
    assert small.metric("evictions") > 20
    small.wait_until_idle()
    # the encoder's memory goes with it: then the disk has everything
    # (the document that was asked about at start is deleted, and has left the disk)
    wait_for(lambda: len(list((small.root / "documents").rglob("*.safetensors"))) == len(KEPT))
    pid = small.encoder_pid()
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    tiers = Counter(tier for text in KEPT for tier in states(ask(small, [text])))
    assert tiers.keys() <= {"pool", "disk"}
    assert tiers["disk"] > len(KEPT) / 2
    small.wait_until_idle()


def test_after_a_restart_the_first_request_hits(small: Served, nano_adapter: Path, library: Library) -> None:
    kept = {"id": "kept", "text": "This one is registered.", "pin": True}
    assert small.request("POST", "/v1/documents", kept)[0] == 200
    small.process.send_signal(signal.SIGTERM)
    small.process.wait(90)
    options = ["--comb-disk", str(small.root / "documents")]
    with serve(nano_adapter, small.root.with_name("again"), *options, pool=POOL) as again:
        for text in KEPT:
            answer = ask(again, [text])
            assert states(answer) == ["disk"]
            check(library, [text], answer)
        assert states(again.chat([{"id": "kept"}], max_tokens=1)) == ["disk"]
        assert again.request("GET", "/v1/comb")[1]["quota"]["pinned_bytes"]["used"] > 0
        assert again.request("GET", "/v1/documents", key="bob")[1]["data"] == []
        assert states(ask(again, ["Nobody has asked for this one."])) == ["encoded"]  # the control

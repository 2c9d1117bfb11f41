"""A pool far too small for the documents that are asked for, and what lies below it, on a real server."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.library import Library
from tests.helpers.processes import wait_for
from tests.helpers.served import QUESTION, Served, logprobs, serve, states

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

NAMES = ["Ada", "Bob", "Carl", "Dora", "Emil", "Frida", "Gil", "Hanna", "Ivo", "Jane", "Kim", "Lea"]
TEXTS = [f"{name} has {11 + 7 * place} red balls in the {name} box." for place, name in enumerate(NAMES)]
POOL = "96KiB"  # of 1 KiB per token: four documents or so
TOKENS = 5


def check(library: Library, texts: list[str], answer: tuple[int, Any]) -> None:
    expected = library.answer(QUESTION[0]["content"], texts)[1]
    assert logprobs(answer) == pytest.approx(expected, abs=1e-4), texts


@pytest.fixture(scope="module")
def library(nano_adapter: Path) -> Library:
    return Library(nano_adapter, TOKENS)


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("disk") / "documents"


@pytest.fixture(scope="module")
def small(plugin: None, nano_adapter: Path, disk: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with a small pool and a disk tier."""
    options = ["--comb-disk", str(disk), "--comb-pool-block", "4"]
    with serve(nano_adapter, tmp_path_factory.mktemp("small"), *options, pool=POOL) as server:
        yield server


def ask(served: Served, texts: list[str]) -> tuple[int, Any]:
    """An answer; a pool that is full right now is asked again, as its error says."""
    deadline = time.monotonic() + 60
    while (answer := served.chat(texts, max_tokens=TOKENS, ignore_eos=True))[0] == 429:
        assert "in use or pinned" in answer[1]["error"]["message"]
        assert time.monotonic() < deadline, "the pool stays full"
        time.sleep(0.05)
    return answer


def ask_from_the_disk(served: Served, library: Library) -> None:
    for text in TEXTS:
        answer = ask(served, [text])
        assert states(answer) == ["disk"]
        check(library, [text], answer)


def test_documents_come_and_go_and_answers_stay_the_same(small: Served, library: Library, disk: Path) -> None:
    draw, seen = random.Random(2), Counter[str]()
    wanted = [draw.sample(TEXTS, draw.randrange(1, 3)) for _ in range(120)]
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda texts: ask(small, texts), wanted))
    for texts, answer in zip(wanted, answers, strict=True):
        check(library, texts, answer)
        seen.update(states(answer))
    assert seen["encoded"] == len(TEXTS)  # each once: what has left the pool comes back by copy
    assert seen["host"] > 20
    assert seen["pool"] > 5
    assert small.metric("evictions") > 20
    small.wait_until_idle()
    # the encoder's memory goes with it: then the disk has everything
    # (the document that was asked about at start is deleted, and has left the disk)
    wait_for(lambda: len(list(disk.rglob("*.safetensors"))) == len(TEXTS))
    pid = small.encoder_pid()
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    tiers = Counter(tier for text in TEXTS for tier in states(ask(small, [text])))
    assert tiers.keys() <= {"pool", "disk"}
    assert tiers["disk"] > len(TEXTS) / 2
    small.wait_until_idle()


def test_after_a_restart_the_first_request_hits(
    small: Served, nano_adapter: Path, library: Library, disk: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    kept = {"id": "kept", "text": "This one is registered.", "pin": True}
    assert small.request("POST", "/v1/documents", kept)[0] == 200
    small.process.send_signal(signal.SIGTERM)
    small.process.wait(90)
    with serve(nano_adapter, tmp_path_factory.mktemp("again"), "--comb-disk", str(disk), pool=POOL) as again:
        ask_from_the_disk(again, library)
        assert states(again.chat([{"id": "kept"}], max_tokens=1)) == ["disk"]
        assert again.request("GET", "/v1/comb")[1]["quota"]["pinned_bytes"]["used"] > 0
        assert again.request("GET", "/v1/documents", key="bob")[1]["data"] == []
        assert states(ask(again, ["Nobody has asked for this one."])) == ["encoded"]  # the control

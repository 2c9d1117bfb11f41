"""Sixty-four clients for a minute, whose segments are found, compiled, linked and turned out meanwhile."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from comb.documents.found import SegmentFinder, with_segments
from comb_serving.api.routes import CHAT
from comb_training.nano import CHECKPOINT
from tests.helpers.chunks import passage
from tests.helpers.plain import PlainLibrary
from tests.helpers.served import Served, logprobs, serve

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

CLIENTS, SECONDS, LEAST, SEAM = 64, 60.0, 12, 4
CLOSE = 1e-4


def test_no_answer_is_wrong_and_nothing_is_left(plugin: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        monkeypatch.setenv(name, "8")  # oneDNN keeps code for the last 1,024 shapes: 400 MB, and each step has its own
    options = ["--method", f"legolink:{SEAM}", "--comb-segments", "auto", "--comb-segment-tokens", str(LEAST),
               "--max-num-seqs", "32"]  # fmt: skip
    draw = random.Random(3)
    chunks = [passage(draw, 16 + at % 24) for at in range(160)]  # three times what the pool holds
    answered: list[tuple[Any, Any]] = []
    resident: list[tuple[float, int]] = []
    with serve(CHECKPOINT, tmp_path / "s", *options, pool="4MiB") as server:
        end = time.monotonic() + SECONDS

        def client(number: int) -> None:
            own, turn = random.Random(number), 0
            while time.monotonic() < end:
                turn += 1
                # what is in fashion moves on, so that segments come, are worth a place, and go
                first = int(len(chunks) * (1 - (end - time.monotonic()) / SECONDS))
                fashion = [chunks[(first + at) % len(chunks)] for at in range(24)]
                passages = "\n".join(f"Passage {n}: {each}" for n, each in enumerate(own.sample(fashion, 4), 1))
                asked = [{"role": "user", "content": f"{number} {turn} asks.\n{passages}\n\nWhere is Ada?"}]
                body = {"model": "nano", "messages": asked, "temperature": 0, "max_tokens": 4, "logprobs": True,
                        "ignore_eos": True}  # fmt: skip
                answered.append((asked, server.request("POST", CHAT, body, own.choice(["alice", "bob"]))))

        def watch() -> None:
            while time.monotonic() < end:
                resident.append((time.monotonic(), _resident(server)))
                time.sleep(2)

        watcher = threading.Thread(target=watch)
        watcher.start()
        with ThreadPoolExecutor(CLIENTS) as clients:
            list(clients.map(client, range(CLIENTS)))
        watcher.join()
        server.wait_until_idle()
        assert server.request("GET", "/health")[0] == 200
        evicted = server.metric("evictions_total")
    library, finder = PlainLibrary(), SegmentFinder(PlainLibrary().builder.tokenizer, least=LEAST)
    linked = [each for each in answered if each[1][1].get("comb", {}).get("linked_tokens")]
    plain = [each for each in answered if "comb" not in each[1][1]]

    assert len(linked) > 100 < len(plain), (len(linked), len(plain), evicted)
    assert evicted > 100
    for asked, answer in (*random.Random(0).sample(linked, 60), *random.Random(0).sample(plain, 20)):
        ids, report = library.chat(asked).flat, answer[1].get("comb", {"documents": [], "linked_tokens": 0})
        spans = finder.find(ids)
        lengths = [document["tokens"] for document in report["documents"]]
        # those that were in the pool: their lengths say which, where two are alike the answer does
        made = [
            library.logs(with_segments(ids, chosen), f"legolink:{SEAM}", 4)
            if chosen
            else library.logs(library.chat(asked), "full", 4)
            for chosen in _chosen(spans, lengths)
        ]
        found = any(logs == pytest.approx(logprobs(answer), abs=CLOSE) for logs in made)
        assert found, (report, spans)
        assert report["linked_tokens"] <= sum(max(0, tokens - SEAM) for tokens in lengths)
    half = [size for at, size in resident if at < end - SECONDS / 2]
    assert resident[-1][1] < 1.05 * half[-1], resident


def _chosen(spans: list[tuple[int, int]], lengths: list[int]) -> list[list[tuple[int, int]]]:
    """All ways to have segments of these lengths among the spans, in order."""
    if not lengths:
        return [[]]
    return [
        [span, *more]
        for place, span in enumerate(spans)
        if span[1] == lengths[0]
        for more in _chosen(spans[place + 1 :], lengths[1:])
    ]


def _resident(server: Served) -> int:
    """Bytes of all of a server's processes."""
    total = 0
    for number, _, _ in server.processes():
        try:
            total += int(Path(f"/proc/{number}/statm").read_text().split()[1]) * 4096
        except OSError:
            continue
    return total

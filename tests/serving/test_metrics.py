"""What /metrics shows of requests, documents and tiers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from comb_serving.api.routes import CHAT
from comb_serving.manager.counters import BOUNDS, Histogram
from tests.helpers.fakes import until
from tests.helpers.middleware_server import Server, chat

pytest.importorskip("prometheus_client", reason="comes with vLLM")


async def test_every_document_is_counted_by_what_became_of_it() -> None:
    server = Server()
    client = server.client()
    assert server.sample("documents_total", state="hit") == 0
    for _ in range(2):
        tokens = sum(document["tokens"] for document in (await client.post(CHAT, chat())).json["comb"]["documents"])
    await client.post(CHAT, chat(comb={"encoder": False}))
    server.encoders.at_once = False
    failing = chat(documents=["one"])
    task = asyncio.create_task(client.post(CHAT, failing))
    await until(lambda: server.encoders.open)
    assert server.sample("requests_waiting", reason="encoding") == 1
    server.encoders.answer(error="no")
    await task
    states = {state: server.sample("documents_total", state=state) for state in ("hit", "encoded", "inlined")}
    assert states == {"hit": 2, "encoded": 2, "inlined": 2}
    assert server.sample("documents_total", state="failed") == 1
    assert server.sample("document_tokens_total", state="hit") == tokens
    assert server.sample("encode_seconds_count") == 2
    assert server.sample("encode_seconds_sum") == pytest.approx(0.02)
    assert server.sample("references") == 0


async def test_blocks_and_bytes_add_up(tmp_path: Path) -> None:
    server = Server(ranks=2, host_bytes=1000, disk_path=str(tmp_path))
    await server.app.front().check(None)
    await server.client().post("/v1/documents", {"token_ids": [1] * 32, "pin": True})
    await server.client().post("/v1/documents", {"token_ids": [2] * 5})
    blocks = {state: server.sample("pool_blocks", state=state) for state in ("free", "used", "pinned")}
    assert blocks == {"free": 5, "used": 1, "pinned": 2}

    encoders = SimpleNamespace(kept_bytes={"host": 7, "disk": 9}, waiting=3, restarts=4)
    used = {tier: server.sample("pool_used_bytes", encoders, tier=tier) for tier in ("device", "host", "disk")}
    layout = server.manager.layout if server.manager else None
    assert layout is not None
    assert used == {"device": 2 * 3 * 16 * layout.bytes_per_token, "host": 7, "disk": 9}
    assert server.sample("pool_bytes", encoders, tier="device") == 2 * layout.nbytes
    assert server.sample("pool_bytes", encoders, tier="disk") is None  # unbounded
    assert server.sample("encoder_queue_documents", encoders) == 3
    assert server.sample("encoder_restarts_total", encoders) == 4


async def test_without_an_encoder_there_is_no_pool_to_show() -> None:
    server = Server(encoder=False)
    await server.client().post(CHAT, chat())
    assert server.sample("documents_total", state="inlined") == 2
    assert server.sample("encoder_enabled") == 0
    assert server.sample("pool_documents") is None


def test_a_histograms_buckets_are_cumulative() -> None:
    histogram = Histogram()
    for seconds in (0.0, BOUNDS[0], 0.3, 1e9):
        histogram.observe(seconds)
    found = dict(histogram.buckets)
    assert [found[bound] for bound in ("0.001", "0.25", "0.5", "30.0", "+Inf")] == [2, 2, 3, 3, 4]

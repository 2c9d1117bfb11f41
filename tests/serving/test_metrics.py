"""What the log and /metrics say of requests, documents and tiers."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from comb_serving.api.routes import CHAT, tenant_of
from comb_serving.config.instance import configure
from comb_serving.manager.counters import BOUNDS, Histogram
from tests.helpers.fakes import until
from tests.helpers.middleware_server import ASKED, DOCUMENTS, Server, chat


async def test_every_document_is_counted_by_what_became_of_it(server: Server) -> None:
    assert server.sample("documents_total", state="hit") == 0
    for _ in range(2):
        tokens = sum(document["tokens"] for document in (await server.chat()).json["comb"]["documents"])
    await server.chat(comb={"encoder": False})
    server.encoders.at_once = False
    task = asyncio.create_task(server.chat(documents=["one"]))
    await until(lambda: server.encoders.open)
    assert server.sample("requests_waiting", reason="encoding") == 1
    server.encoders.answer(error="no")
    await task
    states = {"hit": 2, "encoded": 2, "inlined": 2, "failed": 1}
    assert {state: server.sample("documents_total", state=state) for state in states} == states
    assert server.sample("document_tokens_total", state="hit") == tokens
    assert server.sample("encode_seconds_count") == 2
    assert server.sample("encode_seconds_sum") == pytest.approx(0.02)
    assert server.sample("references") == 0


async def test_blocks_and_bytes_add_up(tmp_path: Path) -> None:
    server = Server(ranks=2, host_bytes=1000, disk_path=str(tmp_path))
    await server.app.front().check(None)
    await server.post("/v1/documents", {"token_ids": [1] * 32, "pin": True})
    await server.post("/v1/documents", {"token_ids": [2] * 5})
    blocks = {"free": 5, "used": 1, "pinned": 2}
    assert {state: server.sample("pool_blocks", state=state) for state in blocks} == blocks

    encoders = SimpleNamespace(kept_bytes={"host": 1007, "host_size": 2000, "disk": 9}, waiting=3, restarts=4)
    used = {"device": 2 * 3 * 16 * server.manager.layout.bytes_per_token, "host": 1007, "disk": 9}
    assert {tier: server.sample("pool_used_bytes", encoders, tier=tier) for tier in used} == used
    assert server.sample("pool_bytes", encoders, tier="device") == 2 * server.manager.layout.nbytes
    # two of its three blocks are pinned
    assert 3 * (await server.send("GET", "/v1/comb")).json["quota"]["pinned_bytes"]["used"] == 2 * used["device"]
    assert server.sample("pool_bytes", encoders, tier="host") == 2000  # with a longest document's on its way to disk
    assert server.sample("pool_bytes", encoders, tier="disk") is None  # unbounded
    assert server.sample("encoder_queue_documents", encoders) == 3
    assert server.sample("encoder_restarts_total", encoders) == 4


async def test_without_an_encoder_there_is_no_pool_to_show() -> None:
    server = Server(encoder=False)
    await server.chat()
    assert server.sample("documents_total", state="inlined") == 2
    assert server.sample("encoder_enabled") == 0
    assert server.sample("pool_documents") is None


def test_a_histograms_buckets_are_cumulative() -> None:
    histogram = Histogram()
    for seconds in (0.0, BOUNDS[0], 0.3, 1e9):
        histogram.observe(seconds)
    found = dict(histogram.buckets)
    assert [found[bound] for bound in ("0.001", "0.25", "0.5", "30.0", "+Inf")] == [2, 2, 3, 3, 4]


@pytest.fixture
def heard(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "comb_serving")
    return caplog


def lines(heard: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """Those that requests have left in the log."""
    return [json.loads(said.removeprefix("request ")) for said in heard.messages if said.startswith("request {")]


async def test_every_end_of_a_request_leaves_one_line(heard: pytest.LogCaptureFixture, server: Server) -> None:
    key = "secret-key"
    await server.chat(key)
    await server.chat(key, documents=[*DOCUMENTS, "Cy is new."], stream=True)
    await server.chat(key, comb={"encoder": False})
    await server.chat(key, documents=[{"id": "nothing"}])
    await server.chat(key, documents=["x" * 5000])
    server.encoders.at_once, leave = False, asyncio.Event()
    leaving = asyncio.create_task(server.post(CHAT, chat(documents=["another"]), key, leave=leave))
    await until(lambda: server.manager.waiting > 0)
    leave.set()
    await leaving
    await server.post(CHAT, {"messages": ASKED}, key)  # without documents: none
    found = lines(heard)
    assert [line["status"] for line in found] == [200, 200, 200, 404, 400, 499]
    states = [{"encoded": 2}, {"encoded": 1, "hit": 2}, {"inlined": 2}, {}, {}, {}]
    assert [line["documents"] for line in found] == states
    assert (found[2]["encoder"], found[3]["error"]) == (False, "RequestError")
    assert {line["tenant"] for line in found} == {tenant_of(f"Bearer {key}")[:8]}
    assert all(line["seconds"] >= line["encode_seconds"] >= 0 for line in found)
    assert len({line["request_id"] for line in found}) == len(found)


async def test_neither_texts_nor_keys_are_logged_whatever_goes_wrong(
    heard: pytest.LogCaptureFixture, server: Server
) -> None:
    marker = "PRIVATE"
    text, client = f"{marker} text", server.client(f"key-{marker}")
    titled, unknown = {"text": text, "title": marker}, {"text": marker, marker: 1}
    for documents in ([text], [titled], [[text]], [text] * 300, [unknown], text):
        await client.post(CHAT, chat(documents=documents))
    server.echo.fails = True
    assert (await client.post(CHAT, chat(documents=[text]))).status == 500
    assert len(lines(heard)) == 7
    for record in heard.records:
        if record.name.startswith("comb_serving"):
            assert marker not in logging.Formatter().format(record)


async def test_the_clients_id_is_vllms_and_the_lines(heard: pytest.LogCaptureFixture, server: Server) -> None:
    ids: list[str] = []

    async def spy(scope: Any, receive: Any, send: Any) -> None:
        ids.append(dict(scope["headers"])[b"x-request-id"].decode())
        await server.echo(scope, receive, send)

    server.app.app = spy
    await server.post(CHAT, chat(), more=[(b"x-request-id", b'mine" status=200')])
    await server.chat()
    assert [line["request_id"] for line in lines(heard)] == ids
    assert ids[0] == 'mine" status=200'
    text = next(said for said in heard.messages if said.startswith("request {"))
    assert text.startswith('request {"request_id": "mine\\" status=200", ')


def test_the_log_is_configured_once(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.getLogger("comb_serving")
    for name, value in (("handlers", []), ("propagate", logger.propagate), ("level", logger.level)):
        monkeypatch.setattr(logger, name, value)
    configure("encoder")
    configure("another")
    logging.getLogger("comb_serving.x").warning("said %d", 1)
    assert re.fullmatch(r"WARNING \S+ \S+ encoder: said 1\n", capsys.readouterr().err)

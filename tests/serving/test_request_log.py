"""The line that a request with documents leaves in the log."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest

from comb_serving.api.routes import CHAT, tenant_of
from comb_serving.config.instance import JSONFormatter, configure
from comb_serving.config.serve_options import ServeOptions
from tests.helpers.fakes import Client, until
from tests.helpers.middleware_server import MESSAGES, Server, chat


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    found = [record for record in caplog.records if hasattr(record, "comb")]
    return [json.loads(JSONFormatter("front").format(record)) for record in found]


@pytest.fixture(autouse=True)
def _heard(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "comb_serving")


async def test_every_end_of_a_request_leaves_one_line(caplog: pytest.LogCaptureFixture) -> None:
    server = Server()
    client = server.client("secret-key")
    await client.post(CHAT, chat())
    await client.post(CHAT, chat(documents=[*chat()["documents"], "Cy is new."], stream=True))
    await client.post(CHAT, chat(comb={"encoder": False}))
    await client.post(CHAT, chat(documents=[{"id": "nothing"}]))
    await client.post(CHAT, chat(documents=["x" * 5000]))
    server.encoders.at_once = False
    leave = asyncio.Event()
    leaving = asyncio.create_task(client.post(CHAT, chat(documents=["another"]), leave=leave))
    await until(lambda: server.manager.waiting > 0)
    leave.set()
    await leaving
    await client.post(CHAT, {"messages": MESSAGES})  # without documents: none
    found = lines(caplog)
    assert [line["status"] for line in found] == [200, 200, 200, 404, 400, 499]
    states = [{"encoded": 2}, {"encoded": 1, "hit": 2}, {"inlined": 2}, {}, {}, {}]
    assert [line["documents"] for line in found] == states
    assert found[2]["encoder"] is False
    assert found[3]["error"] == "RequestError"
    assert {line["tenant"] for line in found} == {tenant_of("Bearer secret-key")[:8]}
    assert all(line["seconds"] >= line["encode_seconds"] >= 0 for line in found)
    assert len({line["request_id"] for line in found}) == len(found)


async def test_neither_texts_nor_keys_are_logged_whatever_goes_wrong(caplog: pytest.LogCaptureFixture) -> None:
    marker = "PRIVATE"
    server = Server()
    client = server.client(f"key-{marker}")
    bodies = [
        chat(documents=[f"{marker} text"]),
        chat(documents=[{"text": f"{marker} text", "title": marker}]),
        chat(documents=[[f"{marker} text"]]),
        chat(documents=[f"{marker} text"] * 300),
        chat(documents=[{"text": marker, marker: 1}]),
        chat(documents=f"{marker} text"),
    ]
    for body in bodies:
        await client.post(CHAT, body)
    server.echo.fails = True
    assert (await client.post(CHAT, bodies[0])).status == 500
    assert len(lines(caplog)) == 7
    for record in caplog.records:
        if record.name.startswith("comb_serving"):
            assert marker not in logging.Formatter().format(record)
            assert marker not in JSONFormatter("front").format(record)


async def test_the_clients_id_is_vllms_and_the_lines(caplog: pytest.LogCaptureFixture) -> None:
    server = Server()
    scopes: list[Any] = []

    async def spy(scope: Any, receive: Any, send: Any) -> None:
        scopes.append(dict(scope["headers"]))
        await server.echo(scope, receive, send)

    server.app.app = spy

    async def named(scope: Any, receive: Any, send: Any) -> None:
        headers = [*scope["headers"], (b"x-request-id", b'mine" status=200')]
        await server.app({**scope, "headers": headers}, receive, send)

    await Client(named).post(CHAT, chat())
    await server.client().post(CHAT, chat())
    ids = [headers[b"x-request-id"].decode() for headers in scopes]
    assert [line["request_id"] for line in lines(caplog)] == ids
    assert ids[0] == 'mine" status=200'
    text = next(record.getMessage() for record in caplog.records if hasattr(record, "comb"))
    assert text.startswith('request request_id="mine\\" status=200" ')


def test_configured_once_as_asked(capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("comb_serving")
    before = logger.handlers, logger.propagate, logger.level
    logger.handlers = []
    try:
        configure("json", "encoder 1")
        configure("text", "another")
        logging.getLogger("comb_serving.x").warning("said %d", 1)
        line = json.loads(capsys.readouterr().err)
        assert (line["process"], line["level"], line["message"]) == ("encoder 1", "WARNING", "said 1")
    finally:
        logger.handlers, logger.propagate, logger.level = before
    with pytest.raises(ValueError, match="text or json"):
        ServeOptions("x", log_format="xml")

"""The encoder switched off and on while the server runs."""

from __future__ import annotations

import asyncio

import pytest

from comb_serving.api.choice import MethodChoice
from comb_serving.api.http import RequestError
from comb_serving.api.routes import CHAT, SWITCH
from comb_serving.config.serve_options import ServeOptions, key_hash
from comb_serving.launch.launcher import launch
from comb_serving.pool.capability import KEY
from tests.helpers.fakes import until
from tests.helpers.middleware_server import DOCUMENTS, Server, chat

ADMIN = key_hash("admin")


async def test_off_inlines_from_the_next_request_on_and_on_finds_the_pool_as_it_was() -> None:
    server = Server(admin_hash=ADMIN)
    server.echo.gate = asyncio.Event()
    under_way = asyncio.create_task(server.chat(stream=True))
    await until(lambda: server.echo.bodies)
    assert (await server.post(SWITCH, {"encoder": False}, "admin")).json["encoder"] is False
    assert KEY in server.echo.bodies[0]["vllm_xargs"]
    assert server.manager.references == 2
    server.echo.gate.set()
    assert (await under_way).events[0]["comb"]["encoder"] is True
    server.echo.gate = None
    assert (await server.chat()).states == ["inlined", "inlined"]
    asked = await server.chat(comb={"encoder": True})  # a request can't switch it on
    assert asked.json["comb"]["encoder"] is False
    made = await server.post("/v1/documents", {"text": "Cy sleeps.", "id": "cy", "pin": True})
    assert (made.status, made.json["state"]) == (200, "inlined")
    assert len(server.encoders.asked) == 2
    assert (await server.post(SWITCH, {"encoder": True}, "admin")).json["encoder"] is True
    on = await server.chat(documents=[*DOCUMENTS, {"id": "cy"}])
    assert on.states == ["hit", "hit", "encoded"]
    assert server.manager.blocks_by_state()["pinned"] == 1
    server.check_idle()


@pytest.mark.parametrize("api_keys", [(), (key_hash("user"),)])
async def test_only_the_admin_key_switches(api_keys: tuple[str, ...]) -> None:
    server = Server(admin_hash=ADMIN, key_hashes=api_keys)
    for key, status in (("user", 401), (None, 401), ("admin", 200)):
        assert (await server.post(SWITCH, {"encoder": False}, key)).status == status
        assert server.app.front().preprocessor.linking == (status != 200)
    for key, status in (("admin", 200), ("user", 200), ("other", 401 if api_keys else 200)):
        assert (await server.client(key).send("GET", SWITCH)).status == status
    if api_keys:  # the admin key is no API key
        assert (await server.post(CHAT, chat(), "admin")).status == 401
    without = Server(key_hashes=api_keys)
    for key in ("user", "admin", None):
        assert (await without.post(SWITCH, {"encoder": False}, key)).status == 403
    assert without.app.front().preprocessor.linking


@pytest.mark.parametrize("body", [{}, {"encoder": 1}, {"encoder": True, "more": 1}, [], b"{"])
async def test_bad_bodies_change_nothing(body: object) -> None:
    server = Server(admin_hash=ADMIN)
    assert (await server.post(SWITCH, body, "admin")).status == 400
    assert server.app.front().preprocessor.linking
    assert (await server.client("admin").send("DELETE", SWITCH)).status == 405


async def test_a_server_without_an_encoder_cannot_get_one() -> None:
    server = Server(encoder=False, admin_hash=ADMIN)
    assert (await server.post(SWITCH, {"encoder": True}, "admin")).status == 409
    state = (await server.post(SWITCH, {"encoder": False}, "admin")).json
    quota = {"documents": {"used": 0, "limit": 3}}
    assert state == {"object": "comb", "encoder": False, "switchable": False, "quota": quota}


def test_requests_on_hybrids_get_what_stands_for_a_method_there() -> None:
    choice = MethodChoice(ServeOptions("nano-hybrid", method="hypic:8,front=prose"))
    assert choice.of_request({"method": "primed"})[0].name == "hypic:8,front=prose"
    for other in ("naive", "primed:4", "hypic:4,front=prose"):
        with pytest.raises(RequestError, match="compiled in another way than those here: ask for hypic:8,front=prose"):
            choice.of_request({"method": other})


def test_an_admin_key_that_clients_have_is_refused() -> None:
    with pytest.raises(ValueError, match="one of the API keys"):
        launch(ServeOptions("a", admin_hash=ADMIN), ["--api-key", "user", "admin"])

"""Segments that come again: held without waiting, compiled when nobody is kept waiting by it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from comb_serving.api.http import RequestError
from comb_serving.manager import sightings
from comb_serving.manager.leases import WantedDocument
from comb_serving.manager.sightings import Sightings
from tests.helpers.middleware_server import Server


@pytest.fixture
def server() -> Iterator[Server]:
    found = Server(method="naive")
    yield found
    found.check_idle()


async def wanted(found: Server, *token_ids: tuple[int, ...], tenant: str = "t") -> list[WantedDocument]:
    keys = await found.manager.keys(token_ids, tenant)
    return [WantedDocument(key, ids, tenant) for key, ids in zip(keys, token_ids, strict=True)]


def sightings_of(found: Server, *, spare: bool = False) -> Sightings:
    finder: Any = None  # nothing is looked for here
    return Sightings(found.manager, finder, lambda: spare)


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def answered(seen: Sightings) -> None:
    """Another request has had its answer."""
    with seen.answering():
        pass
    await settled()


async def test_the_second_sight_is_compiled_and_not_while_somebody_waits(server: Server) -> None:
    server.encoders.at_once = False
    seen = sightings_of(server)
    one, other = await wanted(server, (5, 6, 7), (8, 9))
    seen.note(one)
    await settled()
    assert not server.encoders.asked
    with seen.answering():
        seen.note(one)
        await answered(seen)
        assert not server.encoders.asked  # one request is still open
    await settled()
    assert server.encoders.asked == [one.key]
    assert not server.manager.hold([one, other]).documents  # on its way
    server.encoders.answer()
    await settled()
    lease = server.manager.hold([one, other, one])
    assert [document.key for document in lease.documents] == [one.key, one.key]
    lease.release()


async def test_a_server_that_is_never_idle_compiles_one_at_the_end_of_each_answer(server: Server) -> None:
    seen = sightings_of(server, spare=True)
    one, other = await wanted(server, (5, 6, 7), (8, 9))
    with seen.answering():
        for document in (one, other) * 2:
            seen.note(document)
        await settled()
        assert not server.encoders.asked
        for asked in ([other.key], [other.key, one.key]):  # seen last, compiled first
            await answered(seen)
            assert server.encoders.asked == asked


async def test_as_many_are_compiled_at_once_as_nobody_waits_long_for(server: Server) -> None:
    seen = sightings_of(server, spare=True)
    documents = await wanted(server, (17,), tenant="other")
    documents += await wanted(server, (15, 16), (12, 13, 14), (10, 11), (8, 9), (5, 6, 7))

    async def after_an_answer(tokens_per_second: float) -> list[str]:
        before = len(server.encoders.asked)
        seen._tokens_per_second = tokens_per_second
        await answered(seen)
        return server.encoders.asked[before:]

    keys = [document.key for document in reversed(documents)]
    with seen.answering():
        for document in documents * 2:
            seen.note(document)
        assert await after_an_answer(0.0) == keys[:1]
        assert seen._tokens_per_second > 0  # of what was compiled
        assert await after_an_answer(40.0) == keys[1:3]  # four tokens in a tenth of a second
        assert await after_an_answer(1e6) == keys[3:5]
        assert await after_an_answer(1e6) == keys[5:]  # a tenant's own


async def test_where_somebody_always_waits_a_share_of_what_they_cost_is_spent_on_them(server: Server) -> None:
    seen = sightings_of(server, spare=False)
    one, other = await wanted(server, (5, 6, 7), (8, 9))
    with seen.answering():
        for sight in range(2, 40):
            for document in (one, other):
                seen.note(document)
            await answered(seen)
            spent = sum(3 if key == one.key else 2 for key in server.encoders.asked)
            assert spent <= sightings.SHARE * (sight - 1) * 5 + 1e-9
            if server.encoders.asked:
                break
        assert server.encoders.asked == [other.key]
        assert sight == 9  # eight times five tokens seen, of which a twentieth are its two
    await settled()


async def test_what_has_no_place_together_is_compiled_one_by_one() -> None:
    server = Server(method="naive", tenant_share=0.25)  # of eight blocks of sixteen
    seen = sightings_of(server)
    documents = await wanted(server, (5, 6), (7, 8), (9, 10))
    seen._tokens_per_second = 1e6
    with seen.answering():
        for document in documents * 2:
            seen.note(document)
    await settled()
    assert set(server.encoders.asked) == {document.key for document in documents}
    server.check_idle()


async def test_the_table_is_bounded(monkeypatch: pytest.MonkeyPatch, server: Server) -> None:
    monkeypatch.setattr(sightings, "REMEMBERED", 3)
    seen = sightings_of(server)
    documents = await wanted(server, *((token,) for token in range(5, 10)))
    for document in documents:
        seen.note(document)
    seen.note(documents[0])  # forgotten: its first sight again
    await settled()
    assert not server.encoders.asked
    seen.note(documents[-1])
    await settled()
    assert server.encoders.asked == [documents[-1].key]


async def test_nothing_is_held_over_a_tenants_share() -> None:
    server = Server(method="naive", tenant_share=0.25)  # of eight blocks of sixteen
    documents = await wanted(server, (5, 6), (7, 8), (9, 10))
    for document in documents:
        (await server.manager.acquire([document])).release()
    lease = server.manager.hold(documents[:2])
    assert len(lease.documents) == 2
    lease.release()
    assert not server.manager.hold(documents).documents
    server.check_idle()


@pytest.mark.parametrize(
    ("asked", "message"), [("auto", "without --comb-segments"), ("on", '"auto" or "off"'), (3, '"auto" or "off"')]
)
def test_a_request_widens_nothing_that_the_operator_has_not_allowed(
    asked: object, message: str, server: Server
) -> None:
    choice = server.app.front().preprocessor.choice
    with pytest.raises(RequestError, match=message):
        choice.of_request({"segments": asked})
    assert choice.of_request({"segments": "off"}) == choice.of_request(None) == (choice.current, False)

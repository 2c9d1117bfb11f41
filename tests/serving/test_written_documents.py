"""Documents that stand in messages, as Anthropic's Messages API writes them, with a server that says what it got."""

from __future__ import annotations

from typing import Any
from unittest.mock import AsyncMock

import pytest

from comb.cache.picache import document_of
from comb_serving.api.fields import document_part
from comb_serving.api.http import RequestError
from comb_serving.api.response import ResponseWriter
from comb_serving.api.routes import CHAT, COUNT, MESSAGES
from comb_serving.pool.capability import KEY, Capability, unpack
from tests.helpers.middleware_server import BUILDER, LAYOUT, SECRET, SEGMENTS, Server

TEXT, OTHER = "Ada went to the garden.", "Bob is in the kitchen."
WRITTEN = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": TEXT}, "title": "A"}
QUESTION = {"type": "text", "text": "Where is Ada?"}


def document(**more: Any) -> dict[str, Any]:
    return {**WRITTEN, **more}


def body(*parts: Any, **more: Any) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": [*parts, QUESTION]}], **more}


@pytest.mark.parametrize("method", [None, "naive"])
async def test_they_are_documents_at_their_place(method: str | None) -> None:
    server = Server(method=method)
    content = {"type": "content", "content": [{"type": "text", "text": OTHER}]}
    answer = await server.post(MESSAGES, body(WRITTEN, document(source=content, title=None)))
    assert answer.states == ["compiled" if method else "encoded"] * 2
    (got,) = server.echo.bodies
    first, second = SEGMENTS
    referenced = [{"type": "document", "id": "x"}, {"type": "document", "id": "y"}, QUESTION]
    built = BUILDER.build([{"role": "user", "content": referenced}], [], {"x": [first], "y": [second]})
    ids = list(built.flat if method else built.bare)
    assert got["kv_transfer_params"] == {"prompt_token_ids": ids}
    handles = unpack(Capability.verify(got["vllm_xargs"][KEY], SECRET).documents, LAYOUT)
    assert [handle.tokens for handle in handles] == [len(first), len(second)]
    # they are those of the field, too: whoever sends the same text has the hit
    again = await server.post(CHAT, {"messages": [{"role": "user", "content": "?"}], "documents": [OTHER]})
    assert again.states == ["hit"]
    server.check_idle()


@pytest.mark.parametrize("method", [None, "naive", "full"])
async def test_they_are_counted_as_the_answers_usage_has_them(method: str | None) -> None:
    server = Server(method=method)
    asked = body(WRITTEN, document(title=None))
    usage = (await server.post(MESSAGES, asked)).json["usage"]
    del asked["max_tokens"]
    assert (await server.post(COUNT, asked)).json == {"input_tokens": usage["prompt_tokens"]}
    assert len(server.echo.bodies) == 1
    refused = await server.post(COUNT, body(document(colour="red")))
    assert (refused.status, "no field 'colour'" in refused.json["error"]["message"]) == (400, True)
    plain = await server.post(COUNT, body())  # vLLM's own to count
    assert plain.json["got"]["messages"] == body()["messages"]
    server.encoders.open.clear()


async def test_cache_control_keeps_them_for_their_time(monkeypatch: pytest.MonkeyPatch, server: Server) -> None:
    for ttl, kept in (("1h", {"ttl": "1h"}), ("5m", {})):
        written = document(title=ttl, cache_control={"type": "ephemeral", **kept})
        assert (await server.post(MESSAGES, body(written), "alice")).status == 200
    assert (await server.post(MESSAGES, body(document(title="not kept")), "alice")).status == 200
    (catalog,) = server.app.front().preprocessor.registered._catalogs.values()  # no other tenant's
    start = catalog.clock()
    assert server.manager.blocks_by_state()["pinned"] == 2
    for seconds, left in ((299, 2), (301, 1), (3601, 0)):
        monkeypatch.setattr(catalog, "clock", lambda now=start + seconds: now)
        assert len(catalog.ids()) == left
    assert server.manager.blocks_by_state()["pinned"] == 0
    assert len(set(map(document_of, server.encoders.forgotten))) == 2


async def test_what_has_no_room_to_be_kept_is_answered_all_the_same() -> None:
    server = Server(tenant_pinned_share=0.01)
    kept = document(cache_control={"type": "ephemeral"})
    assert (await server.post(MESSAGES, body(kept))).status == 200
    assert server.manager.blocks_by_state()["pinned"] == 0
    server.check_idle()


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (document(source={"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}), "send their text"),
        (document(source={"type": "url", "url": "http://x/a.pdf"}), "send their text"),
        (document(source={"type": "content", "content": [{"type": "image"}]}), "send their text"),
        (document(source={"type": "text", "data": ""}), "send their text"),
        (document(source=None), "send their text"),
        (document(citations={"enabled": True}), "can't have citations"),
        (document(title=3), "title that is no text"),
        (document(cache_control={"type": "ephemeral", "ttl": "1d"}), "one of 5m, 1h"),
        (document(cache_control={"type": "persistent"}), "one of 5m, 1h"),
        (document(cache_control={"type": "ephemeral", "ttl": ["5m"]}), "one of 5m, 1h"),
        (document(colour="red"), "no field 'colour'"),
        ({"type": "tool_result", "tool_use_id": "a", "content": [WRITTEN]}, "documents in a tool's answer"),
    ],
)
async def test_what_would_be_an_answer_without_its_document_is_refused(part: Any, message: str, server: Server) -> None:
    answer = await server.post(MESSAGES, body(part))
    assert (answer.status, answer.json["error"]["param"]) == (400, "messages")
    assert message in answer.json["error"]["message"]


def test_a_context_stands_in_front_of_its_text() -> None:
    read, ttl = document_part(document(context="From a letter.", citations={"enabled": False}), "messages")
    assert read == {"text": f"From a letter.\n\n{TEXT}", "title": "A"}
    assert ttl is None
    with pytest.raises(RequestError, match="context that is no text"):
        document_part(document(context=[1]), "messages")


@pytest.mark.parametrize(
    ("counted", "given", "expected"),
    [
        # beside the prompt: seven of ten document tokens were hits
        (False, {"input_tokens": 5}, (5, 7, 3)),
        (False, {"input_tokens": 5, "cache_read_input_tokens": 2}, (5, 9, 3)),
        # in the prompt: vLLM's cached tokens hold those that were compiled for this request
        (True, {"input_tokens": 5, "cache_read_input_tokens": 12}, (5, 9, 3)),
        # which vLLM doesn't tell at a stream's start
        (True, {"input_tokens": 17}, (5, 9, 3)),
        # four of them were recomputed at seams, which vLLM takes for cached
        (True, {"input_tokens": 5, "cache_read_input_tokens": 16}, (9, 9, 3)),
    ],
)
def test_usage_tells_what_was_cached_from_what_is_from_now_on(
    counted: bool, given: dict[str, int], expected: tuple[int, int, int]
) -> None:
    writer = ResponseWriter(AsyncMock(), dict, 10, 7, counted=(lambda: (9, 3)) if counted else None)
    usage = {**given, "output_tokens": 1}
    writer._amend(usage, 1)
    names = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    assert tuple(usage[name] for name in names) == expected

"""Registered documents over restarts: a second front on the same folder."""

from __future__ import annotations

import asyncio
import copy
import errno
import logging
import os
import stat
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from comb.cache.picache import compiled_key, document_of
from comb.cache.store import PICacheStore
from comb.cache.tiers import SUFFIX
from comb.documents.document import PromptBuilder
from comb_serving.api import registered
from comb_serving.api.routes import CHAT, DOCUMENTS, SWITCH, tenant_of
from comb_serving.config.serve_options import key_hash
from comb_serving.manager.manager import PICManager
from tests.helpers import middleware_server
from tests.helpers.fakes import IDENTITY, Client, until
from tests.helpers.middleware_server import BUILDER, Server, chat

TEXTS = {"a": "Ada is in the garden.", "b": "Bob is in the kitchen."}


@pytest.fixture(autouse=True)
def _heard(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "comb_serving")


async def started(folder: Path, known: Any = IDENTITY, **options: Any) -> Server:
    """A server on a disk folder that has looked at itself."""
    server = Server(disk_path=str(folder), **options)
    server.encoders.known = known
    await server.app.front().check(None)
    return server


async def add(asked: Server | Client, name: str, text: str = "", **more: Any) -> int | None:
    return (await asked.post(DOCUMENTS, {"id": name, "text": text or TEXTS[name], **more})).status


async def names(asked: Server | Client) -> list[str]:
    return [one["id"] for one in (await asked.send("GET", DOCUMENTS)).json["data"]]


async def used(asked: Server | Client, *names: str) -> list[str]:
    """The states of registered documents in a request."""
    return (await asked.post(CHAT, chat(documents=[{"id": name} for name in names]))).states


def files(folder: Path) -> list[Path]:
    return sorted((folder / registered.FOLDER).iterdir())


def at(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """The time of day, for what is registered."""
    monkeypatch.setattr(registered, "time", SimpleNamespace(time=lambda: seconds))


def slow_writes(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Whether one has begun, and what lets it end."""
    writing, gate, write = threading.Event(), threading.Event(), registered.write_whole

    def slowly(path: Path, data: bytes) -> None:
        writing.set()
        assert gate.wait(30)
        write(path, data)

    monkeypatch.setattr(registered, "write_whole", slowly)
    return writing, gate


async def test_a_restart_forgets_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = await started(tmp_path)
    alice, bob = first.client("alice-key"), first.client("bob-key")
    assert [await add(alice, "b"), await add(alice, "a", pin=True), await add(bob, "a", "Bob's own.")] == [200] * 3
    unnamed = (await alice.post(DOCUMENTS, {"token_ids": [5, 6, 7]})).json["id"]
    sizes = (await alice.send("GET", DOCUMENTS)).json["data"]

    second = await started(tmp_path)
    alice, bob, nobody = (second.client(key) for key in ("alice-key", "bob-key", None))
    assert await names(alice) == ["b", "a", unnamed]
    assert await names(bob) == ["a"]
    assert await names(nobody) == []
    assert [one | {"cached": True} for one in (await alice.send("GET", DOCUMENTS)).json["data"]] == sizes
    assert (await alice.send("GET", SWITCH)).json["quota"]["documents"]["used"] == 3
    assert "4 registered documents of before are there" in caplog.text
    # what a pin is worth comes with the first use
    assert second.encoders.asked == []
    assert second.manager.blocks_by_state()["pinned"] == 0
    assert await used(alice, "a", "b", "a") == ["encoded"] * 3
    assert second.encoders.asked == [first.encoders.asked[1], first.encoders.asked[0]]
    assert second.manager.blocks_by_state()["pinned"] == second.manager.layout.blocks_for(sizes[1]["tokens"])
    assert await used(alice, "a") == ["hit"]
    assert dict(second.manager.index.pins) == {first.encoders.asked[1]: 1}
    assert (await alice.send("DELETE", f"{DOCUMENTS}/a")).status == 200
    assert not second.manager.index.pins
    assert await add(alice, "b", "another text") == 400
    second.check_idle()


async def test_nobody_else_reads_the_files_and_they_hold_no_api_key(tmp_path: Path) -> None:
    mask = os.umask(0)
    try:
        (tmp_path / "disk").mkdir(mode=0o755)  # a volume, say
        server = await started(tmp_path / "disk")
        await add(server.client("alice-key"), "a")
    finally:
        os.umask(mask)
    (file,) = files(tmp_path / "disk")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert b"alice-key" not in file.read_bytes()
    assert key_hash("alice-key").encode() not in file.read_bytes()
    assert tenant_of("Bearer alice-key").encode() in file.read_bytes()
    PICacheStore(disk_path=tmp_path / "disk")  # the documents' own folder is closed all the same
    assert stat.S_IMODE((tmp_path / "disk").stat().st_mode) == 0o700
    file.parent.chmod(0o755)
    (file.parent / "letter.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"has mode 0755 and holds 'letter\.txt'"):
        Server(disk_path=str(tmp_path / "disk"))


@pytest.mark.parametrize("what", ["fingerprint", "method", "dtype"])
async def test_keys_name_the_weights_that_are_here_now(tmp_path: Path, what: str) -> None:
    first = await started(tmp_path)
    await add(first, "a")
    second = await started(tmp_path, replace(IDENTITY, **{what: "another"}))
    assert await used(second, "a") == ["encoded"]
    assert second.encoders.asked[0] != first.encoders.asked[0]
    again = await started(tmp_path)
    assert await used(again, "a") == ["encoded"]
    assert again.encoders.asked == first.encoders.asked


async def test_what_the_weights_do_not_take_is_dropped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = await started(tmp_path)
    await add(first, "a")
    await first.post(DOCUMENTS, {"id": "long", "token_ids": [5] * 40})
    await first.post(DOCUMENTS, {"id": "other", "token_ids": [1000]})
    second = await started(tmp_path, replace(IDENTITY, max_document_tokens=30, vocab_size=1000))
    assert await names(second) == ["a"]
    assert "1 registered documents are dropped: a document has 40 tokens, the encoder takes at most 30" in caplog.text
    assert "1 registered documents are dropped: token id 1000 is not in 0..999" in caplog.text
    assert len(files(tmp_path)) == 1


async def test_tokens_of_another_tokenizer_are_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = await started(tmp_path)
    for name in TEXTS:
        await add(first, name)
    other = copy.deepcopy(BUILDER.tokenizer)
    other.add_tokens(["<|new|>"])
    monkeypatch.setattr(middleware_server, "BUILDER", PromptBuilder(other))
    second = await started(tmp_path)
    assert await names(second) == []
    assert "2 registered documents are dropped: their tokens are another tokenizer's" in caplog.text
    assert files(tmp_path) == []
    assert await add(second, "a") == 200


async def test_with_nothing_linked_they_are_there_too(tmp_path: Path) -> None:
    first = await started(tmp_path)
    await add(first, "a", pin=True)
    off = await started(tmp_path, encoder=False)
    assert await used(off, "a") == ["inlined"]
    assert await add(off, "b", pin=True) == 200
    again = await started(tmp_path)
    assert await used(again, "a", "b") == ["encoded", "encoded"]
    assert again.manager.blocks_by_state()["pinned"] == 2


@pytest.mark.parametrize("harm", ["cut", "empty", "changed", "renamed"])
async def test_damage_costs_one_document(tmp_path: Path, harm: str, caplog: pytest.LogCaptureFixture) -> None:
    first = await started(tmp_path)
    await add(first, "a")
    (file,) = files(tmp_path)
    await add(first, "b")
    data = file.read_bytes()
    if harm == "renamed":
        file.rename(file.with_name(f"x{registered.SUFFIX}"))
    else:
        file.write_bytes({"cut": data[:-3], "empty": b"", "changed": data.replace(b"[", b"{", 1)}[harm])
    second = await started(tmp_path)
    assert await names(second) == ["b"]
    assert "1 registered documents are dropped: their files " in caplog.text
    assert len(files(tmp_path)) == 1
    assert await add(second, "a") == 200


async def test_a_file_that_cannot_be_read_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = await started(tmp_path)
    (tmp_path / registered.FOLDER / f"folder{registered.SUFFIX}").mkdir()
    await add(first, "a")
    assert await names(await started(tmp_path)) == ["a"]
    assert "a registered document can't be read: " in caplog.text


@pytest.mark.parametrize("function", ["os.fsync", "pathlib.Path.replace", "comb.files.os.open"])
async def test_a_full_disk_is_an_error_and_nothing_is_half_registered(
    tmp_path: Path, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = await started(tmp_path)
    assert await add(server, "a", ttl_s=1000) == 200
    (file,) = files(tmp_path)
    before = file.read_bytes()
    with monkeypatch.context() as full:
        full.setattr(function, Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
        answer = await server.post(DOCUMENTS, {"id": "b", "text": TEXTS["b"], "pin": True})
        assert (answer.status, answer.headers["retry-after"]) == (503, "60")
        assert "No space left on device; nothing was changed" in answer.json["error"]["message"]
        assert await add(server, "a", pin=True) == 503  # what it was before it stays
    assert await names(server) == ["a"]
    assert (await server.post(CHAT, chat(documents=[{"id": "b"}]))).status == 404
    assert not server.manager.index.pins
    server.check_idle()
    assert files(tmp_path) == [file]
    assert file.read_bytes() == before
    assert await add(server, "b", pin=True) == 200
    assert await names(await started(tmp_path)) == ["a", "b"]


async def test_a_folder_that_is_gone_is_no_lack_of_room(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    server = await started(tmp_path / "disk")
    assert await add(server, "a") == 200
    (tmp_path / "disk").rename(tmp_path / "unmounted")
    answer = await server.post(DOCUMENTS, {"id": "b", "text": TEXTS["b"]})
    assert (answer.status, answer.headers.get("retry-after")) == (503, None)
    message = answer.json["error"]["message"]
    assert "No such file or directory; nothing was changed, its operator" in message
    assert "room" not in message
    assert str(tmp_path) not in message
    assert f"can't be kept or deleted: [Errno 2] No such file or directory: '{tmp_path}" in caplog.text
    assert (await server.send("DELETE", f"{DOCUMENTS}/a")).status == 503
    assert await names(server) == ["a"]
    (tmp_path / "unmounted").rename(tmp_path / "disk")
    assert (await server.send("DELETE", f"{DOCUMENTS}/a")).status == 200
    assert await names(await started(tmp_path / "disk")) == []


async def test_times_to_live_go_on_while_the_server_is_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at(monkeypatch, 1000)
    first = await started(tmp_path)
    assert [await add(first, "a", ttl_s=50), await add(first, "b", ttl_s=100, pin=True)] == [200] * 2
    (document,), forgotten = first.app.front().preprocessor.registered.of("").find(["a"]), []
    monkeypatch.setattr(PICManager, "remove", lambda _, key: bool(forgotten.append(key)))
    at(monkeypatch, 1060)
    second = await started(tmp_path)
    assert forgotten == [document_of(document.key)]  # what is kept of it on disk
    assert await names(second) == ["b"]
    assert len(files(tmp_path)) == 1  # nothing of a document is to be found after its time
    assert await used(second, "b") == ["encoded"]
    (entry,) = second.manager.pool.entries.values()
    assert entry.expires_at - second.manager.clock() == pytest.approx(40, abs=1)
    at(monkeypatch, 1101)
    await add(second.client("other"), "a")  # nor while the server runs, whoever registers something
    assert len(files(tmp_path)) == 1
    third = await started(tmp_path)
    assert await names(third) == []
    assert await names(third.client("other")) == ["a"]


@pytest.mark.parametrize("ttl", [0, -1, True, "5", 10**309, float("inf")])
async def test_a_time_to_live_is_a_number_of_seconds(ttl: Any, tmp_path: Path) -> None:
    server = await started(tmp_path)
    answer = await server.post(DOCUMENTS, {"text": TEXTS["a"], "ttl_s": ttl})
    assert (answer.status, answer.json["error"]["message"]) == (400, "ttl_s is a positive number of seconds")
    assert await add(server, "a", ttl_s=10**308) == 200


async def test_a_time_to_live_ends_though_nobody_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registered, "LOOK_SECONDS", 0.01)
    server = await started(tmp_path)
    assert [await add(server, "a", ttl_s=0.05), await add(server, "b")] == [200] * 2
    kept = server.app.front().preprocessor.registered
    await until(lambda: (len(files(tmp_path)), len(server.manager.pool.entries)) == (1, 1))
    kept.stop()


async def test_a_renewed_document_lives_as_long_as_was_said_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at(monkeypatch, 1000)
    first = await started(tmp_path)
    for more in ({"ttl_s": 10}, {}):
        assert await add(first, "a", **more) == 200
    at(monkeypatch, 2000)
    assert await add(first, "b") == 200
    assert await names(await started(tmp_path)) == ["a", "b"]


async def test_what_is_deleted_stays_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = await started(tmp_path)
    for key in ("alice", "bob"):
        await add(first.client(key), "a")
    with monkeypatch.context() as broken:  # it would be there again
        broken.setattr("pathlib.Path.unlink", Mock(side_effect=OSError(errno.EROFS, os.strerror(errno.EROFS))))
        assert (await first.client("alice").send("DELETE", f"{DOCUMENTS}/a")).status == 503
    assert await names(first.client("alice")) == ["a"]
    assert (await first.client("alice").send("DELETE", f"{DOCUMENTS}/a")).json["deleted"] is True
    assert (await first.client("alice").send("DELETE", f"{DOCUMENTS}/a")).status == 404
    second = await started(tmp_path)
    assert await names(second.client("alice")) == []
    assert await names(second.client("bob")) == ["a"]


@pytest.mark.parametrize("linked", [True, False])
async def test_keys_and_values_go_with_their_document_whatever_has_compiled_it(
    tmp_path: Path, linked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other weights and methods before a restart, LoRAs that aren't served any more, another number of ranks."""
    at(monkeypatch, 1000)
    first = await started(tmp_path)
    assert [await add(first, "a"), await add(first, "b", ttl_s=50), await add(first, "c", "Cy.")] == [200] * 3
    await first.client("other").post(DOCUMENTS, {"id": "long", "token_ids": [5] * 40})
    known, kept = first.app.front().preprocessor.registered, dict[str, list[Path]]()
    segments = [*known.of("").find(["a", "b", "c"]), *known.of(tenant_of("Bearer other")).find(["long"])]
    for folder in (tmp_path, tmp_path / "rank-1-of-2"):
        folder.mkdir(exist_ok=True)
        for segment in segments:
            for key in (segment.key, compiled_key(segment.key, "a LoRA"), compiled_key(segment.key, "a method")):
                path = folder / f"{key}{SUFFIX}"
                path.write_bytes(b"K/V")
                kept.setdefault(segment.id, []).append(path)

    def there() -> set[str]:
        return {name for name, paths in kept.items() if any(path.exists() for path in paths)}

    at(monkeypatch, 1060)
    short = replace(IDENTITY, fingerprint="another", max_document_tokens=30)
    second = await started(tmp_path, short, encoder=linked)
    assert there() == ({"a", "c"} if linked else {"a", "c", "long"})  # one isn't taken any more
    assert (await second.send("DELETE", f"{DOCUMENTS}/a")).status == 200
    assert "a" not in there()
    assert all(path.exists() for path in kept["c"])


async def test_pins_stay_within_a_share_that_has_become_smaller(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = await started(tmp_path)
    for number in range(3):
        body = {"id": f"d{number}", "token_ids": [number + 5] * 32, "pin": True}
        assert (await first.post(DOCUMENTS, body)).status == 200
    second = await started(tmp_path, tenant_pinned_share=0.5)  # four of eight blocks
    for name in ("d2", "d0", "d1", "d1"):
        await used(second, name)
    assert second.manager.blocks_by_state()["pinned"] == 4
    assert "is not pinned: your key would pin 6 of 8 blocks, its share is 4" in caplog.text
    assert (await second.send("DELETE", f"{DOCUMENTS}/d2")).status == 200
    assert await used(second, "d1") == ["hit"]
    assert second.manager.blocks_by_state()["pinned"] == 4
    second.check_idle()


async def test_who_asks_for_them_at_once_is_told_to_wait(tmp_path: Path) -> None:
    await add(await started(tmp_path), "a")
    server = Server(disk_path=str(tmp_path))
    asked: Sequence[tuple[str, str, Any]] = [
        ("GET", DOCUMENTS, None),
        ("POST", DOCUMENTS, {"id": "a", "text": "another"}),
        ("DELETE", f"{DOCUMENTS}/a", None),
        ("POST", CHAT, chat(documents=[{"id": "a"}])),
        ("POST", CHAT, chat(messages=[{"role": "user", "content": [{"type": "document", "id": "a"}]}])),
    ]
    for method, path, body in asked:
        answer = await server.send(method, path, body)
        assert (answer.status, answer.headers["retry-after"]) == (503, "2")
    for body in (chat(), {"messages": chat()["messages"]}):
        assert (await server.post(CHAT, body)).status == 200
    assert (await server.send("GET", SWITCH)).status == 200
    await server.app.front().check(None)
    assert await used(server, "a") == ["encoded"]


async def test_changes_come_one_after_the_other_whoever_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = await started(tmp_path)
    writing, gate = slow_writes(monkeypatch)
    leave = asyncio.Event()
    leaving = asyncio.create_task(server.post(DOCUMENTS, {"id": "x", "text": "one"}, leave=leave))
    await until(writing.is_set)
    others = [
        asyncio.create_task(server.post(DOCUMENTS, {"id": "x", "text": "two"})),
        asyncio.create_task(server.send("DELETE", f"{DOCUMENTS}/x")),
    ]
    await until(lambda: len(server.encoders.asked) == 2)
    assert await names(server) == []
    leave.set()
    await leaving
    gate.set()
    # a change that has begun comes to its end, and nobody has come between its file and its entry
    assert [(await other).status for other in others] in ([400, 200], [200, 200])
    server.check_idle()
    assert await names(await started(tmp_path)) == await names(server)


async def test_a_pin_that_comes_back_takes_no_room_that_was_promised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {"id": "before", "token_ids": [5] * 32, "pin": True}
    assert (await (await started(tmp_path)).post(DOCUMENTS, before)).status == 200
    server = await started(tmp_path, tenant_pinned_share=0.5)  # four of eight blocks
    writing, gate = slow_writes(monkeypatch)
    now = {"id": "now", "token_ids": [6] * 48, "pin": True}
    adding = asyncio.create_task(server.post(DOCUMENTS, now))
    await until(writing.is_set)
    assert await used(server, "before") == ["encoded"]
    gate.set()
    assert (await adding).status == 200
    assert await used(server, "before") == ["hit"]
    assert server.manager.blocks_by_state()["pinned"] == 3

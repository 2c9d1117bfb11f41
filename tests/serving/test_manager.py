"""The PIC manager over encoders that a test answers for: who has what, and who waits for room, in order."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from comb_serving.api.routes import CHAT
from comb_serving.config.serve_options import ServeOptions
from comb_serving.encoding.protocol import EncoderError
from comb_serving.manager.leases import (
    DocumentsTooLargeError,
    Lease,
    PoolFullError,
    PoolPinnedError,
    WaitQueue,
    WantedDocument,
)
from comb_serving.manager.manager import NO_PLACE, PICManager
from comb_serving.pool.shared_pool import PoolLayout
from tests.helpers.fakes import FakeEncoders, until
from tests.helpers.middleware_server import Server, chat
from tests.helpers.stores import check_manager

LAYOUT = PoolLayout(cross_layers=1, kv_heads=1, head_dim=2, num_blocks=8, block_size=4)


def wanted(name: str, tokens: int = 4) -> WantedDocument:
    return WantedDocument(name, tuple(range(tokens)))


async def steps() -> None:
    for _ in range(6):
        await asyncio.sleep(0)


async def test_a_document_is_encoded_once_for_all_who_want_it() -> None:
    encoders = FakeEncoders(at_once=False)
    manager = PICManager(LAYOUT, encoders)
    tasks = [asyncio.create_task(manager.acquire([wanted("a", 5), wanted("b")])) for _ in range(5)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert encoders.asked == ["a", "b"]
    assert manager.waiting == 5
    for _ in range(2):
        encoders.answer()
    leases = await asyncio.gather(*tasks)
    assert len({lease.documents[0].handle for lease in leases}) == 1
    assert [lease.documents[0].tier for lease in leases] == ["encoded"] + ["pool"] * 4
    assert manager.references == 10
    for lease in leases:
        lease.release()
        lease.release()
    assert manager.references == manager.waiting == 0
    again = await manager.acquire([wanted("b"), wanted("a", 5), wanted("b")])
    assert encoders.asked == ["a", "b"]
    assert [document.tier for document in again.documents] == ["pool"] * 3
    assert again.documents[0].handle == again.documents[2].handle
    assert manager.references == 2
    check_manager(manager)


async def test_only_requests_that_miss_wait() -> None:
    encoders = FakeEncoders()
    manager = PICManager(LAYOUT, encoders)
    (await manager.acquire([wanted("a")])).release()
    encoders.at_once = False
    slow = asyncio.create_task(manager.acquire([wanted("b")]))
    await asyncio.sleep(0)
    (await manager.acquire([wanted("a")])).release()
    assert not slow.done()
    encoders.answer()
    (await slow).release()


async def test_the_least_recently_used_goes_first_and_nothing_that_is_kept() -> None:
    encoders = FakeEncoders()
    manager = PICManager(LAYOUT, encoders)
    held = await manager.acquire([wanted("held", 8)])
    for name in ("pinned", "old", "new"):
        (await manager.acquire([wanted(name, 8)])).release()
    assert manager.pin("pinned")
    (await manager.acquire([wanted("old", 8)])).release()
    (await manager.acquire([wanted("x", 8)])).release()
    kept = [name for name in ("held", "pinned", "old", "new", "x") if manager.lookup(name)]
    assert kept == ["held", "pinned", "old", "x"]
    with pytest.raises(PoolFullError, match="in use or pinned"):
        await manager.acquire([wanted("y", 20)])
    assert manager.lookup("old")  # refused without having evicted in vain
    with pytest.raises(DocumentsTooLargeError, match="larger --comb-pool-bytes"):
        await manager.acquire([wanted("z", 33)])
    for times in (5, 10_000):  # 8 blocks, of 2 each
        with pytest.raises(DocumentsTooLargeError, match="as often as it is given"):
            await manager.acquire([wanted("old", 8)] * times)
    (await manager.acquire([wanted("old", 8)] * 4)).release()
    assert manager.unpin("pinned")
    assert not manager.unpin("pinned")
    held.release()
    (await manager.acquire([wanted("z", 32)])).release()
    assert len(manager.pool.entries) == 1
    assert encoders.forgotten == []  # what was evicted may come back from lower tiers
    check_manager(manager)


async def test_a_failed_document_fails_its_waiters_and_nobody_else() -> None:
    encoders = FakeEncoders(at_once=False)
    manager = PICManager(LAYOUT, encoders)
    good = asyncio.create_task(manager.acquire([wanted("good")]))
    await asyncio.sleep(0)
    bad = [asyncio.create_task(manager.acquire([wanted("bad"), wanted("good")])) for _ in range(3)]
    await asyncio.sleep(0)
    encoders.answer()
    encoders.answer(error="NaN")
    results = await asyncio.gather(*bad, return_exceptions=True)
    assert all(isinstance(result, EncoderError) and "NaN" in str(result) for result in results)
    assert manager.references == 1
    (await good).release()
    assert not manager.lookup("bad")
    assert manager.lookup("good")
    assert manager.counters.documents["failed"] == 1
    check_manager(manager)


async def test_removed_in_use_and_expired() -> None:
    now = 0.0
    encoders = FakeEncoders()
    manager = PICManager(LAYOUT, encoders, clock=lambda: now)
    lease = await manager.acquire([wanted("a")])
    assert manager.remove("a")
    assert set(encoders.forgotten) == {"a"}
    assert not manager.lookup("a")
    assert len(manager.free_blocks) == LAYOUT.num_blocks - 1
    lease.release()
    assert len(manager.free_blocks) == LAYOUT.num_blocks
    (await manager.acquire([wanted("b", 32)])).release()
    manager.pin("b")
    manager.set_expiry("b", 5.0)
    now = 4.9
    assert manager.lookup("b")
    now = 5.0
    (await manager.acquire([wanted("c", 32)])).release()  # a pin doesn't outlive its document
    assert manager.index.expired == 1
    assert encoders.forgotten[-1] == "b"
    manager.set_expiry("c", 5.0)
    now = 10.0
    assert not manager.remove("c")  # as a catalog of documents does, whose clock is the same
    assert manager.index.expired == 2
    manager.remove("gone before")  # evicted, but perhaps on a lower tier
    assert encoders.forgotten[-1] == "gone before"
    check_manager(manager)


async def test_what_is_removed_while_it_is_encoded_is_forgotten_behind_that() -> None:
    now, encoders = 0.0, FakeEncoders(at_once=False)
    manager = PICManager(LAYOUT, encoders, clock=lambda: now)
    asked = [asyncio.create_task(manager.acquire([wanted(name)])) for name in ("a-1", "b-1", "c-1")]
    await asyncio.sleep(0)
    assert manager.remove("a-2")  # of another method: all of the document goes
    manager.set_expiry("b-1", 5.0)
    now = 5.0
    manager.index.drop_expired()
    encoders.forgotten.clear()
    for task in asked:
        encoders.answer()
        (await task).release()
    assert encoders.forgotten == ["a-1", "b-1"]
    # wanted again meanwhile, it stays
    encoders.forgotten.clear()
    for number in range(2):
        asked[number] = asyncio.create_task(manager.acquire([wanted("d-1")]))
        await asyncio.sleep(0)
        if not number:
            manager.remove("d")
            encoders.forgotten.clear()
    for task in asked[:2]:
        encoders.answer()
        (await task).release()
    assert encoders.forgotten == []
    check_manager(manager)


async def test_a_failure_that_nobody_has_noticed_yet_is_no_hit() -> None:
    encoders = FakeEncoders(at_once=False)
    manager = PICManager(LAYOUT, encoders)
    failing = asyncio.create_task(manager.acquire([wanted("a")]))
    await asyncio.sleep(0)
    encoders.answer(error="NaN")
    encoders.at_once = True  # and no step of the loop in between
    lease = await manager.acquire([wanted("a"), wanted("b")])
    assert [document.tier for document in lease.documents] == ["encoded"] * 2
    assert isinstance((await asyncio.gather(failing, return_exceptions=True))[0], EncoderError)
    check_manager(manager)
    lease.release()


async def test_a_hit_that_expires_while_room_is_made_stays_until_its_request_ends() -> None:
    now, step = 0.0, 0.0

    def clock() -> float:
        nonlocal now
        now += step
        return now

    manager = PICManager(LAYOUT, FakeEncoders(), clock=clock)
    (await manager.acquire([wanted("a", 8)])).release()
    (await manager.acquire([wanted("b", 24)])).release()
    manager.set_expiry("a", 2.5)
    step = 1.0  # found in time, gone when room is made for the other one
    lease = await manager.acquire([wanted("a", 8), wanted("c", 8)])
    step = 0.0
    assert lease.documents[0].tier == "pool"
    assert not manager.lookup("a")
    blocks = [block for document in lease.documents for block in document.handle.blocks]
    assert len(set(blocks)) == len(blocks) == 4
    check_manager(manager)
    lease.release()
    check_manager(manager)


async def test_the_check_notices() -> None:
    manager = PICManager(LAYOUT, FakeEncoders())
    lease = await manager.acquire([wanted("a")])
    check_manager(manager)
    manager.free_blocks.extend(lease.handles[0].blocks)
    with pytest.raises(AssertionError):
        check_manager(manager)


SIZES = {name: 1 + 5 * index for index, name in enumerate("abcdef")}
NAMES = st.sampled_from("abcdef")
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.lists(NAMES, min_size=1, max_size=4)),
        st.tuples(st.just("hold"), st.just("abcdef")),
        st.tuples(st.sampled_from(["release", "cancel"]), st.integers(0, 20)),
        st.tuples(st.just("answer"), st.sampled_from([True, True, False])),
        st.tuples(st.sampled_from(["pin", "unpin", "remove", "expire"]), NAMES),
        st.tuples(st.just("later"), st.none()),
    ),
    min_size=10,
    max_size=60,
)


class Play:
    """Requests of a test, in the order in which they came, and the naive truth about them.

    With encoders that answer `at_once`, who waits does so for room: then nobody may be overtaken or forgotten.
    """

    def __init__(self, wait_seconds: float, *, at_once: bool) -> None:
        self.now, self.encoders = 0.0, FakeEncoders(at_once)
        self.manager = PICManager(LAYOUT, self.encoders, wait_seconds, clock=lambda: self.now)
        self.tasks: list[tuple[asyncio.Task[Lease], set[str]]] = []
        self.leases: list[Lease] = []

    async def move(self, what: str, value: Any) -> None:
        if what == "ask":
            task = asyncio.create_task(self.manager.acquire([wanted(name, SIZES[name]) for name in value]))
            self.tasks.append((task, set(value)))
        elif what == "hold":
            self.leases.append(self.manager.hold([wanted(name, SIZES[name]) for name in value]))
            held = {document.handle for document in self.leases[-1].documents}
            assert not held & {handle for _, handle, _ in self.encoders.open}
        elif what == "release" and self.leases:
            self.leases.pop(value % len(self.leases)).release()
        elif what == "cancel" and self.tasks:
            self.tasks[value % len(self.tasks)][0].cancel()
        elif what == "answer" and self.encoders.open:
            self.encoders.answer(error=None if value else "no")
        elif what == "expire":
            self.manager.set_expiry(value, 1.0)
        elif what in ("pin", "unpin", "remove"):
            getattr(self.manager, what)(value)
        elif what == "later" and not self.encoders.at_once:  # time gives room, of which nobody is told
            self.now += 1.0
        await self.settle()

    async def settle(self) -> None:
        await steps()
        check_manager(self.manager)
        for place, (task, names) in reversed(list(enumerate(self.tasks))):
            if not task.done():
                continue
            del self.tasks[place]
            if task.cancelled() or task.exception() is not None:
                assert task.cancelled() or isinstance(task.exception(), NO_PLACE)
                continue
            self.leases.append(task.result())
            # who came before and still waits was overtaken: only by one who took no room
            hits = all(document.tier == "pool" for document in task.result().documents)
            waiting = self.encoders.at_once and any(not earlier.done() for earlier, _ in self.tasks[:place])
            assert hits or not waiting, names
        # whoever has a lease has blocks that nobody else has
        owner: dict[int, str] = {}
        for document in (document for lease in self.leases for document in lease.documents):
            for block in document.handle.blocks:
                assert owner.setdefault(block, document.key) == document.key
        if self.tasks and self.encoders.at_once:
            assert not self.fits(self.tasks[0][1]), "the first in line could go on, but nobody has woken it"

    def fits(self, names: set[str]) -> bool:
        """Whether there is room for documents: free blocks, and those of documents that nobody wants to keep."""
        manager = self.manager
        missing = sum(LAYOUT.blocks_for(SIZES[name]) for name in names if not manager.lookup(name))
        loose = [e for e in manager.pool.entries.values() if not (e.references or e.key in manager.index.pins)]
        return missing <= len(manager.free_blocks) + sum(e.size for e in loose if e.key not in names)

    async def end(self) -> None:
        """Everybody who waits gets what they want once the others end: nobody starves, in as many rounds at most."""
        for name in SIZES:
            while self.manager.unpin(name):
                pass
        await self.settle()
        for _ in range(len(self.tasks) + 2):
            while self.encoders.open:
                self.encoders.answer()
            await self.settle()
            while self.leases:
                self.leases.pop().release()
            await self.settle()
        assert not self.tasks
        assert self.manager.references == self.manager.waiting == len(self.manager.queue) == 0
        for name in SIZES:
            self.manager.remove(name)
        assert len(self.manager.free_blocks) == LAYOUT.num_blocks


async def play(moves: list[tuple[str, Any]], wait_seconds: float = 1000.0, *, at_once: bool = True) -> None:
    game = Play(wait_seconds, at_once=at_once)
    for what, value in moves:
        await game.move(what, value)
    await game.end()


@settings(max_examples=350, deadline=None)
@given(STEPS, st.sampled_from([0.0, 1000.0]), st.booleans())
async def test_any_sequence_keeps_the_invariants_and_nobody_is_forgotten_overtaken_or_starved(
    moves: list[tuple[str, Any]], wait_seconds: float, at_once: bool
) -> None:
    await play(moves, wait_seconds, at_once=at_once)


async def test_the_property_would_notice_a_lost_wake_up_and_who_overtakes(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as faulty:
        faulty.setattr(WaitQueue, "wake", lambda self: None)
        with pytest.raises(AssertionError, match="nobody has woken it"):
            await play([("ask", ["f"]), ("ask", ["e"]), ("release", 0)])
    monkeypatch.setattr(WaitQueue, "__len__", lambda self: 0)
    with pytest.raises(AssertionError):
        await play([("ask", ["c"]), ("ask", ["f"]), ("ask", ["b"])])


async def test_waiting_is_bounded_and_a_pin_that_no_release_moves_is_refused_at_once() -> None:
    manager = PICManager(LAYOUT, FakeEncoders(), wait_seconds=0.05)
    lease = await manager.acquire([wanted("a", 20)])
    with pytest.raises(PoolFullError, match=r"within 0.05 s"):
        await manager.acquire([wanted("b", 20)])
    manager.wait_seconds = 1000.0
    waiting = asyncio.create_task(manager.acquire([wanted("b", 20)]))
    await steps()
    assert (len(manager.queue), waiting.done()) == (1, False)
    manager.pin("a")
    with pytest.raises(PoolPinnedError, match="pinned documents"):
        await manager.acquire([wanted("c", 20)])
    lease.release()
    with pytest.raises(PoolPinnedError):  # it came into the way while this one waited
        await waiting
    (await manager.acquire([wanted("a", 20), wanted("c", 12)])).release()
    check_manager(manager)


async def test_hits_pass_those_who_wait_for_room_but_not_for_ever() -> None:
    manager = PICManager(LAYOUT, FakeEncoders(), wait_seconds=1000.0)
    held = [await manager.acquire([wanted("a", 4)])]
    large = asyncio.create_task(manager.acquire([wanted("z", 32)]))
    await steps()
    small = asyncio.create_task(manager.acquire([wanted("b", 4)]))
    for waited in (0.0, 450.0):
        manager.queue._waiters[0].since -= waited
        held.append(await manager.acquire([wanted("a", 4)]))
    assert not small.done()  # there is room for it, but not its turn
    manager.queue._waiters[0].since -= 51.0  # more than half of the time that it may wait
    late = asyncio.create_task(manager.acquire([wanted("a", 4)]))
    await steps()
    assert not late.done()
    for lease in held:
        lease.release()
    (await large).release()
    for task in (small, late):
        (await task).release()
    assert manager.references == 0
    check_manager(manager)


async def test_over_http_a_request_waits_then_answers_and_one_that_leaves_is_gone() -> None:
    server = Server(wait_seconds=30.0)
    server.echo.gate, leave = asyncio.Event(), asyncio.Event()
    first = asyncio.create_task(server.chat(documents=[{"token_ids": [1] * 60}], stream=True))
    await until(lambda: server.echo.bodies)
    assert (await server.chat(documents=[{"token_ids": [3] * 50}])).status == 200  # beside it there is room
    two = chat(documents=[{"token_ids": [index] * 40} for index in (4, 5)])
    leaving = asyncio.create_task(server.post(CHAT, two, leave=leave))
    await until(lambda: len(server.manager.queue) >= 1)
    waiting = asyncio.create_task(server.chat(documents=[{"token_ids": [2] * 64}]))
    await until(lambda: len(server.manager.queue) >= 2)
    leave.set()
    assert (await leaving).status is None
    assert (await waiting).states == ["encoded"]  # its turn has come, and there is room for it
    server.echo.gate.set()
    await first
    server.check_idle()


async def test_full_of_documents_in_use_is_429_with_retry_after_when_the_wait_is_over() -> None:
    server = Server(wait_seconds=0.05)
    server.echo.gate = asyncio.Event()
    first = asyncio.create_task(server.chat(documents=[{"token_ids": [1] * 60}], stream=True))
    await until(lambda: server.echo.bodies)
    server.echo.gate, gate = None, server.echo.gate
    full = await server.chat(documents=[{"token_ids": [index] * 40} for index in (4, 5)])
    assert (full.status, full.headers["retry-after"]) == (429, "2")
    gate.set()
    await first
    server.check_idle()
    with pytest.raises(ValueError, match="wait_seconds"):
        ServeOptions("x", wait_seconds=-1)

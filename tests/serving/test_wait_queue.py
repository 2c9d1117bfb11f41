"""Requests that wait for room in the pool: in order, without lost wake-ups, and not for ever."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from comb_serving.api.routes import CHAT
from comb_serving.config.serve_options import ServeOptions
from comb_serving.manager.leases import Lease, PoolFullError, PoolPinnedError, WaitQueue, WantedDocument
from comb_serving.manager.manager import PICManager
from comb_serving.pool.shared_pool import PoolLayout
from tests.helpers.fakes import FakeEncoders, until
from tests.helpers.middleware_server import Server, chat
from tests.helpers.stores import check_manager

LAYOUT = PoolLayout(cross_layers=1, kv_heads=1, head_dim=2, num_blocks=8, block_size=4)
SIZES = {name: 1 + 5 * index for index, name in enumerate("abcdef")}


def wanted(name: str, tokens: int | None = None) -> WantedDocument:
    return WantedDocument(name, tuple(range(SIZES[name] if tokens is None else tokens)))


async def steps() -> None:
    for _ in range(6):
        await asyncio.sleep(0)


class Play:
    """Requests of a test, in the order in which they came, and the naive truth about them."""

    def __init__(self) -> None:
        self.manager = PICManager(LAYOUT, FakeEncoders(), wait_seconds=1000.0)
        self.tasks: list[tuple[asyncio.Task[Lease], set[str]]] = []
        self.leases: list[Lease] = []

    def ask(self, names: list[str]) -> None:
        task = asyncio.create_task(self.manager.acquire([wanted(name) for name in names]))
        self.tasks.append((task, set(names)))

    async def settle(self) -> None:
        await steps()
        check_manager(self.manager)
        for place, (task, names) in reversed(list(enumerate(self.tasks))):
            if not task.done():
                continue
            del self.tasks[place]
            if task.cancelled() or task.exception() is not None:
                assert task.cancelled() or isinstance(task.exception(), PoolPinnedError)
                continue
            self.leases.append(task.result())
            # who came before and still waits was overtaken: only by one who took no room
            hits = all(document.tier == "pool" for document in task.result().documents)
            assert hits or not any(not earlier.done() for earlier, _ in self.tasks[:place]), names
        if self.tasks:
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
        for _ in range(len(self.tasks) + 1):
            while self.leases:
                self.leases.pop().release()
            await self.settle()
        assert not self.tasks
        assert self.manager.references == len(self.manager.queue) == 0


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.lists(st.sampled_from("abcdef"), min_size=1, max_size=3, unique=True)),
        st.tuples(st.sampled_from(["release", "cancel"]), st.integers(0, 20)),
        st.tuples(st.sampled_from(["pin", "unpin", "remove"]), st.sampled_from("abcdef")),
    ),
    max_size=40,
)


async def play(moves: list[tuple[str, Any]]) -> None:
    game = Play()
    for what, value in moves:
        if what == "ask":
            if sum(LAYOUT.blocks_for(SIZES[name]) for name in value) <= LAYOUT.num_blocks:
                game.ask(value)
        elif what == "release" and game.leases:
            game.leases.pop(value % len(game.leases)).release()
        elif what == "cancel" and game.tasks:
            game.tasks[value % len(game.tasks)][0].cancel()
        elif what in ("pin", "unpin", "remove"):
            getattr(game.manager, what)(value)
        await game.settle()
    await game.end()


@settings(max_examples=250, deadline=None)
@given(STEPS)
async def test_nobody_is_forgotten_overtaken_or_starved(moves: list[tuple[str, Any]]) -> None:
    await play(moves)


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

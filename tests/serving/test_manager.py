"""The PIC manager over encoders that a test answers for."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from comb_serving.encoding.protocol import EncoderError
from comb_serving.manager.leases import DocumentsTooLargeError, Lease, PoolFullError, PoolPinnedError, WantedDocument
from comb_serving.manager.manager import PICManager
from comb_serving.pool.shared_pool import PoolLayout
from tests.helpers.fakes import FakeEncoders
from tests.helpers.stores import check_manager

LAYOUT = PoolLayout(cross_layers=1, kv_heads=1, head_dim=2, num_blocks=8, block_size=4)


def wanted(name: str, tokens: int = 4) -> WantedDocument:
    return WantedDocument(name, tuple(range(tokens)))


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


async def test_a_client_that_leaves_while_waiting_gives_back_everything() -> None:
    encoders = FakeEncoders(at_once=False)
    manager = PICManager(LAYOUT, encoders)
    leaving = asyncio.create_task(manager.acquire([wanted("a", 32)]))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    assert manager.references == 0
    manager.remove("a")
    assert len(manager.free_blocks) == 0  # the encoder still writes there
    encoders.answer()
    await asyncio.sleep(0)
    assert len(manager.free_blocks) == LAYOUT.num_blocks
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
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("acquire"), st.lists(st.sampled_from("abcdef"), min_size=1, max_size=4)),
        st.tuples(st.just("hold"), st.just("abcdef")),
        st.tuples(st.just("release"), st.integers(0, 20)),
        st.tuples(st.just("cancel"), st.integers(0, 20)),
        st.tuples(st.just("answer"), st.sampled_from([True, True, False])),
        st.tuples(st.sampled_from(["pin", "unpin", "remove", "expire"]), st.sampled_from("abcdef")),
        st.tuples(st.just("later"), st.none()),
    ),
    min_size=20,
    max_size=60,
)


@settings(max_examples=120, deadline=None)
@given(STEPS, st.sampled_from([0.0, 1000.0]))
async def test_any_sequence_keeps_the_invariants(steps: list[tuple[str, Any]], wait_seconds: float) -> None:
    now = 0.0
    encoders = FakeEncoders(at_once=False)
    manager = PICManager(LAYOUT, encoders, wait_seconds, clock=lambda: now)
    tasks: list[asyncio.Task[Lease]] = []
    leases: list[Lease] = []

    async def settle() -> None:
        for _ in range(4):
            await asyncio.sleep(0)
        for task in [task for task in tasks if task.done()]:
            tasks.remove(task)
            if not task.cancelled() and task.exception() is None:
                leases.append(task.result())
            elif not task.cancelled():
                assert isinstance(
                    task.exception(), PoolFullError | PoolPinnedError | EncoderError | DocumentsTooLargeError
                )
        # whoever has a lease has blocks that nobody else has
        owner: dict[int, str] = {}
        for lease in leases:
            for document in lease.documents:
                for block in document.handle.blocks:
                    assert owner.setdefault(block, document.key) == document.key
        check_manager(manager)

    for what, value in steps:
        if what == "acquire":
            tasks.append(asyncio.create_task(manager.acquire([wanted(name, SIZES[name]) for name in value])))
        elif what == "hold":
            leases.append(manager.hold([wanted(name, SIZES[name]) for name in value]))
            assert not {document.handle for document in leases[-1].documents} & {
                handle for _, handle, _ in encoders.open
            }
        elif what == "release" and leases:
            leases.pop(value % len(leases)).release()
        elif what == "cancel" and tasks:
            tasks[value % len(tasks)].cancel()
        elif what == "answer" and encoders.open:
            encoders.answer(error=None if value else "no")
        elif what == "expire":
            manager.set_expiry(value, 1.0)
        elif what in ("pin", "unpin", "remove"):
            getattr(manager, what)(value)
        elif what == "later":
            now += 1.0
        await settle()
    while encoders.open or leases:
        while encoders.open:
            encoders.answer()
        await settle()  # who now has room asks the encoders in turn
        while leases:
            leases.pop().release()
        await settle()
    assert not tasks  # whoever waited for room had it
    assert manager.references == manager.waiting == 0
    check_manager(manager)
    for name in SIZES:
        manager.remove(name)
    assert len(manager.free_blocks) == LAYOUT.num_blocks

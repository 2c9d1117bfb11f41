"""Attention to documents in blocks: the plain way, the plan of the work, and the kernels where there is no GPU."""

from __future__ import annotations

import heapq

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from comb.kernels.dispatch import attend
from comb.kernels.dispatch import why_plain_attention as why_plain
from comb.kernels.launch import Launch
from comb.kernels.paged.attention import BlockTable, PagedBatch, attend_plain
from comb.kernels.paged.plan import PagedLaunch, PagedPlan, make_plan, to_device
from tests.helpers.paged_cases import by_hand, in_fp8, paged_case

CPU = torch.device("cpu")


def test_a_table_names_filled_slots_only() -> None:
    table = BlockTable([(5, (3, 1)), (4, (0,)), (1, (5,))], 4)
    assert table.last.tolist() == [15, 4, 3, 20]
    assert table.slots().tolist() == [12, 13, 14, 15, 4, 0, 1, 2, 3, 20]
    assert len(table.slots()) == 10
    with pytest.raises(ValueError, match="5 tokens don't fill 1 blocks of 4"):
        BlockTable([(5, (3,))], 4)
    with pytest.raises(ValueError, match="beyond"):
        BlockTable([(1, (2**30,))], 4)


def test_the_plain_way_is_softmax_over_own_documents() -> None:
    query, layer, batch = paged_case(torch.float32)
    torch.testing.assert_close(attend(query, layer, batch).double(), by_hand(query, layer, batch), rtol=0, atol=1e-6)
    small = in_fp8(layer)
    found = attend_plain(query, small, batch)
    torch.testing.assert_close(found.double(), by_hand(query, small, batch), rtol=0, atol=1e-6)
    # eight bits are near the truth, and another row's documents are not
    error = (found - by_hand(query, layer, batch)).abs().max()
    assert 1e-4 < error < 0.1
    turned = PagedBatch(batch.counts, batch.tables[1:] + batch.tables[:1])
    assert (attend_plain(query, layer, turned) - found).abs().max() > 0.5
    # what lies behind a document's end would show
    batch.tables[0].last[1] += 1
    batch.tables[0]._slots.clear()
    wrong = attend_plain(query, layer, batch).isnan().flatten(1).all(1)
    assert wrong[: batch.counts[0]].all()
    assert not wrong[batch.counts[0] :].any()


@st.composite
def batches(draw: st.DrawFn) -> PagedBatch:
    block, free = draw(st.integers(1, 5)), iter(range(10_000))
    rows = draw(
        st.lists(st.tuples(st.integers(1, 70), st.lists(st.integers(1, 40), min_size=1, max_size=4)), min_size=1)
    )
    tables = [
        BlockTable([(tokens, [next(free) for _ in range(-(-tokens // block))]) for tokens in documents], block)
        for _, documents in rows
    ]
    return PagedBatch(tuple(count for count, _ in rows), tuple(tables))


@settings(deadline=None, max_examples=60)
@given(
    batch=batches(), shared=st.sampled_from([1, 3, 8, 20]), programs=st.integers(1, 200),
    least=st.sampled_from([1, 16, 500]),
)  # fmt: skip
def test_a_plan_shows_each_token_its_own_blocks_once(batch: PagedBatch, shared: int, programs: int, least: int) -> None:
    launch = Launch(programs=programs)
    plan = make_plan(batch, heads=2 * shared, groups=2, device=CPU, sizes=PagedLaunch(launch, launch, 64, least))
    parts: dict[int, list[int]] = {}
    seen: dict[int, list[int]] = {}
    direct, used = set(), []
    for items in plan.launches:
        for token, count, begin, end, part in items.numbers.tolist():
            assert shared <= count * shared <= items.rows
            assert begin < end
            for one in range(count):
                seen.setdefault(token + one, []).extend(plan.table[begin:end].tolist())
                if part < 0:
                    direct.add(token + one)
                else:
                    parts.setdefault(token + one, []).append(part + one)
                    used.append(part + one)
    at = 0
    for count, table in zip(batch.counts, batch.tables, strict=True):
        for token in range(at, at + count):
            assert sorted(seen.pop(token)) == sorted(table.last.tolist())
        at += count
    assert not seen
    assert sorted(used) == list(range(plan.partial_rows))
    merges = {token: [first + step * one for one in range(count)] for token, first, step, count in plan.merges.tolist()}
    assert merges == parts
    assert direct | set(merges) == set(range(sum(batch.counts)))
    assert not direct & set(merges)


def makespan(plan: PagedPlan, groups: int, places: int) -> tuple[int, float]:
    """Blocks that the last program ends after, where each goes to the place that is free first, and all over places."""
    ends, total = [0] * places, 0
    for items in plan.launches:
        for size in (items.numbers[:, 3] - items.numbers[:, 2]).repeat_interleave(groups).tolist():
            heapq.heapreplace(ends, ends[0] + size)
            total += size
    return max(ends), total / places


LENGTHS = {
    "one": [2000], "few": [250] * 8, "8 x 8 x 4000 tokens": [2000] * 8, "32 x 8 x 4000 tokens": [2000] * 32,
    "many": [250] * 128, "long": [16_000] * 4, "one long": [8000] + [50] * 63, "two": [10, 8000],
    "mixed": [1 + 37 * n * n % 3989 for n in range(40)], "a few mixed": [100 + 397 * n * n % 3989 for n in range(8)],
}  # fmt: skip


@pytest.mark.parametrize("places", [264, 396, 660])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=list(LENGTHS))
def test_programs_end_together(lengths: list[int], places: int) -> None:
    """As on a GPU of 132 multiprocessors, which hold 2, 3 or 5 programs each."""
    launch, tables = Launch(programs=places), []
    for length in lengths:
        tables.append(BlockTable([(1, (0,))], 16))
        tables[-1].last = np.full(length, 15, dtype=np.int32)
    batch = PagedBatch((1,) * len(lengths), tuple(tables))
    found, ideal = makespan(make_plan(batch, heads=32, groups=8, device=CPU, sizes=PagedLaunch(launch)), 8, places)
    assert found <= 1.15 * ideal
    # what is compared with: shares that are as large as a place's mean work, and the rest of each row
    share = -(-8 * sum(lengths) // places)
    rest = [min(share, length - first) for length in lengths for first in range(0, length, share)]
    uneven = [0] * places
    for size in np.repeat(rest, 8).tolist():
        heapq.heapreplace(uneven, uneven[0] + size)
    assert max(uneven) >= found / 1.05


def test_shares_fill_the_programs_and_grow_with_the_documents_of_the_step_alone() -> None:
    launch = Launch(programs=64)
    for length in (16, 1000, 16_000):
        batch = PagedBatch((1, 1, 1, 1), tuple(BlockTable([(length, range(-(-length // 16)))], 16) for _ in range(4)))
        plan = make_plan(batch, heads=8, groups=2, device=CPU, sizes=PagedLaunch(launch, launch, least_keys=128))
        (items,) = plan.launches
        sizes = items.numbers[:, 3] - items.numbers[:, 2]
        assert len(items.numbers) * 2 <= 8 * 64 + 4 * 2
        assert len(plan.table) == 4 * -(-length // 16)
        if length > 1000:
            assert len(items.numbers) * 2 >= 60
            # a place takes some shares one after the other
            assert int(sizes.max()) <= -(-4 * 2 * length // 16 // 64)
        else:
            assert int(sizes.max()) <= max(8, -(-length // 16))


def test_arrays_arrive_as_they_were() -> None:
    import numpy as np

    arrays = [np.arange(6, dtype=np.int32).reshape(2, 3), np.zeros((0, 4), dtype=np.int32), np.int32([7])]
    assert [tensor.tolist() for tensor in to_device(arrays, CPU)] == [[[0, 1, 2], [3, 4, 5]], [], [7]]


def test_reasons_for_the_plain_way(monkeypatch: pytest.MonkeyPatch) -> None:
    query, layer, _ = paged_case(torch.float32)
    monkeypatch.setattr("comb.kernels.dispatch.has_triton", lambda: True)
    monkeypatch.setattr("comb.kernels.dispatch.INTERPRETED", False)
    assert why_plain(query, layer) == "device cpu"
    monkeypatch.setattr("comb.kernels.dispatch.INTERPRETED", True)
    assert why_plain(query, layer) == why_plain(query, in_fp8(layer)) == why_plain(query.half(), in_fp8(layer)) == ""
    assert why_plain(query.double(), layer) == "float64 queries"
    assert why_plain(query.half(), layer) == "float16 queries, float32 keys"
    assert why_plain(query.to("meta"), layer) == "the pool is on cpu, queries are on meta"
    assert why_plain(torch.zeros(1, 2, 300), layer) == "heads of more than 256 channels"
    assert why_plain(torch.zeros(1, 200, 10), layer) == "more than 64 query heads to a key/value head"
    monkeypatch.setattr("comb.kernels.dispatch.has_triton", lambda: False)
    assert why_plain(query, layer) == "triton is not installed"

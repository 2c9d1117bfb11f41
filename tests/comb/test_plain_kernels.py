"""What computes where there is no GPU: the plain ways, the plan of the work, and what the kernels' checks notice."""

from __future__ import annotations

import heapq
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from comb.kernels.dispatch import attend, why_plain_step
from comb.kernels.dispatch import why_plain_attention as why_plain
from comb.kernels.launch import Launch
from comb.kernels.mac.mac_config import MacConfig
from comb.kernels.paged.attention import BlockTable, PagedBatch, attend_plain
from comb.kernels.paged.plan import PagedLaunch, PagedPlan, make_plan
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


def test_reasons_for_the_plain_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    query, layer, _ = paged_case(torch.float32)

    def step(dtype: torch.dtype, keys: torch.dtype | None = None, *, width: int = 8, heads: int = 2) -> str:
        some = torch.zeros(1, 1, 3, width, dtype=keys or dtype)
        return why_plain_step(torch.zeros(1, heads, width, dtype=dtype), some, some)

    monkeypatch.setattr("comb.kernels.dispatch.has_triton", lambda: True)
    monkeypatch.setattr("comb.kernels.dispatch.INTERPRETED", False)
    assert why_plain(query, layer) == step(torch.float32) == "device cpu"
    monkeypatch.setattr("comb.kernels.dispatch.INTERPRETED", True)
    assert why_plain(query, layer) == why_plain(query, in_fp8(layer)) == why_plain(query.half(), in_fp8(layer)) == ""
    assert step(torch.float32) == step(torch.bfloat16) == ""
    assert why_plain(query.double(), layer) == "float64 queries"
    assert step(torch.float64) == "float64 queries, float64 keys"
    assert why_plain(query.half(), layer) == "float16 queries, float32 keys"
    assert step(torch.float32, torch.bfloat16) == "float32 queries, bfloat16 keys"
    assert why_plain(query.to("meta"), layer) == "the pool is on cpu, queries are on meta"
    for reason in (why_plain(torch.zeros(1, 2, 300), layer), step(torch.float32, width=320)):
        assert reason == "heads of more than 256 channels"
    for reason in (why_plain(torch.zeros(1, 200, 10), layer), step(torch.float32, heads=65)):
        assert reason == "more than 64 query heads to a key/value head"
    monkeypatch.setattr("comb.kernels.dispatch.has_triton", lambda: False)
    assert why_plain(query, layer) == step(torch.float32) == "triton is not installed"


# ---- what the checks of a GPU's kernels notice, by answers of the plain way with faults in them ----


@pytest.fixture
def cases() -> Any:
    pytest.importorskip("triton", reason="the cases know the kernels: pip install triton")
    from comb.kernels import cases

    return cases


def paged(cases: Any, dtype: torch.dtype, *, fp8: bool = False) -> Any:
    return cases.PagedCase(2, 4, 500, 1, dtype, fp8, heads=4, groups=2, width=64).make(CPU)


def mac(cases: Any, hits: float, dtype: torch.dtype) -> Any:
    config = MacConfig(window=64, band=128, tau=0.6, min_length=0, max_chain=None, max_drift=False)
    return cases.MacCase(config, 2, 3000, hits, dtype, heads=4, groups=2, width=64).make(CPU)


@pytest.mark.parametrize("fp8", [False, True], ids=["plain", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_paged_checks_take_rounding_and_nothing_else(cases: Any, dtype: torch.dtype, fp8: bool) -> None:
    call = paged(cases, dtype, fp8=fp8)
    assert call.error(call.rival()) < call.bound / 2
    wrong = {name: call.error(make()) for name, make in call.wrong.items()}
    assert len(wrong) == 3
    # one tile in 31 of one row: a sixth of its answer, however small attention to noise is
    assert min(wrong.values()) > 5 * call.bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("hits", [0.0, 0.5, 1.0])
def test_mac_checks_take_rounding_and_nothing_else(cases: Any, hits: float, dtype: torch.dtype) -> None:
    call = mac(cases, hits, dtype)
    step, rings = call.plain()
    assert call.error((replace(step, output=step.output.to(dtype)), rings)) < call.bound / 2
    wrong = {name: call.error(make()) for name, make in call.wrong.items()}
    assert len(wrong) == 2
    assert min(wrong.values()) > 4 * call.bound
    # the exact attention that kernels are timed against
    assert call.rival_error(call.rival()) < call.bound
    assert min(call.rival_error(make()) for make in call.wrong_rivals.values()) > 10 * call.bound
    rings.pos[0, 0] += 1  # a ring that was not written
    assert call.error((step, rings)) == float("inf")


def test_a_fault_says_what_is_wrong(cases: Any) -> None:
    call = paged(cases, torch.bfloat16)
    right = replace(call, answer=call.rival)
    errors, fault = right.fault()
    assert fault == ""
    assert errors["least_wrong"] > 5 * call.bound
    broken = replace(call, answer=call.wrong["a tile left out"]).fault()[1]
    assert broken.startswith("the kernel is off by 0.")
    assert "compared with" in replace(right, rival=call.wrong["scores a tenth too large"]).fault()[1]
    # a check that would let a wrong kernel pass is no check
    assert replace(right, bound=0.2).fault()[1].startswith("the check would hardly notice a tile left out")
    assert replace(right, answer=lambda: call.rival() * float("nan")).fault()[1] != ""


def test_errors_are_of_each_vector_alone(cases: Any) -> None:
    wanted = torch.tensor([[3.0, 4.0], [0.03, 0.04]])
    assert cases.relative_error(wanted, wanted) == 0
    off = wanted.clone()
    off[1, 0] += 0.01
    assert cases.relative_error(off, wanted) == pytest.approx(0.2)
    off[0, 0] = float("nan")
    assert cases.relative_error(off, wanted) == float("inf")
    assert cases.relative_error(torch.zeros(1, 2), torch.zeros(1, 2)) == 0

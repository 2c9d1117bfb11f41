"""The kernels of paged attention under Triton's interpreter.

New memory is filled with NaN, and so is every slot of the pool that no row may read.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from comb.kernels.cases import relative_error
from comb.kernels.dispatch import attend
from comb.kernels.dispatch import why_plain_attention as why_plain
from comb.kernels.launch import Launch
from comb.kernels.paged import kernel as paged_module
from comb.kernels.paged import plan as plan_module
from comb.kernels.paged.attention import PagedBatch, PagedLayer, attend_plain
from comb.kernels.paged.kernel import attend_paged
from comb.kernels.paged.plan import PagedLaunch
from tests.helpers.paged_cases import by_hand, in_fp8, paged_case
from tests.interpreted.faults import distance, mutate, unwritten_memory_is_nan, watch_launches  # noqa: F401  a fixture

# up to many shares of one block each; some of whole rows; everything in one
SHARES = {
    "blocks": PagedLaunch(Launch(key_tile=16, programs=300), Launch(key_tile=32, programs=300), 16, 1),
    "some": PagedLaunch(Launch(key_tile=16, programs=12), Launch(key_tile=16, programs=12), 32, 24),
    "whole": PagedLaunch(least_keys=1000),
}
BOUNDS = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 3e-2}


@pytest.mark.parametrize("shares", SHARES)
@pytest.mark.parametrize("fp8", [False, True], ids=["plain", "fp8"])
@pytest.mark.parametrize("dtype", BOUNDS)
def test_kernel_is_the_plain_way_and_float64(dtype: torch.dtype, fp8: bool, shares: str) -> None:
    query, layer, batch = paged_case(dtype)
    if fp8:
        layer = in_fp8(layer)
    assert why_plain(query, layer) == ""
    expected = by_hand(query, layer, batch)
    found = attend_paged(query, layer, batch, SHARES[shares])
    assert found.dtype == dtype
    assert torch.equal(found, attend_paged(query, layer, batch, SHARES[shares]))
    bound = BOUNDS[dtype]
    assert distance(found, expected) < bound
    assert distance(found, attend_plain(query, layer, batch)) < bound
    # twice as far from another document's answer
    assert distance(found.roll(1, 0), expected) > 0.3


@pytest.mark.parametrize(
    ("heads", "groups", "width", "block"), [(5, 1, 16, 16), (4, 4, 24, 3), (18, 1, 8, 1), (2, 2, 33, 5)]
)
def test_odd_sizes(heads: int, groups: int, width: int, block: int) -> None:
    """More heads to a key/value head than a tile's least rows, pages of one token, blocks that are no power of two."""
    query, layer, batch = paged_case(torch.float32, heads=heads, groups=groups, width=width, block=block, seed=1)
    sizes = replace(SHARES["some"], prefill_rows=64)
    assert distance(attend_paged(query, layer, batch, sizes), by_hand(query, layer, batch)) < 1e-5


def test_small_values_in_fp8_keep_their_precision_beside_queries_in_half() -> None:
    """A weight times the scale of values around 1e-3 is below what float16 can hold."""
    query, layer, batch = paged_case(torch.float16)
    small = in_fp8(replace(layer, values=(layer.values.float() * 1e-3).half()))
    expected = by_hand(query, small, batch)
    assert relative_error(attend_paged(query, small, batch, SHARES["some"]), expected) < 1e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("smallest", [0, -1])
def test_scales_may_differ_by_any_factor(dtype: torch.dtype, smallest: int) -> None:
    """A weight times a scale may be beyond float16 on either side; only the largest one counts."""
    query, layer, batch = paged_case(torch.float32)
    layer, query = scaled(in_fp8(layer), smallest), query.to(dtype)
    expected = by_hand(query, layer, batch)
    assert relative_error(attend_paged(query, layer, batch, SHARES["some"]), expected) < BOUNDS[dtype]


def scaled(layer: PagedLayer, smallest: int) -> PagedLayer:
    """In fp8, with scales of values that grow from slot to slot, or shrink."""
    assert layer.value_scales is not None
    factors = torch.logspace(-9, 4, len(layer.value_scales))
    return replace(layer, value_scales=layer.value_scales * (factors if smallest == 0 else factors.flip(0))[:, None])


def test_queries_may_be_strided_and_layers_share_a_plan() -> None:
    query, layer, batch = paged_case(torch.float32)
    wide = torch.full((*query.shape[:2], 25), float("nan"))
    wide[..., 3:13] = query
    first = attend_paged(wide[..., 3:13], layer, batch, SHARES["some"])
    assert torch.equal(first, attend_paged(query, layer, batch, SHARES["some"]))
    assert len(batch.plans) == 1
    assert torch.equal(attend(query, layer, batch), attend_paged(query, layer, batch))
    assert len(batch.plans) == 2


def test_launches_are_on_the_device_of_the_query(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = watch_launches(monkeypatch, (paged_module, "_paged_kernel"), (paged_module, "_paged_merge_kernel"))
    query, layer, batch = paged_case(torch.float32)
    attend_paged(query, layer, batch, SHARES["some"])
    assert {name: len(devices) for name, devices in launches.items()} == {"_paged_kernel": 2, "_paged_merge_kernel": 1}
    assert all(device is query for devices in launches.values() for device in devices)


def test_a_row_alone_is_the_row_in_the_batch_and_order_does_not_matter() -> None:
    query, layer, batch = paged_case(torch.float32)
    whole = attend_paged(query, layer, batch, SHARES["whole"])
    at = 0
    for count, table in zip(batch.counts, batch.tables, strict=True):
        alone = attend_paged(query[at : at + count], layer, PagedBatch((count,), (table,)), SHARES["whole"])
        assert distance(alone, whole[at : at + count]) < 1e-6
        at += count
    back = PagedBatch(batch.counts[::-1], batch.tables[::-1])
    parts = list(query.split(list(batch.counts)))[::-1]
    turned = attend_paged(torch.cat(parts), layer, back, SHARES["blocks"])
    assert distance(torch.cat(list(turned.split(list(back.counts)))[::-1]), whole) < 1e-5


MUTANTS = {
    "holes are read": (
        paged_module, "_paged_kernel", "inside = (entry < end) & (slot <= last)", "inside = entry < end"
    ),
    "no rescaling": (paged_module, "_paged_kernel", "o = o * shrink[:, None] + ", "o = o + "),
    "first key/value head": (paged_module, "_paged_kernel", "slot * stride_vs + g * stride_vg", "slot * stride_vs"),
    "scale of the keys left out": (
        paged_module, "_paged_kernel", "scores *= tl.load(key_scale_ptr", "scores += 0 * tl.load(key_scale_ptr"
    ),
    "units not rescaled": (paged_module, "_paged_kernel", "shrink *= unit * inverse", "shrink *= 1.0"),
    "shares weigh the same": (paged_module, "_paged_merge_kernel", "weights = tl.exp2(lse - higher)",
                              "weights = tl.where(inside, 1.0, 0.0)"),
    "a share left out": (paged_module, "_paged_merge_kernel", "inside = one + column < count",
                         "inside = one + column < count - 1"),
}  # fmt: skip


def _compare() -> None:
    query, plain, batch = paged_case(torch.float32)
    for layer in (in_fp8(plain), scaled(in_fp8(plain), 0)):
        expected = by_hand(query, layer, batch)
        for sizes in (SHARES["some"], SHARES["blocks"]):
            batch.plans.clear()
            assert relative_error(attend_paged(query, layer, batch, sizes), expected) < 1e-4


@pytest.mark.parametrize(("module", "name", "old", "new"), MUTANTS.values(), ids=list(MUTANTS))
def test_a_wrong_kernel_is_noticed(
    module: Any, name: str, old: str, new: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    mutate(module, name, old, new, monkeypatch, tmp_path)
    with pytest.raises(AssertionError):
        _compare()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("part[item] + number * size[item], -1)", "part[item], -1)"),
        ("for one in (0, 1))", "for one in (0, 2))"),
    ],
    ids=["shares in one place", "the neighbour's blocks"],
)
def test_a_wrong_plan_is_noticed(old: str, new: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    mutate(plan_module, "_items", old, new, monkeypatch, tmp_path)
    with pytest.raises(AssertionError):
        _compare()


def test_the_right_kernels_pass_what_wrong_ones_do_not() -> None:
    _compare()

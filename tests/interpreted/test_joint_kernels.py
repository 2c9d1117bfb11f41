"""The kernels of joint attention under Triton's interpreter.

New memory is filled with NaN, and so is every slot of pool and cache that no token may read.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from comb.kernels.joint import kernel as joint_module
from comb.kernels.joint.attention import join_, join_plain_, own_masses
from comb.kernels.joint.batch import joint_batches
from comb.kernels.paged import kernel as paged_module
from comb.kernels.paged.attention import attend_plain, why_plain
from tests.helpers.joint_cases import JointCase, joint_case, turning
from tests.helpers.paged_cases import in_fp8
from tests.interpreted.faults import distance, mutate, unwritten_memory_is_nan, watch_launches  # noqa: F401  a fixture

BOUNDS = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 4e-2}
CPU = torch.device("cpu")


def joined(case: JointCase, most: int = 4096) -> torch.Tensor:
    assert why_plain(case.query, case.layer) == ""
    output = case.output.clone()
    for batch in joint_batches(case.runs, CPU, most):
        join_(output, case.query, case.layer, case.own, batch, turning, case.scale)
    return output


def joined_plainly(case: JointCase) -> torch.Tensor:
    output = case.output.clone()
    (batch,) = joint_batches(case.runs, CPU)
    turned = batch.turned(turning, case.scale)
    mass = torch.empty(len(batch.readers), case.query.shape[1])
    read = attend_plain(case.query, case.layer, batch.batch, mass=mass, turned=turned)
    join_plain_(output, own_masses(case.query, case.own, batch, case.scale), read, mass, batch)
    return output


@pytest.fixture(params=[512, 16], ids=["one share", "many shares"], autouse=True)
def shares(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joint_module, "SHARE", request.param)
    monkeypatch.setattr(joint_module, "KEYS", 16)
    monkeypatch.setattr(joint_module, "READ", 4)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("dtype", BOUNDS)
def test_kernels_are_the_plain_way_and_float64(dtype: torch.dtype, window: int | None) -> None:
    case = joint_case(dtype, window=window)
    expected = case.expected()
    found = joined(case)
    assert found.dtype == dtype
    assert distance(found, expected) < BOUNDS[dtype]
    assert distance(found, joined_plainly(case)) < BOUNDS[dtype]
    assert torch.equal(found[[0, 9]], case.output[[0, 9]])
    assert torch.equal(found, joined(case))  # the same to the bit whenever it is computed
    assert distance(joined(case, most=10), expected) < BOUNDS[dtype]
    assert distance(case.output, expected) > 0.3


@pytest.mark.parametrize(("heads", "groups", "width"), [(5, 1, 16), (4, 4, 24), (18, 1, 8), (2, 2, 33)])
@pytest.mark.parametrize("scattered", [False, True], ids=["packed", "strided"])
def test_odd_sizes(heads: int, groups: int, width: int, scattered: bool) -> None:
    case = joint_case(torch.float32, heads=heads, groups=groups, width=width, scattered=scattered, seed=1)
    assert distance(joined(case), case.expected()) < 1e-5


def test_documents_in_fp8() -> None:
    case = joint_case(torch.bfloat16)
    case = replace(case, layer=in_fp8(case.layer))
    assert distance(joined(case), joined_plainly(case)) < BOUNDS[torch.bfloat16]


def test_a_layer_takes_three_launches_or_four(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("_own_mass_kernel", "_join_kernel"), ("_paged_kernel", "_paged_merge_kernel")
    launches = watch_launches(
        monkeypatch, *((joint_module, name) for name in names[0]), *((paged_module, name) for name in names[1])
    )
    case = joint_case(torch.float32)
    case.runs = [case.runs[0], replace(case.runs[2], count=1)]  # a step of decoding
    joined(case)
    assert {name: len(devices) for name, devices in launches.items()} == {
        "_own_mass_kernel": 1, "_join_kernel": 1, "_paged_kernel": 1, "_paged_merge_kernel": 0
    }  # fmt: skip
    assert all(device is case.query for devices in launches.values() for device in devices)


MUTANTS = {
    "not turned": (paged_module, "_paged_kernel", "cosine[None, :] + other * sine[None, :]", "cosine[None, :]"),
    "turned the other way": (
        paged_module, "_paged_kernel", "channel < TURNED // 2, -sine, sine)", "channel < TURNED // 2, sine, -sine)"
    ),
    "another token's query": (
        paged_module, "_paged_kernel", "tl.load(row_ptr + at, mask=own", "tl.load(row_ptr + at * 0, mask=own"
    ),
    "later keys are seen": (joint_module, "_own_mass_kernel", "<= place[:, None])", "<= place[:, None] + 1)"),
    "another request's keys": (
        joint_module, "_own_mass_kernel", "table_ptr + row * stride_table", "table_ptr + stride_table"
    ),
    "first key/value head": (joint_module, "_own_mass_kernel", "+ g * stride_kg", "+ 0 * stride_kg"),
    "another token's readings": (
        joint_module, "_join_kernel", "tl.load(order_ptr + one + column", "tl.load(order_ptr + (one + column) // 2"
    ),
    "no rescaling": (joint_module, "_join_kernel", "o = o * shrink + ", "o = o + "),
    "own tokens weigh one": (joint_module, "_join_kernel", "highest = top + tl.log2", "highest = 0 * tl.log2"),
}  # fmt: skip


@pytest.mark.parametrize(("module", "name", "old", "new"), MUTANTS.values(), ids=list(MUTANTS))
def test_a_wrong_kernel_is_noticed(
    module: Any, name: str, old: str, new: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    case = joint_case(torch.float32)
    expected = case.expected()
    assert distance(joined(case), expected) < 1e-5
    mutate(module, name, old, new, monkeypatch, tmp_path)
    assert not distance(joined(case), expected) < 1e-3

"""Documents and own tokens in one softmax over paged keys: the plain way against float64, and the kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from comb.kernels.joint import attention as joint
from comb.kernels.joint.attention import join_, own_masses
from comb.kernels.joint.batch import joint_batches
from tests.helpers.joint_cases import JointCase, joint_case, turning

CPU = torch.device("cpu")


def joined(case: JointCase, most: int = 4096) -> torch.Tensor:
    output = case.output.clone()
    for batch in joint_batches(case.runs, CPU, most):
        join_(output, case.query, case.layer, case.own, batch, turning, case.scale)
    return output


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("most", [4096, 10, 1])
def test_one_softmax_over_own_tokens_and_documents(window: int | None, most: int) -> None:
    case = joint_case(torch.float32, window=window)
    expected = case.expected()
    found = joined(case, most)
    assert (found - expected).abs().max() < 2e-6
    assert torch.equal(found[[0, 9]], case.output[[0, 9]])  # they read nothing, to the bit
    for run in case.runs:
        here = slice(run.token, run.token + run.count)
        assert (case.output[here] - expected[here]).abs().amax((1, 2)).min() > 0.05  # each of the others does


def test_places_and_scale_count() -> None:
    case = joint_case(torch.float32)
    expected = case.expected()
    moved = [replace(run, starts=run.starts + 1) for run in case.runs]
    for wrong in (replace(case, runs=moved), replace(case, scale=1.0)):
        assert (joined(wrong) - expected).abs().max() > 0.01


def test_keys_in_a_layout_of_their_own_are_read_by_slots() -> None:
    case = joint_case(torch.float32)
    assert torch.equal(joined(replace(case, own=replace(case.own, keys=None))), joined(case))


def test_many_own_keys_are_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    case = joint_case(torch.float32)
    (batch,) = joint_batches(case.runs, CPU)
    whole = own_masses(case.query, case.own, batch, case.scale)
    monkeypatch.setattr(joint, "_AT_ONCE", 1000)
    assert (own_masses(case.query, case.own, batch, case.scale) - whole).abs().max() < 1e-6

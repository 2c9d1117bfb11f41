"""What the checks of a GPU's kernels notice, by answers of the plain way with faults in them: no kernel runs here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the cases know the kernels: pip install triton")

CPU = torch.device("cpu")


def paged(dtype: torch.dtype, *, fp8: bool = False, queries: int = 1) -> Any:
    from comb.kernels.cases import PagedCase

    return PagedCase(2, 4, 500, queries, dtype, fp8, heads=4, groups=2, width=64)


def mac(hits: float, dtype: torch.dtype) -> Any:
    from comb.kernels.cases import MacCase
    from comb.kernels.mac.mac_config import MacConfig

    config = MacConfig(window=64, band=128, tau=0.6, min_length=0, max_chain=None, max_drift=False)
    return MacCase(config, 2, 3000, hits, dtype, heads=4, groups=2, width=64)


@pytest.mark.parametrize("fp8", [False, True], ids=["plain", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_paged_checks_take_rounding_and_nothing_else(dtype: torch.dtype, fp8: bool) -> None:
    call = paged(dtype, fp8=fp8).make(CPU)
    assert call.error(call.rival()) < call.bound / 2
    wrong = {name: call.error(make()) for name, make in call.wrong.items()}
    assert len(wrong) == 3
    # one tile in 31 of one row: a sixth of its answer, however small attention to noise is
    assert min(wrong.values()) > 5 * call.bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("hits", [0.0, 0.5, 1.0])
def test_mac_checks_take_rounding_and_nothing_else(hits: float, dtype: torch.dtype) -> None:
    call = mac(hits, dtype).make(CPU)
    step, rings = call.plain()
    assert call.error((replace(step, output=step.output.to(dtype)), rings)) < call.bound / 2
    wrong = {name: call.error(make()) for name, make in call.wrong.items()}
    assert len(wrong) == 2
    assert min(wrong.values()) > 4 * call.bound
    # the exact attention that kernels are timed against
    assert call.rival_error(call.rival()) < call.bound
    assert min(call.rival_error(make()) for make in call.wrong_rivals.values()) > 10 * call.bound


def test_a_ring_that_was_not_written_is_noticed() -> None:
    call = mac(0.5, torch.float32).make(CPU)
    step, rings = call.plain()
    rings.pos[0, 0] += 1
    assert call.error((step, rings)) == float("inf")


def test_a_fault_says_what_is_wrong() -> None:
    call = paged(torch.bfloat16).make(CPU)
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


def test_errors_are_of_each_vector_alone() -> None:
    from comb.kernels.cases import relative_error

    wanted = torch.tensor([[3.0, 4.0], [0.03, 0.04]])
    assert relative_error(wanted, wanted) == 0
    off = wanted.clone()
    off[1, 0] += 0.01
    assert relative_error(off, wanted) == pytest.approx(0.2)
    off[0, 0] = float("nan")
    assert relative_error(off, wanted) == float("inf")
    assert relative_error(torch.zeros(1, 2), torch.zeros(1, 2)) == 0

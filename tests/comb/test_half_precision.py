"""A model that a CPU multiplies much more slowly than it would in float32 is told of; nothing else is."""

import logging
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from comb.backbones import loading


@pytest.fixture(autouse=True)
def _not_said_yet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(loading, "NOTICED", 100)
    loading._warned.clear()
    yield
    loading._warned.clear()


def _said(model: nn.Module, caplog: pytest.LogCaptureFixture) -> list[str]:
    with caplog.at_level(logging.WARNING, loading.__name__):
        loading.warn_if_slow(model)
    return caplog.messages


def test_a_slow_dtype_is_told_once_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loading, "slowdown", lambda dtype: 68.0)
    model = nn.Linear(10, 10).to(torch.bfloat16)
    assert _said(model, caplog) == [
        "this CPU multiplies bfloat16 some 68 times slower than float32: load the model with dtype=float32 "
        "(--dtype float32; model.dtype=float32 when training)"
    ]
    assert len(_said(model, caplog)) == 1


@pytest.mark.parametrize(
    ("model", "times"),
    [
        (nn.Linear(10, 10), 68.0),  # float32
        (nn.Linear(10, 10).to(torch.bfloat16), 1.2),  # a CPU that has it
        (nn.Linear(9, 9).to(torch.bfloat16), 68.0),  # 90 parameters: done before it is noticed
        (nn.Linear(10, 10, device="meta", dtype=torch.bfloat16), 68.0),
        (nn.ReLU(), 68.0),
    ],
)
def test_nothing_else_is(
    model: nn.Module, times: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loading, "slowdown", lambda dtype: times)
    assert _said(model, caplog) == []


def test_it_is_measured() -> None:
    assert 0.2 < loading.slowdown(torch.float32) < 5
    assert loading.slowdown(torch.bfloat16) > 0

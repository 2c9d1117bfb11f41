"""Whether cuDNN's attention stays on, by times that a stand-in for the GPU says."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch

from comb import methods
from comb.backbones import attention_calls
from tests.helpers.byte_text import byte_llama


class Kernels:
    """cuDNN's switch; new lengths take so many seconds with it, and without."""

    def __init__(self, with_it: float, without: float, *, on: bool = True) -> None:
        self.seconds, self.on, self.measured = {True: with_it, False: without}, on, 0

    def cudnn_sdp_enabled(self) -> bool:
        return self.on

    def enable_cudnn_sdp(self, on: bool) -> None:
        self.on = on

    def measure(self, device: torch.device) -> tuple[float, float]:
        self.measured += 1
        return self.seconds[self.on], 0.0001


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    attention_calls._chosen.clear()
    yield
    attention_calls._chosen.clear()


def choose(kernels: Kernels, device: str = "cuda:0") -> bool:
    attention_calls.choose_attention(torch.device(device), new_and_again=kernels.measure, backend=kernels)
    return kernels.on


def test_cudnn_goes_where_it_plans_for_each_length_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    slow = Kernels(0.03, 0.0002)
    with caplog.at_level(logging.WARNING):
        assert not choose(slow)
    assert "takes 30 ms for each new number of keys here, without it 0.2 ms" in caplog.text
    slow.on = True  # a user's own choice holds
    assert choose(slow)
    assert slow.measured == 2


def test_it_stays_where_it_is_not_what_is_slow(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for index, kernels in enumerate((Kernels(0.0004, 0.0002), Kernels(0.03, 0.03))):
            assert choose(kernels, f"cuda:{index}")
        assert not choose(Kernels(0.03, 0.0, on=False), "cuda:2")
        assert choose(Kernels(0.03, 0.0), "cpu")
    assert not caplog.text


def test_methods_choose_before_they_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr("comb.methods.base.choose_attention", chosen.append)
    methods.create("full", byte_llama())
    assert chosen == [torch.device("cpu")]

"""Times of stages: the host's clock on a CPU, events of the stream on a GPU (whose clock stands in here)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from comb.backbones.forward import StageTimes


def test_times_add_up_and_a_part_is_no_part_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 4.0, 9.0, 20.0, 21.0])
    monkeypatch.setattr("comb.backbones.forward.time.perf_counter", lambda: next(clock))
    times = StageTimes(torch.device("cpu"), "compose")
    assert dict(times) == {"compose": 0.0}
    with times.timed("recompute"), times.timed("compose", within="recompute"):
        pass
    with times.timed("compose"):
        pass
    assert dict(times) == {"compose": 4.0, "recompute": 6.0}


def test_on_a_gpu_nothing_waits_until_times_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    made: list[Any] = []

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing
            self.number = len(made)
            made.append(self)

        def record(self, stream: str) -> None:
            told.append(f"{self.number} on {stream}")

        def synchronize(self) -> None:
            told.append(f"{self.number} awaited")

        def elapsed_time(self, end: Event) -> float:
            return 500.0 * (end.number - self.number)  # milliseconds

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"{device}'s")
    times = StageTimes(torch.device("cuda:1"))
    with pytest.raises(ValueError, match="broken"), times.timed("link"):
        raise ValueError("broken")
    with times.timed("link"):
        pass
    assert told == ["0 on cuda:1's", "1 on cuda:1's", "2 on cuda:1's", "3 on cuda:1's"]
    assert dict(times) == {"link": 1.0}
    assert told[4:] == ["1 awaited", "3 awaited"]
    assert times["link"] == 1.0  # once

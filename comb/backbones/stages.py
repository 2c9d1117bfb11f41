"""Where the time of a link goes: seconds by stage, which on a GPU are its own and not those of the host that queues."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch


class StageTimes(Mapping[str, float]):
    """Seconds by the name of the stage, so far.

    On a GPU, a stage begins and ends with an event in the stream of its work; the host waits for one only where
    somebody reads the times. Elsewhere it is the host's clock.

    Args:
        device: which does the work. stages: that are there from the start, with zero seconds.
    """

    def __init__(self, device: torch.device, *stages: str) -> None:
        self.device = device
        self._seconds = dict.fromkeys(stages, 0.0)
        self._open: list[tuple[str, float, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def timed(self, stage: str, *, within: str | None = None) -> Iterator[None]:
        """Adds the time of the body to `stage`, and takes it from the stage `within` which it runs."""
        shares = [(stage, 1.0), *([] if within is None else [(within, -1.0)])]
        if self.device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            stream = torch.cuda.current_stream(self.device)
            begin.record(stream)
            try:
                yield
            finally:
                end.record(stream)
                self._open += [(name, sign, begin, end) for name, sign in shares]
            return
        begun = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - begun
            for name, sign in shares:
                self._add(name, sign * seconds)

    def _add(self, stage: str, seconds: float) -> None:
        self._seconds[stage] = self._seconds.get(stage, 0.0) + seconds

    def _settled(self) -> dict[str, float]:
        for stage, sign, begin, end in self._open:
            end.synchronize()
            self._add(stage, sign * begin.elapsed_time(end) / 1000)
        self._open.clear()
        return self._seconds

    def __getitem__(self, stage: str) -> float:
        return self._settled()[stage]

    def __iter__(self) -> Iterator[str]:
        return iter(self._settled())

    def __len__(self) -> int:
        return len(self._settled())

"""A simulated device whose streams do nothing before somebody waits for them: what is read too early is garbage.

Every thread has a current stream of its own, at first the one that all threads share, as with CUDA.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from comb.cache.store import PICacheStore
from comb_serving.encoding.kept import KeptDocuments
from tests.helpers.simulated_device import DEVICE, DeviceTensor

ROWS = torch.arange(12.0).view(4, 3)


class Stream:
    """Work in order, done when it is waited for."""

    def __init__(self, device: Any = None) -> None:
        self.work: list[Callable[[], object]] = []
        self.done = 0

    def wait_event(self, event: Event) -> None:
        self.work.append(event.synchronize)

    def run(self, end: int) -> None:
        while self.done < end:
            self.done += 1
            self.work[self.done - 1]()


class Event:
    """A place in a stream."""

    def record(self, stream: Stream) -> None:
        self.stream, self.end = stream, len(stream.work)

    def synchronize(self) -> None:
        self.stream.run(self.end)


SHARED, current = Stream(), threading.local()


def current_stream(_: Any = None) -> Stream:
    return getattr(current, "stream", SHARED)


@contextmanager
def stream(chosen: Stream) -> Iterator[None]:
    before, current.stream = current_stream(), chosen
    yield
    current.stream = before


for name, function in {"Stream": Stream, "Event": Event, "current_stream": current_stream, "stream": stream}.items():
    setattr(torch.get_device_module(DEVICE), name, function)


class Gathered(DeviceTensor):
    """Rows that the current stream has been told to gather."""

    readers: list[Stream]

    @classmethod
    def of(cls, rows: Tensor) -> Gathered:
        made = cls(torch.full_like(rows, torch.nan))
        made.readers = []
        current_stream().work.append(lambda: made.inner.copy_(rows))
        return made

    def record_stream(self, stream: Stream) -> None:  # type: ignore[override]
        self.readers.append(stream)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is torch.ops.aten._to_copy.default
        assert kwargs["device"].type == "cpu"
        stream = current_stream()
        stream.run(len(stream.work))
        return args[0].inner.clone()


def test_a_document_that_is_still_being_gathered_is_kept_whole(tmp_path: Path) -> None:
    kept = KeptDocuments(PICacheStore(disk_path=tmp_path))
    taken = []
    with stream(Stream()):  # as vLLM's main thread has one
        for number in range(3):
            taken.append(Gathered.of(ROWS + number))
            kept.keep(f"key-{number}", taken[-1])
    kept.close()
    for tier in ("host", "disk"):
        for number in range(3):
            found = kept.fetch(f"key-{number}")
            assert found is not None
            assert torch.equal(found[0], ROWS + number)
            assert found[1] == tier
        kept = KeptDocuments(PICacheStore(disk_path=tmp_path))
    # their memory isn't anybody else's before the copy has been made
    assert all(len(rows.readers) == 1 and rows.readers[0] is not SHARED for rows in taken)


def test_another_thread_that_does_not_wait_reads_garbage() -> None:
    read = []
    with stream(Stream()):
        rows = Gathered.of(ROWS)
        thread = threading.Thread(target=lambda: read.append(rows.to("cpu")))
        thread.start()
        thread.join()
        assert read[0].isnan().all()
        assert torch.equal(rows.to("cpu"), ROWS)

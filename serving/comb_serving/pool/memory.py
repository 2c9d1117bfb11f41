"""What a pool is made of: a file in shared memory, or memory of a GPU that other processes open by a handle.

Both are bytes, made by the decoder's worker under a path: there lies the memory itself, or its handle (JSON). Writing
may go on behind the host's back; `finish` says when others can read it.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch
from torch import Tensor

from comb_serving.pool import cuda_ipc


class HostMemory:
    """A mapped file that several processes see; what is written is there.

    Attributes:
        flat: [nbytes] uint8.
    """

    def __init__(self, flat: Tensor) -> None:
        self.flat = flat

    @classmethod
    def create(cls, path: Path, nbytes: int, device: torch.device) -> HostMemory:
        """Raises FileExistsError for a path that is taken, OSError if there is no room."""
        with _new_file(path) as descriptor:
            try:
                os.posix_fallocate(descriptor, 0, nbytes)  # now, not as a bus error when a page is touched
            except OSError as error:
                raise OSError(f"no room for a pool of {nbytes / 2**20:.0f} MiB in {path.parent}: {error}") from error
        return cls.attach(path, nbytes)

    @classmethod
    def attach(cls, path: Path, nbytes: int) -> HostMemory:
        """Memory that another process has made."""
        return cls(torch.from_file(str(path), shared=True, size=nbytes, dtype=torch.uint8))

    def writing(self, source: torch.device) -> AbstractContextManager[None]:
        """Everything written inside comes after what has been computed on `source`."""
        return contextlib.nullcontext()

    def finish(self) -> None:
        """Waits until all that was written is there for every process."""


class DeviceMemory(HostMemory):
    """Memory of a GPU. Who attaches writes on a stream of its own, beside what the GPU is computing for it."""

    _stream: torch.cuda.Stream | None = None

    @classmethod
    def create(cls, path: Path, nbytes: int, device: torch.device) -> DeviceMemory:
        """Raises FileExistsError for a path that is taken, OSError if there is no room, CannotShareError."""
        cuda_ipc.check_shareable()
        with _new_file(path) as descriptor:
            try:
                flat = torch.empty(nbytes, dtype=torch.uint8, device=device)
            except torch.OutOfMemoryError as error:
                raise OSError(
                    f"no room for a pool of {nbytes / 2**20:.0f} MiB on {device}: make --comb-pool-bytes smaller"
                ) from error
            os.write(descriptor, json.dumps(cuda_ipc.export(flat)).encode())
        return cls(flat)

    @classmethod
    def attach(cls, path: Path, nbytes: int) -> DeviceMemory:
        """Raises CannotShareError where this process can't open it."""
        return cls(cuda_ipc.open_exported(json.loads(path.read_text()))[:nbytes])

    @contextmanager
    def writing(self, source: torch.device) -> Iterator[None]:
        """A source on another GPU is copied over, directly where the two can, by torch."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.flat.device)
        for device in {self.flat.device, source}:
            if device.type == "cuda":
                self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            yield

    def finish(self) -> None:
        if self._stream is not None:
            done = torch.cuda.Event()
            done.record(self._stream)
            done.synchronize()


MEMORIES: dict[str, type[HostMemory]] = {"host": HostMemory, "cuda": DeviceMemory}


@contextmanager
def _new_file(path: Path) -> Iterator[int]:
    """A new file for this user alone, which is gone again if the body fails."""
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        yield descriptor
    except BaseException:
        path.unlink()
        raise
    finally:
        os.close(descriptor)

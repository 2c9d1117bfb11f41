"""What a pool is made of: a file in shared memory, or memory of a GPU that other processes open by a handle.

Both are bytes, made by the decoder's worker under a path: there lies the memory itself, or its handle. Writing
may go on behind the host's back; `finish` says when others can read it.
"""

from __future__ import annotations

import ast
import contextlib
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


class HostMemory:
    """A mapped file that several processes see; what is written is there. `flat`: [nbytes] uint8."""

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
        with _new_file(path) as descriptor:
            try:
                flat = torch.empty(nbytes, dtype=torch.uint8, device=device)
            except torch.OutOfMemoryError as error:
                raise OSError(
                    f"no room for a pool of {nbytes / 2**20:.0f} MiB on {device}: make --comb-pool-bytes smaller"
                ) from error
            os.write(descriptor, repr(export(flat)).encode())
        return cls(flat)

    @classmethod
    def attach(cls, path: Path, nbytes: int) -> DeviceMemory:
        """Raises CannotShareError where this process can't open it."""
        return cls(open_exported(*ast.literal_eval(path.read_text()))[:nbytes])

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


# Memory of one GPU is handed from process to process by a handle that fits into a file, by torch's own IPC calls.
# The owner must keep its tensor for as long as others read or write it; they may come, go and be killed as they like.
# torch counts receivers so that it can keep memory that the owner frees too early. Here one handle serves several
# receivers, one after the other or at once, which is right because the owner frees its pool last.


class CannotShareError(RuntimeError):
    """This memory can't be handed to another process, or not be opened here."""


def export(tensor: Tensor) -> tuple[Any, ...]:
    """What another process needs to map the whole storage of `tensor`: the GPU's UUID, and the bytes and numbers that
    torch gives and takes behind the GPU's number, CUDA's handle first.

    Raises CannotShareError for memory that CUDA gives no handle of.
    """
    try:
        device, *values = tensor.untyped_storage()._share_cuda_()
    except RuntimeError as error:
        raise CannotShareError(
            f"CUDA gives no handle of the pool's memory ({error}): is it in a pool of vLLM's (sleep mode), or are "
            "processes isolated from one another? --comb-pool-memory host keeps documents in host memory"
        ) from error
    if values[0][1:2] == b"e":  # 'c': from cudaMalloc
        raise CannotShareError(
            "the pool's memory is in an expandable segment, which the encoder process can't open: take "
            "expandable_segments:True out of PYTORCH_ALLOC_CONF, or give --comb-pool-memory host"
        )
    return str(torch.cuda.get_device_properties(device).uuid), *values


def open_exported(uuid: str, *values: Any) -> Tensor:
    """The exporter's storage as bytes [nbytes] uint8, on the same GPU, whichever number it has here.

    Raises CannotShareError if this process can't see that GPU, or the exporter is gone.
    """
    seen = [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
    if uuid not in seen:
        raise CannotShareError(
            f"the pool is on GPU {uuid}, this process sees {seen or 'none'}: let CUDA_VISIBLE_DEVICES name it, too"
        )
    device = seen.index(uuid)
    torch.cuda.init()
    try:
        with torch.cuda.device(device):
            storage = torch.UntypedStorage._new_shared_cuda(device, *values)
    except RuntimeError as error:
        raise CannotShareError(f"the pool's memory on GPU {uuid} can't be opened: {error}") from error
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

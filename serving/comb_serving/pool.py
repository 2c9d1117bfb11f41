"""The shared pool of PICaches: one paged tensor of cross keys and values that the encoder writes and the decoder reads.

Owned by the decoder's worker, so that an encoder that dies takes no memory with it. On a CPU the tensor is a file in
shared memory that both processes map; which blocks hold which document is known to the PIC manager alone.

Shapes: C cross layers, S slots (blocks x block_size, one token each), H key/value heads, D head_dim.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from comb.atomic import write_temporary
from comb_serving.handles import Handle

MANIFEST = ".json"


@dataclass(frozen=True)
class PoolLayout:
    """What the pool looks like; with tensor parallelism each rank has a pool of its own heads."""

    cross_layers: int
    kv_heads: int
    head_dim: int
    num_blocks: int
    block_size: int = 16
    dtype: str = "float32"

    def __post_init__(self) -> None:
        for name in ("cross_layers", "kv_heads", "head_dim", "num_blocks", "block_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"a pool's {name} must be at least 1, not {getattr(self, name)}")

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype by its name."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """[C, 2, S, H, D]: keys and values of every slot."""
        return self.cross_layers, 2, self.num_blocks * self.block_size, self.kv_heads, self.head_dim

    @property
    def bytes_per_token(self) -> int:
        """Of one slot over all cross layers."""
        return 2 * self.cross_layers * self.kv_heads * self.head_dim * self.torch_dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Of the whole pool."""
        return self.bytes_per_token * self.num_blocks * self.block_size

    def blocks_for(self, tokens: int) -> int:
        """Blocks that a document of so many tokens takes."""
        return -(-tokens // self.block_size)


class SharedPool:
    """A mapped pool. `create` in the process that owns it, `attach` in the others.

    Attributes:
        tensor: [C, 2, S, H, D].
    """

    def __init__(self, path: Path, layout: PoolLayout, *, owner: bool) -> None:
        self.path, self.layout, self.owner = path, layout, owner
        count = layout.nbytes // layout.torch_dtype.itemsize
        flat = torch.from_file(str(path), shared=True, size=count, dtype=layout.torch_dtype)
        self.tensor: Tensor = flat.view(layout.shape)

    @classmethod
    def create(cls, path: str | Path, layout: PoolLayout) -> SharedPool:
        """A new pool under a path that isn't there yet, readable by this user alone; the manifest beside it comes last.

        Raises:
            FileExistsError: if the path is taken: by a running instance, or one that was killed.
            OSError: if there is no room for it.
        """
        path = Path(path)
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, layout.nbytes)  # now, not as a bus error when a page is touched
        except OSError as error:
            path.unlink()
            raise OSError(f"no room for a pool of {layout.nbytes / 2**20:.0f} MiB in {path.parent}: {error}") from error
        finally:
            os.close(descriptor)
        pool = cls(path, layout, owner=True)
        write_temporary(path.parent, json.dumps(asdict(layout)).encode()).rename(manifest_of(path))
        return pool

    @classmethod
    def attach(cls, path: str | Path) -> SharedPool:
        """A pool that another process owns. Raises FileNotFoundError while it isn't complete."""
        path = Path(path)
        return cls(path, PoolLayout(**json.loads(manifest_of(path).read_text())), owner=False)

    def close(self) -> None:
        """Removes the files, if this process owns them; mappings stay valid until their processes drop them."""
        if self.owner:
            manifest_of(self.path).unlink(missing_ok=True)
            self.path.unlink(missing_ok=True)

    def slots(self, handle: Handle) -> Tensor:
        """Slots of a document's tokens [tokens] int64, in order."""
        size = self.layout.block_size
        starts = torch.tensor(handle.blocks, device=self.tensor.device)[:, None] * size
        return (starts + torch.arange(size, device=self.tensor.device)).flatten()[: handle.tokens]

    def write(self, handle: Handle, keys: Tensor, values: Tensor, heads: slice = slice(None)) -> None:
        """Stores a document's keys and values, each [C, tokens, all H, D], of which this pool holds `heads`."""
        where = self.slots(handle)
        for index, part in enumerate((keys, values)):
            self.tensor[:, index].index_copy_(1, where, part[:, :, heads].to(self.tensor))

    def read(self, layer: int, handles: Sequence[Handle]) -> tuple[Tensor, Tensor]:
        """Keys and values of documents behind one another in cross layer `layer`, each [tokens, H, D]."""
        where = torch.cat([self.slots(handle) for handle in handles])
        return self.tensor[layer, 0].index_select(0, where), self.tensor[layer, 1].index_select(0, where)


def manifest_of(path: Path) -> Path:
    """The file that says what a pool looks like; it is there when the pool is ready."""
    return path.with_name(path.name + MANIFEST)

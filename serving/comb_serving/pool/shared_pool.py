"""The shared pool of PICaches: one paged tensor of cross keys and values that the encoder writes and the decoder reads.

Owned by the decoder's worker, so that an encoder that dies takes no memory with it. It lies in shared memory of the
host or in a GPU's (`memory`); which blocks hold which document is known to the PIC manager alone. In fp8
each vector of a slot and head has a scale beside it, so that a document's blocks hold all there is to know of it.

Shapes: C cross layers, S slots (blocks x block_size, one token each), H key/value heads, D head_dim.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from comb.cache.quantization import quantize
from comb.files import write_whole
from comb.kernels.paged.attention import FP8, BlockTable, PagedLayer, take
from comb_serving.pool.capability import PoolHandle
from comb_serving.pool.memory import MEMORIES, HostMemory

MANIFEST = ".json"


@dataclass(frozen=True)
class PoolLayout:
    """What the pool looks like; with tensor parallelism each rank has a pool of its own heads."""

    cross_layers: int
    kv_heads: int
    head_dim: int
    num_blocks: int
    block_size: int = 16
    dtype: str = "float32"  # in which the encoder computes and the decoder reads
    stored: str = (
        "auto"  # as `dtype` is; or "fp8": e4m3 with a float32 scale per cross layer, slot, head, key and value
    )
    memory: str = "host"  # "host" or "cuda"
    sink_tokens: int = 0  # slots of each document in front of its tokens', for the encoder's sink

    def __post_init__(self) -> None:
        for name in ("cross_layers", "kv_heads", "head_dim", "num_blocks", "block_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"a pool's {name} must be at least 1, not {getattr(self, name)}")
        if self.stored not in ("auto", "fp8"):
            raise ValueError(f"a pool is stored as auto or fp8, not {self.stored!r}")

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype by its name."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def stored_dtype(self) -> torch.dtype:
        """Of the numbers in the pool."""
        return FP8 if self.stored == "fp8" else self.torch_dtype

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """[C, 2, S, H, D]: keys and values of every slot."""
        return self.cross_layers, 2, self.num_blocks * self.block_size, self.kv_heads, self.head_dim

    @property
    def scale_bytes(self) -> int:
        """Of all scales, which come first."""
        return 4 * math.prod(self.shape[:-1]) if self.stored == "fp8" else 0

    @property
    def nbytes(self) -> int:
        """Of the whole pool."""
        return self.scale_bytes + math.prod(self.shape) * self.stored_dtype.itemsize

    @property
    def bytes_per_token(self) -> int:
        """Of one slot over all cross layers, its scales included."""
        return self.nbytes // (self.num_blocks * self.block_size)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that a document of so many tokens takes."""
        return -(-(tokens + self.sink_tokens) // self.block_size)

    def table(self, handles: Sequence[PoolHandle]) -> BlockTable:
        """Where documents lie, each behind its sink."""
        return BlockTable([(self.sink_tokens + handle.tokens, handle.blocks) for handle in handles], self.block_size)


class SharedPool:
    """A mapped pool. `create` in the process that owns it, `attach` in the others.

    Attributes:
        tensor: [C, 2, S, H, D].
        scales: [C, 2, S, H] float32 in fp8, else None.
    """

    def __init__(self, path: Path, layout: PoolLayout, memory: HostMemory, *, owner: bool) -> None:
        self.path, self.layout, self.memory, self.owner = path, layout, memory, owner
        scales, data = memory.flat.split([layout.scale_bytes, layout.nbytes - layout.scale_bytes])
        self.tensor: Tensor = data.view(layout.stored_dtype).view(layout.shape)
        self.scales: Tensor | None = None
        if layout.stored == "fp8":
            self.scales = scales.view(torch.float32).view(layout.shape[:-1])

    @classmethod
    def create(cls, path: str | Path, layout: PoolLayout, device: torch.device | str = "cpu") -> SharedPool:
        """A new pool under a path that isn't there yet, readable by this user alone; the manifest beside it comes last.

        Args:
            device: where it lies; its kind takes the place of `layout.memory`.

        Raises:
            FileExistsError: if the path is taken: by a running instance, or one that was killed.
            OSError: if there is no room for it.
            memory.CannotShareError: if it is on a GPU and can't be handed to other processes.
        """
        path, device = Path(path), torch.device(device)
        layout = replace(layout, memory="cuda" if device.type == "cuda" else "host")
        pool = cls(path, layout, MEMORIES[layout.memory].create(path, layout.nbytes, device), owner=True)
        write_whole(manifest_of(path), json.dumps(asdict(layout)).encode())
        return pool

    @classmethod
    def attach(cls, path: str | Path) -> SharedPool:
        """A pool that another process owns.

        Raises:
            FileNotFoundError: while it isn't complete.
            memory.CannotShareError: if it is on a GPU that this process can't reach.
        """
        path = Path(path)
        layout = PoolLayout(**json.loads(manifest_of(path).read_text()))
        return cls(path, layout, MEMORIES[layout.memory].attach(path, layout.nbytes), owner=False)

    def close(self) -> None:
        """Removes the files, if this process owns them; mappings stay valid until their processes drop them.

        A GPU's memory stays until this process drops the pool.
        """
        if self.owner:
            manifest_of(self.path).unlink(missing_ok=True)
            self.path.unlink(missing_ok=True)

    def slots(self, handle: PoolHandle) -> Tensor:
        """Slots of a document's keys [sink_tokens + tokens] int64, in order."""
        return self.layout.table([handle]).slots(self.tensor.device)

    def layer(self, index: int) -> PagedLayer:
        """Keys and values of one cross layer, as attention takes them."""
        scales = (None, None) if self.scales is None else self.scales[index].unbind()
        keys, values = self.tensor[index].unbind()
        return PagedLayer(keys, values, self.layout.block_size, *scales)

    def write(self, handle: PoolHandle, keys: Tensor, values: Tensor, heads: slice = slice(None)) -> None:
        """Stores a document's keys and values, each [C, sink and tokens, all H, D], of which this pool holds `heads`.

        On a GPU it may go on after the return: `finish` waits for it, and until then `keys` and `values` must stay.

        Raises:
            ValueError: in fp8, for values that are not finite.
        """
        with self.memory.writing(keys.device):
            where = self.slots(handle)
            for index, part in enumerate((keys, values)):
                own = part[:, :, heads]
                if self.scales is None:
                    self.tensor[:, index].index_copy_(1, where, own.to(self.tensor))
                    continue
                data, scales = quantize(own, "fp8")
                # torch has no index_copy_ for every eight-bit float on every device
                raw = data.view(torch.uint8).to(self.tensor.device)
                self.tensor.view(torch.uint8)[:, index].index_copy_(1, where, raw)
                self.scales[:, index].index_copy_(1, where, scales[..., 0].to(self.scales))

    def finish(self) -> None:
        """Waits until all that was written can be read by other processes."""
        self.memory.finish()

    def read(self, layer: int, handles: Sequence[PoolHandle]) -> tuple[Tensor, Tensor]:
        """Keys and values of documents behind one another in cross layer `layer`, each [tokens, H, D] as computed."""
        where = torch.cat([self.slots(handle) for handle in handles])
        paged, dtype = self.layer(layer), self.layout.torch_dtype
        return take(paged.keys, paged.key_scales, where, dtype), take(paged.values, paged.value_scales, where, dtype)


def manifest_of(path: Path) -> Path:
    """The file that says what a pool looks like; it is there when the pool is ready."""
    return path.with_name(path.name + MANIFEST)

"""The keys and values of a prompt that is being linked: cached segments at their places, the rest to be computed.

Shapes: N prompt tokens, S rows being computed, H cached heads, T tokens of a segment, D channels.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
)

from comb.backbones.forward import keeps_nothing
from comb.cache.picache import DecoderPICache
from comb.linking.positions import PositionMap
from comb.waits import on_device

ROOM = 128
"""Tokens that an answer may have before its cache is copied for the first time."""


@dataclass(frozen=True)
class Span:
    """Where one segment lies in the prompt. `first`: nothing stands in front of it."""

    start: int
    length: int
    first: bool = False

    @property
    def end(self) -> int:
        """One behind its last token."""
        return self.start + self.length


@dataclass
class ScatteredRows:
    """The prompt's length N, and the sorted positions [S] of the rows that are being computed, on the host."""

    length: int
    positions: Tensor
    carried: bool = False
    """Whether the last of them is there for a rotary embedding to look at, and is computed in another pass."""
    _copies: dict[torch.device, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def visible(self) -> int:
        """Keys that any of the rows may see: those up to the last row."""
        return int(self.positions[-1]) + 1

    def runs(self) -> Iterator[tuple[int, int]]:
        """Half-open runs of neighbouring positions."""
        values = self.positions.tolist()
        start = 0
        for index in range(1, len(values) + 1):
            if index == len(values) or values[index] != values[index - 1] + 1:
                yield values[start], values[index - 1] + 1
                start = index

    def on(self, device: torch.device) -> Tensor:
        """The positions on `device`: copied once for all layers of a pass."""
        source, copied = self._copies.get(device, (None, self.positions))
        if source is not self.positions:
            copied = on_device(self.positions, device)
            self._copies[device] = self.positions, copied
        return copied


class ScatterLayer(DynamicLayer):
    """Keys and values [1, H, N, D] of one layer, at their final positions. `update` scatters instead of appending."""

    keys: Tensor
    values: Tensor

    def __init__(self, rows: ScatteredRows, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.rows = rows
        self.lazy_initialization(keys, values)
        self.keys, self.values = keys, values

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Writes keys and values [1, H, S, D] of the current rows; returns all that the last row may see."""
        if self.keys.device != key_states.device:  # this layer's weights lie on another device than the embeddings
            self.keys, self.values = self.keys.to(key_states.device), self.values.to(key_states.device)
        where = self.rows.on(key_states.device)
        self.keys.index_copy_(2, where, key_states)
        self.values.index_copy_(2, where, value_states)
        return self.keys[:, :, : self.rows.visible], self.values[:, :, : self.rows.visible]

    def get_seq_length(self) -> int:
        return self.rows.visible - len(self.rows.positions)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.rows.visible, 0


def plain_layer(keys: Tensor, values: Tensor) -> DynamicLayer:
    """A layer of transformers' own with these keys and values [rows, H, tokens, D]."""
    layer = DynamicLayer()
    layer.lazy_initialization(keys, values)
    layer.keys, layer.values = keys, values
    return layer


class RoomyLayer(DynamicLayer):
    """Keys and values of an ordinary cache with room behind them, so that the next tokens needn't copy all of them.

    transformers appends by concatenation: a document of 4,000 tokens would be copied whole before its first answer
    token. Only one holder may write into the room: `fork` passes it on, and who has none copies as usual.

    Args:
        keys, values: [rows, H, N + room, D].
        length: N.
    """

    def __init__(self, keys: Tensor, values: Tensor, length: int) -> None:
        super().__init__()
        self.lazy_initialization(keys, values)
        self.room: tuple[Tensor, Tensor] | None = (keys, values)
        self.keys, self.values = keys[:, :, :length], values[:, :, :length]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        assert self.keys is not None
        assert self.values is not None
        if self.keys.device != key_states.device:  # this layer's weights lie on another device than the embeddings
            self.keys, self.values = self.keys.to(key_states.device), self.values.to(key_states.device)
            self.room = None
        before, after = self.get_seq_length(), self.get_seq_length() + key_states.shape[-2]
        room = self.room
        # beam search and cropping put other tensors into `keys`; the room behind the old ones isn't theirs
        ours = room is not None and self.keys.data_ptr() == room[0].data_ptr() and len(self.keys) == len(room[0])
        if room is None or not ours or after > room[0].shape[-2]:
            room = self.room = _with_room(self.keys, after), _with_room(self.values, after)
        room[0][:, :, before:after] = key_states
        room[1][:, :, before:after] = value_states
        self.keys, self.values = room[0][:, :, :after], room[1][:, :, :after]
        return self.keys, self.values

    @classmethod
    def of(cls, keys: Tensor, values: Tensor, length: int) -> RoomyLayer:
        """A copy of `keys` and `values` with room for `length` tokens and a little more."""
        most = max(length, keys.shape[2])
        return cls(_with_room(keys, most), _with_room(values, most), keys.shape[2])

    def fork(self) -> RoomyLayer:
        """A layer of the same content that takes the room along."""
        fork = copy.copy(self)
        self.room = None
        return fork


def _with_room(tensor: Tensor, length: int) -> Tensor:
    roomy = tensor.new_empty(*tensor.shape[:2], roomy_size(length), tensor.shape[-1])
    roomy[:, :, : tensor.shape[-2]] = tensor
    return roomy


def roomy_size(length: int) -> int:
    """Tokens that a buffer for `length` of them takes: a little more."""
    return length + max(ROOM, length // 8)


def ordinary_cache(model: Any, layers: Sequence[tuple[Tensor, Tensor]], length: int) -> DynamicCache:
    """A cache of the kind that `model` takes, of the first `length` tokens of keys and values [1, H, N, D].

    In their memory, with what stands behind as room; only what a sliding window shows is copied.
    """
    cache = DynamicCache(config=model.config)
    # behind them there may be places of layers that read the keys of others
    kept = [layer for layer in cache.layers if not keeps_nothing(layer)]
    for number, ((keys, values), layer) in enumerate(zip(layers, kept, strict=True)):
        if type(layer) is DynamicLayer:
            cache.layers[number] = RoomyLayer(keys, values, length)
        else:
            layer.update(keys[:, :, :length], values[:, :, :length])
            # the layer keeps a view of its window; the rest of the prompt must not stay alive behind it
            layer.keys, layer.values = layer.keys.clone(), layer.values.clone()
    return cache


class LayerReached(Exception):  # noqa: N818  a signal, not an error
    """A pass was stopped where it was asked to stop."""


class ScatterCache(Cache):
    """The keys and values of a whole prompt, some cached, some to be computed.

    Args:
        length: N, tokens that the cache is to hold.
        layers: keys and values [1, H, N, D] per layer, with anything at all at positions that will be computed.
    """

    def __init__(self, length: int, layers: Sequence[tuple[Tensor, Tensor]]) -> None:
        self.rows = ScatteredRows(length, torch.arange(length))
        super().__init__(layers=[ScatterLayer(self.rows, keys, values) for keys, values in layers])
        self.stop_layer: int | None = None
        self.deviation: Tensor | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if layer_idx == self.stop_layer:
            # the rows' squared distance between cached and new keys and values
            if self.deviation is None:
                self.deviation = torch.zeros(self.rows.length, device=key_states.device)
            where, layer = self.rows.on(key_states.device), self.layers[layer_idx]
            for cached, new in ((layer.keys, key_states), (layer.values, value_states)):
                difference = new.float() - cached.index_select(2, where).float()
                self.deviation[where] += difference.square().sum(dim=(0, 1, 3))
            layer.update(key_states, value_states)
            raise LayerReached
        updated: tuple[Tensor, Tensor] = self.layers[layer_idx].update(key_states, value_states, *args, **kwargs)
        return updated


def assemble(
    positions: PositionMap,
    picaches: Sequence[DecoderPICache],
    spans: Sequence[Span],
    *,
    end: int,
    length: int,
    compiled_from: int = 0,
    rotate: bool = True,
    device: torch.device | str = "cpu",
    before: Cache | None = None,
    start: int = 0,
) -> ScatterCache:
    """The first `end` tokens of a prompt of `length`: cached segments at their places, zeros elsewhere.

    Args:
        spans: where each PICache goes, in order and without overlap.
        compiled_from: position of a segment's first token when it was compiled.
        rotate: False leaves keys as they were compiled.
        before, start: an ordinary cache of the first `start` tokens, whose keys and values are copied.
    """
    first, last = spans[0].start, spans[-1].end
    linked = torch.arange(first, last)
    compiled = torch.zeros_like(linked)  # between segments there is nothing yet to turn
    for span in spans:
        compiled[span.start - first : span.end - first] = torch.arange(compiled_from, compiled_from + span.length)
    rerotation = positions.rerotation(compiled, linked, length, torch.device(device)) if rotate else None
    layers = []
    for number, rotations in enumerate(positions.layers):
        held: Any = None if before is None else before.layers[number]
        buffers = []
        for name, rotation in zip(("keys", "values"), rotations, strict=True):
            tensors = [getattr(picache, name)[number] for picache in picaches]
            pieces = [(span.start, tensor) for span, tensor in zip(spans, tensors, strict=True)]
            if held is not None:  # layers with a sliding window have forgotten the first tokens: no row looks that far
                earlier = getattr(held, name)[0]
                pieces.insert(0, (start - earlier.shape[1], earlier))
            heads, _, channels = tensors[0].shape
            parts, position = [], 0
            for at, tensor in pieces:
                if at > position:
                    parts.append(tensor.new_zeros(heads, at - position, channels))
                parts.append(tensor)
                position = at + tensor.shape[1]
            parts.append(tensors[0].new_zeros(heads, end + ROOM - position, channels))
            buffer = torch.cat(parts, dim=1)[None]
            if rerotation is not None:
                rerotation.apply(buffer[:, :, first:last], rotation)
            buffers.append(buffer)
        layers.append((buffers[0], buffers[1]))
    return ScatterCache(end, layers)


def fork_cache(cache: Cache) -> Cache:
    """A cache that can grow without changing `cache`.

    Dynamic layers replace their tensors when they grow, so they share them; linear layers write in place into states
    of a fixed size, which are copied; other kinds are copied whole.
    """
    if type(cache) is not DynamicCache:
        return copy.deepcopy(cache)
    fork = copy.copy(cache)
    fork.layers = []
    for layer in cache.layers:
        if isinstance(layer, RoomyLayer):
            fork.layers.append(layer.fork())
        elif type(layer) in (DynamicLayer, DynamicSlidingWindowLayer):
            fork.layers.append(copy.copy(layer))
        elif isinstance(layer, LinearAttentionCacheLayerMixin) and not isinstance(layer, DynamicSlidingWindowLayer):
            linear = copy.copy(layer)
            for name, value in vars(layer).items():
                if isinstance(value, dict):  # per state: tensors, and what is known of them
                    items = value.items()
                    copies = {key: item.clone() if isinstance(item, Tensor) else item for key, item in items}
                    setattr(linear, name, copies)
            fork.layers.append(linear)
        else:
            fork.layers.append(copy.deepcopy(layer))
    return fork


def repeat_rows(cache: Cache, copies: int) -> None:
    """Repeats every row of `cache`; transformers leaves the states of linear layers as they are."""
    linear = [layer for layer in cache.layers if isinstance(layer, LinearAttentionCacheLayerMixin)]
    for layer in linear:
        for states in (layer.conv_states, layer.recurrent_states):
            states.update({key: None if t is None else t.repeat_interleave(copies, 0) for key, t in states.items()})
    if not linear:
        cache.batch_repeat_interleave(copies)
        return
    for layer in cache.layers:
        if isinstance(layer, DynamicLayer):
            layer.batch_repeat_interleave(copies)

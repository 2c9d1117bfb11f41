"""The packed link: everything that is to be computed goes through the backbone in one pass.

`SequentialLinker` takes one run of tokens after the other through all layers; this does so inside of each linear layer
only: hooks call it once per run, with the states composed in between. The rest of the model, full attention included,
sees all rows at once, under a mask by position. On the model in hand both are tried once, and what differs is linked
run by run (`linker_for`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer

from comb.backbones.attention_calls import STAND_INS
from comb.backbones.forward import empty_cache_of, run_decoder, takes_positions
from comb.backbones.identity import identity_of
from comb.backbones.transformers_private import attention_name
from comb.hybrid.caches import attention_layers, read_state
from comb.hybrid.compile import compile_segment
from comb.hybrid.link import Item, SequentialLinker, link_segments, rerotated
from comb.hybrid.picache import HybridPICache
from comb.hybrid.support import HybridSupport
from comb.linking.cache import ROOM, RoomyLayer, ScatteredRows, ScatterLayer
from comb.linking.masks import Masks, masked_attention
from comb.linking.positions import Rerotation
from comb.linking.recomputed import recomputed_attention
from comb.linking.support import distance, made_up_tokens, tolerance_of

_MAX_MASK_ELEMENTS = 2**26
# what models call their linear layers in a mapping of masks
_UNMASKED = ("linear_attention", "conv")


@dataclass(frozen=True)
class _Jump:
    """Over the interior of a segment, whose first token comes to stand at `place`."""

    picache: HybridPICache
    place: int
    rerotation: Rerotation | None


class PackedLinker(SequentialLinker):
    """As `SequentialLinker`, with one pass of the backbone.

    A prompt without an interior, or whose mask would be a burden, is linked in order after all.
    """

    def __init__(self, *args: Any, mapping: bool = True, **options: Any) -> None:
        super().__init__(*args, **options)
        self._mapping = mapping  # whether the model takes a mask per kind of layer; else one mask for all

    def link(self, items: Sequence[Item], cache: Any, start: int, length: int) -> None:
        self.cache, place = cache, start
        token_ids: list[int] = []
        positions: list[int] = []
        steps: list[_Jump | slice] = []  # slices of the rows: neighbours in the prompt
        for item in items:
            if isinstance(item, list):
                steps.append(slice(len(positions), len(positions) + len(item)))
                positions += range(place, place + len(item))
                token_ids += item
                place += len(item)
            else:
                steps.append(_Jump(item.to(self.device), place, self.rerotation(place - item.compiled_at)))
                place += item.end - item.start
        jumps = [step for step in steps if isinstance(step, _Jump)]
        if not jumps or not positions or len(positions) * place > _MAX_MASK_ELEMENTS:
            super().link(items, cache, start, length)
            return
        rows = ScatteredRows(place, torch.tensor(positions))
        with self.seconds.timed("compose"):
            # keys and values of what is held and of all interiors at their places, room for those of the rows
            for number in self.support.attention:
                held, buffers = cache.layers[number], []
                for part, rotation in enumerate(self.support.positions.layers[number]):
                    like = jumps[0].picache.attention[number][part]
                    buffer = like.new_empty(1, like.shape[0], rows.length + ROOM, like.shape[2])
                    if start:
                        buffer[:, :, :start] = (held.keys, held.values)[part]
                    for jump in jumps:
                        moved = rerotated(jump.picache.attention[number][part][None], rotation, jump.rerotation)
                        buffer[:, :, jump.place : jump.place + moved.shape[2]] = moved
                    buffers.append(buffer)
                cache.layers[number] = ScatterLayer(rows, *buffers)
        with self.seconds.timed("recompute"), masked_attention(self.model), ExitStack() as hooks:
            for number, module in self.support.modules.items():
                self._by_runs(number, module, steps, len(positions), hooks)
            masks = Masks((("full_attention", None),), self._mapping)
            built: Any = masks.build(rows, self.model)
            with recomputed_attention(self.model, rows, masks.windowed(built)):
                if self._mapping:
                    built |= dict.fromkeys(_UNMASKED)
                ids, at = torch.tensor(token_ids)[None], rows.on(self.device)[None]
                run_decoder(self.model, ids, cache, position_ids=at, attention_mask=built)
        for number, layer in attention_layers(cache).items():
            cache.layers[number] = RoomyLayer(layer.keys, layer.values, place)

    def _by_runs(
        self, number: int, module: nn.Module, steps: Sequence[_Jump | slice], rows: int, hooks: ExitStack
    ) -> None:
        """Has a linear layer take its rows run by run, with the states composed in between, until `hooks` close.

        In front of the layer its arguments are cut to the first run; behind it, the other runs are computed.
        """
        thread = threading.get_ident()
        runs: Iterator[tuple[Any, dict[str, Any]]] = iter(())

        def cut(value: Any, run: slice) -> Any:
            """A run's part of an argument that has all rows, [1, rows] or [1, rows, ...]."""
            if isinstance(value, Tensor) and value.ndim in (2, 3) and value.shape[1] == rows:
                return value[:, run]
            return tuple(cut(item, run) for item in value) if type(value) is tuple else value

        def arguments(args: Any, kwargs: dict[str, Any]) -> Iterator[tuple[Any, dict[str, Any]]]:
            """Of one run after the other; jumps over what lies in front of the next one."""
            for step in steps:
                if isinstance(step, slice):
                    yield cut(args, step), {name: cut(value, step) for name, value in kwargs.items()}
                else:
                    with self.seconds.timed("compose", within="recompute"):
                        self.jump(number, step.picache.linear[number], step.rerotation)

        def before(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            nonlocal runs
            if threading.get_ident() != thread:
                return None
            runs = arguments(args, kwargs)
            return next(runs)

        def after(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            if threading.get_ident() != thread:
                return None
            outputs = [output, *(layer.forward(*args, **kwargs) for args, kwargs in runs)]
            if isinstance(output, tuple):
                return (torch.cat([part[0] for part in outputs], dim=1), *outputs[-1][1:])
            return torch.cat(outputs, dim=1)

        hooks.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
        # first of all, so that others' hooks see the output of all rows
        hooks.callback(module.register_forward_hook(after, with_kwargs=True, prepend=True).remove)


_SEGMENTS, _SEAM, _FRESH = (23, 19), 2, ((0, 5), (5, 8), (8, 12))


@torch.no_grad()
def linker_for(model: Any, support: HybridSupport) -> Callable[..., SequentialLinker]:
    """`PackedLinker` where that gives what `SequentialLinker` gives, else that. The caller holds the model's lock."""
    if attention_name(model) in STAND_INS:
        return SequentialLinker  # MAC keeps the rows of a prompt in order, and doesn't know the packed pass's mask
    linker: Callable[..., SequentialLinker] = identity_of(model).fact("hybrid linker", lambda: _tried(model, support))
    return linker


def _tried(model: Any, support: HybridSupport) -> Callable[..., SequentialLinker]:
    empty: Any = empty_cache_of(model)
    kinds = {type(empty.layers[number]) for number in support.attention if number < len(empty.layers)}
    # a layer with states and keys has no place for scattered ones
    if (
        support.step is not None
        or kinds != {DynamicLayer}
        or set(support.attention) & set(support.linear)
        or not takes_positions(model)
    ):
        return SequentialLinker
    ids = made_up_tokens(model, _FRESH[-1][1] + sum(_SEGMENTS))
    fresh = [ids[first:last].tolist() for first, last in _FRESH]
    segments = [segment.tolist() for segment in ids[_FRESH[-1][1] :].split(_SEGMENTS)]
    picaches = [compile_segment(model, support, "", segment, seams=support.seams(_SEAM)) for segment in segments]

    def linked(linker: Callable[..., SequentialLinker]) -> list[Tensor]:
        cache = link_segments(model, support, picaches, fresh, linker_type=linker).cache
        states = [state for number in support.linear for state in read_state(cache, number) if state is not None]
        layers = attention_layers(cache).values()
        return [*states, *(tensor for layer in layers for tensor in (layer.keys, layer.values))]

    plain = linked(SequentialLinker)
    # one mask per kind of layer, as transformers' hybrids take them, or a single one
    for linker in (partial(PackedLinker, mapping=True), partial(PackedLinker, mapping=False)):
        try:
            packed = linked(linker)
        except (RuntimeError, TypeError, ValueError, KeyError, IndexError, AttributeError):
            continue  # it doesn't take this mask, or its layers aren't called in this way
        pairs = zip(packed, plain, strict=False)
        if len(packed) == len(plain) and all(distance(left, right) <= tolerance_of(model) for left, right in pairs):
            return linker
    return SequentialLinker

"""Links compiled segments of a hybrid backbone into an ordinary cache of transformers, from left to right.

Tokens to be computed (prefix, seams, gaps, query) go through all layers behind what the cache holds; a compiled
interior is jumped over: linear layers take S <- T S + S_C, full layers append its keys, re-rotated to their places,
and its values. Every later token sees all of it by plain causality, so there is no mask, and the cache can be continued
by ``generate()``. This is the sequential reference: one pass per run of tokens between two interiors.
`comb.hybrid.packed` does it in one.

Shapes: a linear layer's state [H, K, V] and columns [C, kernel], a full layer's keys and values [1, heads, tokens, D].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from comb.backbones.forward import StageTimes, count_in
from comb.hybrid.caches import give_room, new_cache, read_state, run, shift_in, write_state
from comb.hybrid.picache import HybridPICache, SegmentState
from comb.hybrid.support import HybridSupport
from comb.linking.positions import Rerotation, Rotation

Mode = Literal["addition", "transition", "rotation", "seam"]
"""HYPIC's ablation: states added up | with transitions | and keys re-rotated to their places | and seams recomputed."""


Item = list[int] | HybridPICache
"""Of a prompt: tokens to be computed, or a segment whose interior is jumped over."""


@dataclass
class LinkedPrompt:
    """A prompt that is linked up to its last token."""

    token_ids: list[int]  # of the whole prompt
    cache: Any  # covers all of it but the last token; None for a prompt of one token
    recomputed: int  # document tokens that were computed again
    seconds: Mapping[str, float]  # that composing states and keys, and computing tokens, took


class SequentialLinker:
    """Links one prompt."""

    def __init__(self, model: Any, support: HybridSupport, mode: Mode = "seam", *, compose: bool = True) -> None:
        self.model, self.support, self.mode = model, support, mode
        # without it states are added up in any mode: what re-rotation and seams do without eq. 6
        self.compose = compose and mode != "addition"
        self.device: torch.device = model.get_input_embeddings().weight.device
        self.seconds = StageTimes(self.device, "compose", "recompute")
        self.cache: Any = None

    def link(self, items: Sequence[Item], cache: Any, start: int, length: int) -> None:
        """Fills `cache`, which covers `start` tokens of a prompt of `length`, with `items`."""
        self.cache, place = cache, start
        for item in items:
            if isinstance(item, list):
                with self.seconds.timed("recompute"):
                    run(self.model, item, cache, place, step=self.support.step if place else None)
                place += len(item)
                continue
            with self.seconds.timed("compose"):
                picache, rerotation = item.to(self.device), self.rerotation(place - item.compiled_at)
                for number, part in picache.linear.items():
                    self.jump(number, part, rerotation)
                for number, pair in picache.attention.items():
                    rotations = self.support.positions.layers[number]
                    keys, values = (
                        rerotated(tensor[None], rotation, rerotation)
                        for tensor, rotation in zip(pair, rotations, strict=True)
                    )
                    cache.update(keys, values, number)
                count_in(cache, picache.end - picache.start)
                give_room(cache, length)
            place += picache.end - picache.start

    def rerotation(self, shift: int) -> Rerotation | None:
        """Of keys that come to stand `shift` places behind where they were compiled; None where they aren't turned."""
        if self.mode in ("addition", "transition") or shift == 0:
            return None
        return self.support.positions.rerotation(torch.zeros(1), torch.full((1,), shift), 1, self.device)

    def jump(self, number: int, part: SegmentState, rerotation: Rerotation | None) -> None:
        """A linear layer's columns and state behind an interior: S <- T S + S_C."""
        layer = self.support.linear[number]
        columns, state = read_state(self.cache, number)
        if part.columns is not None:
            columns = shift_in(columns, part.columns, layer.kernel)
        if part.state is not None:
            before, state, transition = state, part.state.float(), part.transition
            if layer.rotation is not None and rerotation is not None:
                rotation = layer.rotation

                def rerotate(tensor: Tensor) -> Tensor:
                    return rerotation.apply(tensor.clone(memory_format=torch.contiguous_format), rotation)

                state = rerotate(state) if layer.axis == -1 else rerotate(state.transpose(-1, -2)).transpose(-1, -2)
                transition = None if transition is None else transition.rerotated(rerotate)
            if before is not None and transition is not None:
                kept = transition.apply_on(before.float(), layer.axis) if self.compose else before.float()
                state = state.to(kept.device) + kept
            state = state.to(layer.dtype)
        row = [None if tensor is None else tensor[None].contiguous() for tensor in (columns, state)]
        write_state(self.cache, number, row[0], row[1])


def rerotated(tensor: Tensor, rotation: Rotation | None, rerotation: Rerotation | None) -> Tensor:
    """A copy of keys or values [1, heads, tokens, D], re-rotated where they have a rotation."""
    # the cache may keep what it is given, and the PICache must stay as it is
    copy = tensor.clone()
    return copy if rotation is None or rerotation is None else rerotation.apply(copy, rotation)


def link_segments(
    model: Any,
    support: HybridSupport,
    picaches: Sequence[HybridPICache],
    fresh: Sequence[Sequence[int]],
    *,
    mode: Mode = "seam",
    compose: bool = True,
    before: Sequence[int] = (),
    cache: Any = None,
    linker_type: Callable[..., SequentialLinker] = SequentialLinker,
) -> LinkedPrompt:
    """The prompt ``before + fresh[0] + picaches[0] + fresh[1] + ... + fresh[-1]``. The caller holds the model's lock.

    `cache` covers `before` and is written to. The last token is left to ``generate()``, whose first step gives its
    logits; a prompt whose last segment is kept up to its end has that segment computed again.
    """
    length = len(before) + sum(map(len, fresh)) + sum(picache.num_tokens for picache in picaches)
    token_ids, items, recomputed = list(before), list[Item](), 0

    def compute(tokens: Sequence[int]) -> None:
        if tokens and items and isinstance(items[-1], list):  # neighbouring runs are computed together
            items[-1] += tokens
        elif tokens:
            items.append([*tokens])
        token_ids.extend(tokens)

    for picache, tokens in zip(picaches, fresh, strict=False):
        compute(tokens)
        ids = picache.token_ids.tolist()
        last = len(token_ids) + len(ids) == length
        if picache.start == picache.end or (last and picache.end == len(ids)):
            compute(ids)
            recomputed += len(ids)
            continue
        compute(ids[: picache.start])
        items.append(picache)
        token_ids += ids[picache.start : picache.end]
        compute(ids[picache.end :])
        recomputed += len(ids) - (picache.end - picache.start)
    compute(fresh[-1])
    last_run = items[-1]
    assert isinstance(last_run, list)
    last_run.pop()  # left to `generate`
    if not last_run:
        items.pop()
    linker = linker_type(model, support, mode, compose=compose)
    cache = new_cache(model) if cache is None else cache
    linker.link(items, cache, len(before), length)
    return LinkedPrompt(token_ids, cache if length > 1 else None, recomputed, linker.seconds)

"""Links compiled segments of a hybrid backbone into an ordinary cache of transformers, from left to right.

Tokens to be computed (head, seams, gaps, query) go through all layers behind what the cache holds; a compiled interior
is jumped over: linear layers take S <- T S + S_C, full layers append its keys, re-rotated to their places,
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


@dataclass
class LinkedPrompt:
    """A prompt that is linked up to its last token.

    Args:
        token_ids: the whole prompt.
        cache: covers all of it but the last token; None for a prompt of one token.
        recomputed: document tokens that were computed again.
        seconds: that composing states and keys, and computing tokens, took.
    """

    token_ids: list[int]
    cache: Any
    recomputed: int
    seconds: Mapping[str, float]


class SequentialLinker:
    """Builds one cache: `tokens` and `interior` in the order of the prompt, then `finish`.

    Args:
        mode: less than "seam" leaves out what the paper's ablation leaves out.
        compose: False adds states up, in any mode, as "addition" does: what re-rotation and seams do without eq. 6.
        length: tokens of the whole prompt.
        before, cache: tokens that a cache covers already, and that cache, which is written to; empty by default.
    """

    def __init__(
        self,
        model: Any,
        support: HybridSupport,
        mode: Mode,
        length: int,
        *,
        compose: bool = True,
        before: Sequence[int] = (),
        cache: Any = None,
    ) -> None:
        self.model, self.support, self.mode = model, support, mode
        self.compose = compose and mode != "addition"
        self.cache: Any = new_cache(model) if cache is None else cache
        self.length = length
        self.token_ids: list[int] = list(before)
        self.seconds = StageTimes(model.get_input_embeddings().weight.device, "compose", "recompute")
        self._pending: list[int] = []

    def tokens(self, token_ids: Sequence[int]) -> None:
        """Tokens to be computed; neighbouring runs are computed together."""
        self._pending += token_ids
        self.token_ids += token_ids

    def interior(self, picache: HybridPICache) -> None:
        """Jumps over the compiled interior of a segment."""
        self._compute(len(self.token_ids))
        with self.seconds.timed("compose"):
            picache = picache.to(self.model.get_input_embeddings().weight.device)
            rerotation = self._rerotation(len(self.token_ids) - picache.compiled_at)
            self.token_ids += picache.token_ids[picache.start : picache.end].tolist()
            for number, part in picache.linear.items():
                self.jump(number, part, rerotation)
            for number, pair in picache.attention.items():
                rotations = self.support.positions.layers[number]
                keys, values = (
                    rerotated(tensor[None], rotation, rerotation)
                    for tensor, rotation in zip(pair, rotations, strict=True)
                )
                self.cache.update(keys, values, number)
            count_in(self.cache, picache.end - picache.start)
            give_room(self.cache, self.length)

    def finish(self) -> Any:
        """Computes all that is left but the last token; the cache, or None when there is nothing in front of it."""
        self._compute(len(self.token_ids) - 1)
        return self.cache if len(self.token_ids) > 1 else None

    def _compute(self, end: int) -> None:
        start = len(self.token_ids) - len(self._pending)
        with self.seconds.timed("recompute"):
            run(self.model, self._pending[: end - start], self.cache, start, step=self.support.step if start else None)
        self._pending = []

    def _rerotation(self, shift: int) -> Rerotation | None:
        if self.mode in ("addition", "transition") or shift == 0:
            return None
        device = self.model.get_input_embeddings().weight.device
        return self.support.positions.rerotation(torch.zeros(1), torch.full((1,), shift), 1, device)

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


@torch.no_grad()
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

    `cache` covers `before` and is written to; without it the prompt is linked from its start.

    The last token is left to ``generate()``, whose first step gives its logits; a prompt whose last segment is kept up
    to its end has that segment computed again.

    Raises:
        ValueError: a leading PICache that doesn't stand at the start of the prompt.
    """
    length = len(before) + sum(map(len, fresh)) + sum(picache.num_tokens for picache in picaches)
    linker = linker_type(model, support, mode, length, compose=compose, before=before, cache=cache)
    recomputed = 0
    for picache, tokens in zip(picaches, fresh, strict=False):
        linker.tokens(tokens)
        if picache.leading and linker.token_ids:
            raise ValueError(
                f"a leading PICache was made for the start of a prompt, this one would stand at position "
                f"{len(linker.token_ids)}: compile the document again, without leading=True"
            )
        ids = picache.token_ids.tolist()
        last = len(linker.token_ids) + len(ids) == length
        if picache.start == picache.end or (last and picache.end == len(ids)):
            linker.tokens(ids)
            recomputed += len(ids)
            continue
        linker.tokens(ids[: picache.start])
        linker.interior(picache)
        linker.tokens(ids[picache.end :])
        recomputed += len(ids) - (picache.end - picache.start)
    linker.tokens(fresh[-1])
    return LinkedPrompt(linker.token_ids, linker.finish(), recomputed, linker.seconds)

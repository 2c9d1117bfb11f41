"""Compiles one segment of a hybrid backbone: a pure function of model, token ids and seam widths.

The segment runs alone: values computed in the context of a request would depend on who asked first. `extend` and
`restore` are for exact reuse of a prompt's prefix: nothing is moved or composed there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from comb.backbones.forward import count_in, empty_cache_of
from comb.hybrid.caches import attention_layers, give_room, last_columns, new_cache, read_state, run, write_state
from comb.hybrid.picache import HybridPICache, SegmentState
from comb.hybrid.support import HybridSupport, record, transition_of
from comb.waits import all_finite


def compile_segment(
    model: Any,
    support: HybridSupport,
    fingerprint: str,
    token_ids: Sequence[int],
    *,
    seams: tuple[int, int],
    front: Sequence[int] = (),
    begun: Callable[[], Any] | None = None,
    dtype: torch.dtype = torch.float32,
) -> HybridPICache:
    """The PICache of one segment. The caller holds the model's lock (`exclusive`).

    Args:
        seams: tokens at its start and end that are recomputed whenever the segment is linked, and so are not kept. A
            segment that they cover is kept as token ids only.
        front: token ids that the segment runs behind, instead of alone. Its tokens know of them; what they added to
            states, and their own keys and values, is left out.
        begun: makes the cache behind `front`, where what stands there isn't computed from its tokens.
        dtype: of the states and dense transitions; logarithms of decays stay in float32.

    Raises:
        ValueError: the backbone computes NaN or infinity.
    """
    ids = list(token_ids)
    held = torch.tensor(ids)
    start, end = seams[0], len(ids) - seams[1]
    if start >= end:
        return HybridPICache(fingerprint, held, len(ids), len(ids))
    before, place = ([], len(front)) if begun else (list(front), 0)  # what is run in front, and where that begins
    begin = begun or partial(new_cache, model)
    # causal: what stands behind the interior can't change it
    recording = record(
        model, before + ids[:end], len(before) + start,
        cache=begin(), place=place, modules=support.modules if begun else None,
    )  # fmt: skip
    linear: dict[int, SegmentState] = {}
    earlier: Any = None
    for number, layer in support.linear.items():
        columns, last = read_state(recording.cache, number)
        kept = None if columns is None else last_columns(columns, end - start)
        if last is None:
            linear[number] = SegmentState(columns=kept)
            continue
        transition, state = transition_of(model, recording, number, layer, support.step)
        if state is None:  # S is what T S_before leaves of the last state
            state = last.float()
            if recording.start:
                if earlier is None:
                    earlier = begin()
                    run(model, recording.token_ids[: recording.start], earlier, place)
                _, state_before = read_state(earlier, number)
                assert state_before is not None
                state = state - transition.apply(state_before.float())
        linear[number] = SegmentState(kept, state.to(dtype), transition.stored(dtype))
    attention = _attention(recording.cache, place + recording.start)
    picache = HybridPICache(fingerprint, held, start, end, linear, attention, len(front))
    floating = {name: tensor for name, tensor in picache.tensors().items() if tensor.is_floating_point()}
    if not all_finite(floating.values()):
        broken = [name for name, tensor in floating.items() if not all_finite([tensor])]
        raise ValueError(
            f"the backbone gave NaN or infinite {', '.join(broken[:4])} for a segment of {len(ids)} tokens: its "
            f"weights are damaged, or its values overflow in {model.dtype} or {dtype}"
        )
    return picache


@torch.no_grad()
def extend(
    model: Any, support: HybridSupport, fingerprint: str, before: Sequence[HybridPICache], piece: Sequence[int]
) -> HybridPICache:
    """The snapshot behind `piece`, which follows the pieces of `before`; computes `piece` alone."""
    start = sum(picache.num_tokens for picache in before)
    cache = restore(model, before, start + len(piece))
    run(model, list(piece), cache, start, step=support.step if start else None)
    linear = {}
    for number in support.linear:
        columns, state = read_state(cache, number)
        linear[number] = SegmentState(columns, state)
    return HybridPICache(fingerprint, torch.tensor(list(piece)), 0, len(piece), linear, _attention(cache, start))


def _attention(cache: Any, start: int) -> dict[int, tuple[Tensor, Tensor]]:
    """Copies of keys and values [heads, tokens, D] from position `start` on, by number of the layer."""
    return {
        number: (layer.keys[0, :, start:].clone(), layer.values[0, :, start:].clone())
        for number, layer in attention_layers(cache).items()
    }


def restore(model: Any, pieces: Sequence[HybridPICache], length: int) -> Any:
    """A cache behind all of `pieces`, with room for `length` tokens; empty without pieces."""
    cache = empty_cache_of(model)
    if not pieces:
        return cache
    device = model.get_input_embeddings().weight.device
    for number, part in pieces[-1].linear.items():
        columns, state = (None if tensor is None else tensor[None].to(device) for tensor in (part.columns, part.state))
        write_state(cache, number, columns, state)
    count_in(cache, sum(piece.num_tokens for piece in pieces))
    for number in pieces[0].attention:
        # a prefix is on the device already, what a store keeps may not be
        keys, values = (
            torch.cat([piece.attention[number][part].to(device) for piece in pieces], dim=1)[None] for part in (0, 1)
        )
        cache.update(keys, values, number)
    give_room(cache, length)
    return cache

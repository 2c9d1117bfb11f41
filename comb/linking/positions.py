"""Where positions are in the keys and values that a backbone caches, and how to move them to another place.

Nothing here knows a model class. One forward pass over single tokens at several positions shows, for every layer, which
channels of which cached tensor turn with the position: the whole head (Llama), a part of it (GPT-NeoX), pairs of
neighbours (GPT-J), a slice beside the latent (MLA), another base per layer (Gemma 3), or nothing at all (layers without
positions, ALiBi). What no rotation explains (learned positions) is refused.

Shapes: H cached heads, T tokens, D channels, m rotated pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from comb.backbones.discovery import decoder_layers, layer_input, position_count
from comb.backbones.forward import empty_cache_of, keeps_nothing, run_decoder, takes_positions
from comb.backbones.rotary import RotaryEmbedding, Turns, length_limit, rotary_embeddings, tabulated_embeddings
from comb.waits import on_device

_PROBE_TOKENS = 4
_USUAL = (0, 1, 2, 7, 61)
# relative error up to which a rotation explains what was seen; 16-bit models round cosines and products
_EXPLAINS = {torch.float64: 1e-4, torch.float32: 1e-4}
_EXPLAINS_16_BIT = 3e-2
# channels smaller than this share of the largest one are compared by this share of it: they may be rounding alone
_NEGLIGIBLE = 1e-3


class UnmovableError(ValueError):
    """A backbone whose cached keys and values can't be moved to another position; the message says why."""


@dataclass(frozen=True)
class Rotation:
    """The rotary part of one cached tensor: 2m channels from `start` on.

    `interleaved`: channels 2j and 2j+1 are a pair (GPT-J); otherwise j and j+m are (NeoX, Llama). `backward`: they are
    turned the other way (NanoChat).
    """

    source: int
    start: int
    interleaved: bool
    backward: bool = False

    def pairs(self, tensor: Tensor, m: int) -> tuple[Tensor, Tensor]:
        """Views of the first and second channels of all pairs, each [..., m]."""
        middle, end = self.start + m, self.start + 2 * m
        if self.interleaved:
            first, second = tensor[..., self.start : end : 2], tensor[..., self.start + 1 : end : 2]
        else:
            first, second = tensor[..., self.start : middle], tensor[..., middle:end]
        return (second, first) if self.backward else (first, second)


@dataclass(frozen=True)
class PositionMap:
    """What `find_positions` found: per cache layer the rotation in its keys and values (None: no positions there)."""

    layers: tuple[tuple[Rotation | None, Rotation | None], ...]
    sources: tuple[RotaryEmbedding, ...]

    @property
    def limit(self) -> int | None:
        """Positions of a pass up to which their number changes no key; None where it never does.

        Segments are compiled in passes that stay below.
        """
        return min((source.limit for source in self.sources if source.limit is not None), default=None)

    def rerotation(self, compiled: Tensor, linked: Tensor, length: int, device: torch.device) -> Rerotation:
        """Cosines and sines on `device` that take tokens from `compiled` positions [T] to `linked` positions [T].

        Args:
            compiled: below `limit`.
            length: of the whole prompt, for embeddings that depend on it.
        """
        count, both = len(compiled), on_device(torch.cat([compiled, linked]), device)
        turns = []
        for source in self.sources:
            if source.limit is None:
                cos, sin = source.ask(both)
                turns.append(((cos[:count], sin[:count]), (cos[count:], sin[count:])))
            else:
                turns.append((source.turns(both[:count], 1), source.turns(both[count:], length)))
        return Rerotation.between(turns)


@dataclass(frozen=True)
class Rerotation:
    """Per rotary embedding, cosines and sines [T, m] in float32 or more."""

    factors: tuple[tuple[Tensor, Tensor], ...]

    @classmethod
    def between(cls, turns: Iterable[tuple[Turns, Turns]]) -> Rerotation:
        """Per embedding, from the turns that tokens have to those that they are to have; a common magnitude falls out.

        As the model computed both, so that what was turned is what the model itself would have turned.
        """
        factors = []
        for (cos, sin), (new_cos, new_sin) in turns:
            # not fused: what stays in its place is turned by nothing, to the last bit
            size = cos * cos + sin * sin
            factors.append(((cos * new_cos + sin * new_sin) / size, (cos * new_sin - sin * new_cos) / size))
        return cls(tuple(factors))

    def apply(self, tensor: Tensor, rotation: Rotation | None) -> Tensor:
        """Re-rotates `tensor` [..., T, D] in place, computing in float32 (in float64 for a float64 tensor)."""
        if rotation is None:
            return tensor
        dtype = torch.float64 if tensor.dtype == torch.float64 else torch.float32
        cos, sin = (factor.to(tensor.device, dtype) for factor in self.factors[rotation.source])
        first, second = rotation.pairs(tensor, cos.shape[-1])
        a, b = first.to(dtype), second.to(dtype)
        turned = (a * cos).addcmul_(b, sin, value=-1)
        second.copy_((b * cos).addcmul_(a, sin))
        first.copy_(turned)
        return tensor


Found = tuple[RotaryEmbedding, Rotation] | str | None
"""What `RotaryProbe.explain` says."""


@torch.no_grad()
def find_positions(model: Any, new_cache: Callable[[], Any] = DynamicCache) -> PositionMap:
    """Asks `model` where its cached keys and values hold positions. The caller holds its lock (`exclusive`).

    Args:
        new_cache: makes an empty cache; layers of it without keys (linear ones) are passed over.

    Raises:
        UnmovableError: when no rotation explains how they change with the position.
    """
    if not takes_positions(model):
        return _without_position_ids(model, new_cache)
    probe = RotaryProbe(model)
    explained = probe.explanations(probe.passes, new_cache)
    if any(None in found for found in explained):
        # the rows of one pass may differ by rounding alone (`states_by_position`)
        alone = [[position] for position in dict.fromkeys(position for each in probe.passes for position in each)]
        explained = probe.explanations(alone, new_cache)
    sources: list[RotaryEmbedding] = []
    layers = []
    for number, found in enumerate(explained):
        if None in found:
            part = "keys" if found[0] is None else "values"
            raise UnmovableError(
                f"the cached {part} of layer {number} change with the position in a way that no rotary embedding "
                "explains (learned absolute positions?), so a compiled document can't be moved to another place"
            )
        keys, values = found or (None, None)
        layers.append((numbered(keys, sources), numbered(values, sources)))
    return PositionMap(tuple(layers), tuple(sources))


def numbered(found: Found, sources: list[RotaryEmbedding]) -> Rotation | None:
    """A rotation whose source counts among `sources`, where the embedding is put if it isn't there."""
    if not isinstance(found, tuple):
        return None
    embedding, rotation = found
    if embedding not in sources:
        sources.append(embedding)
    return replace(rotation, source=sources.index(embedding))


def _without_position_ids(model: Any, new_cache: Callable[[], Any]) -> PositionMap:
    """ALiBi models take no positions: their layer 0 must cache the same for a token wherever it stands."""
    ids = _probe_ids(model)[:2]
    caches = []
    for tokens in (ids, ids[1:]):
        cache = new_cache()
        run_decoder(model, torch.tensor([tokens]), cache, attention_mask=torch.ones(1, len(tokens), dtype=torch.long))
        caches.append(cache)
    held = [number for number, layer in enumerate(caches[0].layers) if getattr(layer, "keys", None) is not None]
    for name in ("keys", "values") if held else ():  # states alone know no positions
        second, alone = (getattr(cache.layers[held[0]], name)[:, :, -1] for cache in caches)
        if not _still(torch.stack([second, alone], dim=1).double(), _tolerance(model)):
            raise UnmovableError(
                f"the model takes no position_ids, and the cached {name} of its first layer depend on where a token "
                "stands, so a compiled document can't be moved to another place"
            )
    return PositionMap(((None, None),) * len(caches[0].layers), ())


class RotaryProbe:
    """Single tokens at several positions, and which rotation explains how a tensor made from them changes.

    The first pass stays below every limit of the model's rotary embeddings, others go beyond one each.
    """

    def __init__(self, model: Any) -> None:
        self._model, self.embeddings = model, rotary_embeddings(model)
        if any(each.counts for each in self.embeddings):
            raise UnmovableError(
                "its rotary embedding goes by the number of tokens in a pass, not by positions, and linked prompts "
                "pass in parts"
            )
        limits = sorted({each.limit for each in self.embeddings if each.limit is not None})
        short = _probe_positions(model, limits[0] if limits else None)
        longest = position_count(model.config.get_text_config(decoder=True)) or 0
        self.passes = [short, *([*short, limit - 1, limit, max(longest - 1, limit + 2)] for limit in limits)]
        self._ids = _probe_ids(model)
        self._guesses = tabulated_embeddings(model)
        self._tolerance = _tolerance(model)

    def inputs(self, positions: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Token ids and position ids of a pass over `positions`, both [probe tokens x positions, 1]."""
        for embedding in self.embeddings:  # for the pass that is run next
            embedding.settle(1)
        tokens = torch.tensor(self._ids).repeat_interleave(len(positions))[:, None]
        return tokens, torch.tensor(list(positions)).repeat(len(self._ids))[:, None]

    def by_position(self, tensor: Tensor) -> Tensor:
        """What a pass gave, [probe tokens x positions, H, 1, D], as [probe tokens, positions, H, D] float64."""
        return tensor.double().reshape(len(self._ids), -1, *tensor.shape[1::2])

    def explain(self, seen: Tensor, passes: Sequence[Sequence[int]]) -> Found:
        """The embedding and the rotation (of source 0) behind `seen`, as `by_position` gives it of each of `passes`
        over positions, joined; "still": nothing changes; None: nothing fits."""
        if _still(seen, self._tolerance):
            return "still"
        # angles of a table in float32 are off by this much at its end
        rounding = max(map(max, passes)) * 2.0**-22
        guessed = max(self._tolerance, rounding)
        for embeddings, least in ((self.embeddings, self._tolerance), (self._guesses, guessed)):
            best: tuple[RotaryEmbedding, Rotation] | None = None
            for embedding in embeddings:
                parts = [embedding.turns(torch.tensor(list(positions)), max(positions) + 1) for positions in passes]
                cos, sin = (torch.cat(each)[:, None].to(seen.device) for each in zip(*parts, strict=True))
                for error, rotation in _errors(seen, Rerotation.between([((cos[:1], sin[:1]), (cos, sin))])):
                    if error < least:
                        least, best = error, (embedding, rotation)
            if best is not None:
                return best
        return None

    def explanations(self, passes: Sequence[Sequence[int]], new_cache: Callable[[], Any]) -> list[tuple[Found, ...]]:
        """Per layer what `explain` says of its keys and its values, seen in `passes`; none where it keeps a state."""
        shots = [self._single_tokens(positions, new_cache) for positions in passes]
        return [
            tuple(self.explain(torch.cat(parts, dim=1), passes) for parts in zip(*layer, strict=True))
            for layer in zip(*shots, strict=True)
        ]

    @contextmanager
    def _fed_alike(self, count: int) -> Iterator[None]:
        """Gives each layer but the first the same of a token at all positions: what the layer before makes of it at the
        first. `count` rows are fed.

        Where a lone token's attention is no copy of its value (sinks), what 16 bits round differs by position, grows
        from layer to layer, and hides how keys turn. What does depend on positions is left, and the next layer's
        keys show it: it is in every token; a router that sees two experts alike takes others for a few.
        """

        def feed(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            given = layer_input(args, kwargs)
            if len(given) != count:  # Gemma 3n's streams
                return args, kwargs
            rows = given.unflatten(0, (len(self._ids), -1))
            first = rows[:, :1]
            far = (rows - first).double().flatten(2).norm(dim=-1) / first.double().flatten(2).norm(dim=-1)
            if float(far.amax(1).amin()) > self._tolerance:
                return args, kwargs
            same = first.expand_as(rows).flatten(0, 1)
            return ((same, *args[1:]), kwargs) if args else ((), {**kwargs, "hidden_states": same})

        handles = [layer.register_forward_pre_hook(feed, with_kwargs=True) for layer in decoder_layers(self._model)[1:]]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _single_tokens(self, positions: Sequence[int], new_cache: Callable[[], Any]) -> list[tuple[Tensor, ...]]:
        """Per layer, keys and values [probe tokens, positions, H, D] of tokens that see only themselves."""
        tokens, where = self.inputs(positions)
        cache = new_cache()
        with self._fed_alike(len(tokens)):
            run_decoder(self._model, tokens, cache, position_ids=where)
        shots: list[tuple[Tensor, ...]] = []
        for layer in cache.layers:
            if keeps_nothing(layer) or (hasattr(layer, "recurrent_states") and getattr(layer, "keys", None) is None):
                shots.append(())
                continue
            if layer.keys is None or layer.values is None or layer.keys.ndim != 4:
                raise UnmovableError(f"a cache layer holds {type(layer).__name__} without keys and values per token")
            shots.append((self.by_position(layer.keys), self.by_position(layer.values)))
        if not all(bool(torch.isfinite(tensor).all()) for shot in shots for tensor in shot):
            raise UnmovableError(f"the backbone computes NaN or infinite keys and values in {self._model.dtype}")
        return shots


@torch.no_grad()
def states_by_position(model: Any, numbers: Sequence[int]) -> dict[int, Tensor]:
    """The recurrent states that single tokens leave at several positions, [tokens, positions, ...] in float64.

    By the number of the linear layer, for those of `numbers` whose states have heads and key channels; none for a
    model that takes no positions. A pass for each position, over the same rows: kernels take the rows of a pass in
    blocks, so that two of them may differ by rounding where nothing else does.
    """
    if not numbers or not takes_positions(model):
        return {}
    found: dict[int, list[Tensor]] = {}
    tokens = torch.tensor(_probe_ids(model)[:2])[:, None]
    for position in _probe_positions(model, length_limit(model)):
        cache: Any = empty_cache_of(model)
        run_decoder(model, tokens, cache, position_ids=torch.full_like(tokens, position))
        for number in numbers:
            states = cache.layers[number].recurrent_states[0]
            if states.ndim == 4:
                found.setdefault(number, []).append(states.double())
    return {number: torch.stack(states, dim=1) for number, states in found.items()}


def explain_states(model: Any, number: int, seen: Tensor) -> tuple[tuple[RotaryEmbedding, Rotation] | None, int]:
    """The embedding and the rotation by which a linear layer's state turns with a token's position, and its axis.

    `seen` is the layer's part of `states_by_position`. None where it doesn't turn; raises UnmovableError where no
    rotation explains how it changes.
    """
    probe = RotaryProbe(model)
    for axis in (-2, -1):
        channels_last = seen.transpose(-1, -2) if axis == -2 else seen
        flat = channels_last.reshape(*seen.shape[:2], -1, channels_last.shape[-1])
        found = probe.explain(flat, probe.passes[:1])
        if found is not None:
            return (None if isinstance(found, str) else found), axis
    raise UnmovableError(
        f"the state of linear layer {number} changes with the position in a way that no rotary embedding explains, so "
        "a compiled document can't be moved to another place"
    )


def check_shifts(embeddings: Sequence[RotaryEmbedding]) -> None:
    """Raises UnmovableError unless a step of one position turns alike everywhere."""
    at = torch.tensor([0, 2, 7, 61])
    for embedding in embeddings:
        here, there = (embedding.turns(positions, int(at[-1]) + 2) for positions in (at, at + 1))
        ((cos, sin),) = Rerotation.between([(here, there)]).factors
        if float(torch.stack([cos - cos[:1], sin - sin[:1]]).abs().max()) > 1e-3:
            raise UnmovableError("its rotary embedding turns tokens that are moved equally far by different angles")


def _still(seen: Tensor, tolerance: float) -> bool:
    """Whether `seen` [tokens, positions, H, D] is the same at all positions."""
    size, least = _sizes(seen)
    return float(((seen - seen[:, :1]).abs() / (size + least)).amax()) <= tolerance


def _errors(seen: Tensor, rerotation: Rerotation) -> Iterator[tuple[float, Rotation]]:
    """How far `seen` is from its first position, turned, for every place, pairing and direction of turning."""
    origin, (size, least), m = seen[:, :1], _sizes(seen), rerotation.factors[0][0].shape[-1]
    for start in sorted({0, seen.shape[-1] - 2 * m}):
        if start < 0 or start + 2 * m > seen.shape[-1]:
            continue
        for interleaved, backward in product((False, True), repeat=2):
            rotation = Rotation(0, start, interleaved, backward)
            predicted = rerotation.apply(origin.expand_as(seen).clone(), rotation)
            sizes = size.clone()
            first, second = rotation.pairs(sizes, m)
            larger = torch.maximum(first, second)  # each channel of a pair counts as its larger one
            first.copy_(larger)
            second.copy_(larger)
            yield float(((predicted - seen).abs() / (sizes + least)).amax()), rotation


def _sizes(seen: Tensor) -> tuple[Tensor, float]:
    """Each channel's size [H, D], and what is added to it; errors count relative to that.

    A key bias can make one channel of a real model a thousand times larger than others, whose turning it must not hide.
    """
    size = seen.abs().amax(dim=(0, 1))
    return size, float(size.amax().clamp_min(1e-30)) * _NEGLIGIBLE


def _probe_positions(model: Any, limit: int | None) -> list[int]:
    """A few positions below `limit`, some at each number in the configuration: there a model may change its way."""
    config = model.config.get_text_config(decoder=True)
    # embeddings that depend on the length go back to their short form only below the original length
    end = limit - 1 if limit else position_count(config) or 1010
    return sorted(position for position in {*_USUAL, *positions_near(config), end - 1} if 0 <= position < end)


def positions_near(config: Any) -> set[int]:
    """Before and at each larger number in a configuration: a length, or what else a model may count to."""
    numbers = {number for number in _integers(config) if number > _USUAL[-1]}
    return {position for number in numbers for position in (number - 1, number)}


def _integers(values: Any, above: tuple[Any, ...] = ()) -> Iterator[int]:
    values = vars(values) if hasattr(values, "to_dict") else values
    if isinstance(values, int) and not isinstance(values, bool):
        yield values
    if any(values is each for each in above):  # it holds itself
        return
    for value in values.values() if isinstance(values, dict) else values if isinstance(values, list) else ():
        yield from _integers(value, (*above, values))


def _probe_ids(model: Any) -> list[int]:
    vocabulary = model.get_input_embeddings().weight.shape[0]
    return [1 + (37 * index) % max(1, vocabulary - 1) for index in range(1, _PROBE_TOKENS + 1)]


def _tolerance(model: Any) -> float:
    return _EXPLAINS.get(model.dtype, _EXPLAINS_16_BIT)

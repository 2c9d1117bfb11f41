"""Tries linking on the model in hand, on fifteen made-up tokens, before any method relies on it.

The answer is kept on the model, so that a server asks once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from comb.backbones.attention_calls import attention
from comb.backbones.forward import run_decoder, takes_positions
from comb.backbones.identity import exclusive, identity_of
from comb.backbones.rotary import length_limit
from comb.cache.picache import DecoderPICache
from comb.linking.cache import ScatterCache, Span, assemble
from comb.linking.masks import Masks, cache_kinds, exact_attention, mask_candidates, masked_attention
from comb.linking.passes import recompute, recompute_in_order
from comb.linking.positions import UnmovableError, find_positions
from comb.linking.rotation import PositionMap

# Frobenius norm of the difference over that of the result. 16-bit rounding differs with the shape of a batch.
TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4}
_TOLERANCE_16_BIT = 5e-2

_SEGMENTS = (5, 6)
_QUERY = 4
_SMALL_WINDOW = 128


@dataclass(frozen=True)
class LinkSupport:
    """How a model's prompts are linked.

    Args:
        positions: how cached keys and values are moved.
        masks: how scattered rows are masked; None where they are computed run by run.
    """

    positions: PositionMap
    masks: Masks | None


def find_support(model: Any) -> LinkSupport:
    """How `model` is linked, found anew when weights, dtype or attention have changed.

    Raises:
        UnmovableError: when it can't be, with the reason.
    """
    name = exact_attention(model)
    found: LinkSupport | str = identity_of(model).fact(f"link support, {name}", lambda: _find(model, name))
    if isinstance(found, str):
        raise UnmovableError(found)
    return found


def check_keys_cached(model: Any) -> None:
    """That keys and values in a cache of transformers' are all that `model` keeps of earlier tokens.

    Raises:
        UnmovableError: when it isn't, with the reason.
    """
    reason: str = identity_of(model).fact("keys cached", lambda: _why_not_cached(model))
    if reason:
        raise UnmovableError(reason)


def _why_not_cached(model: Any) -> str:
    try:
        cache_kinds(model)
    except UnmovableError as error:
        return str(error)
    with exclusive(model):
        try:
            return _why_not_continued(model)
        except (RuntimeError, TypeError, ValueError, KeyError, IndexError, AttributeError, AssertionError) as error:
            return f"its forward pass doesn't go on from a cache ({type(error).__name__}: {error})"


@torch.no_grad()
def _why_not_continued(model: Any) -> str:
    windows = (getattr(layer, "sliding_window", None) for layer in cache_kinds(model))
    # beyond a window, where that is cheap: Moshi's cache has one, and its attention doesn't
    count = _QUERY + max(2, min((window for window in windows if window and window <= _SMALL_WINDOW), default=2))
    cache: Any = DynamicCache(config=model.config)
    ids, takes = made_up_tokens(model, count)[None], takes_positions(model)

    def run(cache: Any, first: int, last: int) -> Tensor:
        where, mask = torch.arange(first, last)[None] if takes else None, torch.ones(1, last, dtype=torch.long)
        return run_decoder(model, ids[:, first:last], cache, attention_mask=mask, position_ids=where)[0, -_QUERY:]

    whole = run(DynamicCache(config=model.config), 0, count)
    run(cache, 0, count - _QUERY)
    hidden = run(cache, count - _QUERY, count)
    held = [getattr(layer, "keys", None) for layer in cache.layers]
    without = [str(number) for number, keys in enumerate(held) if keys is None]
    if len(without) == len(held):
        return "its forward pass leaves nothing in a cache of keys and values: it keeps a state in a form of its own"
    if without:
        return f"layers {', '.join(without)} leave no keys and values in its cache: they keep a state of their own"
    if max(keys.shape[2] for keys in held if keys is not None) > count:
        return "its forward pass puts more tokens into its cache than the prompt has"
    # not finite here and there: other checks say so
    if distance(hidden, whole) > tolerance_of(model):
        why = " (its layers quantise what they are given: a token comes out otherwise beside other tokens)"
        return f"its forward pass doesn't go on from a cache as from the tokens in it{why * _quantises_passes(model)}"
    return ""


def _quantises_passes(model: Any) -> bool:
    """Torch's dynamic quantisation, and bitsandbytes in 8 bits."""
    kinds = {f"{type(module).__module__}.{type(module).__name__}" for module in model.modules()}
    return any(kind.startswith("torch.ao.nn.quantized.dynamic") or kind.endswith("Linear8bitLt") for kind in kinds)


def takes_padded_rows(model: Any) -> bool:
    """Whether rows of a batch may be padded on the left.

    Models of states may ignore their mask (RWKV), and the longest row may change all rows' rotary embedding.
    """
    return length_limit(model) is None and bool(identity_of(model).fact("padded rows", lambda: _try_padding(model)))


@torch.no_grad()
def _try_padding(model: Any) -> bool:
    if any(parameter.is_meta for parameter in model.parameters()):
        return True
    ids = made_up_tokens(model, sum(_SEGMENTS))[None].to(model.get_input_embeddings().weight.device)
    padded = torch.cat([torch.zeros_like(ids[:, :_QUERY]), ids], dim=1)
    mask = torch.ones_like(padded)
    mask[:, :_QUERY] = 0
    arguments: dict[str, Any] = {"attention_mask": mask, "use_cache": False}
    if takes_positions(model):
        arguments["position_ids"] = (mask.cumsum(dim=1) - 1).clamp_min(0)
    with exclusive(model):
        alone = model(input_ids=ids, use_cache=False).logits[0, -1]
        return distance(model(input_ids=padded, **arguments).logits[0, -1], alone) <= tolerance_of(model)


def _find(model: Any, name: str) -> LinkSupport | str:
    try:
        with exclusive(model), attention(model, name):
            return _try(model)
    except UnmovableError as error:
        return str(error)


def _try(model: Any) -> LinkSupport:
    if any(parameter.is_meta for parameter in model.parameters()):
        raise UnmovableError("its weights are on the meta device")
    check_keys_cached(model)
    positions = find_positions(model)
    prompt = _TrialPrompt(model, positions)
    every = torch.arange(prompt.length)
    reference = prompt.plain()
    ordered = recompute_in_order(model, prompt.cache(), prompt.token_ids, every)
    if ordered is None or distance(ordered, reference) > prompt.tolerance:
        raise UnmovableError("its forward pass doesn't continue a cache of ordinary keys and values exactly")
    masks = _understood(model, prompt)
    if masks is None and positions.limit is not None:
        raise UnmovableError("it takes no mask by position, and its rotary embedding depends on the prompt's length")
    return LinkSupport(positions, masks)


def _understood(model: Any, prompt: _TrialPrompt) -> Masks | None:
    """The first way of masking under which scattered rows come out as run by run; None if there is none."""
    if not takes_positions(model):
        return None
    scattered = torch.tensor([5, 6, 9, 11, 12, 13, 14])
    expected = prompt.cache()
    recompute_in_order(model, expected, prompt.token_ids, scattered)
    for masks in mask_candidates(model):
        cache = prompt.cache()
        try:
            with masked_attention(model):
                recompute(model, cache, prompt.token_ids, scattered, masks)
        except (RuntimeError, TypeError, ValueError, KeyError, IndexError, AttributeError):
            continue  # it doesn't take this form; the next one, or run by run
        pairs = zip(_tensors(cache), _tensors(expected), strict=True)
        if all(distance(left, right) <= prompt.tolerance for left, right in pairs):
            return masks
    return None


class _TrialPrompt:
    """Two compiled segments and a query."""

    def __init__(self, model: Any, positions: PositionMap) -> None:
        self.model = model
        self.positions = positions
        self.length = sum(_SEGMENTS) + _QUERY
        self.tolerance = tolerance_of(model)
        self.token_ids = made_up_tokens(model, self.length)
        self.spans = [Span(0, _SEGMENTS[0], first=True), Span(_SEGMENTS[0], _SEGMENTS[1])]
        self.picaches = [self._compile(span) for span in self.spans]

    def cache(self) -> ScatterCache:
        device = self.model.get_input_embeddings().weight.device
        arguments = {"end": self.length, "length": self.length, "device": device}
        return assemble(self.positions, self.picaches, self.spans, **arguments)

    def plain(self) -> Tensor:
        """Last hidden state of an ordinary forward pass over everything."""
        return run_decoder(self.model, self.token_ids[None], DynamicCache())[0, -1]

    def _compile(self, span: Span) -> DecoderPICache:
        cache = DynamicCache()
        run_decoder(self.model, self.token_ids[None, span.start : span.end], cache)
        keys, values = ([getattr(layer, name)[0] for layer in cache.layers] for name in ("keys", "values"))
        return DecoderPICache("", tuple(keys), tuple(values))


def _tensors(cache: ScatterCache) -> list[Tensor]:
    return [tensor for layer in cache.layers for tensor in (layer.keys, layer.values) if tensor is not None]


def made_up_tokens(model: Any, count: int) -> Tensor:
    """Token ids [count], the same every time, none of them special as far as one can tell."""
    vocabulary = model.get_input_embeddings().weight.shape[0]
    return torch.randint(min(3, vocabulary - 1), vocabulary, (count,), generator=torch.Generator().manual_seed(0))


def tolerance_of(model: Any) -> float:
    """Relative error up to which two ways of computing the same count as equal in the model's dtype."""
    return TOLERANCES.get(model.dtype, _TOLERANCE_16_BIT)


def distance(left: Tensor, right: Tensor) -> float:
    """Frobenius norm of the difference, relative to `right`'s."""
    left, right = left.float(), right.float()
    return float((left - right).norm() / right.norm().clamp_min(1e-30))

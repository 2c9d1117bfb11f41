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
from comb.backbones.forward import decoder_of, empty_cache_of, keeps_nothing, run_decoder, takes_positions
from comb.backbones.identity import exclusive, identity_of
from comb.backbones.rotary import length_limit
from comb.linking.cache import ScatterCache, Span, assemble
from comb.linking.masks import Masks, cache_kinds, exact_attention, mask_candidates, masked_attention
from comb.linking.passes import compile_tokens, recompute, recompute_in_order
from comb.linking.positions import PositionMap, UnmovableError, find_positions

# Frobenius norm of the difference over that of the result. 16-bit rounding differs with the shape of a batch.
TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4}
_TOLERANCE_16_BIT = 5e-2

_SEGMENTS = (5, 6)
_QUERY = 4
_SMALL_WINDOW = 128


@dataclass(frozen=True)
class LinkSupport:
    """How a model's prompts are linked."""

    positions: PositionMap  # how cached keys and values are moved
    masks: Masks | None  # how scattered rows are masked; None where they are computed run by run


def find_support(model: Any) -> LinkSupport:
    """How `model` is linked, found anew when weights, dtype or attention have changed.

    Raises:
        UnmovableError: when it can't be, with the reason.
    """
    name = exact_attention(model)
    found: LinkSupport | str = identity_of(model).fact(f"link support, {name}", lambda: _try(model, name))
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


def check_decoder_alone(model: Any) -> None:
    """That nothing around a model's decoder changes what it reads, since documents are compiled by the decoder alone.

    Raises:
        UnmovableError: when something does, with what is known of it.
    """
    peft = getattr(model, "peft_config", None)
    for config in peft.values() if isinstance(peft, dict) else ():
        if getattr(config, "is_prompt_learning", False):
            raise UnmovableError("peft puts learned tokens in front of every prompt (prompt learning)")
        if getattr(config, "alora_invocation_tokens", None):  # which made-up tokens don't hold
            raise UnmovableError("peft begins an activated LoRA in the middle of a prompt (alora_invocation_tokens)")
    heard: list[Tensor] = []
    ids = made_up_tokens(model, _QUERY)[None].to(model.get_input_embeddings().weight.device)
    hook = decoder_of(model).register_forward_hook(lambda *call: heard.append(call[-1][0]))
    try:
        model(input_ids=ids, use_cache=False)
    finally:
        hook.remove()
    alone = run_decoder(model, ids, empty_cache_of(model))
    if heard and (heard[0].shape != alone.shape or distance(heard[0], alone) > tolerance_of(model)):
        raise UnmovableError("what stands around its decoder (a hook, a forward of your own) changes what that reads")


@torch.no_grad()
def _why_not_cached(model: Any) -> str:
    try:
        kinds = cache_kinds(model)
        with exclusive(model):
            check_decoder_alone(model)
            # beyond a window, where that is cheap: Moshi's cache has one, and its attention doesn't
            windows = [window for window in (getattr(layer, "sliding_window", None) for layer in kinds) if window]
            count = _QUERY + max(2, min((window for window in windows if window <= _SMALL_WINDOW), default=2))
            ids, takes = made_up_tokens(model, count)[None], takes_positions(model)

            def run(cache: Any, first: int, last: int) -> Tensor:
                where, mask = torch.arange(first, last)[None] if takes else None, torch.ones(1, last, dtype=torch.long)
                part = ids[:, first:last]
                return run_decoder(model, part, cache, attention_mask=mask, position_ids=where)[0, -_QUERY:]

            cache: Any = DynamicCache(config=model.config)
            whole = run(DynamicCache(config=model.config), 0, count)
            run(cache, 0, count - _QUERY)
            hidden = run(cache, count - _QUERY, count)
            held = [getattr(layer, "keys", None) for layer in cache.layers if not keeps_nothing(layer)]
            if len(held) > len(kinds):
                return "its forward pass goes through some layers more than once, and keeps keys and values each time"
            without = [str(number) for number, keys in enumerate(held) if keys is None]
            if len(without) == len(held):
                why = "its forward pass leaves nothing in a cache of keys and values"
                return f"{why}: it keeps a state in a form of its own"
            if without:
                named = ", ".join(without)
                return f"layers {named} leave no keys and values in its cache: they keep a state of their own"
            if max(keys.shape[2] for keys in held if keys is not None) > count:
                return "its forward pass puts more tokens into its cache than the prompt has"
            if not distance(hidden, whole) > tolerance_of(model):  # also of what isn't finite: other checks say so
                return ""
    except UnmovableError as error:
        return str(error)
    except (RuntimeError, TypeError, ValueError, KeyError, IndexError, AttributeError, AssertionError) as error:
        return f"its forward pass doesn't go on from a cache ({type(error).__name__}: {error})"
    # torch's dynamic quantisation, and bitsandbytes in 8 bits
    names = {f"{type(module).__module__}.{type(module).__name__}" for module in model.modules()}
    quantises = any(each.startswith("torch.ao.nn.quantized.dynamic") or each.endswith("Linear8bitLt") for each in names)
    why = " (its layers quantise what they are given: a token comes out otherwise beside other tokens)"
    return f"its forward pass doesn't go on from a cache as from the tokens in it{why * quantises}"


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


def _try(model: Any, name: str) -> LinkSupport | str:
    """How a prompt of two compiled segments and a query is linked, under the attention `name`; or why it can't be."""
    if any(parameter.is_meta for parameter in model.parameters()):
        return "its weights are on the meta device"
    try:
        with exclusive(model), attention(model, name):
            check_keys_cached(model)
            positions, tolerance = find_positions(model), tolerance_of(model)
            length = sum(_SEGMENTS) + _QUERY
            ids = made_up_tokens(model, length)
            spans = [Span(0, _SEGMENTS[0], first=True), Span(_SEGMENTS[0], _SEGMENTS[1])]
            picaches = [compile_tokens(model, "", ids[span.start : span.end].tolist()) for span in spans]

            def cache() -> ScatterCache:
                device = model.get_input_embeddings().weight.device
                return assemble(positions, picaches, spans, end=length, length=length, device=device)

            reference = run_decoder(model, ids[None], DynamicCache())[0, -1]
            ordered = recompute_in_order(model, cache(), ids, torch.arange(length))
            if distance(ordered, reference) > tolerance:
                return "its forward pass doesn't continue a cache of ordinary keys and values exactly"
            scattered, expected = torch.tensor([5, 6, 9, 11, 12, 13, 14]), cache()
            recompute_in_order(model, expected, ids, scattered)
            # the first way of masking under which scattered rows come out as run by run
            for masks in mask_candidates(model) if takes_positions(model) else []:
                found = cache()
                try:
                    with masked_attention(model):
                        recompute(model, found, ids, scattered, masks)
                except (RuntimeError, TypeError, ValueError, KeyError, IndexError, AttributeError):
                    continue  # it doesn't take this form; the next one, or run by run
                layers, parts = zip(found.layers, expected.layers, strict=True), ("keys", "values")
                if all(distance(getattr(a, part), getattr(b, part)) <= tolerance for a, b in layers for part in parts):
                    return LinkSupport(positions, masks)
    except UnmovableError as error:
        return str(error)
    if positions.limit is not None:
        return "it takes no mask by position, and its rotary embedding depends on the prompt's length"
    return LinkSupport(positions, None)


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

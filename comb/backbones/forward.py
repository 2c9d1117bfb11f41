"""Runs a backbone's decoder stack, without its head, through the interfaces that all of transformers shares."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache

from comb.backbones.state_cache import StateCache, count_in
from comb.waits import on_device


@dataclass
class PassCount:
    """Tokens that have passed through a backbone's decoder; through some of its layers, that share of one."""

    tokens: float = 0.0


_counted: ContextVar[PassCount | None] = ContextVar("where passes of this thread are counted", default=None)


@contextmanager
def counted_passes() -> Iterator[PassCount]:
    """Counts what `run_decoder` takes inside of the block, in this thread; a nested block counts for itself."""
    count = PassCount()
    token = _counted.set(count)
    try:
        yield count
    finally:
        _counted.reset(token)


def count_tokens(tokens: float) -> None:
    """Adds to the count that is being taken, if one is."""
    count = _counted.get()
    if count is not None:
        count.tokens += tokens


def decoder_of(model: Any) -> Any:
    """The stack of decoder layers with embeddings and final norm; the model itself where it has no such part."""
    find = getattr(model, "get_decoder", None)
    decoder = find() if callable(find) else None
    # transformers goes by the name, and ModernBERT's output head is called `decoder`
    reads = decoder is not None and "input_ids" in inspect.signature(decoder.forward).parameters
    return decoder if reads else getattr(model, "base_model", model)


def takes_positions(model: Any) -> bool:
    """Whether positions can be given from outside; ALiBi models count keys instead."""
    return "position_ids" in inspect.signature(decoder_of(model).forward).parameters


def cache_argument(model: Any, cache: Cache | None) -> str:
    """Under which name a forward pass takes `cache`: models of states alone (Mamba) call it otherwise than the rest."""
    if not isinstance(cache, StateCache):
        return "past_key_values"
    names = inspect.signature(decoder_of(model).forward).parameters
    return "cache_params" if "past_key_values" not in names else "past_key_values"


def run_decoder(
    model: Any,
    input_ids: Tensor,
    cache: Cache,
    *,
    position_ids: Tensor | None = None,
    attention_mask: Tensor | Mapping[str, Tensor | None] | None = None,
) -> Tensor:
    """Last hidden states [rows, tokens, hidden] of `input_ids` [rows, tokens] behind what `cache` holds."""
    decoder = decoder_of(model)
    device = model.get_input_embeddings().weight.device
    arguments: dict[str, Any] = {"input_ids": on_device(input_ids, device), "use_cache": True}
    arguments[cache_argument(model, cache)] = cache
    if position_ids is not None:
        arguments["position_ids"] = on_device(position_ids, device)
    if isinstance(attention_mask, Mapping):
        arguments["attention_mask"] = {
            kind: None if mask is None else on_device(mask, device) for kind, mask in attention_mask.items()
        }
    elif attention_mask is not None:
        arguments["attention_mask"] = on_device(attention_mask, device)
    hidden: Tensor = decoder(**arguments)[0]
    count_tokens(input_ids.numel())
    count_in(cache, input_ids.shape[1])
    return hidden

"""Runs a backbone's decoder stack, without its head, through the interfaces that all of transformers shares."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache


def decoder_of(model: Any) -> Any:
    """The stack of decoder layers with embeddings and final norm; the model itself where it has no such part."""
    find = getattr(model, "get_decoder", None)
    decoder = find() if callable(find) else None
    return getattr(model, "base_model", model) if decoder is None else decoder


def takes_positions(model: Any) -> bool:
    """Whether positions can be given from outside; ALiBi models count keys instead."""
    return "position_ids" in inspect.signature(decoder_of(model).forward).parameters


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
    arguments: dict[str, Any] = {"input_ids": input_ids.to(device), "past_key_values": cache, "use_cache": True}
    if position_ids is not None:
        arguments["position_ids"] = position_ids.to(device)
    if isinstance(attention_mask, Mapping):
        arguments["attention_mask"] = {
            kind: None if mask is None else mask.to(device) for kind, mask in attention_mask.items()
        }
    elif attention_mask is not None:
        arguments["attention_mask"] = attention_mask.to(device)
    hidden: Tensor = decoder(**arguments)[0]
    return hidden

"""How cached keys depend on positions, found out from vLLM's own modules: each layer is asked, none is believed.

The model is run for one token at several positions, with attention that returns nothing: so all that differs from row
to row comes from positions. What reaches a layer's cache either is the same everywhere, or the cosines and sines of
one of the model's rotary modules must take the key of one position to those of all others. Everything else is refused:
positions that are added to embeddings, frequencies that change with the length of the prompt, and what nobody has
thought of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor, nn
from vllm.forward_context import set_forward_context
from vllm.lora.layers import LoRAMapping
from vllm.model_executor.layers.attention.attention import Attention
from vllm.model_executor.layers.attention.mla_attention import MLAAttention

from comb.backbones.rotary import embedding_of
from comb.linking.positions import Rerotation, Rotation, positions_near
from comb_serving.vllm.linking.cache_access import token_shape
from comb_serving.vllm.linking.states import is_linear

TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 4e-2}  # of the largest key


@dataclass(frozen=True)
class KeyPositions:
    """Rotary tables of a model, and which of them each layer's keys are rotated by."""

    tables: tuple[tuple[Tensor, Tensor], ...]  # cosines and sines [positions, m], float32, as vLLM computes them
    layers: dict[str, Rotation | None]  # by name; None where keys have no positions

    def rerotation(self, compiled: Tensor, linked: Tensor) -> Rerotation:
        """What takes keys [T, heads, dim] from positions [T] to positions [T], in every table."""
        return Rerotation.between(
            ((cos[compiled, None], sin[compiled, None]), (cos[linked, None], sin[linked, None]))
            for cos, sin in self.tables
        )

    def digest(self) -> str:
        """Of how keys are turned, as a part of documents' keys: what beside the weights decides them. vLLM takes other
        tables for another --max-model-len (LongRoPE); of those that go on alone, the first rows are the same."""
        first = [each[:16].cpu().numpy().tobytes() for table in self.tables for each in table]
        return f"+{sha256(b''.join(first)).hexdigest()[:16]}"


def find_positions(model: nn.Module, layers: dict[str, Any], vllm_config: Any) -> KeyPositions:
    """Asks each layer. Raises ValueError for a layer whose keys can't be taken to another position."""
    last = vllm_config.model_config.max_model_len - 1
    device = next(model.parameters()).device
    near = {position for position in positions_near(vllm_config.model_config.hf_text_config) if position < last}
    positions = torch.tensor(sorted({0, 1, min(2, last), last // 3, *near, last}), device=device)
    keys = _keys(model, layers, positions, vllm_config)
    found = (_table(module, last + 1, device) for module in model.modules())
    tables = tuple(table for table in found if table is not None)
    return KeyPositions(tables, {name: _rotation(name, each, positions, tables) for name, each in keys.items()})


@torch.inference_mode()
def _keys(model: nn.Module, layers: dict[str, Any], positions: Tensor, vllm_config: Any) -> dict[str, Tensor]:
    """The part of each layer's cache that may hold positions [P, heads, dim], for one token at P positions."""
    caught: dict[str, tuple[Tensor, Tensor]] = {}
    known = vllm_config.compilation_config.static_forward_context
    everywhere = {name: layer for name, layer in known.items() if isinstance(layer, Attention | MLAAttention)}
    linear = [layer for layer in known.values() if is_linear(layer)]

    def catch(
        name: str, layer: Any, query: Tensor, first: Tensor, second: Tensor, output_shape: Any = None, **_: Any
    ) -> Tensor:
        """In place of an attention layer: keeps what goes into the cache, and adds nothing to any row."""
        if first is None:
            raise ValueError(f"{name} writes to its cache by itself")
        caught[name] = first, second
        if output_shape is None:
            output_shape = (len(query), layer.num_heads * getattr(layer, "head_size_v", layer.head_size))
        return query.new_zeros(output_shape)

    def nothing(hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """In place of a linear layer: tokens that follow each other in a sequence would leave traces in each other."""
        return torch.zeros_like(hidden_states)

    for name, layer in everywhere.items():
        layer.forward = partial(catch, name, layer)  # on this object alone, in front of its class's
    for layer in linear:
        layer.forward = nothing
    if (loras := getattr(model, "lora_manager", None)) is not None:
        none = (0,) * len(positions)  # of them: what they add depends on no position
        loras.set_adapter_mapping(LoRAMapping(none, none, is_prefill=True))
    try:
        with set_forward_context(None, vllm_config, num_tokens=len(positions), skip_compiled=True):
            model(input_ids=torch.ones_like(positions, dtype=torch.int32), positions=positions)
    except Exception as error:
        raise ValueError(
            f"{type(model).__name__} can't be asked for its keys: {type(error).__name__}: {error}"
        ) from error
    finally:
        for layer in [*everywhere.values(), *linear]:
            del layer.forward
    found = {}
    for name, layer in layers.items():
        if name not in caught:
            raise ValueError(f"{name}: {type(model).__name__} doesn't bring keys to its cache")
        shape = token_shape(layer)
        parts = [part.reshape(len(positions), *size) for part, size in zip(caught[name], shape.parts, strict=True)]
        other = parts[1 - shape.rotated].float()
        if (other - other[:1]).abs().max() > _bound(parts[1 - shape.rotated]):
            raise ValueError(f"{name}: what is cached beside keys depends on positions, so a document can't be moved")
        found[name] = parts[shape.rotated]
    return found


def _bound(keys: Tensor) -> float:
    return TOLERANCE[keys.dtype] * float(keys.abs().max())


def _rotation(name: str, keys: Tensor, positions: Tensor, tables: Sequence[tuple[Tensor, Tensor]]) -> Rotation | None:
    """By which table the key of each position is taken to all others; None if keys have no positions."""
    bound, keys = _bound(keys), keys.float()
    if (keys - keys[:1]).abs().max() <= bound:
        return None
    pairs = [(a, b) for a in range(len(positions)) for b in range(len(positions)) if a != b]
    sources, targets = (torch.tensor(side, device=keys.device) for side in zip(*pairs, strict=True))
    for source, table in enumerate(tables):
        turn = KeyPositions((table,), {}).rerotation(positions[sources], positions[targets])
        for start in sorted({0, keys.shape[-1] - 2 * table[0].shape[1]}):
            for interleaved in (False, True) if start >= 0 else ():
                rotation = Rotation(0, start, interleaved)
                if (turn.apply(keys[sources].clone(), rotation) - keys[targets]).abs().max() <= bound:
                    return Rotation(source, start, interleaved)
    raise ValueError(
        f"{name}: no rotary embedding of the model explains how its keys change with positions; where positions are "
        "added to embeddings, a document can't be moved"
    )


def _table(module: nn.Module, count: int, device: torch.device) -> tuple[Tensor, Tensor] | None:
    """Cosines and sines [count, m] of a rotary module, vLLM's or transformers'; None for any other module."""
    rounded = getattr(module, "cos_sin_cache", None)
    if isinstance(rounded, Tensor):
        if rounded.ndim != 2 or len(rounded) < count:
            return None
        # in float32 where its own are rounded to the model's dtype
        compute = getattr(module, "_compute_cos_sin_cache", None)
        exact = rounded if compute is None or rounded.dtype == torch.float32 else compute().to(device)
        same = exact.shape == rounded.shape and (exact - rounded.to(device)).abs().max() <= 1e-2 * exact.abs().max()
        cos, sin = (exact if same else rounded).to(device, torch.float32).chunk(2, dim=-1)
        return cos.contiguous(), sin.contiguous()
    width, size = getattr(module, "rotary_dim", None), getattr(module, "head_size", None)
    if isinstance(width, int) and isinstance(size, int):  # one that keeps another table (LongRoPE) is asked
        m, key = width // 2, torch.zeros(count, size, device=device)
        key[:, :m] = 1  # first halves of the pairs that are turned: cosines and sines come back
        try:
            turned = module(torch.arange(count, device=device), key.clone(), key.clone())[1].reshape(key.shape)
        except (AssertionError, AttributeError, IndexError, RuntimeError, TypeError, ValueError):
            return None  # with arguments of its own: nothing known here
        return turned[:, :m].contiguous(), turned[:, m : 2 * m].contiguous()
    if not isinstance(getattr(module, "inv_freq", None), Tensor):
        return None
    # transformers', which may be asked about requests of any lengths at once
    embedding = embedding_of(module, count)
    if embedding is None or (embedding.limit is not None and embedding.limit < count):
        return None
    cos, sin = embedding.ask(torch.arange(count, device=device))
    return cos.contiguous(), sin.contiguous()

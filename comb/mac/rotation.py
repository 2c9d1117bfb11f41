"""Queries as they were before the rotary embedding, from what attention gets: rotated back by the model's own angles.

Nothing here knows a model class. One pass over single tokens at several positions shows which channels of every layer's
query turn with the position (`comb.linking.positions.RotaryProbe`); what no rotation explains stays exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from comb.backbones.attention_calls import AttentionCall, watched
from comb.backbones.forward import decoder_of, takes_positions
from comb.backbones.identity import identity_of
from comb.backbones.rotary import RotaryEmbedding
from comb.backbones.transformers_private import can_set_attention
from comb.kernels.mac.state import accumulator
from comb.linking.positions import Rerotation, RotaryProbe, Rotation

# under which sparse attention (DeepSeek-V3.2, GLM-MoE-DSA, MiniMax-M3) hands over the keys that its indexer has chosen
_CHOSEN = ("indices", "block_indices")


class UnsupportedModelError(ValueError):
    """A model whose attention MAC can't stand in for; the message says why."""


@dataclass(frozen=True)
class LayerQueries:
    """How one layer's queries turn with the position."""

    module: nn.Module  # the attention module that calls
    source: RotaryEmbedding | None = None  # what turns them; None where positions aren't in the query (NoPE)
    rotation: Rotation | None = None  # the channels that turn
    unknown: str = ""  # why MAC leaves this layer alone

    def unrotated(self, query: Tensor, positions: Tensor) -> Tensor:
        """`query` [B, H, N, D] at `positions` [B or 1, N] before its rotary embedding, in 32 bits or more.

        The embedding's magnitude (YaRN) is divided out, so that distances are comparable.
        """
        unrotated = query.to(accumulator(query.dtype), copy=True)
        if self.source is None or self.rotation is None:
            return unrotated
        # asked as the model asked in this pass: positions are all of its rows', or the last of them
        turns = (part.to(query.device).unflatten(0, positions.shape) for part in self.source.ask(positions.flatten()))
        cos, sin = (part[:, None].to(unrotated.dtype) for part in turns)
        size = cos.square() + sin.square()
        return Rerotation(((cos / size, -sin / size),)).apply(unrotated, self.rotation)


@torch.no_grad()
def find_queries(model: Any) -> dict[int, LayerQueries]:
    """By layer index, every layer that calls attention through transformers' interface. The caller holds the lock.

    Kept on the model until its weights change.

    Raises:
        UnsupportedModelError: when no layer does, or positions can't be given to the model.
    """
    found: dict[int, LayerQueries] = identity_of(model).fact("MAC queries", lambda: _find_queries(model))
    return found


def _find_queries(model: Any) -> dict[int, LayerQueries]:
    name = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{name} is an encoder-decoder; MAC works on decoder-only models")
    if not takes_positions(model):
        raise UnsupportedModelError(
            f"{name} takes no position_ids (ALiBi?), so its attention isn't a function of query and keys alone: "
            "use it without MAC"
        )
    if not can_set_attention(model):
        raise UnsupportedModelError(
            f"{name} computes attention in its own code, not through transformers' AttentionInterface: "
            "use it without MAC"
        )
    probe, passes = RotaryProbe(model), list[dict[int, list[AttentionCall]]]()
    device = model.get_input_embeddings().weight.device

    def note(call: AttentionCall) -> None:
        index = getattr(call.module, "layer_idx", None)
        if isinstance(index, int):
            passes[-1].setdefault(index, []).append(call)

    for each in probe.passes:
        passes.append({})
        tokens, positions = (tensor.to(device) for tensor in probe.inputs(each))
        with watched(model, note):
            decoder_of(model)(input_ids=tokens, position_ids=positions, use_cache=False)
    seen = passes[0]
    if not seen:
        raise UnsupportedModelError(
            f"no layer of {name} computes softmax attention through transformers' AttentionInterface: "
            "use it without MAC"
        )
    if any(call.options.get(name) is not None for calls in seen.values() for call in calls for name in _CHOSEN):
        raise UnsupportedModelError(
            f"{name} chooses the keys of every query by an indexer, and does so only under attention that it knows by "
            "name: use it without MAC"
        )
    queries = {}
    for index, calls in seen.items():
        module = calls[0].module
        if len(calls) > 1:
            queries[index] = LayerQueries(module, unknown="several attentions in one layer")
            continue
        turned = torch.cat([probe.by_position(call.query) for each in passes for call in each[index]], dim=1)
        found = probe.explain(turned, probe.passes)
        if isinstance(found, tuple):
            queries[index] = LayerQueries(module, *found)
        else:
            unknown = "" if found == "still" else "queries that no rotary embedding explains"
            queries[index] = LayerQueries(module, unknown=unknown)
    return queries

"""Starts the null keys of cross blocks in closed form: what documents compete with in the layer's own attention.

In a prompt, a layer shares one softmax between the documents and all else: with z the log-sum-exp of all other scores,
a document's token of score s gets exp(s) / (exp(z) + sum of exp(s)). A cross block sees the documents, and one null key
for each of them. Documents get the same share there if the null keys' scores sum up to exp(z), which is to say
q . k_null = z - log(documents). z is close to linear in q, so the best null key is the solution of a least-squares
problem. A null key of zeros stands for much less than what a head usually rests on: every document would then be heard,
also by heads that don't care for it.

Shapes: N tokens of a question, H query heads, G key and value heads, D their size.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from comb.backbones.attention_calls import AttentionCall, watched
from comb.backbones.discovery import ATTENTION_NAMES, decoder_layers, find_child, layer_input
from comb.backbones.forward import decoder_of
from comb.model.least_squares import NormalEquations
from comb.model.modeling import CombForCausalLM
from comb_training.data.batches import TrainingExample

logger = logging.getLogger(__name__)


@torch.no_grad()
def fit_sinks(model: CombForCausalLM, examples: Sequence[TrainingExample], *, ridge: float = 1.0) -> dict[int, float]:
    """Solves for the null keys of all blocks on the questions and answers of `examples`, read without their documents.

    Blocks in front of layers that don't compute softmax attention over the block's heads (MLA, linear attention) stay
    as they are. Soft caps and sinks that a layer adds to its scores don't count.

    Args:
        examples: each with documents, of which only the number counts.
        ridge: the penalty on a null key, in units of one token's squared query.

    Returns:
        By layer, how much of z the null keys explain (R2, at most 1).

    Raises:
        ValueError: the adapter has no null keys.
    """
    if model.config.encoder_config.joint_attention:
        raise ValueError("model.fit_sinks solves for null keys, and joint attention needs none: leave it out")
    if model.config.encoder_config.sink != "null":
        raise ValueError("model.fit_sinks solves for null keys: they come with model.options {sink: 'null'}")
    layers = decoder_layers(model.backbone)
    fits = {
        layer: _SinkFit(block)
        for layer, block in zip(model.config.cross_attention_layers, model.cross_blocks, strict=True)
    }
    attentions = {find_child(layers[index], ATTENTION_NAMES): fit for index, fit in fits.items()}
    count = 0

    def see(call: AttentionCall) -> None:
        if (fit := attentions.get(call.module)) is not None:
            fit.add(call, count)

    with ExitStack() as stack:
        for index, fit in fits.items():
            stack.callback(layers[index].register_forward_pre_hook(fit.capture, with_kwargs=True).remove)
        stack.enter_context(watched(model.backbone, see))
        for example in examples:
            count = len(example.segments)
            ids = torch.tensor([[*example.prompt.query, *example.target]], device=model.device)
            decoder_of(model.backbone)(input_ids=ids, use_cache=False)
    quality = {}
    for (index, fit), head in zip(fits.items(), model.encoder.key_value_heads, strict=True):
        if fit.sums:
            null_key, quality[index] = fit.solve(ridge)
            head.null_key.copy_(null_key)  # type: ignore[operator]  # a parameter
    logger.info("null keys fitted, R2: %s", ", ".join(f"layer {layer}: {r2:.2f}" for layer, r2 in quality.items()))
    return quality


class _SinkFit:
    """The least-squares problem of one block's null keys, one for each of the G heads."""

    def __init__(self, block: Any) -> None:
        self.block = block
        self.sums: list[NormalEquations] = []
        self._hidden = torch.empty(0)

    def capture(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forward pre-hook of the decoder layer behind the block."""
        self._hidden = layer_input(args, kwargs)

    def add(self, call: AttentionCall, documents: int) -> None:
        """The attention of the layer whose input was captured, over one row."""
        attention = self.block.cross_attn
        hidden = self._hidden.to(self.block.attention_gate)
        projected = attention.q_proj(self.block.input_layernorm(hidden)).unflatten(-1, (-1, attention.head_dim))
        queries = attention.q_norm(projected)[0].transpose(0, 1).double() * attention.scaling  # [H, N, D]
        groups = len(queries) // attention.num_key_value_groups
        if call.query.shape[1] != len(queries) or call.keys.shape[1] != groups:
            return
        if not self.sums:
            size, device = attention.head_dim, queries.device
            self.sums = [NormalEquations.zeros(size, 1, device, bias=False) for _ in range(groups)]
        z = call.scores()[0].logsumexp(-1) - math.log(documents)  # [G, H / G, N]
        for sums, x, y in zip(self.sums, queries.unflatten(0, (groups, -1)), z, strict=True):
            sums.add(x.flatten(0, 1), y.flatten()[:, None])

    def solve(self, ridge: float) -> tuple[Tensor, float]:
        """Null keys [G, D], and the mean R2 of the heads."""
        null_keys, quality = zip(*(sums.solve(ridge) for sums in self.sums), strict=True)
        return torch.stack(null_keys)[..., 0], float(torch.stack(quality).mean())

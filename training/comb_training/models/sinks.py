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

from comb.backbones.discovery import ATTENTION_NAMES, decoder_layers, find_child, layer_input
from comb.backbones.forward import decoder_of
from comb.linking.attention_calls import AttentionCall, watched
from comb.model.modeling import CombForCausalLM
from comb_training.data.batches import TrainingExample

logger = logging.getLogger(__name__)


@torch.no_grad()
def fit_sinks(model: CombForCausalLM, examples: Sequence[TrainingExample], *, ridge: float = 1.0) -> dict[int, float]:
    """Solves for the null keys of all blocks on the questions and answers of `examples`, read without their documents.

    Blocks in front of layers that don't compute softmax attention over the block's heads (MLA, linear attention) stay
    as they are. Soft caps and sinks that a layer adds to its scores don't count.

    Args:
        ridge: the penalty on a null key, in units of one token's squared query.

    Returns:
        By layer, how much of z the null keys explain (R2, at most 1).

    Raises:
        ValueError: the adapter has no null keys.
    """
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
            if count:
                ids = torch.tensor([[*example.prompt.query, *example.target]], device=model.device)
                decoder_of(model.backbone)(input_ids=ids, use_cache=False)
    quality = {}
    for (index, fit), head in zip(fits.items(), model.encoder.key_value_heads, strict=True):
        if fit.tokens:
            null_key, quality[index] = fit.solve(ridge)
            head.null_key.copy_(null_key)  # type: ignore[operator]  # a parameter
    logger.info("null keys fitted, R2: %s", ", ".join(f"layer {layer}: {r2:.2f}" for layer, r2 in quality.items()))
    return quality


class _SinkFit:
    """Normal equations of one block's null keys, a key for each of the G heads. float64"""

    def __init__(self, block: Any) -> None:
        self.block = block
        self.tokens = 0
        self.xx: Any = 0.0  # [G, D, D]
        self.xz: Any = 0.0  # [G, D]
        self.z: Any = 0.0  # [G]
        self.zz: Any = 0.0  # [G]
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
        z = _log_sum_exp(call) - math.log(documents)  # [H, N]
        x, y = queries.unflatten(0, (groups, -1)).flatten(1, 2), z.double().unflatten(0, (groups, -1)).flatten(1)
        self.xx += x.transpose(1, 2) @ x
        self.xz += (x.transpose(1, 2) @ y[..., None])[..., 0]
        self.z += y.sum(1)
        self.zz += y.pow(2).sum(1)
        self.tokens += y.shape[1]

    def solve(self, ridge: float) -> tuple[Tensor, float]:
        """Null keys [G, D], and the mean R2 of the heads."""
        penalty = ridge * torch.eye(self.xx.shape[-1], dtype=self.xx.dtype, device=self.xx.device)
        solution = torch.linalg.solve(self.xx + penalty, self.xz)
        residual = (
            self.zz - 2 * (solution * self.xz).sum(-1) + torch.einsum("gd,gde,ge->g", solution, self.xx, solution)
        )
        spread = (self.zz - self.z.pow(2) / self.tokens).clamp_min(1e-12)
        return solution, float((1 - residual / spread).mean())


def _log_sum_exp(call: AttentionCall) -> Tensor:
    """Of the scores of every token of one row. [H, N] float32"""
    query = call.query[0].float().unflatten(0, (call.keys.shape[1], -1))  # [G, H / G, N, D]
    scores = query @ call.keys[0, :, None].float().transpose(-1, -2) * call.scale
    mask = call.mask
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()[None, None]
    allowed = mask[0, :, None]  # [1, 1, N, N]
    scores = scores.masked_fill(~allowed, -math.inf) if mask.dtype == torch.bool else scores + allowed
    summed: Tensor = scores.logsumexp(-1).flatten(0, 1)
    return summed

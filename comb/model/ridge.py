"""Starts an encoder's key and value heads in closed form: ridge regression onto the backbone's own keys and values.

What a cross block reads in front of a decoder layer should be what that layer's attention would read if the document
stood in the prompt: the backbone's keys and values of the document alone, before rotary positions. Each head maps the
encoder's normalised output to them linearly, so the best head is the solution of a least-squares problem, summed up
over passages without keeping them. An encoder of the backbone's first layers starts from there near the quality that
its depth allows, where random or copied heads start from noise.

Shapes: N tokens of a batch of passages, D the hidden width, W = kv_heads * head_dim.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from comb.backbones.discovery import ATTENTION_NAMES, decoder_layers, find_child, layer_input, text_config
from comb.backbones.forward import decoder_of
from comb.model.initialization import LayerParts, read_layer
from comb.model.least_squares import NormalEquations
from comb.model.modeling import CombForCausalLM
from comb.model.segments import padded_batches

logger = logging.getLogger(__name__)

Segment = Sequence[int]


@dataclass(frozen=True)
class HeadFit:
    """How well the encoder's output says the backbone's keys and values in front of one layer: R2, at most 1."""

    layer: int
    keys: float
    values: float


@torch.no_grad()
def fit_to_backbone(
    model: CombForCausalLM, passages: Sequence[Segment], *, ridge: float = 10.0, batch_tokens: int = 4096
) -> list[HeadFit]:
    """Fits all heads to what the backbone computes of `passages`; returns how well.

    Heads in front of layers whose attention has no ordinary keys and values (MLA, linear attention) stay as they are.

    Args:
        passages: token ids of texts like the documents to come; a few hundred of some hundred tokens.
        ridge: the penalty on weights, in units of one token's squared normalised features.
        batch_tokens: of one forward pass, padding included.
    """
    targets = [_LayerTargets.of(model, layer) for layer in model.config.cross_attention_layers]
    heads: list[Any] = list(model.encoder.key_value_heads)
    fitted = [index for index, target in enumerate(targets) if target is not None]
    sums: dict[int, NormalEquations] = {}
    for features, given, first in _observed(model, passages, targets, batch_tokens):
        for index in fitted:
            x, keys_values = heads[index].norm(features[index].to(heads[index].k_proj.weight)).float(), given[index]
            if index not in sums:
                sums[index] = NormalEquations.zeros(x.shape[-1], keys_values.shape[-1], x.device)
            sums[index].add(x[~first], keys_values[~first])
    fits = []
    for index in fitted:
        head, width = heads[index], heads[index].k_proj.out_features
        solution, quality = sums[index].solve(ridge)
        for projection, part in ((head.k_proj, solution[:, :width]), (head.v_proj, solution[:, width:])):
            projection.weight.copy_(part[:-1].T)
            if projection.bias is not None:
                projection.bias.copy_(part[-1])
        fits.append(HeadFit(model.config.cross_attention_layers[index], float(quality[:width].mean()),
                            float(quality[width:].mean())))  # fmt: skip
    if model.config.encoder_config.cross_qk_norm == "head":
        _fit_norms(model, passages, targets, fitted, batch_tokens)
    logger.info("heads fitted, R2 of keys and values: %s",
                ", ".join(f"layer {fit.layer}: {fit.keys:.2f} {fit.values:.2f}" for fit in fits))  # fmt: skip
    return fits


def _fit_norms(
    model: CombForCausalLM,
    passages: Sequence[Segment],
    targets: Sequence[_LayerTargets | None],
    fitted: Sequence[int],
    batch_tokens: int,
) -> None:
    """Norm weights of cross-attention's queries and keys, by least squares per channel: the backbone may have none."""
    heads: list[Any] = list(model.encoder.key_value_heads)
    blocks: list[Any] = list(model.cross_blocks)
    found: dict[tuple[int, str], Tensor] = {}
    few = passages[: max(8, len(passages) // 8)]
    for features, given, first in _observed(model, few, targets, batch_tokens):
        for index in fitted:
            head, target, size = heads[index], targets[index], heads[index].head_dim
            assert target is not None
            keys = head.k_proj(head.norm(features[index])).float().unflatten(-1, (-1, size))
            wanted = given[index].chunk(2, -1)[0].unflatten(-1, (-1, size))
            queries, projected = target.queries(size)
            for name, ours, theirs in (("key", keys, wanted), ("query", projected, queries)):
                norm = ours * (ours.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()
                products = torch.stack(((norm * theirs)[~first].sum((0, 1)), norm[~first].pow(2).sum((0, 1))))
                found[index, name] = found.get((index, name), 0) + products
    for (index, name), (product, square) in found.items():
        norm = heads[index].k_norm if name == "key" else blocks[index].cross_attn.q_norm
        norm.weight.copy_(product / square.clamp_min(1e-12))


class _LayerTargets:
    """The keys, values and queries of one decoder layer, before positions, from what its attention is given."""

    def __init__(self, attention: nn.Module, parts: LayerParts) -> None:
        self.attention = attention
        self._parts = parts
        self._input = torch.empty(0)

    @classmethod
    def of(cls, model: CombForCausalLM, layer: int) -> _LayerTargets | None:
        module = decoder_layers(model.backbone)[layer]
        parts = read_layer(module, model.info, text_config(model.backbone))
        attention = find_child(module, ATTENTION_NAMES)
        known = parts.has(*(f"self_attn.{name}.weight" for name in ("q_proj", "k_proj", "v_proj")))
        heads = model.config.encoder_config.num_key_value_heads * model.config.encoder_config.head_dim
        if attention is None or not known or len(parts.weights["self_attn.k_proj.weight"]) != heads:
            return None
        return cls(attention, parts)

    def capture(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forward pre-hook of the attention."""
        self._input = layer_input(args, kwargs).detach()

    def keys_values(self, real: Tensor, head_dim: int) -> Tensor:
        """Of the batch that was captured: [N, 2 W]. real [rows, tokens] marks what isn't padding."""
        self._input = self._input[real]
        keys = self._normed(self._project("k_proj"), "k_norm", head_dim)
        return torch.cat((keys, self._project("v_proj")), -1)

    def queries(self, head_dim: int) -> tuple[Tensor, Tensor]:
        """The backbone's queries, and the same before its own norm if it has one; both [N, heads, head_dim]."""
        plain = self._project("q_proj")
        normed = self._normed(plain, "q_norm", head_dim)
        return normed.unflatten(-1, (-1, head_dim)), plain.unflatten(-1, (-1, head_dim))

    def _project(self, name: str) -> Tensor:
        weights, bias = self._parts.weights, self._parts.weights.get(f"self_attn.{name}.bias")
        inputs = self._input.float()
        return nn.functional.linear(
            inputs, weights[f"self_attn.{name}.weight"].float(), None if bias is None else bias.float()
        )

    def _normed(self, x: Tensor, name: str, head_dim: int) -> Tensor:
        scale = self._parts.weights.get(f"self_attn.{name}.weight")
        if scale is None:
            return x
        shaped = x.unflatten(-1, (-1, head_dim)) if self._parts.qk_norm == "head" else x
        shaped = shaped * (shaped.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * scale.float()
        return shaped.flatten(-2) if self._parts.qk_norm == "head" else shaped


def _observed(
    model: CombForCausalLM, passages: Sequence[Segment], targets: Sequence[_LayerTargets | None], batch_tokens: int
) -> Iterator[tuple[list[Tensor], list[Tensor], Tensor]]:
    """Batch by batch, of all tokens: the inputs of every head [N, D], the keys and values behind every target [N, 2 W]
    (empty without one), and which tokens are a passage's first [N]."""
    size = model.config.encoder_config.head_dim
    for batch in padded_batches(sorted(set(map(tuple, passages)), key=len), batch_tokens):
        lengths = torch.tensor([len(passage) for passage in batch])
        ids = nn.utils.rnn.pad_sequence([torch.tensor(passage) for passage in batch], batch_first=True)
        real = (torch.arange(ids.shape[1])[None] < lengths[:, None]).to(model.device)
        with _capturing(model, targets) as features:
            # what is behind a passage on its right is seen by none of its tokens
            decoder_of(model.backbone)(input_ids=ids.to(model.device), use_cache=False)
            model.encode_batch(batch)
        first = torch.zeros_like(real)
        first[:, 0] = True
        flat = [hidden[real] if hidden.shape[:2] == real.shape else hidden[0] for hidden in features]
        given = [torch.empty(0) if target is None else target.keys_values(real, size) for target in targets]
        yield flat, given, first[real]


@contextmanager
def _capturing(model: CombForCausalLM, targets: Sequence[_LayerTargets | None]) -> Iterator[list[Tensor]]:
    """What the heads are given, in the list, and what the targets' attentions are given, in the targets."""
    features: list[Tensor] = [torch.empty(0)] * len(targets)

    def keep(index: int, args: tuple[Any, ...]) -> None:
        features[index] = args[0].detach()

    with ExitStack() as stack:
        for index, head in enumerate(model.encoder.key_value_heads):
            hook = head.register_forward_pre_hook(lambda _, args, index=index: keep(index, args))
            stack.callback(hook.remove)
        for target in targets:
            if target is not None:
                stack.callback(target.attention.register_forward_pre_hook(target.capture, with_kwargs=True).remove)
        yield features

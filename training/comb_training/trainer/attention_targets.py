"""`train.objective=attention`: cross blocks learn what documents add to hidden states in the backbone's own attention.

The first stage of an encoder with layers of its own (docs/comb.md#two-stages): answers alone, some fifty tokens a row
behind thirty layers, teach it nothing for a long time. Here every token behind the documents is a target of d numbers
at every cross block, and nothing goes back through the backbone.

Shapes: B rows, T tokens of a full prompt, n target tokens of the row with most, d hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from comb.backbones.discovery import ATTENTION_NAMES, find_child, layer_input
from comb.evaluation.placement import takes_masks, without_hidden
from comb_training.data.batches import IGNORED


@dataclass
class AttentionTargets:
    """Of one cross block, at the tokens that a target is predicted at, padded on the right. float32

    Args:
        states: in front of its layer. [B, n, d]
        added: what the layer's attention adds there for the documents: its output less that with them hidden. [B, n, d]
        valid: what is no padding. [B, n]
    """

    states: Tensor
    added: Tensor
    valid: Tensor

    def errors(self, found: Tensor) -> Tensor:
        """Squared distance of what a block adds [B, n, d], over the mean square of what is wanted. [targets]"""
        wanted = self.added.square().sum(-1)[self.valid].mean().clamp_min(1e-12)
        return (found.float() - self.added).square().sum(-1)[self.valid] / wanted


def check_attention(model: Any) -> None:
    """Raises ValueError if what documents add in the backbone's attention can't be told, or isn't what it adds."""
    backbone = model.backbone
    if not takes_masks(backbone):
        raise ValueError(
            f"train.objective=attention hides documents with masks, which {backbone.config._attn_implementation} "
            "doesn't take: set model.options: {attn_implementation: sdpa}"
        )
    factor = getattr(backbone.config, "residual_multiplier", 1.0)
    if model.encoder.config.norm_placement != "pre" or factor != 1.0:
        raise ValueError(
            "train.objective=attention is for backbones that add the output of their attention as it is: this one has "
            "norms behind it or a factor on it"
        )
    layers = backbone.get_submodule(model.info.layers_path)
    for index in model.config.cross_attention_layers:
        if find_child(layers[index], ATTENTION_NAMES) is None:
            raise ValueError(f"layer {index} of the backbone has no attention that documents could be hidden from")


@contextmanager
def attention_targets(model: Any, prompts: dict[str, Tensor]) -> Iterator[list[AttentionTargets]]:
    """Targets of every cross block, in the list when the backbone has run over `prompts` within the ``with`` block.

    Args:
        model: a `CombForCausalLM` that `check_attention` lets through.
        prompts: ``full_prompts`` of a `Collator`.
    """
    labels, documents = prompts["labels"], prompts["documents"]
    predicts = nn.functional.pad(labels[:, 1:] != IGNORED, (0, 1))
    hidden = (~documents[:, :, None] & documents[:, None, :])[:, None]
    layers = model.backbone.get_submodule(model.info.layers_path)
    valid = _rows(predicts[..., None], predicts)[..., 0]
    states: dict[int, Tensor] = {}
    added: dict[int, Tensor] = {}

    def watch(stack: ExitStack, index: int) -> None:
        attention = find_child(layers[index], ATTENTION_NAMES)
        assert attention is not None  # `check_attention`

        def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            states[index] = _rows(layer_input(args, kwargs).float(), predicts)

        def leave(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            # not by a call, which would come here again
            without = module.forward(*args, **without_hidden(args, kwargs, hidden))
            added[index] = _rows(output[0].float() - without[0].float(), predicts)

        stack.callback(layers[index].register_forward_pre_hook(enter, with_kwargs=True).remove)
        stack.callback(attention.register_forward_hook(leave, with_kwargs=True).remove)

    found: list[AttentionTargets] = []
    with ExitStack() as stack, torch.no_grad():
        for index in model.config.cross_attention_layers:
            watch(stack, index)
        yield found
    found += [AttentionTargets(states[index], added[index], valid) for index in model.config.cross_attention_layers]


def _rows(values: Tensor, chosen: Tensor) -> Tensor:
    """Of [B, T, d] what `chosen` [B, T] has, padded with zeros: [B, n, d]."""
    return nn.utils.rnn.pad_sequence([row[mask] for row, mask in zip(values, chosen, strict=True)], batch_first=True)

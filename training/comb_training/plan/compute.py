"""Floating point operations of a training step, and how long a GPU takes for them at a share of its peak."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from comb.backbones.discovery import text_config
from comb.model.modeling import CombForCausalLM
from comb_training.plan.activations import PassSize

H200_FLOPS = 989e12
"""Peak of an H200 per second in bfloat16, without sparsity (its data sheet)."""
UTILISATION = 0.4
"""Share of it that is counted on: what well-fed training of dense models commonly reaches; comb's isn't measured."""
TOLERANCE = 0.1
"""How far the counts are from those of torch's counter at most, either way (tests/training/test_plan_compute.py)."""


@dataclass(frozen=True)
class StepCompute:
    """Operations of one forward and backward pass of one rank, by what they are for.

    Args:
        encoder: documents through the encoder, there and back. decoder: rows through backbone and what reads documents.
        teacher: full prompts through the plain backbone; 0 without `train.kl_weight`.
        tokens: of different documents, queries and answers, as the run's log counts them.
    """

    encoder: float
    decoder: float
    teacher: float
    tokens: int

    @property
    def total(self) -> float:
        """All of them."""
        return self.encoder + self.decoder + self.teacher

    @property
    def seconds(self) -> float:
        """On one H200, at `UTILISATION`."""
        return self.total / (H200_FLOPS * UTILISATION)


def step_compute(model: CombForCausalLM, size: PassSize, *, teacher: bool, checkpointing: bool) -> StepCompute:
    """Counts a pass of this size.

    A token costs two operations per weight that it meets on its way there, two more on the way back where the gradient
    goes on to its input, and two where the weight itself is trained. A query that attends to k keys costs 4 k per
    channel of all heads, and twice that on the way back. Left out are attention inside of a document and of a row,
    norms, the optimizer, and whatever moves bytes only.

    Args:
        model: on any device, also meta. size: of the pass; with padding.
        teacher: whether the plain backbone reads the full prompts (`train.kl_weight`).
        checkpointing: every layer with a gradient computes its way there twice.
    """
    config: Any = model.config.encoder_config
    layers: list[Any] = list(model.backbone.get_submodule(model.info.layers_path))
    active = _active_experts(text_config(model.backbone))
    crosses: list[int] = model.config.cross_attention_layers or []
    channels = config.num_attention_heads * config.head_dim
    ways = 2 if checkpointing else 1
    weights = [_weights(layer, active) for layer in layers]
    head = model.info.vocab_size * config.hidden_size * size.targets

    if (
        config.shared_layers
    ):  # nothing goes back through the backbone; what the last head reads is made before its layer
        encoder = 2.0 * size.documents * sum(weights[: crosses[-1]])
    else:
        own = _weights(model.encoder.layers)
        encoder = 2.0 * size.documents * ((ways + 1) * own + _weights(model.encoder.layers, trained=True))
    heads = model.encoder.key_value_heads
    back = 0 if config.shared_layers else _weights(heads)
    encoder += 2.0 * size.documents * (_weights(heads) + back + _weights(heads, trained=True))

    behind = sum(weights[crosses[0] :]) if crosses else 0
    decoder = 2.0 * size.queries * (sum(weights[: crosses[0]] if crosses else weights) + (ways + 1) * behind)
    blocks = model.cross_blocks
    decoder += 2.0 * size.queries * ((ways + 1) * _weights(blocks) + _weights(blocks, trained=True))
    decoder += 4.0 * len(crosses) * channels * size.queries * size.linked / size.rows * (ways + 2)
    decoder += 4.0 * head  # there, and back to its input

    full = size.linked + size.queries
    reading = 0.0
    if teacher:
        reading = 2.0 * full * sum(weights) + 4.0 * len(layers) * channels * full * full / size.rows + 2.0 * head
    return StepCompute(encoder, decoder, reading, size.documents + size.queries)


def _weights(part: nn.Module, active: float = 1.0, *, trained: bool = False) -> float:
    """Weights of a part's matrices that one token meets; of experts, which lie in one tensor or in a list, a share."""
    return sum(
        parameter.numel() * (active if ".experts." in f".{name}" else 1.0)
        for name, parameter in part.named_parameters()
        if (parameter.ndim == 2 or ".experts." in f".{name}") and (parameter.requires_grad or not trained)
    )


def _active_experts(config: Any) -> float:
    """The share of a mixture's experts that one token meets; 1 for other models."""
    chosen = getattr(config, "num_experts_per_tok", None)
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    count = next((value for name in names if (value := getattr(config, name, None))), None)
    return chosen / count if chosen and count else 1.0

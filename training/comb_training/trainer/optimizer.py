"""AdamW over what trains: gates learn faster, only matrices decay."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import AdamW

from comb_training.config import TrainConfig


def parameter_groups(
    model: nn.Module, *, learning_rate: float, gate_multiplier: float, weight_decay: float
) -> list[dict[str, Any]]:
    """Optimizer groups: matrices (with decay), norms and biases (without), gates (without, faster).

    Gates are the parameters whose name ends in "gate".
    """
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    gates = [parameter for name, parameter in named if name.endswith("gate")]
    others = [parameter for name, parameter in named if not name.endswith("gate")]
    groups = [
        {"params": [p for p in others if p.ndim >= 2], "lr": learning_rate, "weight_decay": weight_decay},
        {"params": [p for p in others if p.ndim < 2], "lr": learning_rate, "weight_decay": 0.0},
        {"params": gates, "lr": learning_rate * gate_multiplier, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def adamw(model: nn.Module, config: TrainConfig) -> AdamW:
    """The optimizer of a run, at the peak of its learning rates."""
    groups = parameter_groups(
        model,
        learning_rate=config.learning_rate,
        gate_multiplier=config.gate_learning_rate_multiplier,
        weight_decay=config.weight_decay,
    )
    return AdamW(groups, lr=config.learning_rate, betas=(0.9, config.adam_beta2))

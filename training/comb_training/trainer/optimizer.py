"""AdamW over what trains: gates learn faster, only matrices decay."""

from __future__ import annotations

from torch import nn
from torch.optim import AdamW

from comb_training.config import TrainConfig


def adamw(model: nn.Module, config: TrainConfig) -> AdamW:
    """The optimizer of a run, at the peak of its learning rates.

    Its groups: matrices (with decay), norms and biases (without), gates (without, faster). Gates are the parameters
    whose name ends in "gate".
    """
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    gates = [parameter for name, parameter in named if name.endswith("gate")]
    others = [parameter for name, parameter in named if not name.endswith("gate")]
    rate = config.learning_rate
    groups = [
        {"params": [p for p in others if p.ndim >= 2], "lr": rate, "weight_decay": config.weight_decay},
        {"params": [p for p in others if p.ndim < 2], "lr": rate, "weight_decay": 0.0},
        {"params": gates, "lr": rate * config.gate_learning_rate_multiplier, "weight_decay": 0.0},
    ]
    return AdamW([group for group in groups if group["params"]], lr=rate, betas=(0.9, 0.98))

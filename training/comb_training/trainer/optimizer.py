"""AdamW over what trains, and its learning rate over a run that ends by steps, by epochs or by the clock."""

from __future__ import annotations

import math
import time

from torch import nn
from torch.optim import AdamW

from comb_training.config import TrainConfig
from comb_training.trainer import distributed

GATES_FASTER = 10.0
"""Gates start at zero and decide how soon the encoder is heard: their learning rate is that of the rest times this."""
UNLIMITED_STEPS = 10**9  # for runs that only the clock ends
FINAL = 0.02
"""Where the cosine ends, as a share of the peak."""


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
        {"params": gates, "lr": rate * GATES_FASTER, "weight_decay": 0.0},
    ]
    return AdamW([group for group in groups if group["params"]], lr=rate, betas=(0.9, 0.98))


class LearningRateSchedule:
    """Linear warm-up, then a cosine down to `FINAL`, as a factor of the peak learning rate.

    Progress is the greater of steps done / steps and seconds used / `max_seconds`. So a run that the clock ends
    gets its whole cool-down however fast the machine is; its learning rates then depend on the machine, which a
    run limited by steps avoids.
    """

    def __init__(self, steps: int, max_seconds: float | None, warmup: float) -> None:
        self.steps = steps
        self.max_seconds = max_seconds
        self.warmup = warmup
        self.used = 0.0
        """Seconds of optimisation so far; a resumed run goes on with those of its checkpoint."""
        self._last = 0.0

    def start(self) -> None:
        """The clock runs from here."""
        self._last = time.monotonic()

    def tick(self) -> None:
        """Counts the seconds since the last look at the clock. Collective where the clock ends the run."""
        now = time.monotonic()
        self.used += now - self._last
        self._last = now
        if self.max_seconds is not None:
            # the first rank's clock holds for all: their learning rates must be the same
            [self.used] = distributed.summed(self.used if distributed.is_main() else 0.0)

    def over(self, step: int) -> bool:
        """Whether nothing is left to train after `step` steps."""
        return step >= self.steps or (self.max_seconds is not None and self.used >= self.max_seconds)

    def progress(self, step: int) -> float:
        """0 at the start, 1 at the end."""
        clock = 0.0 if self.max_seconds is None else self.used / self.max_seconds
        return min(1.0, max(step / self.steps, clock))

    def __call__(self, step: int) -> float:
        """The factor for the update that follows `step` steps."""
        # the first update has done nothing yet, but its learning rate must not be zero
        progress = max(self.progress(step), min(1.0, 1 / self.steps))
        if self.max_seconds is not None:
            progress = max(progress, 1e-3)
        if progress < self.warmup:
            return progress / self.warmup
        rest = (progress - self.warmup) / (1 - self.warmup)
        return FINAL + (1 - FINAL) * 0.5 * (1 + math.cos(math.pi * rest))


def total_steps(config: TrainConfig, steps_per_epoch: int) -> int:
    """Optimizer steps of the whole run: the least of `steps` and `epochs`, unlimited if only the clock ends it."""
    limits = [UNLIMITED_STEPS]
    if config.steps is not None:
        limits.append(config.steps)
    if config.epochs is not None:
        limits.append(max(1, math.ceil(config.epochs * steps_per_epoch)))
    return min(limits)

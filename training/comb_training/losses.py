"""What is minimised: cross-entropy on the answers and, with a weight, the distance to a teacher's distribution there.

Shapes: B rows, T tokens, N target tokens (all of a batch, row by row), V vocabulary, k kept classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from comb_training.batches import IGNORED


@dataclass(frozen=True)
class Teacher:
    """A teacher's k likeliest next tokens at every target token: `indices` and float32 `logprobs`, both [N, k]."""

    indices: Tensor
    logprobs: Tensor

    @classmethod
    def of(cls, logits: Tensor, labels: Tensor, k: int) -> Teacher:
        """From logits [B, T, V] of the rows that `labels` [B, T] belong to."""
        _, counted = _targets(labels)
        logprobs = logits[:, :-1][counted].float().log_softmax(-1)
        kept = logprobs.topk(min(k, logprobs.shape[-1]), dim=-1)
        return cls(kept.indices, kept.values)


def target_loss(
    outputs: Any,
    labels: Tensor,
    num_items_in_batch: Tensor | int | None = None,
    *,
    teacher: Teacher | None = None,
    weight: float = 0.0,
) -> Tensor:
    """Cross-entropy over target tokens (+ `weight` x `divergence`): the sum over `num_items_in_batch`, or the mean.

    Args:
        outputs: with ``logits`` [B, T, V].
        labels: [B, T], -100 where nothing is to be learned.
    """
    targets, counted = _targets(labels)
    # only the rows that count are turned into float32: a vocabulary of float32 logits per token is large
    logits = outputs.logits[:, :-1][counted].float()
    if num_items_in_batch is None:
        num_items_in_batch = len(logits)
    loss = nn.functional.cross_entropy(logits, targets[counted], reduction="sum")
    if teacher is not None:
        loss = loss + weight * divergence(logits, teacher).sum()
    return loss / num_items_in_batch


def divergence(logits: Tensor, teacher: Teacher) -> Tensor:
    """KL(teacher || student) [N] in nats, over the teacher's k classes and one more for all others together.

    That is at most the divergence over all classes, and equal to it for k = V.
    """
    student = logits.log_softmax(-1).gather(-1, teacher.indices)
    kept = teacher.logprobs.exp()
    # the rest of both distributions; rounding can take a sum above one
    smallest = torch.finfo(torch.float32).tiny
    rest_teacher = (1 - kept.sum(-1)).clamp_min(0)
    rest_student = (1 - student.exp().sum(-1)).clamp_min(smallest)
    rest = rest_teacher * (rest_teacher.clamp_min(smallest).log() - rest_student.log())
    if teacher.indices.shape[-1] == logits.shape[-1]:
        rest = torch.zeros_like(rest)  # there is no other class: what is left is rounding
    return (kept * (teacher.logprobs - student)).sum(-1) + rest


def _targets(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Next tokens [B, T - 1], and which of them count."""
    targets = labels[:, 1:]
    return targets, targets != IGNORED

"""What is minimised: cross-entropy on the answers and, with a weight, the distance to a teacher's distribution there.

Shapes: B rows, T tokens, N target tokens (all of a batch, row by row), V vocabulary, k kept classes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from comb_training.data.batches import IGNORED


@dataclass(frozen=True)
class Teacher:
    """A teacher's k likeliest next tokens at every target token: `indices` and float32 `logprobs`, both [N, k]."""

    indices: Tensor
    logprobs: Tensor

    @classmethod
    def of(cls, logits: Tensor, labels: Tensor, k: int) -> Teacher:
        """From logits of the rows that `labels` [B, T] belong to: [B, T, V], or as `target_logits_only` leaves them."""
        logprobs = _target_logits(logits, labels).float().log_softmax(-1)
        kept = logprobs.topk(min(k, logprobs.shape[-1]), dim=-1)
        return cls(kept.indices, kept.values)


@contextmanager
def target_logits_only(model: Any, labels: Tensor) -> Iterator[None]:
    """Within it, forward passes of `model` over the rows of `labels` [B, T] give logits [1, N, V], of targets only.

    Logits are what training keeps most of where rows are short, and most of them nobody looks at: a question's, and in
    a teacher's prompt the documents'. They are left out in front of the language model head, by a hook, because
    ``logits_to_keep`` takes the same columns of all rows. A model without such a head gives them all.
    """
    head = model.get_output_embeddings()
    if head is None:
        yield
        return
    _, counted = _targets(labels)
    places = nn.functional.pad(counted, (0, 1)).flatten().nonzero()[:, 0]  # the last column predicts nothing

    def select(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden, *rest = args
        if hidden.shape[:2] != labels.shape:
            raise RuntimeError(f"the head is given {list(hidden.shape)} states for labels of {list(labels.shape)}")
        return (hidden.flatten(0, 1).index_select(0, places.to(hidden.device))[None], *rest)

    handle = head.register_forward_pre_hook(select)
    try:
        yield
    finally:
        handle.remove()


def target_loss(
    outputs: Any,
    labels: Tensor,
    num_items_in_batch: Tensor | float | None = None,
    *,
    teacher: Teacher | None = None,
    weight: float = 0.0,
    ce_weight: float = 1.0,
) -> Tensor:
    """`ce_weight` x cross-entropy (+ `weight` x `divergence`) over target tokens: the sum over `num_items_in_batch`, or
    the mean.

    Args:
        outputs: with ``logits`` [B, T, V], or as `target_logits_only` leaves them.
        labels: [B, T], -100 where nothing is to be learned.
    """
    targets, counted = _targets(labels)
    # only the rows that count are turned into float32: a vocabulary of float32 logits per token is large
    logits = _target_logits(outputs.logits, labels).float()
    if num_items_in_batch is None:
        num_items_in_batch = len(logits)
    loss = ce_weight * nn.functional.cross_entropy(logits, targets[counted], reduction="sum")
    if teacher is not None:
        loss = loss + weight * divergence(logits, teacher).sum()
    return loss / num_items_in_batch


def token_losses(outputs: Any, labels: Tensor, teacher: Teacher | None = None) -> Tensor:
    """Cross-entropy, or with a teacher `divergence`, at every target token [N]; as for `target_loss`."""
    targets, counted = _targets(labels)
    logits = _target_logits(outputs.logits, labels).float()
    if teacher is not None:
        return divergence(logits, teacher)
    return nn.functional.cross_entropy(logits, targets[counted], reduction="none")


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


def _target_logits(logits: Tensor, labels: Tensor) -> Tensor:
    """[N, V] of logits of all tokens, or of targets only: never both, since no row's first token is a target."""
    if logits.shape[:2] == labels.shape:
        return logits[:, :-1][_targets(labels)[1]]
    return logits.flatten(0, 1)


def _targets(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Next tokens [B, T - 1], and which of them count."""
    targets = labels[:, 1:]
    return targets, targets != IGNORED

"""How far a method's next-token distributions are from full recompute's, on full recompute's own answers.

Example by example: full recompute answers greedily; that answer is then forced through every method's state, and
KL(full || method) and agreement of the likeliest token are added up over its tokens. Logits of one answer are all
that is held at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm import tqdm

from comb.bench.request import linked
from comb.documents.document import Document
from comb.engine.engine import PICEngine

Requests = Sequence[tuple[str, Sequence[Document]]]


@dataclass(frozen=True)
class Fidelity:
    """Means over `tokens` answer tokens: KL(full || method) in nats, and the share with the same likeliest token."""

    kl: float
    top1_agreement: float
    tokens: int


@dataclass
class _Sums:
    kl: float = 0.0
    agreed: int = 0
    tokens: int = 0

    def add(self, reference: Tensor, logits: Tensor) -> None:
        self.kl += float(kl_divergence(reference, logits).sum())
        self.agreed += int((reference.argmax(-1) == logits.argmax(-1)).sum())
        self.tokens += len(reference)


def kl_divergence(reference: Tensor, logits: Tensor) -> Tensor:
    """KL(reference || other) in nats per row: [rows, vocabulary] twice -> [rows], in float64.

    Distributions are taken in float32, as sampling does; a token that the reference rules out counts nothing.
    """
    p, q = reference.float().log_softmax(-1), logits.float().log_softmax(-1)
    weights = p.double().exp()
    return torch.where(weights > 0, weights * (p.double() - q.double()), 0.0).sum(-1)


def measure_fidelity(
    reference: PICEngine,
    engines: Mapping[str, PICEngine],
    requests: Mapping[str, Requests],
    *,
    max_new_tokens: int,
    progress: bool = True,
) -> dict[str, Fidelity | str]:
    """Per name of `engines`, how faithful it is; or in its place, why it could not be measured.

    Args:
        reference: an engine with method ``full``.
        requests: per name the same questions in the same order, with the documents that this method gets; those of
            the reference under ``"full"``.
    """
    sums = {name: _Sums() for name in engines}
    failed: dict[str, str] = {}
    for number in tqdm(range(len(requests["full"])), "KL", unit="question", disable=not progress, leave=False):
        request = requests["full"][number]
        answer = reference.ask(*request, max_new_tokens=max_new_tokens).token_ids
        expected = _answer_logits(reference, request, answer)
        for name, engine in engines.items():
            if name in failed:
                continue
            try:
                sums[name].add(expected, _answer_logits(engine, requests[name][number], answer))
            except (ValueError, torch.OutOfMemoryError) as error:
                failed[name] = f"no KL: {error}"
    return {
        name: failed.get(name) or Fidelity(total.kl / total.tokens, total.agreed / total.tokens, total.tokens)
        for name, total in sums.items()
    }


def _answer_logits(engine: PICEngine, request: tuple[str, Sequence[Document]], answer: Sequence[int]) -> Tensor:
    """Logits [answer tokens, vocabulary]; leaves nothing in the engine's store."""
    try:
        with linked(engine, *request) as state:
            return state.answer_logits(answer)
    finally:
        engine.store.clear()

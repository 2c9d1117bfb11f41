"""How well the model in training answers held-out questions: exact match and F1, all ranks taking their share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from comb.documents.document import Example
from comb.evaluation.run import evaluate
from comb_training.config import Config
from comb_training.trainer import distributed


@dataclass(frozen=True)
class HeldoutAnswers:
    """Answers `examples` greedily by the method that is trained.

    Args:
        model: as it is evaluated when the run is over; its weights may move between calls, but may not be sharded.
        examples: the same on every rank, questions as the template writes them.
    """

    model: Any
    tokenizer: Any
    examples: Sequence[Example]
    config: Config

    def __call__(self) -> dict[str, float]:
        """``eval_em`` and ``eval_f1``, means in 0..1. Collective."""
        mine = self.examples[distributed.rank() :: distributed.world_size()]
        em = f1 = 0.0
        if mine:
            [result] = evaluate(
                (self.model, self.tokenizer),
                mine,
                [self.config.train.method],
                max_new_tokens=self.config.eval.max_new_tokens,
                batch_size=self.config.eval.batch_size,
                timing_examples=0,
                document_template=self.config.data.document_template,
                progress=False,
            )
            em, f1 = len(mine) * result.em, len(mine) * result.f1
        em, f1, count = distributed.summed(em, f1, len(mine))
        return {"eval_em": em / count, "eval_f1": f1 / count}

"""Methods of training whose rows hold their documents: whole prompts under a mask by documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from comb.documents.datasets import Counts
from comb.documents.document import Prompt
from comb.linking.blocks import FRESH, PADDING
from comb_training.config import Config
from comb_training.data.batches import Collator, TrainingExample
from comb_training.models.method import TrainingMethod


@dataclass
class RowCollator(Collator):
    """Whole prompts with their answers, padded; `segments` [B, T] tells the documents apart."""

    def __call__(self, examples: Sequence[TrainingExample]) -> dict[str, Any]:
        self.check_targets(examples)
        batch: dict[str, Any] = self.rows([(example.prompt.flat, example) for example in examples])
        if self.full_prompts:
            batch["full_prompts"] = {name: tensor.clone() for name, tensor in batch.items()}
        segments = torch.full(batch["input_ids"].shape, PADDING)
        for index, example in enumerate(examples):
            numbers = segment_numbers(example.prompt)
            segments[index, : len(numbers) + len(example.target)] = FRESH
            segments[index, : len(numbers)] = torch.tensor(numbers)
        batch["segments"] = segments
        return batch


def segment_numbers(prompt: Prompt) -> list[int]:
    """For each token of ``prompt.flat``, the number of its document, `FRESH` outside of them."""
    gaps = (*(prompt.gaps or ((),) * max(0, len(prompt.segments) - 1)), ())
    numbers = [FRESH] * len(prompt.head)
    for number, (segment, gap) in enumerate(zip(prompt.segments, gaps, strict=True), 1):
        numbers += [number] * len(segment) + [FRESH] * len(gap)
    return numbers + [FRESH] * len(prompt.tail)


class RowTraining(TrainingMethod):
    """What the methods share whose documents are part of the rows that train."""

    collator = RowCollator

    def row(self, example: TrainingExample) -> TrainingExample:
        """The same question as a row that holds its documents."""
        return replace(example, prompt=Prompt(example.prompt.flat, (), ()))

    def decoder_tokens(self, example: TrainingExample, model: Any) -> int:
        """Positions of the backbone that its row takes."""
        return len(example.prompt.flat) + len(example.target)

    def fitting(
        self, examples: Sequence[TrainingExample], model: Any, config: Config, counts: Counts
    ) -> Sequence[TrainingExample]:
        """Without those longer than `data.max_prompt_tokens` or the backbone's positions."""
        longest: int = model.config.get_text_config().max_position_embeddings
        longest = min(longest, config.data.max_prompt_tokens or longest)
        kept = [example for example in examples if self.decoder_tokens(example, model) <= longest]
        counts.drop(f"prompt and answer of more than {longest} tokens", len(examples) - len(kept))
        return kept

"""Examples -> token ids -> batches for `CombForCausalLM`: short decoder rows beside the documents they are about.

A row is ``head + tail + target`` (the prompt without its documents, then answer and end token); the loss counts
the target only. Rows over the same documents stand next to each other and share tensors, and the model encodes
each different segment of a batch once.

Legend: B rows, T tokens of the longest row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from comb.documents.datasets import Counts
from comb.documents.document import Document, Example, Prompt, PromptBuilder

IGNORED = -100  # what Hugging Face losses skip


@dataclass(frozen=True)
class TrainingExample:
    """Token ids of one question: its documents apart, the prompt around them, and the target to learn.

    `references` are the accepted answers of the dataset, as text.
    """

    prompt: Prompt
    target: tuple[int, ...] = ()
    id: str | None = None
    references: tuple[str, ...] = ()

    @property
    def segments(self) -> tuple[tuple[int, ...], ...]:
        """Token ids of the documents, one tuple each."""
        return self.prompt.segments

    def with_target(self, target: Sequence[int]) -> TrainingExample:
        """The same question with another answer. Raises ValueError for an empty one: its loss would be NaN."""
        if not target:
            raise ValueError(f"example {self.id}: the target is empty, there is nothing to learn")
        return replace(self, target=tuple(target))


def fit_documents(
    examples: Iterable[Example], builder: PromptBuilder, max_document_tokens: int | None, counts: Counts
) -> list[Example]:
    """Cuts documents to what the encoder takes, so that training and evaluation see the same documents.

    A cut document becomes token ids; every cut is counted, each different document once.
    """
    if max_document_tokens is None:
        return list(examples)
    fitted: dict[Document, Document] = {}

    def fit(document: Document) -> Document:
        if document not in fitted:
            ids = builder.segment(document)
            short = document
            if len(ids) > max_document_tokens:
                counts.truncate(f"document of more than {max_document_tokens} tokens")
                short = Document(token_ids=ids[:max_document_tokens], id=document.id, title=document.title)
            fitted[document] = short
        return fitted[document]

    return [replace(example, documents=tuple(map(fit, example.documents))) for example in examples]


def tokenize(
    examples: Iterable[Example],
    builder: PromptBuilder,
    counts: Counts,
    *,
    query_template: str = "{query}",
    max_query_tokens: int | None = None,
) -> list[TrainingExample]:
    """Token ids of every example, with its gold answer as target.

    Examples whose query and answer are longer than `max_query_tokens` are dropped and counted (a target is never
    cut), and so are those without documents, from which an encoder can't learn.
    """
    segments: dict[Document, tuple[int, ...]] = {}
    tokenized = []
    for example in examples:
        if not example.documents:
            counts.drop("no documents")
            continue
        for document in example.documents:
            if document not in segments:
                segments[document] = builder.segment(document)
        query = query_template.replace("{query}", example.query)
        prompt = builder.build(query, [segments[document] for document in example.documents])
        target = builder.answer(example.answer)
        if max_query_tokens is not None and len(prompt.query) + len(target) > max_query_tokens:
            counts.drop(f"query and answer of more than {max_query_tokens} tokens")
            continue
        tokenized.append(TrainingExample(prompt, target, example.id, example.references))
    return tokenized


@dataclass
class Collator:
    """Pads rows on the right and gives equal documents of a batch the same tensor.

    Returns input_ids, attention_mask and labels ``[B, T]`` and documents, per row a list of id tensors ``[tokens]``;
    with `full_prompts` also full_prompts, the same rows with their documents in them (for a teacher that reads them).
    """

    pad_token_id: int
    full_prompts: bool = False

    def __call__(self, examples: Sequence[TrainingExample]) -> dict[str, Any]:
        """One batch. Raises ValueError for an example without a target."""
        self.check_targets(examples)
        batch: dict[str, Any] = self.rows([(example.prompt.query, example.target) for example in examples])
        if self.full_prompts:
            batch["full_prompts"] = self.rows([(example.prompt.flat, example.target) for example in examples])
        tensors: dict[tuple[int, ...], Tensor] = {}
        for example in examples:
            for segment in example.segments:
                if segment not in tensors:
                    tensors[segment] = torch.from_numpy(np.array(segment, dtype=np.int64))
        batch["documents"] = [[tensors[segment] for segment in example.segments] for example in examples]
        return batch

    @staticmethod
    def check_targets(examples: Sequence[TrainingExample]) -> None:
        """Raises ValueError for an example without a target."""
        empty = next((example for example in examples if not example.target), None)
        if empty is not None:
            raise ValueError(f"example {empty.id} has no target tokens: its loss would be NaN")

    def rows(self, parts: Sequence[tuple[Sequence[int], Sequence[int]]]) -> dict[str, Tensor]:
        """Prompts and their targets, padded."""
        shape = (len(parts), max(len(prompt) + len(target) for prompt, target in parts))
        input_ids = torch.full(shape, self.pad_token_id)
        attention_mask = torch.zeros(shape, dtype=torch.long)
        labels = torch.full(shape, IGNORED)
        for index, (prompt, target) in enumerate(parts):
            end = len(prompt) + len(target)
            input_ids[index, :end] = torch.tensor([*prompt, *target])
            attention_mask[index, :end] = 1
            labels[index, len(prompt) : end] = torch.tensor(target)
        return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}

"""Examples -> token ids -> batches for `CombForCausalLM`: short decoder rows beside the documents they are about.

A row is ``prefix + query + target`` (the prompt without its documents, then answer and end token); the loss counts
the target only. Rows over the same documents stand next to each other and share tensors, and the model encodes
each different segment of a batch once.

Legend: B rows, T tokens of the longest row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from comb.documents.datasets import Counts
from comb.documents.document import Document, Example, Prompt, PromptBuilder
from comb.documents.rendering import plain_ids
from comb.documents.splitting import Splitter, split_document

IGNORED = -100  # what Hugging Face losses skip
TOGETHER = 8
"""Examples over the same documents at most that are drawn, and put into a batch, together."""


@dataclass(frozen=True)
class TrainingExample:
    """Token ids of one question: its documents apart, the prompt around them, and the target to learn.

    `references` are the accepted answers of the dataset, as text. `given`: from and up to which tokens of the target
    nothing is learned, the questions between several answers. `source`: the `Example` that it was made of.
    """

    prompt: Prompt
    target: tuple[int, ...] = ()
    id: str | None = None
    references: tuple[str, ...] = ()
    given: tuple[tuple[int, int], ...] = ()
    source: Any = field(default=None, compare=False, repr=False)

    @property
    def segments(self) -> tuple[tuple[int, ...], ...]:
        """Token ids of the documents, one tuple each."""
        return self.prompt.segments


def fit_documents(
    examples: Iterable[Example],
    builder: PromptBuilder,
    max_document_tokens: int | None,
    counts: Counts,
    splitter: Splitter | None = None,
) -> list[Example]:
    """Documents as long as the encoder takes them: cut off, or by `splitter` cut into several, which lose nothing.

    So training and evaluation see the same documents. A cut document becomes token ids; the documents that one is cut
    into stand in its place, in order. Each different document that is cut is counted once. Raises ValueError if the
    splitter's segments can be longer than `max_document_tokens`.
    """
    if splitter is not None and not splitter.cuts:
        splitter = None
    if splitter is not None and max_document_tokens is not None and splitter.max_tokens > max_document_tokens:
        raise ValueError(
            f"data.splitter makes segments of up to {splitter.max_tokens} tokens, but documents may have "
            f"{max_document_tokens} here (the encoder, or data.max_document_tokens): give it a smaller budget, as in "
            f"paragraphs:{max_document_tokens}"
        )
    longest = max_document_tokens if splitter is None else splitter.max_tokens
    if longest is None:
        return list(examples)

    @cache
    def fitted(document: Document) -> tuple[Document, ...]:
        ids = builder.segment(document)
        if len(ids) <= longest:
            return (document,)
        if splitter is None:
            counts.truncate(f"document of more than {longest} tokens")
            return (Document(token_ids=ids[:longest], id=document.id, title=document.title),)
        segments = split_document(builder.tokenizer, ids, splitter)
        counts.noted[f"documents of more than {longest} tokens, split without loss"] += 1
        counts.noted["segments made of them"] += len(segments)
        return tuple(Document(token_ids=segment, id=document.id) for segment in segments)

    return [
        replace(example, documents=tuple(chain.from_iterable(map(fitted, example.documents)))) for example in examples
    ]


def join_questions(
    examples: Iterable[TrainingExample], most: int, builder: PromptBuilder, *, longest: int | None = None
) -> list[TrainingExample]:
    """Examples over the same documents as one, up to `most` questions: behind an answer the next question and its own,
    an empty line between them.

    A row's documents, and a teacher's pass over them, then serve several answers. The id and references are the first
    question's. Examples of another set of a mixture, or another round of one, are in rows of their own. `longest`:
    tokens of a row with its documents; a question that would make it longer begins another.
    """
    groups: dict[Any, list[TrainingExample]] = {}
    for example in examples:
        prompt, (source, of_mixture, _) = example.prompt, str(example.id).partition("/")
        source = source if of_mixture else ""
        groups.setdefault((source, prompt.prefix, prompt.segments, prompt.gaps), []).append(example)
    joined: list[TrainingExample] = []
    for questions in groups.values():
        asked, before = most, questions[0]
        for question in questions:
            row = question if asked == most else _behind(joined[-1], before, question, builder)
            before = question
            if asked == most or (longest is not None and len(row.prompt.flat) + len(row.target) > longest):
                joined.append(question)
                asked = 1
            else:
                joined[-1] = row
                asked += 1
    return joined


def _behind(
    row: TrainingExample, before: TrainingExample, question: TrainingExample, builder: PromptBuilder
) -> TrainingExample:
    """A row with one more question, behind that of `before`."""
    target = list(row.target)
    if target[-1] == builder.tokenizer.eos_token_id:
        target.pop()
    answer = builder.tokenizer.decode(before.target, skip_special_tokens=True)
    # the backbone's own answer ends with whatever token its stop is in, or is cut
    stop = "" if set(answer) & set(builder.stop) else builder.stop[:1]
    empty = "\n" * max(0, 2 - len(answer + stop) + len((answer + stop).rstrip("\n")))
    between = [*plain_ids(builder.tokenizer, stop + empty), *question.prompt.query]
    given = (len(target), len(target) + len(between))
    return replace(row, target=(*target, *between, *question.target), given=(*row.given, given))


def tokenize(
    examples: Iterable[Example], builder: PromptBuilder, counts: Counts, *, max_query_tokens: int | None = None
) -> list[TrainingExample]:
    """Token ids of every example, with its gold answer as target.

    Examples whose query and answer are longer than `max_query_tokens` are dropped and counted (a target is never
    cut), and so are those without documents, from which an encoder can't learn.
    """
    segment = cache(builder.segment)
    prefixes: dict[tuple[int, ...], tuple[int, ...]] = {}
    tokenized = []
    for example in examples:
        if not example.documents:
            counts.drop("no documents")
            continue
        prompt = builder.build(example.query, list(map(segment, example.documents)))
        prompt = replace(prompt, prefix=prefixes.setdefault(prompt.prefix, prompt.prefix))  # rows begin alike
        target = builder.answer(example.answer)
        if max_query_tokens is not None and len(prompt.bare) + len(target) > max_query_tokens:
            counts.drop(f"query and answer of more than {max_query_tokens} tokens")
            continue
        references = example.references if example.answer else ()  # a made question has none
        tokenized.append(TrainingExample(prompt, target, example.id, references, source=example))
    return tokenized


def by_documents(examples: Iterable[TrainingExample]) -> list[list[int]]:
    """Places of the examples, those over the same documents together."""
    groups: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    for place, example in enumerate(examples):
        groups.setdefault(example.segments, []).append(place)
    return list(groups.values())


@dataclass
class Collator:
    """Pads rows on the right and gives equal documents of a batch the same tensor.

    Returns input_ids, attention_mask and labels ``[B, T]``, documents, per row a list of id tensors ``[tokens]``;
    with `full_prompts` also full_prompts, the same rows with their documents in them (for a teacher that reads them).
    With `exact_prefix` also prefix_tokens, per row the tokens in front of the documents, which read none of them
    (`CombConfig`).
    """

    pad_token_id: int
    full_prompts: bool = False
    exact_prefix: bool = False

    def __call__(self, examples: Sequence[TrainingExample]) -> dict[str, Any]:
        """One batch. Raises ValueError for an example without a target."""
        batch: dict[str, Any] = self.rows([(example.prompt.bare, example) for example in examples])
        if self.exact_prefix:
            batch["prefix_tokens"] = [len(example.prompt.prefix) for example in examples]
        if self.full_prompts:
            batch["full_prompts"] = self.rows([(example.prompt.flat, example) for example in examples])
        tensors: dict[tuple[int, ...], Tensor] = {}
        for example in examples:
            for segment in example.segments:
                if segment not in tensors:
                    tensors[segment] = torch.tensor(segment)
        batch["documents"] = [[tensors[segment] for segment in example.segments] for example in examples]
        return batch

    def rows(self, parts: Sequence[tuple[Sequence[int], TrainingExample]]) -> dict[str, Tensor]:
        """Prompts and the targets of their examples, padded."""
        ids, labels = [], []
        for prompt, example in parts:
            if not example.target:
                raise ValueError(f"example {example.id} has no target tokens: its loss would be NaN")
            learned = list(example.target)
            for start, stop in example.given:
                learned[start:stop] = [IGNORED] * (stop - start)
            ids.append(torch.tensor([*prompt, *example.target]))
            labels.append(torch.tensor([IGNORED] * len(prompt) + learned))
        return {
            "input_ids": pad_sequence(ids, batch_first=True, padding_value=self.pad_token_id),
            "attention_mask": pad_sequence([torch.ones_like(row) for row in ids], batch_first=True),
            "labels": pad_sequence(labels, batch_first=True, padding_value=IGNORED),
        }

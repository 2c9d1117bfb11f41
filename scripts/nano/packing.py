"""The prompt layout, and rows that hold one context with many questions.

Layout of a prompt: `<|user|>`, then each document's text and a newline tokenised alone, then the query tokenised
alone, then `<|assistant|>`; the answer follows, tokenised alone, and `<|end|>`.

Legend: B rows, T tokens of the longest row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from comb_training.nano.world import KINDS, Scene
from scripts.nano.tokenizer import ASSISTANT, END, USER

CONTEXT, PADDING = 0, -1  # values of `segment`; questions are numbered from 1


@dataclass(frozen=True)
class EncodedScene:
    """Token ids of a scene: the context once and, per question, what asks it and what answers it."""

    context: list[int]
    asks: list[list[int]]
    answers: list[list[int]]
    kinds: list[str]

    def prompt(self, question: int) -> list[int]:
        """Ids of the prompt with one question, as inference builds it."""
        return self.context + self.asks[question]


@dataclass(frozen=True)
class PackedRows:
    """A packed batch: every tensor [B, T] but `visible` [B, 1, T, T], true where a query may see a key."""

    input_ids: Tensor
    position_ids: Tensor
    segment: Tensor
    visible: Tensor
    targets: Tensor
    weights: Tensor  # of the loss at predicting `targets`; above 0.5 exactly on answers
    kind: Tensor  # index into KINDS at answers, -1 elsewhere


def encode(tokenizer: PreTrainedTokenizerFast, scene: Scene, *, documents: bool = True) -> EncodedScene:
    """Tokenise a scene in the layout above, without its documents if `documents` is false."""
    context_texts = [f"{document}\n" for document in scene.documents] if documents else []
    texts = context_texts + [q.query for q in scene.questions] + [q.answer for q in scene.questions]
    pieces = cast(list[list[int]], tokenizer(texts, add_special_tokens=False)["input_ids"]) if texts else []
    user, assistant, end = tokenizer.convert_tokens_to_ids([USER, ASSISTANT, END])
    split, count = len(context_texts), len(scene.questions)
    return EncodedScene(
        context=[user, *(token for piece in pieces[:split] for token in piece)],
        asks=[[*piece, assistant] for piece in pieces[split : split + count]],
        answers=[[*piece, end] for piece in pieces[split + count :]],
        kinds=[q.kind for q in scene.questions],
    )


def pack(scenes: Sequence[EncodedScene], pad: int, document_weight: float) -> PackedRows:
    """Lay each scene out in one row: its context, then its questions one after another.

    A question sees the context and itself, and its positions go on where the context ends, so each question is
    computed exactly as if it stood alone in its prompt.
    """
    lengths = [len(s.context) + sum(map(len, s.asks)) + sum(map(len, s.answers)) for s in scenes]
    shape = (len(scenes), max(lengths))
    ids, positions = torch.full(shape, pad), torch.zeros(shape, dtype=torch.long)
    segment, kind = torch.full(shape, PADDING), torch.full(shape, -1)
    targets, weights = torch.zeros(shape, dtype=torch.long), torch.zeros(shape)
    for row, scene in enumerate(scenes):
        end = len(scene.context)
        ids[row, :end] = torch.tensor(scene.context)
        positions[row, :end] = torch.arange(end)
        segment[row, :end] = CONTEXT
        targets[row, : end - 1] = ids[row, 1:end]
        weights[row, : end - 1] = document_weight
        for number, (ask, answer, name) in enumerate(zip(scene.asks, scene.answers, scene.kinds, strict=True), 1):
            start, end = end, end + len(ask) + len(answer)
            ids[row, start:end] = torch.tensor(ask + answer)
            positions[row, start:end] = torch.arange(len(scene.context), len(scene.context) + end - start)
            segment[row, start:end] = number
            asked = start + len(ask) - 1  # position of <|assistant|>, which predicts the answer's first token
            targets[row, asked : end - 1] = ids[row, asked + 1 : end]
            weights[row, asked : end - 1] = 1.0
            kind[row, asked : end - 1] = KINDS.index(name)
    return PackedRows(ids, positions, segment, visibility(segment), targets, weights, kind)


def visibility(segment: Tensor) -> Tensor:
    """Which key each query sees, [B, 1, T, T] bool, from segments [B, T]; padding sees itself so no row is empty."""
    query, key = segment[:, :, None], segment[:, None, :]
    causal = torch.ones(segment.shape[1], segment.shape[1], dtype=torch.bool).tril()
    return (((key == CONTEXT) | (key == query)) & causal)[:, None]

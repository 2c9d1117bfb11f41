"""The library's own greedy answers over documents, to compare a server's with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from comb import CombForCausalLM, Document, PromptBuilder
from tests.helpers.engines import apart, reference


class Library:
    """Answers of exactly `tokens` tokens, each computed once."""

    def __init__(self, adapter: Path, tokens: int) -> None:
        self.tokens = tokens
        self.model: Any = CombForCausalLM.from_pretrained(adapter, dtype=torch.float32)
        self.builder = PromptBuilder(AutoTokenizer.from_pretrained(adapter))
        self.known: dict[tuple[Any, ...], tuple[list[int], list[float], list[torch.Tensor]]] = {}

    def answer(
        self, question: str, texts: Sequence[str], *, chat: bool = True, encoder: bool = True
    ) -> tuple[list[int], list[float]]:
        """Token ids and their log-probabilities, of a chat or a completion, documents linked or in the prompt."""
        return self._answer(question, texts, chat, encoder)[:2]

    def first_token(self, question: str, texts: Sequence[str], *, chat: bool, encoder: bool) -> torch.Tensor:
        """Log-probabilities of all tokens for the first place of the answer. [vocabulary]"""
        return self._answer(question, texts, chat, encoder)[2][0]

    def apart(self, answer: tuple[list[int], list[float]], question: str, texts: Sequence[str]) -> float:
        """How far a server's answer in a chat is from this one (`engines.apart`)."""
        return apart(answer, self._answer(question, texts, chat=True, encoder=True)[2])

    def _answer(
        self, question: str, texts: Sequence[str], chat: bool, encoder: bool
    ) -> tuple[list[int], list[float], list[torch.Tensor]]:
        asked = (question, tuple(texts), chat, encoder)
        if asked not in self.known:
            documents = [list(self.builder.segment(Document(text))) for text in texts]
            messages = [{"role": "user", "content": question}]
            built = self.builder.build(messages, documents) if chat else self.builder.complete(question, documents)
            prompt = list(built.bare if encoder else built.flat)
            prefix = min(len(built.prefix), len(prompt) - 1) if self.model.config.exact_prefix else 0
            self.known[asked] = reference(self.model, prompt, documents if encoder else [], self.tokens, prefix)
        return self.known[asked]

"""What the library says to prompts that a server has linked documents in, without training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from comb import methods
from comb.documents.document import Document, Prompt, PromptBuilder
from comb_training.nano import CHECKPOINT
from tests.helpers.engines import answer

Texts = Sequence[str | Document]


def logs(output: Any) -> list[float]:
    """Log-probabilities of the tokens that vLLM has answered with."""
    found: list[float] = answer(output)[1]
    return found


@dataclass
class PlainLibrary:
    """The nano backbone, its prompts, and greedy answers to them by the library's own methods."""

    folder: Any = CHECKPOINT

    @cached_property
    def model(self) -> Any:
        return AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32).eval()

    @cached_property
    def builder(self) -> PromptBuilder:
        return PromptBuilder(AutoTokenizer.from_pretrained(self.folder))

    def chat(self, messages: Any, texts: Texts = ()) -> Prompt:
        return self.builder.build(messages, [self.builder.segment(text) for text in texts])

    def completion(self, text: str, texts: Texts = ()) -> Prompt:
        return self.builder.complete(text, [self.builder.segment(each) for each in texts])

    def logs(self, prompt: Prompt, method: str, tokens: int, compiled_by: PlainLibrary | None = None) -> list[float]:
        """Log-probabilities of the tokens of a greedy answer that no end stops; over another model's documents."""
        made = methods.create(method, self.model)
        source = made if compiled_by is None else methods.create(method, compiled_by.model)
        compiled = source.compile([list(segment) for segment in prompt.segments])
        if compiled_by is not None:
            compiled = [replace(each, fingerprint=made.fingerprint) for each in compiled]  # else they are refused
        gaps = [list(gap) for gap in prompt.gaps] or None
        state = made.link(compiled, list(prompt.query), prefix_ids=list(prompt.prefix), gaps=gaps)
        ids, logits = state.generate_with_logits(
            max_new_tokens=tokens, do_sample=False, eos_token_id=[], pad_token_id=0
        )
        logs = logits.float().log_softmax(-1)
        return [log[token].item() for log, token in zip(logs, ids, strict=True)]

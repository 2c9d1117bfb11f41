"""What all methods of one comparison share: a model, how examples become requests, and how long an answer may be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from comb.documents.datasets import Counts
from comb.documents.document import Document, Example, PromptBuilder, stopping_tokens, until_stop
from comb.kernels.mac.mac_config import MacConfig

if TYPE_CHECKING:
    from comb.cache.store import PICacheStore
    from comb.engine.engine import PICEngine

NO_DOCUMENTS = "none"
"""A control in place of a method: the backbone is asked without any document."""


@dataclass(frozen=True)
class Setting:
    """Model, tokenizer, and how examples become requests."""

    model: Any
    tokenizer: Any
    builder: PromptBuilder
    query_template: str = "{query}"
    splitter: str | None = None
    mac: MacConfig | None = None

    def engine(self, method: str, store: PICacheStore | None = None) -> PICEngine:
        """A fresh engine; ``naive@fixed:128`` is a method with a splitter of its own.

        Raises:
            ValueError: where the method is unknown or doesn't fit the model.
        """
        from comb.engine.engine import PICEngine

        name, _, splitter = ("full" if method == NO_DOCUMENTS else method).partition("@")
        splitter = splitter or self.splitter or ""
        extra: dict[str, Any] = {"splitter": splitter} if splitter else {}
        extra |= {"prompt_builder": self.builder, "mac": self.mac}
        return PICEngine(self.model, self.tokenizer, method=name, store=store, **extra)

    def request(self, method: str, example: Example) -> tuple[str, Sequence[Document]]:
        """Question and documents; no documents for the control "none"."""
        documents = () if method == NO_DOCUMENTS else example.documents
        return self.query_template.replace("{query}", example.query), documents

    def prompt_tokens(self, example: Example, *, documents: bool = True) -> int:
        """Of the prompt, with or without its documents in it."""
        segments = [self.builder.segment(document) for document in example.documents]
        prompt = self.builder.build(self.request("full", example)[0], segments)
        return len(prompt.flat if documents else prompt.query)


@dataclass(frozen=True)
class AnswerRules:
    """How long an answer may be, and where it ends before the model's own end token.

    Args:
        stop: characters that end an answer, each of them; the answer is what stands in front. Empty: none.
    """

    max_new_tokens: int = 48
    stop: str = ""

    def settings(self, engine: PICEngine) -> dict[str, Any]:
        """For ``generate``, greedy: every token whose text holds a character of `stop` is an end token."""
        settings = engine.settings({"max_new_tokens": self.max_new_tokens})
        if self.stop:
            own = settings["eos_token_id"]
            own = [] if own is None else own if isinstance(own, list) else [own]
            settings["eos_token_id"] = [*own, *stopping_tokens(engine.tokenizer, self.stop)]
        return settings

    def text(self, engine: PICEngine, token_ids: Sequence[int]) -> str:
        """An answer's tokens as the text that is scored."""
        text = str(engine.tokenizer.decode(list(token_ids), skip_special_tokens=True))
        return until_stop(text, self.stop)


def drop_too_long(
    setting: Setting, examples: Sequence[Example], specs: Sequence[str], max_new_tokens: int, counts: Counts
) -> list[Example]:
    """Examples whose prompts and answers fit the backbone with every method; the others are counted as dropped.

    Raises:
        ValueError: if none is left, or a method is unknown or doesn't fit the model.
    """
    limits: dict[bool, int] = {}  # with documents in the prompt, and without
    for spec in specs:
        method = setting.engine(spec).method
        if (limit := method.max_prompt_tokens) is not None:
            reads_documents = spec != NO_DOCUMENTS and not method.uses_encoder
            limits[reads_documents] = min(limits.get(reads_documents, limit), limit)
    kept = list(examples)
    for documents, limit in limits.items():
        room = limit - max_new_tokens
        fitting = [each for each in kept if setting.prompt_tokens(each, documents=documents) <= room]
        prompt = "prompt" if documents else "prompt without documents"
        reason = f"{prompt} and {max_new_tokens} new tokens exceed the model's {limit} positions"
        counts.drop(reason, len(kept) - len(fitting))
        kept = fitting
    if not kept:
        raise ValueError(
            f"no question is left to ask ({counts}): use fewer or shorter documents, allow for shorter answers, or "
            "take only methods that don't put documents into the prompt"
        )
    return kept

"""Documents and prompts as structure: where one document ends is never guessed from text or separators."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Document:
    """What a user hands over to be reused: text or token ids, with an optional id and title.

    Raises:
        ValueError: if it holds neither text nor token ids, both, or nothing but white space.
    """

    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    id: str | None = None
    title: str | None = None

    def __post_init__(self) -> None:
        if (self.text is None) == (self.token_ids is None):
            raise ValueError(f"a document needs either text or token_ids, exactly one of them (id={self.id!r})")
        if self.text is not None and not self.text.strip():
            raise ValueError(f"empty document (id={self.id!r}): give it some text or leave it out")
        if self.token_ids is not None:
            if len(self.token_ids) == 0:
                raise ValueError(f"empty document (id={self.id!r}): token_ids has no element")
            object.__setattr__(self, "token_ids", tuple(int(token) for token in self.token_ids))


def as_document(item: str | Document) -> Document:
    """A `Document`, from one or from plain text. Raises ValueError for anything else."""
    if isinstance(item, Document):
        return item
    if isinstance(item, str):
        return Document(item)
    raise ValueError(f"a document is a str or a comb.Document, not {type(item).__name__}")


@dataclass(frozen=True)
class Example:
    """One row of a dataset: ordered documents, the query, the answer to learn and the answers that count.

    `group` names what must stay on one side of a train/held-out split (an article, a story).
    """

    documents: tuple[Document, ...]
    query: str
    answer: str
    answers: tuple[str, ...] = ()
    id: str | None = None
    group: str | None = None

    @property
    def references(self) -> tuple[str, ...]:
        """All accepted answers; `answer` alone when no others are given."""
        return self.answers or (self.answer,)


@dataclass(frozen=True)
class Prompt:
    """Token ids of one prompt: ``head + segments + tail``; the segments are the documents, each on its own."""

    head: tuple[int, ...]
    segments: tuple[tuple[int, ...], ...]
    tail: tuple[int, ...]

    @property
    def flat(self) -> tuple[int, ...]:
        """The whole prompt in one row, as a model without document reuse reads it."""
        return self.head + tuple(token for segment in self.segments for token in segment) + self.tail

    @property
    def query(self) -> tuple[int, ...]:
        """The prompt without its documents, as a COMB decoder reads it."""
        return self.head + self.tail


@dataclass(frozen=True)
class PromptBuilder:
    """Turns documents and a query into token ids, the same way in training, evaluation and serving.

    With a chat template the documents stand at the start of the first user message; without one, behind the
    tokenizer's BOS token (if it adds one). Each document is tokenised alone, so its ids never depend on its
    neighbours.

    Args:
        tokenizer: a Hugging Face tokenizer.
        document_template: a format string with ``{text}`` and, optionally, ``{title}``; by default the title, if
            there is one, and the text, each on its own line.

    Raises:
        ValueError: for a template without ``{text}``.
    """

    tokenizer: Any
    document_template: str | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.document_template is not None and "{text}" not in self.document_template:
            raise ValueError(f"document_template {self.document_template!r} has no {{text}}: documents would be empty")

    def segment(self, document: str | Document) -> tuple[int, ...]:
        """Token ids of one document. Raises ValueError if it tokenises to nothing."""
        document = as_document(document)
        if document.token_ids is not None:
            self._check_ids(document)
            return document.token_ids
        template = self.document_template or ("{title}\n{text}\n" if document.title else "{text}\n")
        text = template.format(text=document.text, title=document.title or "")
        ids = self._ids(text)
        if not ids:
            raise ValueError(f"document (id={document.id!r}) has no token left after tokenisation")
        return ids

    def build(
        self,
        query: str | Sequence[Message],
        segments: Sequence[Sequence[int]] = (),
    ) -> Prompt:
        """The prompt for `query` (a question, or chat messages) over already tokenised documents."""
        messages = [{"role": "user", "content": query}] if isinstance(query, str) else [dict(m) for m in query]
        if not messages:
            raise ValueError("no messages: give at least one message with role and content")
        head, tail = self._chat(messages) if self.tokenizer.chat_template else self._plain(query)
        if not head + tail:
            raise ValueError("the query is empty: there is no token to decode from")
        return Prompt(head, tuple(tuple(int(token) for token in segment) for segment in segments), tail)

    def answer(self, text: str) -> tuple[int, ...]:
        """Token ids of an answer with its end-of-turn token."""
        if self.tokenizer.eos_token_id is None:
            raise ValueError("the tokenizer has no eos_token: set one, or generation would never stop")
        return (*self._ids(text), int(self.tokenizer.eos_token_id))

    def _ids(self, text: str) -> tuple[int, ...]:
        # a document that spells a special token stays text: `split_special_tokens` keeps it from becoming one
        return tuple(self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))

    def _plain(self, query: str | Sequence[Message]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        if not isinstance(query, str):
            raise ValueError(
                "chat messages need a tokenizer with a chat_template; this one has none: pass the query as text"
            )
        bos = self.tokenizer.bos_token_id
        adds_bos = bos is not None and self.tokenizer.encode("a")[0] == bos
        return ((bos,) if adds_bos else ()), self._ids(query)

    def _chat(self, messages: list[dict[str, Any]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Splits the rendered chat at the first user content, where the documents go.

        User text is replaced by random markers before rendering, so that neither the template nor the tokenizer
        can mistake a user's words for structure.
        """
        contents: dict[str, str] = {}
        first_user: str | None = None
        for message in messages:
            if not isinstance(message.get("content"), str):
                raise ValueError(f"message content must be text, not {type(message.get('content')).__name__}")
            marker = f"comb{secrets.token_hex(16)}"
            contents[marker] = message["content"]
            message["content"] = marker
            if first_user is None and message.get("role") == "user":
                first_user = marker
        if first_user is None:
            raise ValueError("no message with role 'user': documents and question belong to a user message")
        rendered: str = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **self.chat_template_kwargs
        )
        return self._assemble(rendered, contents, first_user)

    def _assemble(
        self, rendered: str, contents: dict[str, str], first_user: str
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        head: list[int] = []
        tail: list[int] = []
        target = head
        position = 0
        found = sorted((rendered.find(marker), marker) for marker in contents)
        for start, marker in found:
            if start < 0:
                raise ValueError("the chat template leaves out a message; documents can't be placed in it")
            target.extend(self._template_ids(rendered[position:start]))
            if marker == first_user:
                target = tail
            target.extend(self._ids(contents[marker]))
            position = start + len(marker)
        tail.extend(self._template_ids(rendered[position:]))
        return tuple(head), tuple(tail)

    def _template_ids(self, text: str) -> list[int]:
        # the template's own words: its special tokens are meant as such
        return list(self.tokenizer.encode(text, add_special_tokens=False)) if text else []

    def _check_ids(self, document: Document) -> None:
        size = len(self.tokenizer)
        bad = next((token for token in document.token_ids or () if not 0 <= token < size), None)
        if bad is not None:
            raise ValueError(
                f"document (id={document.id!r}) holds token id {bad}, but the tokenizer knows 0..{size - 1}: "
                "it was tokenised with another tokenizer"
            )

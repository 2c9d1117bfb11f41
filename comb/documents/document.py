"""Documents and prompts as structure: where one document ends is never guessed from text or separators."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import chain
from typing import Any

from comb.documents.messages import DOCUMENTS, Message, Reference, as_messages
from comb.documents.rendering import (
    Rendered,
    Slot,
    added_tokens,
    document_ids,
    plain_ids,
    render_chat,
    renders_chats,
    token_blocks,
)


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
        for name in ("id", "title", "text"):
            if not isinstance(value := getattr(self, name), str | None):
                raise ValueError(f"a document's {name} is a str, not {type(value).__name__} (id={self.id!r})")
        if self.text is not None and not self.text.strip():
            raise ValueError(f"empty document (id={self.id!r}): give it some text or leave it out")
        if self.token_ids is not None:
            try:
                object.__setattr__(self, "token_ids", tuple(map(operator.index, self.token_ids)))
            except TypeError as error:
                raise ValueError(f"a document's token_ids are one row of integers (id={self.id!r}): {error}") from error
            if not self.token_ids:
                raise ValueError(f"empty document (id={self.id!r}): token_ids has no element")

    def name(self, key: str) -> str:
        """What reports and the catalog call it: its id, or, where it has none, after its content key."""
        return self.id or f"doc-{key[:12]}"


DocumentLike = str | Document | Mapping[str, Any]
"""A text, a `Document`, or its fields by name, as in rows and requests: ``{"text": ..., "title": ...}``."""


def as_document(item: DocumentLike) -> Document:
    """Raises ValueError for what isn't `DocumentLike`."""
    if isinstance(item, Document):
        return item
    if isinstance(item, str):
        return Document(item)
    if not isinstance(item, Mapping):
        raise ValueError(f"a document is a str, a comb.Document or a dict with text, not {type(item).__name__}")
    known = [each.name for each in fields(Document)]
    if foreign := [name for name in item if name not in known]:
        raise ValueError(f"a document has {', '.join(known)}, no {foreign[0]!r}")
    if item.keys() <= {"id", "title"}:
        raise ValueError(f"a document without text: {dict(item)!r:.80} (ids of add_documents go into document_ids=)")
    return Document(**item)


def stopping_tokens(tokenizer: Any, characters: str) -> list[int]:
    """Ids of all tokens whose text holds one of these characters."""
    texts = tokenizer.batch_decode([[token] for token in range(len(tokenizer))]) if characters else []
    return [token for token, text in enumerate(texts) if not set(characters).isdisjoint(text)]


def until_stop(text: str, characters: str) -> str:
    """An answer without what a model writes behind its end, the first of these characters."""
    end = next((place for place, character in enumerate(text) if character in characters), None)
    return text[:end].strip()


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
    """Token ids of one prompt: ``prefix + segments + query``; the segments are the documents, each on its own.

    `gaps` are the fresh tokens between segments, one entry less than these; empty where all follow each other.
    """

    prefix: tuple[int, ...]
    segments: tuple[tuple[int, ...], ...]
    query: tuple[int, ...]
    gaps: tuple[tuple[int, ...], ...] = ()

    @property
    def fresh(self) -> tuple[tuple[int, ...], ...]:
        """The tokens in front of each segment, and last those behind all."""
        if not self.segments:
            return ((*self.prefix, *self.query),)
        return (self.prefix, *(self.gaps or ((),) * (len(self.segments) - 1)), self.query)

    @property
    def flat(self) -> tuple[int, ...]:
        """The whole prompt in one row, as a model without document reuse reads it."""
        runs = chain.from_iterable(zip(self.fresh, (*self.segments, ()), strict=True))
        return tuple(chain.from_iterable(runs))

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Where the segments stand in `flat`: the place of the first token, and how many there are."""
        found, position = [], 0
        for run, segment in zip(self.fresh, self.segments, strict=False):
            found.append((position + len(run), len(segment)))
            position += len(run) + len(segment)
        return tuple(found)

    @property
    def bare(self) -> tuple[int, ...]:
        """The prompt without its documents, as a COMB decoder reads it."""
        return tuple(chain.from_iterable(self.fresh))

    def behind(self, count: int) -> tuple[int, int, Prompt]:
        """Tokens and segments in front of a cut behind `count` tokens of `flat`, and what is left behind it.

        A segment is never cut, but left whole.
        """
        fresh, position = self.fresh, 0
        for index, (run, segment) in enumerate(zip(fresh, (*self.segments, ()), strict=True)):
            inside = count - position
            position += len(run)
            if count < position + len(segment) or index == len(self.segments):
                ahead = (run[inside:], *fresh[index + 1 :])
                prefix, *gaps, query = ahead if len(ahead) > 1 else ((), *ahead)
                rest = Prompt(prefix, self.segments[index:], query, tuple(gaps) if any(gaps) else ())
                return min(count, position), index, rest
            position += len(segment)
        raise AssertionError("the last run has no segment behind it")


def _assembled(
    blocks: Sequence[int | Reference],
    segments: Sequence[Sequence[int]],
    referenced: Mapping[str, Sequence[Sequence[int]]],
) -> Prompt:
    if not any(isinstance(block, int) for block in blocks):
        raise ValueError("the query is empty: there is no token to decode from")
    fresh: list[list[int]] = [[]]
    placed: list[tuple[int, ...]] = []
    for block in blocks:
        if isinstance(block, int):
            fresh[-1].append(block)
            continue
        if block.id is not None and block.id not in referenced:
            raise ValueError(f"a message names document {block.id!r}, which nobody has looked up")
        for segment in segments if block.id is None else referenced[block.id]:
            placed.append(tuple(int(token) for token in segment))
            fresh.append([])
    if not placed:
        # raw text without documents keeps what the tokenizer puts in front of it apart all the same
        place = blocks.index(DOCUMENTS) if DOCUMENTS in blocks else 0
        return Prompt(tuple(fresh[0][:place]), (), tuple(fresh[0][place:]))
    prefix, *gaps, query = (tuple(ids) for ids in fresh)
    return Prompt(prefix, tuple(placed), query, tuple(gaps) if any(gaps) else ())


@dataclass(frozen=True, eq=False)
class PromptBuilder:
    """Turns documents and a query into token ids, the same way in training, evaluation and serving.

    With a chat template the documents stand at the start of the first user message, behind `lead`; without one, behind
    the tokenizer's BOS token (if it adds one), `prefix` and `lead`. Each document is tokenised alone, so its ids never
    depend on its neighbours.

    Args:
        tokenizer: a Hugging Face tokenizer.
        document_template: a format string with ``{text}`` and, optionally, ``{title}``; by default the title, if
            there is one, and the text, each on its own line.
        prefix: plain text in front of the documents, for a language model that answers best after a few examples; the
            prompt is then ``prefix + documents + question`` without a chat template.
        lead: plain text in front of the documents in either case, such as the first half of an instruction.
        stop: characters that end an answer, each of them, where no chat template does; answers to learn have the first
            one behind them.

    Raises:
        ValueError: for a template without ``{text}``, or with other fields.
    """

    tokenizer: Any
    document_template: str | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    prefix: str | None = None
    stop: str = ""
    lead: str = ""

    def __post_init__(self) -> None:
        if (template := self.document_template) is None:
            return
        try:
            shows_text = template.format(text="a", title="") != template.format(text="b", title="")
        except (LookupError, ValueError) as error:
            raise ValueError(
                f"document_template {template!r}: {error!r}; its fields are {{text}} and {{title}}"
            ) from error
        if not shows_text:
            raise ValueError(f"document_template {template!r} has no {{text}}: documents would be empty")

    def segment(self, document: str | Document) -> tuple[int, ...]:
        """Token ids of one document. Raises ValueError if it tokenises to nothing."""
        document = as_document(document)
        if document.token_ids is not None:
            size = len(self.tokenizer)
            bad = next((token for token in document.token_ids if not 0 <= token < size), None)
            if bad is not None:
                raise ValueError(
                    f"document (id={document.id!r}) holds token id {bad}, but the tokenizer knows 0..{size - 1}: "
                    "it was tokenised with another tokenizer"
                )
            return document.token_ids
        template = self.document_template or ("{title}\n{text}\n" if document.title else "{text}\n")
        ids = document_ids(self.tokenizer, template.format(text=document.text, title=document.title or ""))
        if not ids:
            raise ValueError(f"document (id={document.id!r}) has no token left after tokenisation")
        return ids

    def build(
        self,
        query: str | Sequence[Message],
        segments: Sequence[Sequence[int]] = (),
        referenced: Mapping[str, Sequence[Sequence[int]]] | None = None,
    ) -> Prompt:
        """The prompt for `query` (a question, or chat messages) over already tokenised documents.

        Args:
            segments: documents at the start of the first user message.
            referenced: segments of the documents that messages name (`referenced_documents`), by id.

        Raises:
            ValueError: for an empty query, messages that a template can't render, or an unknown reference.
        """
        messages = as_messages(query)
        if not messages:
            raise ValueError("no messages: give at least one message with role and content")
        if self.prefix is None and renders_chats(self.tokenizer):
            front: list[str | Slot] = [*([self.lead] if self.lead else []), *([DOCUMENTS] if segments else [])]
            rendered = render_chat(self.tokenizer, messages, self.chat_template_kwargs, front)
            return _assembled(token_blocks(self.tokenizer, rendered), segments, referenced or {})
        if not isinstance(query, str):
            lacks = "the tokenizer has no chat_template" if self.prefix is None else "a prefix takes no messages"
            raise ValueError(f"{lacks}: ask with a text (over HTTP a prompt at /v1/completions)")
        return self.complete(query, segments, prefix=(self.prefix or "") + self.lead)

    def complete(
        self, text: str, segments: Sequence[Sequence[int]] = (), *, prefix: str = "", add_special_tokens: bool = True
    ) -> Prompt:
        """The prompt for raw text, whatever chat template there is: the tokens that the tokenizer makes of it.

        Documents stand in front of it, but behind `prefix` and a BOS token or what else the tokenizer begins a text
        with (`add_special_tokens`). Raises ValueError for an empty text without a BOS token.
        """
        front, back = added_tokens(self.tokenizer) if add_special_tokens else ([], [])
        slots = ((len(prefix), len(prefix), DOCUMENTS),) if segments else ()
        mark = [] if segments else [DOCUMENTS]
        blocks = [*front, *mark, *token_blocks(self.tokenizer, Rendered(prefix + text, slots)), *back]
        if not front and not prefix and segments and blocks[1:2] == [self.tokenizer.bos_token_id]:
            blocks[:2] = [blocks[1], blocks[0]]  # behind a BOS token that the text itself spells
        return _assembled(blocks, segments, {})

    def answer(self, text: str) -> tuple[int, ...]:
        """Token ids of an answer with its end-of-turn token."""
        if self.tokenizer.eos_token_id is None:
            raise ValueError("the tokenizer has no eos_token: set one, or generation would never stop")
        return (*plain_ids(self.tokenizer, text + self.stop[:1]), int(self.tokenizer.eos_token_id))

"""Chat messages as structure: text, documents named inside of them, and what a model has generated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Message = Mapping[str, Any]

# whose content has to be words and documents; a call has none, and a tool's answer may be anything
_WORDS_ONLY = (None, "user", "system", "developer")


@dataclass(frozen=True)
class Reference:
    """A place in a prompt for the document of this id; None for the documents that a request carries."""

    id: str | None


DOCUMENTS = Reference(None)


@dataclass(frozen=True)
class References:
    """Ids of documents inside of messages, in order: before the place of a prompt's other documents, and after it."""

    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()


@dataclass(frozen=True)
class Generated:
    """A part of a message that a model has generated: its tokens, which its text would not always become again."""

    token_ids: tuple[int, ...]
    text: str


def as_messages(query: str | Sequence[Message]) -> Sequence[Message]:
    """A question as chat messages. Raises ValueError for anything but text and messages."""
    messages: Sequence[Message] = [{"role": "user", "content": query}] if isinstance(query, str) else query
    if not isinstance(messages, Sequence) or not all(isinstance(message, Mapping) for message in messages):
        raise ValueError(f'a question is text or a list of messages {{"role": ..., "content": ...}}, not {query!r:.80}')
    return messages


def referenced_documents(query: str | Sequence[Message]) -> References:
    """The documents that messages name in parts ``{"type": "document", "id": ...}``.

    Raises:
        ValueError: for what is no question, or a malformed part.
    """
    before: list[str] = []
    after: list[str] = []
    found = before
    for message in as_messages(query):
        if message.get("role") == "user":
            found = after  # the first one has the prompt's other documents at its start
        found += [part.id for part in message_parts(message) if isinstance(part, Reference) and part.id is not None]
    return References(tuple(before), tuple(after))


def message_parts(message: Message) -> list[str | Reference | Generated]:
    """A message's content: texts, documents, generated tokens; empty where none of these is in it, as in a tool's JSON.

    Raises:
        ValueError: for another part, and for a user's message without any.
    """
    content = message.get("content")
    if isinstance(content, str):
        return [content]
    given = content if isinstance(content, list | tuple) else [content]
    parts: list[str | Reference | Generated] = []
    unknown = []
    for part in given:
        match part:
            case Generated():
                parts.append(part)
            case {"type": "text", "text": str(text)}:
                parts.append(text)
            case {"type": "document", "id": str(document)}:
                parts.append(Reference(document))
            case _:
                unknown.append(part)
    if unknown and (message.get("role") in _WORDS_ONLY or not all(isinstance(part, str) for part in parts)):
        raise ValueError(
            'message content must be text, or a list of {"type": "text", "text": ...} and '
            f'{{"type": "document", "id": ...}}, not {unknown[0]!r}'
        )
    return [] if unknown else parts

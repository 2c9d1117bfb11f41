"""Chat messages as structure: text, documents named inside of them, and what a model has generated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Message = Mapping[str, Any]


@dataclass(frozen=True)
class References:
    """Ids of documents inside of messages, in order: before the place of a prompt's other documents, and after it."""

    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()


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
            found = after
        found += [str(part) for kind, part in message_parts(message) if kind == "document"]
    return References(tuple(before), tuple(after))


@dataclass(frozen=True)
class Generated:
    """A part of a message that a model has generated, as tokens: text would not always become the same ones again."""

    token_ids: tuple[int, ...]


def message_parts(message: Message) -> list[tuple[str, str | Generated]]:
    """A message's content as (kind, text, document id or generated tokens)."""
    content = message.get("content")
    if isinstance(content, str):
        return [("text", content)]
    parts: list[tuple[str, str | Generated]] = []
    for part in content if isinstance(content, list | tuple) else [content]:
        if isinstance(part, Generated):
            parts.append(("generated", part))
            continue
        match part:
            case {"type": "text", "text": str(text)}:
                parts.append(("text", text))
            case {"type": "document", "id": str(document)}:
                parts.append(("document", document))
            case _:
                raise ValueError(
                    'message content must be text, or a list of {"type": "text", "text": ...} and '
                    f'{{"type": "document", "id": ...}}, not {part!r}'
                )
    return parts

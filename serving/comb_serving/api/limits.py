"""How much a request may hold: looked at before anything of it is converted, rendered or tokenised.

Work on it is then linear in what the model could read at all: a text has at most as many characters as so many tokens
of the longest kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from comb.locks import lock_of
from comb_serving.api.request_error import RequestError

# of lists in a body; stop strings and bad words vLLM limits itself
MOST = {"documents": 4096, "messages": 10_000, "input": 10_000, "tools": 1024, "prompt": 1024, "items": 1024}
MOST_FIELDS = 1024
LONG = 100_000  # characters, which a tokenizer works on for a noticeable part of a second
_SLICE = 50_000

_PROMPTS = ("prompt", "items")  # each is a prompt or a list of prompts
_TEXTS = ("messages", "input", "system", "instructions", "tools", "suffix", "query")
# of messages, what templates don't write out: media, seals, and short names
_UNREAD = {"image_url", "video_url", "audio_url", "input_audio", "image", "source", "signature", "encrypted_content"}
_NAMES, _NAME_LENGTH = {"role", "type", "id", "call_id", "tool_call_id", "status"}, 64


def check_counts(body: Mapping[str, Any]) -> None:
    """Raises RequestError (400) for more fields, items of lists or parts of messages than are served at once."""
    if len(body) > MOST_FIELDS:
        raise RequestError(400, f"the body has {len(body)} fields, at most {MOST_FIELDS} are taken")
    for name, most in MOST.items():
        found = body.get(name)
        if not isinstance(found, list) or (name in _PROMPTS and found and type(found[0]) is int):
            continue
        parts = [one["content"] for one in found if isinstance(one, dict) and isinstance(one.get("content"), list)]
        count = max(len(found), sum(map(len, parts)))
        if count > most:
            raise RequestError(400, f"{name} has {count} items, at most {most} are taken at once", param=name)


def check_characters(body: Mapping[str, Any], tokens: int, longest: int) -> None:
    """Raises RequestError (400) for a text that has more characters than `tokens` tokens of `longest` characters."""
    for name in _TEXTS:
        check_length(name, sum(map(len, texts_of(body.get(name)))), tokens, longest)
    for name in _PROMPTS:
        found = body.get(name)
        for text in found if isinstance(found, list) else [found]:
            check_length(name, len(text) if isinstance(text, str) else 0, tokens, longest)


def check_length(what: str, characters: int, tokens: int, longest: int, param: str | None = None) -> None:
    """Raises RequestError (400) for more characters than so many tokens can have."""
    if characters > tokens * longest:
        raise RequestError(
            400,
            f"{what} has {characters} characters, and {tokens} tokens, of which there is room for, at most "
            f"{tokens * longest}",
            param=param or what,
        )


def check_tokens(tokenizer: Any, texts: Iterable[str], tokens: int, gone: Callable[[], bool]) -> None:
    """Counts tokens slice by slice, for who would otherwise tokenise a whole text that is far too long.

    Raises:
        RequestError: 400 for twice as many as there is room for; a slice may have some more alone than in its place.
    """
    count = 0
    for text in texts:
        for start in range(0, len(text), _SLICE):
            if gone():
                return
            with lock_of(tokenizer):
                count += len(tokenizer.encode(text[start : start + _SLICE], add_special_tokens=False))
            if count > 2 * tokens:
                raise RequestError(400, f"the texts have more than {count} tokens, and there is room for {tokens}")


def texts_of(value: Any) -> Iterator[str]:
    """All texts inside of a JSON value that may become a part of a prompt."""
    left = [value]
    while left:
        found = left.pop()
        if isinstance(found, str):
            yield found
        elif isinstance(found, list):
            left += found
        elif isinstance(found, dict):
            left += [
                inner
                for name, inner in found.items()
                if name not in _UNREAD
                and not (name in _NAMES and isinstance(inner, str) and len(inner) <= _NAME_LENGTH)
            ]

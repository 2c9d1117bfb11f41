"""Tokens and passwords in what is about to be published: found by value, by the name beside them, by their look."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable

REMOVED = "[removed]"

_SHORTEST = 6  # shorter values stand in files for other reasons
_ENVIRONMENT = re.compile(r"(^|_)(TOKEN|KEY|SECRET|PASSWORD|PASSWD)$", re.IGNORECASE)
# not every *_token: a tokenizer's bos_token is none
_NAME = (
    r"(?<![a-z0-9])(?<!(?:bos|eos|pad|unk|sep|cls)_)(?<!mask_)(?<!(?:image|audio|video)_)"
    r"(?:token|api[_-]?key|secret|password)"
)
# in JSON: a string under a name or behind an option, and a name with its value inside of a string
_NAMED = re.compile(
    rf'(?:{_NAME}"\s*:|"-[\w.-]*{_NAME}"\s*,)\s*"(?P<string>(?:[^"\\]|\\.){{{_SHORTEST},}})"|'
    rf"{_NAME}(?:\\\"|')?\s*[=:]\s*(?:\\\"|')?(?P<assigned>[^\s\"',}}\\]{{{_SHORTEST},}})",
    re.IGNORECASE,
)
_LOOKS = re.compile(
    rb"hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|gh[opsu]_[A-Za-z0-9]{30,}|AKIA[0-9A-Z]{16}|"
    rb"(?<=://)[^/\s:@\"]+:[^/\s@\"]+(?=@)"
)


def known_secrets(*more: str | None) -> frozenset[str]:
    """The values of this process's environment variables called ``*_TOKEN``, ``*_KEY`` and the like, and `more`."""
    found = {value for name, value in os.environ.items() if _ENVIRONMENT.search(name)}
    return frozenset(value for value in {*found, *more} if value and len(value) >= _SHORTEST)


def named_secrets(data: bytes) -> frozenset[str]:
    """Values in JSON that stand under a secret's name: ``{"token": ...}``, ``"--token", ...``, ``token=...``."""
    found = (match["string"] or match["assigned"] for match in _NAMED.finditer(data.decode()))
    return frozenset(json.loads(f'"{value}"', strict=False) for value in found)


def holds_secret(data: bytes, secrets: Iterable[str] = ()) -> bool:
    """Whether a file's content holds one of `secrets`, or what looks like a token."""
    return any(secret.encode() in data for secret in secrets) or _LOOKS.search(data) is not None


def redact_json(data: bytes, secrets: Iterable[str] = ()) -> bytes:
    """JSON with every secret replaced by ``[removed]``; data without one comes back as it is."""
    for secret in sorted({*secrets, *named_secrets(data)}, key=len, reverse=True):
        data = data.replace(json.dumps(secret)[1:-1].encode(), REMOVED.encode())
    return _LOOKS.sub(REMOVED.encode(), data)

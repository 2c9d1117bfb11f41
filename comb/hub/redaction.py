"""Tokens and passwords in what is about to be published: found by value, by the name beside them, by their look."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

REMOVED = "[removed]"

_ENVIRONMENT = re.compile(r"(^|_)(TOKEN|KEY|SECRET|PASSWORD|PASSWD)$", re.IGNORECASE)
# not every *_token: a tokenizer's bos_token is none
_NAME = r"(?:(?:hf|hub|api|auth|access|use_auth|wandb|github|secret)[_-])?(?:token|api[_-]?key|secret|password)"
_NAMED = re.compile(rf"(?:.*[._-])?{_NAME}", re.IGNORECASE)
_SPECIAL_TOKEN = re.compile(r".*\b(bos|eos|pad|unk|sep|cls|mask|image|audio|video)_token", re.IGNORECASE)
_ASSIGNED = re.compile(rf"(?:^|[\s.,{{_-]){_NAME}[\"']?\s*[=:]\s*[\"']?([^\s\"',}}]+)", re.IGNORECASE)
_LOOKS = re.compile(
    rb"hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|gh[opsu]_[A-Za-z0-9]{30,}|AKIA[0-9A-Z]{16}|"
    rb"(?<=://)[^/\s:@\"]+:[^/\s@\"]+(?=@)"
)
_SHORTEST = 6  # shorter values stand in files for other reasons


def known_secrets(*more: str | None) -> frozenset[str]:
    """The values of this process's environment variables called ``*_TOKEN``, ``*_KEY`` and the like, and `more`."""
    found = {value for name, value in os.environ.items() if _ENVIRONMENT.search(name)}
    return frozenset(value for value in {*found, *more} if value and len(value) >= _SHORTEST)


def named_secrets(content: Any) -> frozenset[str]:
    """Values in JSON content that stand under a secret's name: ``{"token": ...}``, ``--token ...``, ``token=...``."""
    found: set[str] = set()
    if isinstance(content, Mapping):
        for name, value in content.items():
            if isinstance(value, str) and _is_secret_name(str(name)):
                found.add(value)
            found |= named_secrets(value)
    elif isinstance(content, list):
        for item, following in pairwise([*content, None]):
            option = isinstance(item, str) and item.startswith("-") and _is_secret_name(item.lstrip("-"))
            if option and isinstance(following, str):
                found.add(following)
            found |= named_secrets(item)
    elif isinstance(content, str):
        found.update(_ASSIGNED.findall(content))
    return frozenset(value for value in found if len(value) >= _SHORTEST)


def _is_secret_name(name: str) -> bool:
    return _NAMED.fullmatch(name) is not None and _SPECIAL_TOKEN.fullmatch(name) is None


def holds_secret(data: bytes, secrets: Iterable[str] = ()) -> bool:
    """Whether a file's content holds one of `secrets`, or what looks like a token."""
    return any(secret.encode() in data for secret in secrets) or _LOOKS.search(data) is not None


def redact_json(data: bytes, secrets: Iterable[str] = ()) -> bytes:
    """JSON with every secret replaced by ``[removed]``; data without one comes back as it is."""
    everything = {*secrets, *named_secrets(json.loads(data))}
    for secret in sorted(everything, key=len, reverse=True):
        data = data.replace(json.dumps(secret)[1:-1].encode(), REMOVED.encode())
    return _LOOKS.sub(REMOVED.encode(), data)

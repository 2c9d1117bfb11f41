"""What mustn't be published: tokens and passwords, by value, by the name beside them or by their look; and paths."""

from __future__ import annotations

import fnmatch
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path

from comb.backbones.unpublished import public

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


def clean_files(
    folder: Path, names: set[str], records: set[str], contents: dict[str, bytes], secrets: frozenset[str]
) -> list[str]:
    """Takes tokens and paths out of the files that are to be published, and says of which.

    Args:
        records: those of `names` that `comb train` and `comb eval` wrote.
        contents: of the files that go up otherwise than they are in `folder`; those that change are added.

    Raises:
        ValueError: another file than a record holds a token.
    """
    warnings = []
    secrets = secrets.union(*(named_secrets((folder / name).read_bytes()) for name in records))
    for name in sorted(names):
        path = folder / name
        if name in contents:
            data = contents[name]
        elif path.suffix == ".safetensors":  # the header is all that can hold text
            with path.open("rb") as file:
                data = file.read(8 + int.from_bytes(file.read(8), "little"))
        else:
            data = path.read_bytes()
        if name in records and (clean := redact_json(data, secrets)) != data:
            contents[name] = data = clean
            warnings.append(f"{name} goes up without the token that it holds here")
        if name in records or fnmatch.fnmatch(name, "*config.json"):
            content = json.loads(data)
            # of a configuration the other values are the model's and the tokenizer's
            without = public(content) if name in records else {
                key: public(value) if key.endswith(("_path", "_file")) else value for key, value in content.items()
            }  # fmt: skip
            if without != content:  # what is written now has no paths; adapters of before have
                contents[name] = data = f"{json.dumps(without, indent=2)}\n".encode()
                warnings.append(f"{name} goes up with the names of files and folders here in place of their paths")
        if holds_secret(data, secrets):
            raise ValueError(
                f"{path} holds what is or looks like a token or password: take it out (and revoke it, if "
                "others could see it). Nothing was uploaded"
            )
    return warnings

"""Text and JSON that a person names, read or refused with the file and what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_text(path: str | Path) -> str:
    """The text of a UTF-8 file, with or without a mark in front (Windows editors put one there).

    Raises:
        ValueError: for other text, naming the file.
        OSError: as `open` does.
    """
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error}): save it as UTF-8") from error


def read_json(path: str | Path, remedy: str = "write or download it again") -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ValueError: if it is none, naming the file and the `remedy`.
        OSError: as `open` does.
    """
    try:
        content = json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is damaged, it is not JSON ({error}): {remedy}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} should be a JSON object, it is a {type(content).__name__}: {remedy}")
    return content

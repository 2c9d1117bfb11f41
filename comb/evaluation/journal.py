"""The rows of a run that may be broken off and gone on with: one JSON object in each line, on disk when it is there."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Journal:
    """Rows that were written before, and those that are added now.

    Args:
        path: of the file; None keeps rows in memory only.
        made_with: what all rows depend on. It is the file's first line.

    Raises:
        ValueError: for a file whose rows were made with something else.
    """

    def __init__(self, path: Path | None, made_with: Mapping[str, Any]) -> None:
        self.path = path
        self.rows: list[dict[str, Any]] = []
        expected = json.loads(json.dumps(made_with))
        if path is None:
            return
        if path.exists() and (whole := _whole_lines(path)):
            try:
                first, *self.rows = map(json.loads, whole)
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"{path} is damaged, line by line it is not JSON ({error}): choose another --out, or remove it"
                ) from error
            differing = [name for name in {**expected, **first} if first.get(name) != expected.get(name)]
            if differing:
                name = differing[0]
                raise ValueError(
                    f"{path} holds answers that were made with {name}={first.get(name)!r}, now it is "
                    f"{expected.get(name)!r}: choose another --out, or remove the file"
                )
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._write(expected)

    def add(self, row: dict[str, Any]) -> None:
        """One more row, which is on disk when this returns."""
        self.rows.append(row)
        if self.path is not None:
            self._write(row)

    def _write(self, row: Mapping[str, Any]) -> None:
        assert self.path is not None
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())


def _whole_lines(path: Path) -> list[str]:
    """The file's lines; the half of one that a broken-off run has left at its end is cut off."""
    content = path.read_bytes()
    end = content.rfind(b"\n") + 1
    if end < len(content):
        with path.open("r+b") as file:
            file.truncate(end)
    # not splitlines: JSON strings may hold U+2028 and the like
    return content[:end].decode("utf-8").split("\n")[:-1]

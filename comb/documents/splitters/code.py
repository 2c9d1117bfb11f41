"""Source code by definitions."""

from __future__ import annotations

import re
from collections.abc import Iterator

from comb.documents.splitting import Splitter, lines, paragraphs, spaces, splitters

_TOP_LEVEL = re.compile(r"\n[ \t\r]*\n(?=[^\s)}\]])")


def top_level_blocks(text: str) -> Iterator[int]:
    """In front of lines that aren't indented and follow a blank one: definitions with their comments and decorators."""
    return (match.end() for match in _TOP_LEVEL.finditer(text))


@splitters.register("code")
class Code(Splitter):
    """Top-level definitions, then blank lines, then lines."""

    levels = (top_level_blocks, paragraphs, lines, spaces)

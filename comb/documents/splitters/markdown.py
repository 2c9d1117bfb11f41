"""Markdown by sections and blocks, with code fences kept whole."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from comb.documents.splitting import Splitter, lines, paragraphs, sentences, spaces, splitters

_FENCE = re.compile(r"^[ ]{0,3}(`{3,}|~{3,})", re.MULTILINE)
_HEADING = re.compile(r"^[ ]{0,3}#{1,6}(?:[ \t]|$)", re.MULTILINE)


def headings(text: str) -> Iterator[int]:
    """In front of Markdown headings, outside of code fences."""
    fenced = list(_fences(text))
    return (match.start() for match in _HEADING.finditer(text) if not _inside(match.start(), fenced))


def markdown_blocks(text: str) -> Iterator[int]:
    """Behind blank lines outside of code fences, and around fenced blocks."""
    fenced = list(_fences(text))
    apart = (offset for offset in paragraphs(text) if not _ends_with_heading(text, offset))
    outside = {offset for offset in apart if not _inside(offset, fenced)}
    return iter(sorted(outside | {offset for block in fenced for offset in block if 0 < offset < len(text)}))


def _ends_with_heading(text: str, offset: int) -> bool:
    # a heading stays with what follows it
    return _HEADING.match(text[max(0, offset - 256) : offset].rstrip().rpartition("\n")[2]) is not None


def _fences(text: str) -> Iterator[tuple[int, int]]:
    """Half-open character ranges of fenced code blocks; one that is never closed reaches to the end."""
    opened: re.Match[str] | None = None
    for match in _FENCE.finditer(text):
        if opened is None:
            opened = match
        elif match[1][0] == opened[1][0] and len(match[1]) >= len(opened[1]):
            end = text.find("\n", match.end())
            yield opened.start(), len(text) if end < 0 else end + 1
            opened = None
    if opened is not None:
        yield opened.start(), len(text)


def _inside(offset: int, ranges: Sequence[tuple[int, int]]) -> bool:
    return any(first < offset < last for first, last in ranges)


@splitters.register("markdown")
class Markdown(Splitter):
    """Sections, then blocks, lines and sentences; a fenced code block stays whole where it fits the budget."""

    levels = (headings, markdown_blocks, lines, sentences, spaces)

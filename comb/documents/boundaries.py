"""Boundaries of units in plain text: character offsets at which a paragraph, a line, a sentence or a word may start."""

from __future__ import annotations

import re
from collections.abc import Iterator

_BLANK_LINES = re.compile(r"\n(?:[ \t\r]*\n)+")
_LINE = re.compile(r"\n")
_SENTENCE_END = re.compile(r"[.!?…]+[\"'”’»)\]]*\s+|[。！？]+[」』”’）]*\s*")
_ABBREVIATION = re.compile(
    r"(?<!['’])\b(?:[A-Za-z]|Mr|Mrs|Ms|Dr|Prof|St|Sr|Jr|vs|etc|cf|al|Inc|Ltd|Co|Corp|Vol|approx|(?:[A-Za-z]\.)+[A-Za-z])\.\s*$"
)
_BEFORE_NUMBER = re.compile(r"\b(?:No|Fig|Eq|Sec|pp?|ca|Jan|Feb|Mar|Apr|Jun|Jul|Aug|Sept?|Oct|Nov|Dec)\.\s*$")
_LIST_NUMBER = re.compile(r"(?:^|\n)[ \t]*\d{1,3}\.\s*$")


def paragraphs(text: str) -> Iterator[int]:
    """Behind blank lines."""
    return (match.end() for match in _BLANK_LINES.finditer(text))


def lines(text: str) -> Iterator[int]:
    """Behind line ends."""
    return (match.end() for match in _LINE.finditer(text))


def sentences(text: str) -> Iterator[int]:
    """Behind the ends of sentences and lines, though not behind abbreviations and initials."""
    ends = {match.end() for match in _SENTENCE_END.finditer(text) if not _abbreviated(text, match)}
    return iter(sorted({*ends, *paragraphs(text)}))


def _abbreviated(text: str, match: re.Match[str]) -> bool:
    """Whether what looks like an end isn't one: an abbreviation, an initial, a list's number, ``"Why?" he asked``."""
    before, after = text[max(0, match.start() - 16) : match.end()], text[match.end() : match.end() + 1]
    if after.islower() and not match[0].startswith((". ", ".\n")):
        return True
    if after.isdigit() and _BEFORE_NUMBER.search(before):
        return True
    return bool(_ABBREVIATION.search(before) or _LIST_NUMBER.search(before))


def spaces(text: str) -> Iterator[int]:
    """In front of words, so that a word keeps together where it fits."""
    return (match.start() for match in re.finditer(r"\s\S", text))

"""Segments found in a prompt that nobody has marked: where one ends follows from what stands there, not from where.

A prompt is cut at strong joints (special tokens, tagged or numbered chunks, a tool's schema) always, and between them
at starts of lines that their own next tokens choose (content-defined chunking, as in LBFS: Muthitacharoen et al. 2001).
So an insertion moves the segment that it is in, and those behind it are cut as before.
"""

from __future__ import annotations

import re
import zlib
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

from comb.documents.document import Prompt
from comb.locks import lock_of

LABELS = (
    r"</?(?:documents?|docs?|source|context|chunk|passage|file|tools?|examples?|search_results?)\b[^>\n]*>",
    r"(?:passage|document|source|context|chunk|paragraph|file|result) ?\[?#?\d+\]?(?=\W)[:.)]?",
    r"\[\d+\]:?",
    r"(?=\{\"|```)",  # a tool's schema, or another object, in a line of its own; code
)
"""What stands at the start of a line in front of a segment, and isn't a part of it: a number changes with the order."""

KINDS = ("prose", "code", "json", "logs")  # what a segment is written in
_LOG = re.compile(r"\W*(?:\d{4}-\d\d-\d\d|\d\d:\d\d:\d\d|(?:TRACE|DEBUG|INFO|WARN(?:ING)?|ERROR|FATAL|CRITICAL)\b)")
_NAMED = re.compile(r"\"[^\"\n]*\" *:")  # a value of an object
_CODE = re.compile(
    r".*[;{}]\s*$|\s*(?:def|class|import|from|return|if|elif|else|for|while|with|try|except|raise|assert|"
    r"public|private|static|const|let|var|func(?:tion)?|fn|use|pub|void|int)\b.*[:(){}=;,]"
    r"|\s*(?:@\w|//|#include)|\s+\w+: [\w.\[\]|]+(?: = .+)?$"
    r"|\s*[\w.\[\]'\"]+(?: [-+*/|&]?= |\().*|\s*[)\]}]+[,;:]?$|\s*#"
)

MOST = 1024  # tokens of a segment
_LOOK = 8  # tokens whose hash decides whether a line begins a segment
_LINES, _TOKENS = 4, 32  # one start of a line in so many does; in text without lines, one token in so many
_MESSAGES = 1024  # that are remembered
_HEADER = 4  # tokens of a message's role between a special token and the end of its line


def check_sizes(least: int, most: int = MOST, patterns: Sequence[str] = (), kinds: Sequence[str] = KINDS) -> None:
    """Raises ValueError for a pattern that doesn't compile or matches nothing at all, unknown kinds, or wrong sizes."""
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise ValueError(f"segments are of the kinds {', '.join(KINDS)}: there is no {unknown[0]!r}")
    if not 8 <= least <= most // 2:
        raise ValueError(f"a segment's least tokens are 8 to {most // 2}, not {least}")
    for pattern in patterns:
        try:
            empty = re.compile(pattern).match("")
        except re.error as error:
            raise ValueError(f"{pattern!r} is no regular expression: {error}") from error
        if empty is not None:
            raise ValueError(f"the pattern {pattern!r} matches nothing at all: every line would begin a segment")


def kind_of(text: str) -> str:
    """One of `KINDS`, by the forms of a text's lines; what is none of the others is prose."""
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        return "prose"
    if sum(bool(_LOG.match(line)) for line in lines) > len(lines) / 2:
        return "logs"
    if text.lstrip()[0] in '{[]}"' and len(names := _NAMED.findall(text)) >= 3 and len(names) * 30 > len(text.split()):
        return "json"
    indented = sum(line.startswith(("    ", "\t", "  ")) for line in lines) > len(lines) / 3
    coded = sum(bool(_CODE.match(line)) for line in lines)
    return "code" if coded > len(lines) / (5 if indented else 2) else "prose"  # comments in code are prose


def with_segments(token_ids: Sequence[int], spans: Sequence[tuple[int, int]]) -> Prompt:
    """A prompt whose segments are at these places, each ``(start, tokens)``; there is at least one."""
    runs, at = [], 0
    for start, tokens in spans:
        runs.append(tuple(token_ids[at:start]))
        at = start + tokens
    segments = tuple(tuple(token_ids[start : start + tokens]) for start, tokens in spans)
    return Prompt(runs[0], segments, tuple(token_ids[at:]), tuple(runs[1:]))


class SegmentFinder:
    """Cuts prompts of one tokenizer.

    Args:
        least: tokens of a segment; what is shorter is left alone.
        most: tokens of a segment.
        patterns: of one's own, beside `LABELS`: regular expressions, at the start of a line.
        kinds: of segments, the others being left alone.

    Raises:
        ValueError: as `check_sizes`.
    """

    def __init__(
        self, tokenizer: Any, *, least: int = 64, most: int = MOST, patterns: Sequence[str] = (),
        kinds: Sequence[str] = KINDS,
    ) -> None:  # fmt: skip
        check_sizes(least, most, patterns, kinds)
        self.tokenizer, self.least, self.most, self.kinds = tokenizer, least, most, kinds
        self._label = re.compile("|".join(f"(?:{each})" for each in (*LABELS, *patterns)), re.IGNORECASE)
        self._special = frozenset(number for number, token in tokenizer.added_tokens_decoder.items() if token.special)
        self._remembered = lru_cache(_MESSAGES)(self._in_message)

    def find(self, token_ids: Sequence[int], whose: str = "") -> list[tuple[int, int]]:
        """Places and lengths of segments in a prompt's tokens, in order and apart.

        None is found where the tokenizer doesn't say where its tokens are in a text, or makes other tokens of it. What
        was found in a message is remembered, as conversations come with all that was said before.

        Args:
            whose: nobody else finds out by the time that it takes what was asked before.
        """
        if not getattr(self.tokenizer, "is_fast", False):
            return []
        begins = [at for at, token in enumerate(token_ids) if not at or token in self._special]
        messages = (token_ids[begin:end] for begin, end in pairwise([*begins, len(token_ids)]))
        return [
            (begin + start, tokens)
            for begin, message in zip(begins, messages, strict=True)
            for start, tokens in self._remembered(whose, array("q", message).tobytes())
        ]

    def _in_message(self, whose: str, message: bytes) -> list[tuple[int, int]]:
        """Segments of a special token and what follows it up to the next, as bytes of an array of 64-bit integers."""
        token_ids = array("q", message).tolist()
        joints = self._joints(token_ids)
        if joints is None:
            return []
        pieces, lines, blank, strong = joints
        paragraphs = pairwise(sorted({*blank, *strong, len(token_ids)}))
        alone = {at for at, end in paragraphs if at in blank and end - at >= self.least}

        def ends(begin: int, at: int) -> bool:
            """Whether the segment that began at `begin` ends in front of token `at`."""
            size = at - begin
            if at in strong or size >= self.most:
                return True
            if size < self.least:
                # a line with a date, or a heading, in front of a paragraph doesn't make another of it
                return at in alone and not re.search(r"[^\n]\n[^\n]", "".join(pieces[begin:at]))
            if at in blank:
                return True
            chance = zlib.crc32(array("q", token_ids[at : at + _LOOK]).tobytes())
            if at in lines:
                return chance % _LINES == 0 or size >= self.most // 2
            return size >= self.most // 2 and chance % _TOKENS == 0

        found, begin = [], int(token_ids[0] in self._special)
        for at in range(begin + 1, len(token_ids) + 1):
            if at < len(token_ids) and not ends(begin, at):
                continue
            end = at
            while begin < end and not pieces[begin].strip():
                begin += 1
            # a line's end may be one token with what follows it, and another where other text follows
            while end > begin and ("\n" in pieces[end - 1] or pieces[end - 1].rstrip() != pieces[end - 1]):
                end -= 1
            if end - begin >= self.least and kind_of("".join(pieces[begin:end])) in self.kinds:
                found.append((begin, end - begin))
            begin = at
        return found

    def _joints(self, token_ids: Sequence[int]) -> tuple[list[str], set[int], set[int], set[int]] | None:
        """Each token's text, and which begin a line, a line behind a blank one, or at a strong joint; None: unknown."""
        with lock_of(self.tokenizer):
            text = self.tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            made = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        if list(made["input_ids"]) != list(token_ids):
            return None
        places: list[tuple[int, int]] = made["offset_mapping"]
        # a message begins a line, whatever its template puts in front; a token may hold a line's end and what follows:
        # the line begins behind that
        first = places[0][1] if token_ids[0] in self._special else 0
        first += len(text[first:]) - len(text[first:].lstrip(" "))
        starts = (first, *(end.end() for end in re.finditer("\n", text)))
        begins = {start: bisect_left(places, (start,)) for start in starts}
        lines = set(begins.values())
        labels = {at: match.end() for start, at in begins.items() if (match := self._label.match(text, start))}
        strong = {*labels, *(bisect_left(places, (end,)) for end in labels.values())}
        header = 0
        for at, token in enumerate(token_ids):
            header = _HEADER if token in self._special else header - 1
            if header > 0 and at in lines:
                strong.add(at)
        pieces = [text[start:end] for start, end in places]
        blank = {at for start, at in begins.items() if text[max(0, start - 2) : start] == "\n\n"}
        return pieces, lines, blank, strong

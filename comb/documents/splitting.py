"""KVSplit: how a long document is cut into segments, each compiled and cached on its own.

Token ids are cut, never text: a splitter only chooses places between tokens, so no token changes at a boundary.
Splitters go from coarse units to fine ones (paragraphs, then sentences, then tokens): a unit that is too long is cut at
the next finer boundary, and short neighbours are packed together up to the budget.

A splitter of your own is a function from text to character offsets, given where a splitter's name goes, or a subclass:

    @splitters.register("verses")
    class Verses(Splitter):
        levels = (my_boundaries, sentences)

Source: EPIC (arXiv) sec. 5 (KVSplit) and its RQ4.
"""

from __future__ import annotations

import operator
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from operator import itemgetter
from typing import Any, ClassVar

from comb.locks import lock_of
from comb.registry import Registry

Boundaries = Callable[[str], Iterable[int]]
"""Character offsets at which a new unit of a text may start, in increasing order."""

DEFAULT_SPLITTER = "whole"
DEFAULT_MAX_TOKENS = 512
_BROKEN = "\N{REPLACEMENT CHARACTER}"
_LONGEST_CHARACTER = 8  # tokens; four bytes of UTF-8, and then some for tokenizers that normalise

splitters: Registry[type[Splitter]] = Registry("splitter")
"""Splitters by name; `splitters.register("mine")` decorates a subclass of `Splitter`."""


class Splitter:
    """Cuts a document at the coarsest boundaries that keep every segment within `max_tokens`.

    Raises:
        ValueError: when `max_tokens` is not a positive integer.
    """

    levels: tuple[Boundaries, ...] = ()
    cuts: ClassVar[bool] = True
    """False: every document is one segment, and no budget is taken."""

    def __init__(self, max_tokens: int = DEFAULT_MAX_TOKENS) -> None:
        if isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < 1:
            raise ValueError(f"{type(self).__name__}: max_tokens is an integer of at least 1, got {max_tokens!r}")
        self.max_tokens = max_tokens

    def split(self, token_ids: Sequence[int], pieces: Sequence[str]) -> list[tuple[int, ...]]:
        """Segments whose concatenation is `token_ids`, none of them empty.

        Args:
            pieces: the text of every token (`token_pieces`). A boundary inside a token counts behind that token.

        Raises:
            ValueError: when there are not as many pieces as ids, or a boundary function gives offsets that don't
                increase or lie outside of the text.
        """
        if len(token_ids) != len(pieces):
            raise ValueError(f"expected the text of each of {len(token_ids)} tokens, got {len(pieces)} pieces")
        if not self.cuts or len(pieces) <= self.max_tokens:
            return [tuple(token_ids)] if token_ids else []
        text, starts = "".join(pieces), [0, *accumulate(len(piece) for piece in pieces)]
        levels = []
        for level in self.levels:
            offsets = level(text)
            try:
                found = [operator.index(offset) for offset in offsets]
            except TypeError as error:
                raise ValueError(f"a boundary function gives whole numbers, got {offsets!r:.80}") from error
            inside = all(0 <= offset <= len(text) for offset in found)
            if not inside or any(later <= earlier for earlier, later in pairwise(found)):
                raise ValueError(
                    f"a boundary function gives increasing offsets within 0..{len(text)}, got {found[:8]}..."
                )
            # cuts are in front of the first token at or behind an offset
            levels.append(sorted({bisect_left(starts, offset) for offset in found}))
        return [tuple(token_ids[first:last]) for first, last in self._parts(0, len(pieces), levels)]

    def _parts(self, first: int, last: int, levels: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
        """Half-open parts of first..last within the budget, cut at `levels` and packed."""
        if last - first <= self.max_tokens:
            return [(first, last)]
        if not levels:
            return [(cut, min(cut + self.max_tokens, last)) for cut in range(first, last, self.max_tokens)]
        packed: list[tuple[int, int]] = []
        inside = levels[0][bisect_right(levels[0], first) : bisect_left(levels[0], last)]
        for unit in pairwise([first, *inside, last]):
            for begin, end in self._parts(*unit, levels[1:]):
                if packed and end - packed[-1][0] <= self.max_tokens:
                    packed[-1] = (packed[-1][0], end)
                else:
                    packed.append((begin, end))
        return packed


def create(spec: str | Splitter | Boundaries) -> Splitter:
    """A splitter from ``"paragraphs:512"``, from a function from text to character offsets, or as it is.

    Raises:
        ValueError: for an unknown name or a budget that isn't a positive integer.
    """
    if isinstance(spec, Splitter):
        return spec
    if not isinstance(spec, str):
        if not callable(spec):
            raise ValueError(f"a splitter is a name, a Splitter or a function, not {type(spec).__name__}")
        own = Splitter()
        own.levels = (spec, spaces)  # between words where its units are too long
        return own
    name, colon, budget = spec.partition(":")
    cls = splitters.get(name)
    budget = budget.removeprefix("max_tokens=")
    if not colon:
        return cls()
    if not cls.cuts:
        raise ValueError(f"splitter {spec!r}: {name!r} takes no budget; 'fixed:{budget}' would")
    if not budget.isdigit():
        raise ValueError(f"splitter {spec!r}: expected a number of tokens, as in '{name}:{DEFAULT_MAX_TOKENS}'")
    return cls(int(budget))


def split_document(tokenizer: Any, token_ids: Sequence[int], splitter: Splitter) -> list[tuple[int, ...]]:
    """The segments of one tokenised document."""
    if not splitter.cuts:
        return [tuple(token_ids)]
    segments = [tuple(segment) for segment in splitter.split(token_ids, token_pieces(tokenizer, token_ids))]
    if not all(segments) or [token for segment in segments for token in segment] != list(token_ids):
        raise ValueError(
            f"{type(splitter).__name__} made {len(segments)} segments that are not the document: a splitter "
            f"returns its {len(token_ids)} tokens in order, cut into segments that are not empty"
        )
    return segments


def token_pieces(tokenizer: Any, token_ids: Sequence[int]) -> list[str]:
    """The text of every token, without tokenising anything again; joined, nearly the document's text.

    Where a character is spread over several tokens, the last of them has it and the others have no text.
    """
    settings = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    distinct = list(dict.fromkeys(int(token) for token in token_ids))
    with lock_of(tokenizer):
        anchor = next(iter(tokenizer.encode("a", add_special_tokens=False)), None)
    prefix = [] if anchor is None else [anchor]  # in front of a first word SentencePiece tokenizers drop the space
    taken_off = len(tokenizer.decode(prefix, **settings)) if prefix else 0
    texts = tokenizer.batch_decode([[*prefix, token] for token in distinct], **settings)
    piece = {token: text[taken_off:] for token, text in zip(distinct, texts, strict=True)}
    found: list[str] = []
    part: list[int] = []
    for token in map(int, token_ids):
        if not part and _BROKEN not in piece[token]:
            found.append(piece[token])
            continue
        part.append(token)
        text = tokenizer.decode([*prefix, *part], **settings)[taken_off:]
        if _BROKEN not in text or len(part) == _LONGEST_CHARACTER:
            found += [""] * (len(part) - 1) + [text]
            part = []
    return [*found, *(piece[token] for token in part)]


# ---- boundaries: where a paragraph, a line, a sentence or a word may start ----


def _behind(pattern: str) -> Boundaries:
    compiled = re.compile(pattern)

    def boundaries(text: str) -> Iterator[int]:
        return (match.end() for match in compiled.finditer(text))

    return boundaries


paragraphs = _behind(r"\n(?:[ \t\r]*\n)+")
lines = _behind(r"\n")
spaces = _behind(r"(?=\s\S)")  # in front of words, so that a word keeps together where it fits
# not indented and behind a blank line: definitions with their comments and decorators
top_level_blocks = _behind(r"\n[ \t\r]*\n(?=[^\s)}\]])")

_SENTENCE_END = re.compile(r"(?<![.!?…])[.!?…]+[\"'”’»)\]]*\s+|[。！？]+[」』”’）]*\s*")
_ABBREVIATION = re.compile(
    r"(?<!['’])\b(?:[A-Za-z]|Mr|Mrs|Ms|Dr|Prof|St|Sr|Jr|vs|etc|cf|al|Inc|Ltd|Co|Corp|Vol|approx|(?:[A-Za-z]\.)+[A-Za-z])\.\s*$"
)
_BEFORE_NUMBER = re.compile(r"\b(?:No|Fig|Eq|Sec|pp?|ca|Jan|Feb|Mar|Apr|Jun|Jul|Aug|Sept?|Oct|Nov|Dec)\.\s*$")
_LIST_NUMBER = re.compile(r"(?:^|\n)[ \t]*\d{1,3}\.\s*$")
_FENCE = re.compile(r"^[ ]{0,3}(`{3,}|~{3,})", re.MULTILINE)
_HEADING = re.compile(r"^[ ]{0,3}#{1,6}(?:[ \t]|$)", re.MULTILINE)


def sentences(text: str) -> list[int]:
    """Behind the ends of sentences and lines, though not behind abbreviations and initials."""
    ends = set(paragraphs(text))
    for match in _SENTENCE_END.finditer(text):
        before, after = text[max(0, match.start() - 16) : match.end()], text[match.end() : match.end() + 1]
        goes_on = after.islower() and not match[0].startswith((". ", ".\n"))  # ``"Why?" he asked``
        numbered = after.isdigit() and _BEFORE_NUMBER.search(before)
        if not (goes_on or numbered or _ABBREVIATION.search(before) or _LIST_NUMBER.search(before)):
            ends.add(match.end())
    return sorted(ends)


def headings(text: str) -> list[int]:
    """In front of Markdown headings, outside of code fences."""
    return _outside([match.start() for match in _HEADING.finditer(text)], _fences(text))


def markdown_blocks(text: str) -> list[int]:
    """Behind blank lines outside of code fences, and around fenced blocks."""
    fenced = _fences(text)
    # a heading stays with what follows it
    apart = [o for o in paragraphs(text) if not _HEADING.match(text[max(0, o - 256) : o].rstrip().rpartition("\n")[2])]
    around = {offset for block in fenced for offset in block if 0 < offset < len(text)}
    return sorted({*_outside(apart, fenced), *around})


def _fences(text: str) -> list[tuple[int, int]]:
    """Half-open character ranges of fenced code blocks; one that is never closed reaches to the end."""
    found: list[tuple[int, int]] = []
    opened: re.Match[str] | None = None
    for match in _FENCE.finditer(text):
        if opened is None:
            opened = match
        elif match[1][0] == opened[1][0] and len(match[1]) >= len(opened[1]):
            end = text.find("\n", match.end())
            found.append((opened.start(), len(text) if end < 0 else end + 1))
            opened = None
    return found if opened is None else [*found, (opened.start(), len(text))]


def _outside(offsets: Sequence[int], ranges: Sequence[tuple[int, int]]) -> list[int]:
    """Those in none of the `ranges`, which follow one another; their borders are outside."""
    ends = [0, *(last for _, last in ranges)]
    return [offset for offset in offsets if offset >= ends[bisect_left(ranges, offset, key=itemgetter(0))]]


# ---- splitters ----


@splitters.register("paragraphs")
class Paragraphs(Splitter):
    """Paragraphs packed up to the budget; longer ones are cut at sentences, then at words."""

    levels = (paragraphs, sentences, spaces)


@splitters.register("sentences")
class Sentences(Splitter):
    """Sentences packed up to the budget."""

    levels = (sentences, spaces)


@splitters.register("markdown")
class Markdown(Splitter):
    """Sections, then blocks, lines and sentences; a fenced code block stays whole where it fits the budget."""

    levels = (headings, markdown_blocks, lines, sentences, spaces)


@splitters.register("code")
class Code(Splitter):
    """Top-level definitions, then blank lines, then lines."""

    levels = (top_level_blocks, paragraphs, lines, spaces)


@splitters.register("fixed")
class Fixed(Splitter):
    """Segments of `max_tokens` tokens, wherever that cuts; the last one is what is left."""


@splitters.register("whole")
class Whole(Splitter):
    """Every document is one segment."""

    cuts = False

    def __init__(self) -> None:
        super().__init__()

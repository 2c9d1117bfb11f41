"""Needle in a haystack: one fact at a chosen depth of unrelated text, and the question about it.

Two sources. Generated text is a row of tokens in which the needle is put at an exact token and which is then cut into
chunks, each a document (EPIC sec. 5.2: 512 tokens). A dataset keeps its documents whole: the one that answers an
example's question stands among documents of other examples.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from comb.documents.document import Document, Example, PromptBuilder
from comb.evaluation.metrics import normalize_answer
from comb.locks import lock_of

CITIES = ("Aarhus", "Bergen", "Cadiz", "Dresden", "Esbjerg", "Fukuoka", "Galway", "Haifa", "Izmir", "Jakarta")
_SUBJECTS = ("The harbour", "A quiet street", "The old library", "The weather station", "A small bakery", "The river")
_VERBS = ("was repaired", "was painted", "was photographed", "was mentioned in a letter", "was visited by students")
_TIMES = ("in the spring", "after the long winter", "on a Tuesday", "before the festival", "many years ago", "at dawn")
_ENDINGS = ("and nobody thought much of it", "which pleased the neighbours", "as the newspaper reported",
            "although it rained all day", "and the work went on until evening")  # fmt: skip
# no content words
_COMMON = frozenset({"and", "are", "did", "does", "for", "from", "has", "have", "her", "his", "how", "its", "the",
                     "was", "what", "where", "which", "who", "with"})  # fmt: skip


class Case(NamedTuple):
    """One haystack with its needle: the question, how many tokens there are, and at which of them the needle begins."""

    documents: tuple[Document, ...]
    question: str
    answer: str
    tokens: int
    needle_token: int
    needle_tokens: int


def place(tokens: int, depth: float, needle: int, chunk: int) -> int:
    """The token at which a needle begins, with `tokens` in all, at `depth` percent, in chunks of `chunk`.

    A needle that would lie across the end of a chunk moves in front of it: it is retrieval that is measured, not what
    cutting a sentence does.

    Raises:
        ValueError: if the needle is longer than a chunk or than all tokens.
    """
    if needle > min(tokens, chunk):
        raise ValueError(f"a needle of {needle} tokens needs a context and chunks of at least as many")
    start = round((tokens - needle) * depth / 100)
    end_of_chunk = (start // chunk + 1) * chunk
    return start if end_of_chunk >= tokens else min(start, end_of_chunk - needle)


class TextHaystack:
    """Chunks of generated sentences without digits."""

    def __init__(self, tokenizer: Any, chunk_tokens: int, seed: int = 0) -> None:
        self.tokenizer, self.chunk_tokens, self.seed = tokenizer, chunk_tokens, seed
        self._sentences = random.Random(seed)
        self._filler: list[int] = []

    def case(self, tokens: int, depth: float, number: int) -> Case:
        rng = random.Random(f"{self.seed}:{number}")
        city, code = CITIES[rng.randrange(len(CITIES))], str(rng.randrange(1000, 10000))
        needle = self._ids(f" The secret code of the {city} office is {code}.")
        start = place(tokens, depth, len(needle), self.chunk_tokens)
        while len(self._filler) < tokens - len(needle):
            self._filler += self._ids(sentence(self._sentences))
        ids = [*self._filler[:start], *needle, *self._filler[start : tokens - len(needle)]]
        cuts = range(0, len(ids), self.chunk_tokens)
        documents = tuple(Document(token_ids=tuple(ids[cut : cut + self.chunk_tokens])) for cut in cuts)
        question = f"What is the secret code of the {city} office? Answer with the code alone."
        return Case(documents, question, code, tokens, start, len(needle))

    def _ids(self, text: str) -> list[int]:
        with lock_of(self.tokenizer):
            return list(self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))


def sentence(rng: random.Random) -> str:
    """A sentence of plain English behind a space, without digits."""
    # so that none looks like a needle
    return f" {rng.choice(_SUBJECTS)} {rng.choice(_VERBS)} {rng.choice(_TIMES)}, {rng.choice(_ENDINGS)}."


class ExampleHaystack:
    """Whole documents of a dataset.

    The needle is the one document of an example that holds every word of question and answer which any of its
    documents holds; examples without one (two documents are needed, or none answers) are left out. Documents of
    other groups that hold a word of the question which the needle holds too are no filler for it.

    Raises:
        ValueError: if no example has such a document.
    """

    def __init__(self, examples: Sequence[Example], builder: PromptBuilder, template: str = "{query}") -> None:
        self.builder, self.template, self.examples = builder, template, examples
        found = ((example, supporting(example)) for example in examples)
        self.needles = [(example, document) for example, document in found if document is not None]
        if not self.needles:
            raise ValueError("none of the examples has one document that answers it alone: use text as the haystack")

    def case(self, tokens: int, depth: float, number: int) -> Case:
        example, needle = self.needles[number * 7919 % len(self.needles)]
        needle_tokens = len(self.builder.segment(needle))
        room = tokens - needle_tokens
        target, before, after, in_front, used = room * depth / 100, [], [], 0, 0
        for document in self._fillers(example, needle):
            size = len(self.builder.segment(document))
            if used + size > room:
                break
            used += size
            # in front as long as that brings the needle nearer to where it shall be
            if abs(in_front + size - target) <= abs(in_front - target):
                in_front += size
                before.append(document)
            else:
                after.append(document)
        else:
            raise ValueError(
                f"the dataset's documents give a haystack of {used + needle_tokens} tokens, not {tokens}: read more "
                "of it (--limit), or use text"
            )
        if not used:
            raise ValueError(f"{tokens} tokens have no room for a document beside the needle ({needle_tokens} tokens)")
        question = self.template.replace("{query}", example.query)
        documents = (*before, needle, *after)
        return Case(documents, question, example.answer, used + needle_tokens, in_front, needle_tokens)

    def _fillers(self, example: Example, needle: Document) -> Iterator[Document]:
        asked = _words(example.query) & _words(needle.text or "")
        seen = {needle}
        start = self.examples.index(example)
        for other in (*self.examples[start:], *self.examples[:start]):
            if other is example or (other.group is not None and other.group == example.group):
                continue
            for document in other.documents:
                if document not in seen and not asked & _words(document.text or ""):
                    seen.add(document)
                    yield document


Haystack = TextHaystack | ExampleHaystack
"""Makes cases: the `number`-th with so many tokens and the needle at `depth` percent; ValueError if it can't."""


def supporting(example: Example) -> Document | None:
    """The one document with every content word of question and answer that any document has; None without one."""
    words = [_words(document.text or "") for document in example.documents]
    wanted = _words(f"{example.query} {example.answer}") & set().union(*words)
    holding = [document for document, own in zip(example.documents, words, strict=True) if wanted <= own]
    return holding[0] if wanted and len(holding) == 1 else None


def _words(text: str) -> set[str]:
    """Content words in normal form, without an apostrophe's s."""
    plain = re.sub(r"['’]s\b", "", text)
    return {word for word in normalize_answer(plain).split() if len(word) > 2 and word not in _COMMON}

"""What is asked: documents from a pool in shuffled order, a query behind them, and when (seeded, the same for both)."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from comb.documents.document import Document
from comb_serving.bench.options import ServeBenchOptions

_SUBJECTS = ("The harbour", "A quiet street", "The old library", "The weather station", "A small bakery", "The river")
_VERBS = ("was repaired", "was painted", "was photographed", "was mentioned in a letter", "was visited by students")
_TIMES = ("in the spring", "after the long winter", "on a Tuesday", "before the festival", "many years ago", "at dawn")
_ENDINGS = ("and nobody thought much of it", "which pleased the neighbours", "as the newspaper reported",
            "although it rained all day", "and the work went on until evening")  # fmt: skip


@dataclass(frozen=True)
class Ask:
    """One request; number: of it in its phase. The answer's report must name its documents by their ids."""

    number: int
    documents: tuple[Document, ...]
    query: str

    def body(self, *, linked: bool) -> dict[str, Any]:
        """What of a request's body depends on it: documents in a field of their own, or in the message."""
        texts = [str(document.text) for document in self.documents]
        given = [{"id": d.id, "text": text} for d, text in zip(self.documents, texts, strict=True)]
        content = self.query if linked else "\n".join([*texts, self.query])
        extra = {"ignore_eos": True, **({"documents": given} if linked else {})}
        return {"messages": [{"role": "user", "content": content}], "extra_body": extra}


@dataclass
class Workload:
    """Requests of one seed. Each phase draws by its own name, so that phases don't depend on each other.

    Args:
        count: tokens of a text.
    """

    options: ServeBenchOptions
    count: Callable[[str], int]
    pool: tuple[Document, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.pool = tuple(self._document(f"d{number}") for number in range(self.options.pool))

    def cold(self, requests: int) -> list[Ask]:
        """Every document for the first time: new ones first, the whole pool last, so that it is there afterwards.

        More requests than asked for where the pool needs them.
        """
        size, rng = self.options.documents, self._random("cold")
        needed = max(requests, -(-len(self.pool) // size)) * size
        new = [self._document(f"cold{number}") for number in range(needed - len(self.pool))]
        documents = [*new, *rng.sample(self.pool, len(self.pool))]
        return [self._ask("cold", n, documents[n * size : (n + 1) * size]) for n in range(needed // size)]

    def drawn(self, requests: int, phase: str, *, new: int = 0) -> Iterator[Ask]:
        """Documents of the pool in any order, `new` of each request's in no other."""
        rng, size = self._random(phase), self.options.documents
        for number in range(requests):
            documents = [self._document(f"{phase}{number}.{each}") for each in range(new)]
            documents += rng.sample(self.pool, size - new)
            yield self._ask(phase, number, rng.sample(documents, size))

    def together(self, clients: int, repeats: int) -> list[list[Ask]]:
        """Per repeat: `clients` requests about the same documents, each in an order of its own."""
        rng = self._random("together")
        draws = [rng.sample(self.pool, self.options.documents) for _ in range(repeats)]
        return [
            [self._ask("together", repeat * clients + n, rng.sample(drawn, len(drawn))) for n in range(clients)]
            for repeat, drawn in enumerate(draws)
        ]

    def arrivals(self, rate: float, seconds: float) -> list[float]:
        """Moments of a Poisson process in ``[0, seconds)``, given that there are ``rate * seconds`` of them.

        Their number isn't left to chance, so that a short run offers the rate that it says.
        """
        rng = self._random(f"arrivals {rate:g}")
        return sorted(rng.uniform(0, seconds) for _ in range(max(1, round(rate * seconds))))

    def _document(self, name: str) -> Document:
        rng = self._random(f"document {name}")
        return Document(sentences(f"Report {name}.", rng.randint(*self.options.lengths), self.count, rng), id=name)

    def _ask(self, phase: str, number: int, documents: Sequence[Document]) -> Ask:
        name = f"{phase} {number}"
        start, rng = f"Question {name}:", self._random(f"query {name}")
        query = sentences(start, self.options.query_tokens, self.count, rng)
        return Ask(number, tuple(documents), query)

    def _random(self, name: str) -> random.Random:
        return random.Random(f"{self.options.seed}:{name}")


def sentences(start: str, tokens: int, count: Callable[[str], int], rng: random.Random) -> str:
    """Sentences behind `start`, as many as `tokens` allow."""
    text, used = start, count(start)
    while True:
        more = f" {rng.choice(_SUBJECTS)} {rng.choice(_VERBS)} {rng.choice(_TIMES)}, {rng.choice(_ENDINGS)}."
        used += count(more)
        if used > tokens:
            return text
        text += more

"""What is asked: documents from a pool in shuffled order, a query behind them, and when (seeded, the same for both)."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from comb.bench.haystack import sentence

DRAWS = ("uniform", "zipf")


@dataclass(frozen=True)
class PooledDocument:
    """A text with the id under which the answer's report must name it."""

    id: str
    text: str


@dataclass(frozen=True)
class Ask:
    """One request. number: of it in its phase."""

    number: int
    documents: tuple[PooledDocument, ...]
    query: str


@dataclass(frozen=True)
class WorkloadShape:
    """How requests look.

    Args:
        pool: documents that come back. per_request: of them in each request.
        least_tokens, most_tokens: of a document, uniform; reached sentence by sentence, from below.
        query_tokens: about so many. draw: how often documents come back: all alike, or zipf (1 / rank).
    """

    pool: int = 50
    per_request: int = 8
    least_tokens: int = 256
    most_tokens: int = 512
    query_tokens: int = 32
    draw: str = "uniform"

    def __post_init__(self) -> None:
        if not 1 <= self.per_request <= self.pool:
            raise ValueError(f"a request takes 1 to {self.pool} documents, the pool, not {self.per_request}")
        if not 1 <= self.least_tokens <= self.most_tokens or self.query_tokens < 1:
            raise ValueError(
                f"documents of {self.least_tokens} to {self.most_tokens} tokens and queries of {self.query_tokens}: "
                "give at least one token to each, and the shorter length first"
            )
        if self.draw not in DRAWS:
            raise ValueError(f"--draw is one of {', '.join(DRAWS)}, not {self.draw!r}")

    @property
    def longest(self) -> int:
        """Tokens of the longest request, with room for what a chat template adds and a document's last line break."""
        return self.per_request * (self.most_tokens + 2) + 2 * self.query_tokens + 64


@dataclass
class Workload:
    """Requests of one seed. Each phase draws by its own name, so that phases don't depend on each other.

    Args:
        count: tokens of a text.
    """

    shape: WorkloadShape
    count: Callable[[str], int]
    seed: int = 0
    pool: tuple[PooledDocument, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.pool = tuple(self._document(f"d{number}") for number in range(self.shape.pool))

    def cold(self, requests: int) -> list[Ask]:
        """Every document for the first time: new ones first, the whole pool last, so that it is there afterwards.

        More requests than asked for where the pool needs them.
        """
        size, rng = self.shape.per_request, self._random("cold")
        needed = max(requests, -(-len(self.pool) // size)) * size
        new = [self._document(f"cold{number}") for number in range(needed - len(self.pool))]
        documents = [*new, *rng.sample(self.pool, len(self.pool))]
        return [
            Ask(number, tuple(documents[number * size : (number + 1) * size]), self._query("cold", number))
            for number in range(needed // size)
        ]

    def new(self, requests: int, phase: str) -> list[Ask]:
        """Documents that no other phase asks about."""
        size = self.shape.per_request
        return [
            Ask(
                number,
                tuple(self._document(f"{phase}{number}.{each}") for each in range(size)),
                self._query(phase, number),
            )
            for number in range(requests)
        ]

    def drawn(self, requests: int, phase: str) -> list[Ask]:
        """Documents of the pool in any order."""
        rng = self._random(phase)
        return [Ask(number, self._draw(rng), self._query(phase, number)) for number in range(requests)]

    def together(self, clients: int, repeats: int) -> list[list[Ask]]:
        """Per repeat: `clients` requests about the same documents, each in an order of its own."""
        rng = self._random("together")
        found = []
        for repeat in range(repeats):
            documents = self._draw(rng)
            found.append(
                [
                    Ask(
                        repeat * clients + client,
                        tuple(rng.sample(documents, len(documents))),
                        self._query(f"together {repeat}", client),
                    )
                    for client in range(clients)
                ]
            )
        return found

    def soak(self, requests: int) -> Iterator[Ask]:
        """Like `drawn`, but one document of each request is new, so that the pool must evict."""
        rng = self._random("soak")
        for number in range(requests):
            documents = [self._document(f"soak{number}"), *self._draw(rng)[1:]]
            yield Ask(number, tuple(rng.sample(documents, len(documents))), self._query("soak", number))

    def arrivals(self, rate: float, seconds: float) -> list[float]:
        """Moments of a Poisson process in ``[0, seconds)``, given that there are ``rate * seconds`` of them.

        Their number isn't left to chance, so that a short run offers the rate that it says.
        """
        rng = self._random(f"arrivals {rate:g}")
        return sorted(rng.uniform(0, seconds) for _ in range(max(1, round(rate * seconds))))

    def _draw(self, rng: random.Random) -> tuple[PooledDocument, ...]:
        # Efraimidis and Spirakis 2006: the largest of u^(1/w) are a weighted sample without replacement
        weights = (
            [1.0] * len(self.pool) if self.shape.draw == "uniform" else [1 / (n + 1) for n in range(len(self.pool))]
        )
        keys = {document: rng.random() ** (1 / weight) for document, weight in zip(self.pool, weights, strict=True)}
        chosen = sorted(self.pool, key=keys.__getitem__)[-self.shape.per_request :]
        return tuple(rng.sample(chosen, len(chosen)))

    def _document(self, name: str) -> PooledDocument:
        rng = self._random(f"document {name}")
        return PooledDocument(
            name, self._text(f"Report {name}.", rng.randint(self.shape.least_tokens, self.shape.most_tokens), rng)
        )

    def _query(self, phase: str, number: int) -> str:
        name = f"{phase} {number}"
        return self._text(f"Question {name}:", self.shape.query_tokens, self._random(f"query {name}"))

    def _text(self, start: str, tokens: int, rng: random.Random) -> str:
        """Sentences behind `start`, as many as `tokens` allow."""
        text, used = start, self.count(start)
        while True:
            more = sentence(rng)
            used += self.count(more)
            if used > tokens:
                return text
            text += more

    def _random(self, name: str) -> random.Random:
        return random.Random(f"{self.seed}:{name}")


def plain_messages(ask: Ask) -> list[dict[str, str]]:
    """Documents and query in one message, in the request's order: what a server without `documents` is sent."""
    return [{"role": "user", "content": "\n".join([*(d.text for d in ask.documents), ask.query])}]


def linked_messages(ask: Ask) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """The query as messages, and the body's `documents`."""
    return (
        [{"role": "user", "content": ask.query}],
        [{"id": document.id, "text": document.text} for document in ask.documents],
    )

"""The options of `comb bench serve`, and what they ask: documents from a pool in any order, a query behind, and when.

No torch here: `comb bench --help` reads the options.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer

from comb.bench.harness import OutOptions
from comb.bench.options import OfRandomModel, Seed
from comb.documents.document import Document

PLAIN, COMB = "plain vLLM", "comb"
MODEL = "bench"  # the name under which both serve
TRACES = ("agent", "chat", "rag")

_SUBJECTS = ("The harbour", "A quiet street", "The old library", "The weather station", "A small bakery", "The river")
_VERBS = ("was repaired", "was painted", "was photographed", "was mentioned in a letter", "was visited by students")
_TIMES = ("in the spring", "after the long winter", "on a Tuesday", "before the festival", "many years ago", "at dawn")
_ENDINGS = ("and nobody thought much of it", "which pleased the neighbours", "as the newspaper reported",
            "although it rained all day", "and the work went on until evening")  # fmt: skip


@dataclass(frozen=True)
class ServeBenchOptions(OutOptions):
    """What is asked and how often, of which model on which servers. Raises ValueError for what doesn't go together."""

    pool: Annotated[int, typer.Option(min=1, help="documents that come back")] = 50
    documents: Annotated[int, typer.Option(min=1, help="per request")] = 8
    document_tokens: Annotated[str, typer.Option(help="length of a document, from-to")] = "256-512"
    query_tokens: Annotated[int, typer.Option(min=1, help="about so many")] = 32
    max_tokens: Annotated[int, typer.Option(min=2, help="of every answer, exactly")] = 16
    cache_bytes: Annotated[str, typer.Option(help="that each server may keep of keys and values")] = "1GiB"
    pool_bytes: Annotated[str, typer.Option(help="of them, comb's pool of documents")] = "384MiB"
    vllm: Annotated[str, typer.Option(help="options for both servers; auto: what a CPU needs, where there is one")] = (
        "auto"
    )
    dtype: Annotated[str, typer.Option(help="of the model, or of the random one")] = "bfloat16"
    seed: Seed = 0
    checkpoint: Annotated[
        str | None, typer.Option(help="adapter, or a plain model; by default one with random weights")
    ] = None
    method: Annotated[str | None, typer.Option(help="that links a plain model's documents; by default primed")] = None
    backbone: Annotated[str | None, typer.Option(help="of the adapter, for plain vLLM; by default as it says")] = None
    requests: Annotated[int, typer.Option(min=1, help="per closed loop")] = 40
    cold: Annotated[int, typer.Option(min=1, help="requests over documents never seen before")] = 16
    clients: Annotated[str, typer.Option(help="of the closed loops")] = "1,4,16"
    rates: Annotated[str, typer.Option(help="of arrivals per second, or auto: around what each server does")] = "auto"
    seconds: Annotated[float, typer.Option(min=0.1, help="of arrivals per rate")] = 30.0
    together: Annotated[int, typer.Option(min=1, help="clients that ask about the same documents at once")] = 16
    trace: Annotated[str | None, typer.Option(help="clients that change nothing instead: agent, chat or rag")] = None
    prompt_tokens: Annotated[int, typer.Option(min=256, help="of a trace's prompts, about so many")] = 2048
    pause: Annotated[float, typer.Option(min=0, help="seconds before a trace's next request")] = 1.0
    soak: Annotated[int, typer.Option(min=0, help="further requests to comb, memory watched")] = 0
    one_at_a_time: Annotated[bool, typer.Option(help="for a machine that can't hold both servers")] = False
    timeout: Annotated[float, typer.Option(help="seconds after which a request has failed")] = 300.0
    layers: OfRandomModel = 32
    encoder_layers: OfRandomModel = 8
    hidden: OfRandomModel = 192
    heads: OfRandomModel = 3
    kv_heads: OfRandomModel = 1

    def __post_init__(self) -> None:
        if not 1 <= self.documents <= self.pool:
            raise ValueError(f"a request takes 1 to {self.pool} documents, the pool, not {self.documents}")
        least, most = self.lengths
        if self.trace is not None and self.checkpoint is None:
            raise ValueError("--trace is for a plain model whose segments are found: give --checkpoint")
        if self.trace not in (None, *TRACES):
            raise ValueError(f"--trace is one of {', '.join(TRACES)}, not {self.trace!r}")
        if not 1 <= least <= most:
            raise ValueError(f"--document-tokens {self.document_tokens}: at least one token, the shorter length first")

    @property
    def lengths(self) -> tuple[int, int]:
        """Tokens of the shortest and of the longest document."""
        least, _, most = self.document_tokens.partition("-")
        if not least.isdecimal() or not (most or least).isdecimal():
            raise ValueError(f"--document-tokens is a number, or from-to like 256-512, not {self.document_tokens!r}")
        return int(least), int(most or least)

    @property
    def positions(self) -> int:
        """Tokens of the longest request and answer, with room for a chat template and documents' last line breaks."""
        return self.documents * (self.lengths[1] + 2) + 2 * self.query_tokens + 64 + self.max_tokens


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
    """Requests of one seed. Each phase draws by its own name, so that phases don't depend on each other."""

    options: ServeBenchOptions
    count: Callable[[str], int]  # tokens of a text
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

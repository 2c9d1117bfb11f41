"""What the front and the manager have counted since the start; `comb_serving.api.metrics` shows it."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate

from comb_serving.encoding.protocol import MADE
from comb_serving.manager.leases import LeasedDocument
from comb_serving.pool.capability import LinkReport

STATES = ("hit", *MADE, "copied", "failed", "inlined")
BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


@dataclass
class Histogram:
    """How many observations, in seconds, were at most each of `BOUNDS`; the last place counts those above."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS) + 1))
    total: float = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS, seconds)] += 1
        self.total += seconds

    @property
    def buckets(self) -> list[tuple[str, int]]:
        """(upper bound, observations up to it), as Prometheus wants them."""
        return list(zip((*map(str, BOUNDS), "+Inf"), accumulate(list(self.counts)), strict=True))


@dataclass
class Counters:
    """By document and request.

    A document is counted for each client's request as hit (in the pool, or on its way there) or inlined, and once for
    each way into the pool, whoever wanted it there, as encoded or compiled, copied (from a lower tier) or failed.
    """

    documents: Counter[str] = field(default_factory=Counter)  # by state
    tokens: Counter[str] = field(default_factory=Counter)
    encode_seconds: Histogram = field(default_factory=Histogram)
    refused: int = 0  # requests
    prompt_tokens: Counter[tuple[str, str]] = field(default_factory=Counter)  # linked ones, by method and origin
    audits: Counter[tuple[str, str]] = field(default_factory=Counter)  # by method: "same" until answers have "parted"
    found: Counter[tuple[str, str]] = field(default_factory=Counter)  # segments nobody has marked, and their tokens

    def count_new(self, tokens: int) -> None:
        """One found segment of a prompt that isn't in the pool."""
        self.found["segments", "new"] += 1
        self.found["tokens", "new"] += tokens

    def count_found(self, spans: Iterable[tuple[int, int]], link: LinkReport) -> None:
        """The others of a prompt, by what the engine has said: the prefix cache goes first."""
        for start, tokens in spans:
            state = "linked" if link.linked_tokens and start + tokens > link.prefix_tokens else "cached"
            self.found["segments", state] += 1
            self.found["tokens", state] += tokens

    def count_hits(self, documents: Iterable[LeasedDocument]) -> None:
        """The documents of one request, each once, that were in the pool or on their way there."""
        for document in {document.key: document for document in documents}.values():
            if document.tier == "pool":
                self.count("hit", document.handle.tokens)

    def count(self, state: str, tokens: int) -> None:
        """One document of `tokens` tokens."""
        assert state in STATES
        self.documents[state] += 1
        self.tokens[state] += tokens

    def count_audit(self, method: str, same: int, tokens: int) -> None:
        """One request that was answered both linked and in full."""
        self.audits[method, "same"] += same
        self.audits[method, "parted"] += tokens - same

    def count_prompt(self, method: str, link: LinkReport) -> None:
        """One prompt with linked documents."""
        for name, tokens in link.said.items():
            self.prompt_tokens[method, name.removesuffix("_tokens")] += tokens

"""Poisson arrivals and one worker that serves them in order, on a virtual clock.

Arrivals are simulated, service is measured: a request starts when it has arrived and the one before it is done. So a
run lasts as long as its service alone, however long the simulated time is, and an overloaded queue is seen as such.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Arrival:
    """Which user sends a request, and when, in seconds from the start."""

    time: float
    user: int


@dataclass(frozen=True)
class Service:
    """What a request took once it was begun: seconds to the first token and to the last, documents and hits."""

    first_token_s: float
    total_s: float
    documents: int = 0
    hits: int = 0


@dataclass(frozen=True)
class Served:
    """One request on the virtual clock, in seconds."""

    arrival: Arrival
    start: float
    service: Service

    @property
    def end(self) -> float:
        """When its last token was there."""
        return self.start + self.service.total_s

    @property
    def ttft_s(self) -> float:
        """From arrival to the first token, waiting included."""
        return self.start - self.arrival.time + self.service.first_token_s


def poisson_arrivals(rate: float, seconds: float, users: int, seed: int = 0) -> list[Arrival]:
    """Arrivals of a Poisson process of `rate` requests per second in ``[0, seconds)``, each from a random user.

    That is the sum of one process of ``rate / users`` for every user. The same seed gives the same arrivals; at least
    one, so that there is something to measure.
    """
    generator = random.Random(f"{seed}:{rate}")
    arrivals: list[Arrival] = []
    now = generator.expovariate(rate)
    while now < seconds or not arrivals:
        arrivals.append(Arrival(now, generator.randrange(users)))
        now += generator.expovariate(rate)
    return arrivals


def serve_in_order(arrivals: Sequence[Arrival], serve: Callable[[int], Service]) -> list[Served]:
    """Serves one request after the other, first come first served; `serve` answers a user's request and measures it."""
    served: list[Served] = []
    free = 0.0
    for arrival in arrivals:
        served.append(Served(arrival, max(arrival.time, free), serve(arrival.user)))
        free = served[-1].end
    return served

"""Traces: prompts of pieces that come again, asked by clients that send plain messages.

Three are made here after what people report of their servers, each seeded. What a piece says is made up, the same text
for the same name.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from comb.documents.document import Document
from comb_serving.bench.workload import TRACES, sentences

LIKELIEST = 20  # tokens that are compared of a first token's distribution; vLLM gives no more by default
_REPEATED = 0.43  # of a retriever's passages were retrieved before, as field studies have it


@dataclass(frozen=True)
class Piece:
    """A text that may come again."""

    name: str  # what its text is made from
    tokens: int
    schema: bool = False  # written as a tool's JSON instead of as prose


@dataclass(frozen=True)
class TraceRequest:
    """One prompt: the system message's pieces, the conversation so far by turns, then passages and the question."""

    system: tuple[Piece, ...]
    history: tuple[Piece, ...]
    passages: tuple[Piece, ...]
    question: Piece

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """All of them, in the prompt's order."""
        return (*self.system, *self.history, *self.passages, self.question)


@dataclass(frozen=True)
class TraceAsk:
    """A trace's request to a server."""

    number: int
    messages: tuple[dict[str, str], ...]
    salt: str = ""  # of the server's prefix cache, so that two ways of sending a trace share nothing; "" for none
    documents: tuple[Document, ...] = ()  # that a report has to name: its segments have no names

    def body(self, *, linked: bool) -> dict[str, Any]:
        """What of a request's body depends on it."""
        extra = {"ignore_eos": True, **({"cache_salt": self.salt} if self.salt else {})}
        return {"messages": list(self.messages), "logprobs": True, "top_logprobs": LIKELIEST, "extra_body": extra}


@dataclass(frozen=True)
class Trace:
    """Requests in the order of their arrival."""

    name: str
    requests: tuple[TraceRequest, ...]
    count: Callable[[str], int]  # tokens of a text
    systems: bool = True  # whether chats have a system message; else its text begins the user's first
    _texts: dict[Piece, str] = field(default_factory=dict, compare=False)  # each is made once, for every way to send it

    def repeated(self) -> float:
        """The share of all tokens that are in pieces of earlier requests."""
        seen, again, tokens = set[str](), 0, 0
        for request in self.requests:
            again += sum(piece.tokens for piece in request.pieces if piece.name in seen)
            tokens += sum(piece.tokens for piece in request.pieces)
            seen.update(piece.name for piece in request.pieces)
        return again / tokens

    def reordered(self) -> Trace:
        """As a client would send it that orders pieces for exact hits, knowing which come how often: these first."""
        often = Counter(piece.name for request in self.requests for piece in request.pieces)

        def sort(pieces: Sequence[Piece]) -> tuple[Piece, ...]:
            return tuple(sorted(pieces, key=lambda piece: (-often[piece.name], piece.name)))

        sorted_ = (replace(r, system=sort(r.system), passages=sort(r.passages)) for r in self.requests)
        return replace(self, requests=tuple(sorted_))

    def asks(self, salt: str = "") -> list[TraceAsk]:
        """Its requests as they are sent."""
        return [TraceAsk(n, tuple(self.messages(each)), salt) for n, each in enumerate(self.requests)]

    def positions(self, answer: int) -> int:
        """Tokens of the longest prompt and answer, with room for a chat template."""
        longest = max(sum(self.count(m["content"]) + 16 for m in ask.messages) for ask in self.asks())
        return longest + 64 + answer

    def messages(self, request: TraceRequest) -> list[dict[str, str]]:
        """Of a chat, as clients without `documents` write them."""
        turns = [
            {"role": "assistant" if place % 2 else "user", "content": self._text(piece)}
            for place, piece in enumerate(request.history)
        ]
        passages = [f"Passage {n}: {self._text(piece)}" for n, piece in enumerate(request.passages, 1)]
        asked = "\n\n".join([*passages, self._text(request.question)])
        turns.append({"role": "user", "content": asked})
        system = "\n\n".join(map(self._text, request.system))
        if self.systems:
            return [{"role": "system", "content": system}, *turns]
        return [{**turns[0], "content": f"{system}\n\n{turns[0]['content']}"}, *turns[1:]]

    def _text(self, piece: Piece) -> str:
        """What a piece says, which its name alone decides."""
        if piece in self._texts:
            return self._texts[piece]
        rng = random.Random(piece.name)
        if piece.schema:
            described = {"name": piece.name, "description": "", "parameters": {"type": "object", "properties": {}}}
            room = piece.tokens - self.count(json.dumps({"type": "function", "function": described}))
            described["description"] = sentences("Use it when:", max(0, room), self.count, rng)
            text = json.dumps({"type": "function", "function": described})
        else:
            text = sentences(f"{piece.name.capitalize()}.", piece.tokens, self.count, rng)
        self._texts[piece] = text
        return text


def made(name: str, tokens: int, requests: int, seed: int, count: Callable[[str], int]) -> Trace:
    """One of `TRACES`, prompts of about so many tokens."""
    rng = random.Random(f"{seed}:{name}")
    return Trace(name, tuple(_MADE[name](rng, tokens, requests)), count)


def _agent(rng: random.Random, tokens: int, requests: int) -> Iterable[TraceRequest]:
    """A coding agent: a first line that is always another, then instructions, tools and skills; five turns a task."""
    tools = [Piece(f"tool_{n}", tokens // 20, schema=True) for n in range(10)]
    skills = [Piece(f"skill {n}", tokens // 20) for n in range(5)]
    instructions = Piece("instructions", tokens // 10)
    history: list[Piece] = []
    for number in range(requests):
        if number % 5 == 0:
            history = []
        system = (Piece(f"now {rng.random():.8f}, branch {number}", 16), instructions, *tools, *skills)
        question = Piece(f"task {number}", tokens // 40)
        yield TraceRequest(system, tuple(history), (), question)
        history += [question, Piece(f"answer {number}", tokens // 40)]


def _chat(rng: random.Random, tokens: int, requests: int) -> Iterable[TraceRequest]:
    """A chat page that puts what it retrieves into the system message: half is that of the turn before."""
    pool = [Piece(f"page {n}", tokens // 8) for n in range(20)]
    instructions, history = Piece("instructions", tokens // 16), list[Piece]()
    retrieved = rng.sample(pool, 6)
    for number in range(requests):
        if number % 4 == 0:
            history, retrieved = [], rng.sample(pool, 6)
        kept = rng.sample(retrieved, 3)
        retrieved = rng.sample([*kept, *rng.sample([piece for piece in pool if piece not in kept], 3)], 6)
        question = Piece(f"question {number}", tokens // 40)
        yield TraceRequest((instructions, *retrieved), tuple(history), (), question)
        history += [question, Piece(f"reply {number}", tokens // 40)]


def _rag(rng: random.Random, tokens: int, requests: int) -> Iterable[TraceRequest]:
    """Retrieval: eight passages in a retriever's order, of which 43% have come before, the more often the likelier."""
    instructions, numbers, drawn = Piece("instructions", tokens // 16), count(), list[Piece]()
    for number in range(requests):
        chosen: list[Piece] = []
        for _ in range(8):
            before = [piece for piece in drawn if piece not in chosen]
            again = before and rng.random() < _REPEATED
            chosen.append(rng.choice(before) if again else Piece(f"passage {next(numbers)}", tokens // 9))
        drawn += chosen
        yield TraceRequest((instructions,), (), tuple(chosen), Piece(f"question {number}", 24))


_MADE = dict(zip(TRACES, (_agent, _chat, _rag), strict=True))

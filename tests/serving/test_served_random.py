"""Five hundred random requests at once on a real server: each answer is the library's, over its own documents."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from served import CHAT, COMPLETIONS, Served

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

REQUESTS, AT_ONCE, TOKENS = 500, 16, 5
QUESTIONS = ["Where is Ada?", "Who took the red ball, and where did it go after that?", "What is in the kitchen?"]
PARTS = {
    "A": "Ada went to the garden.",
    "B": "Bob is in the kitchen. He has a blue cup, a green hat and the ball that Ada lost.",
    "C": "Then Ada took the red ball.",
    "D": "Nobody was in the hall, and nothing was heard of Carl until the evening of the next day.",
}
SETS = ("", "A", "AB", "BA", "C", "DCB", "D", "ABCD")
WORDS = "salt"  # a tenant's own salt narrows its prefix cache and changes no answer


@dataclass(frozen=True)
class Case:
    """One request: what it asks, and how."""

    question: int
    names: str
    chat: bool
    encoder: bool
    stream: bool
    key: str
    leaves: float | None  # seconds after which the client goes away
    salted: bool

    @property
    def asked(self) -> tuple[Any, ...]:
        """What the answer depends on."""
        return self.question, self.names, self.chat, self.encoder or not self.names

    @property
    def body(self) -> dict[str, Any]:
        text = QUESTIONS[self.question]
        body: dict[str, Any] = {
            "model": "nano", "temperature": 0, "max_tokens": TOKENS, "ignore_eos": True, "stream": self.stream,
            "return_token_ids": True, **({"messages": _messages(text), "logprobs": True} if self.chat else
                                         {"prompt": text, "logprobs": 0}),
        }  # fmt: skip
        if self.names:
            body["documents"] = [PARTS[name] for name in self.names]
        if not self.encoder:
            body["comb"] = {"encoder": False}
        return {**body, "cache_salt": WORDS} if self.salted else body


def _messages(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def draw_cases(draw: random.Random) -> list[Case]:
    cases = []
    for _ in range(REQUESTS):
        leaves = draw.uniform(0, 0.15) if draw.random() < 0.1 else None
        flags = [draw.random() < 0.5 for _ in range(4)]
        names = draw.choice(SETS)
        chat, encoder, stream, salted = flags[0], flags[1] or draw.random() < 0.4, flags[2], flags[3]
        key = draw.choice(("alice", "bob"))
        cases.append(Case(draw.randrange(len(QUESTIONS)), names, chat, encoder, stream, key, leaves, salted))
    return cases


def answer(case: Case, text: str) -> tuple[list[int], list[float]]:
    """Token ids and their log-probabilities."""
    if case.stream:
        events = [event.removeprefix("data: ") for event in text.split("\n\n") if event]
        assert events.pop() == "[DONE]"
        payloads = [json.loads(event) for event in events]
    else:
        payloads = [json.loads(text)]
    reports = [payload["comb"] for payload in payloads if "comb" in payload]
    assert [report["encoder"] for report in reports] == ([case.encoder] if case.names else [])
    ids: list[int] = []
    logs: list[float] = []
    for choice in (choice for payload in payloads for choice in payload["choices"]):
        ids += choice.get("token_ids") or []
        given = choice.get("logprobs") or {}
        logs += [one["logprob"] for one in given.get("content") or ()] if case.chat else given.get("token_logprobs", [])
    return ids, logs


async def ask(client: Any, case: Case) -> tuple[list[int], list[float]] | None:
    """The answer; None for a client that has left."""
    path = CHAT if case.chat else COMPLETIONS

    async def whole() -> str:
        async with client.stream(
            "POST", path, json=case.body, headers={"authorization": f"Bearer {case.key}"}
        ) as response:
            text = (await response.aread()).decode()
            assert response.status_code == 200, text
            return text

    try:
        return answer(case, await asyncio.wait_for(whole(), case.leaves or 120))
    except TimeoutError:
        assert case.leaves is not None, "a request hangs"
        return None


async def ask_all(url: str, cases: list[Case]) -> list[Any]:
    import httpx

    room = asyncio.Semaphore(AT_ONCE)
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:

        async def one(case: Case) -> Any:
            async with room:
                return await ask(client, case)

        return await asyncio.gather(*map(one, cases))


class Library:
    """The library's own answers, each computed once."""

    def __init__(self, adapter: Path) -> None:
        from transformers import AutoTokenizer

        from comb import CombForCausalLM, Document, PromptBuilder

        self.model: Any = CombForCausalLM.from_pretrained(adapter, dtype=torch.float32)
        self.builder = PromptBuilder(AutoTokenizer.from_pretrained(adapter))
        self.segments = {name: list(self.builder.segment(Document(text))) for name, text in PARTS.items()}
        self.known: dict[tuple[Any, ...], Any] = {}

    def answer(self, asked: tuple[Any, ...]) -> Any:
        from engines import reference

        if asked not in self.known:
            question, names, chat, encoder = asked
            documents = [self.segments[name] for name in names]
            text = QUESTIONS[question]
            build = self.builder.build(_messages(text), documents) if chat else self.builder.complete(text, documents)
            prompt = list(build.query if encoder else build.flat)
            self.known[asked] = reference(self.model, prompt, documents if encoder else [], TOKENS)[:2]
        return self.known[asked]


def test_never_another_requests_document(served: Served, nano_adapter: Path) -> None:
    cases = draw_cases(random.Random(23))
    library = Library(nano_adapter)
    answers = asyncio.run(ask_all(served.url, cases))
    seen = Counter(found is not None for found in answers)
    assert seen[True] > 400
    assert seen[False] > 5
    for case, found in zip(cases, answers, strict=True):
        if found is not None:
            ids, logs = library.answer(case.asked)
            assert found[0] == ids, case
            assert found[1] == pytest.approx(logs, abs=1e-4), case
    # the control: over other documents, in another order in the prompt, or asked otherwise, the answer is another one
    for question, _, chat, _ in list(library.known):
        linked = [library.answer((question, names, chat, True))[1] for names in ("", "A", "AB", "C", "D", "DCB")]
        inlined = [library.answer((question, names, chat, False))[1] for names in ("A", "AB", "BA")]
        for first, second in _pairs([*linked, *inlined]):
            assert max(abs(a - b) for a, b in zip(first, second, strict=True)) > 1e-3
    served.wait_until_idle()


def _pairs(items: list[Any]) -> list[tuple[Any, Any]]:
    return [(first, second) for place, first in enumerate(items) for second in items[:place]]

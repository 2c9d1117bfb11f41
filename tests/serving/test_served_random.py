"""Five hundred random requests at once on a real server: each answer is the library's, over its own documents."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.library import Library
from tests.helpers.served import CHAT, COMPLETIONS, Served

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
        asked = {"messages": [{"role": "user", "content": text}], "logprobs": True}
        body: dict[str, Any] = {
            **(asked if self.chat else {"prompt": text, "logprobs": 0}), "model": "nano", "temperature": 0,
            "max_tokens": TOKENS, "ignore_eos": True, "stream": self.stream, "return_token_ids": True,
        }  # fmt: skip
        if self.names:
            body["documents"] = [PARTS[name] for name in self.names]
        if not self.encoder:
            body["comb"] = {"encoder": False}
        return {**body, "cache_salt": WORDS} if self.salted else body


def draw_cases(draw: random.Random) -> list[Case]:
    cases = []
    for _ in range(REQUESTS):
        leaves = 0.15 * draw.random() ** 3 if draw.random() < 0.1 else None  # early enough on any machine
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


def test_never_another_requests_document(served: Served, nano_adapter: Path) -> None:
    cases = draw_cases(random.Random(23))
    library = Library(nano_adapter, TOKENS)

    def expected(question: int, names: str, chat: bool, encoder: bool) -> tuple[list[int], list[float]]:
        return library.answer(QUESTIONS[question], [PARTS[name] for name in names], chat=chat, encoder=encoder)

    answers = asyncio.run(ask_all(served.url, cases))
    seen = Counter(found is not None for found in answers)
    assert seen[True] > 400
    assert seen[False] > 5
    for case, found in zip(cases, answers, strict=True):
        if found is not None:
            ids, logs = expected(*case.asked)
            assert found[0] == ids, case
            assert found[1] == pytest.approx(logs, abs=1e-4), case
    # the control: over other documents, in another order in the prompt, or asked otherwise, the answer is another one
    for question, chat in itertools.product(range(len(QUESTIONS)), (True, False)):
        linked = [expected(question, names, chat, True)[1] for names in ("", "A", "AB", "C", "D", "DCB")]
        inlined = [expected(question, names, chat, False)[1] for names in ("A", "AB", "BA")]
        for first, second in itertools.combinations([*linked, *inlined], 2):
            assert max(abs(a - b) for a, b in zip(first, second, strict=True)) > 1e-3
    served.wait_until_idle()

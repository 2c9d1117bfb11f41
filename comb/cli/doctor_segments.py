"""What linking segments that a server finds costs in quality, by what they are written in: prose, code, JSON, logs.

Prompts are cut as the server cuts them (`comb.documents.found`), all segments of one kind are linked and all else is
computed, and KL is taken at the tokens that full recompute answers with.
"""

from __future__ import annotations

import inspect
import json
import logging
import os
import random
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from statistics import fmean
from typing import Any

from tqdm import tqdm

from comb.documents.document import PromptBuilder
from comb.documents.found import KINDS, SegmentFinder, kind_of, with_segments
from comb.files import read_text

logger = logging.getLogger(__name__)

ANSWER = 24  # tokens of an answer at most
LEAST = 64  # of a segment, as of the server
PIECES = 4  # texts of a made prompt
CHAT = "chat"  # prose in the turns of a conversation: one more kind of prompt, not of segment

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class KindVerdict:
    """What linking one kind of segment with one method costs."""

    method: str
    kind: str
    prompts: int
    kl: float  # KL(full || linked) in nats per token, mean over prompts
    high: float  # of its 95% interval
    linked: float  # the share of the prompts' tokens that were found


def check_segments(
    model: Any, tokenizer: Any, specs: Sequence[str], prompts: Mapping[str, Sequence[Messages]]
) -> list[KindVerdict]:
    """Each method on each kind of segment in each group of prompts.

    Args:
        prompts: by name; of a name that is no kind (`CHAT`, a file of one's own) the segments of every kind are tried,
            as ``name/kind``.

    Raises:
        ValueError: where a method can't run on the model, or nothing is found in any prompt.
    """
    from comb.engine.engine import PICEngine
    from comb.evaluation.compare import kl_divergence
    from comb.evaluation.metrics import bootstrap

    builder, full = PromptBuilder(tokenizer), PICEngine(model, tokenizer, method="full")
    methods = {spec: PICEngine(model, tokenizer, method=spec).method for spec in specs}
    finders = {kind: SegmentFinder(tokenizer, least=LEAST, kinds=(kind,)) for kind in KINDS}
    settings = full.settings({"max_new_tokens": ANSWER})
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    room, long = full.method.max_prompt_tokens, 0
    for group, asked in prompts.items():
        for messages in tqdm(asked, group, unit="prompt", leave=False):
            ids = list(builder.build(messages).flat)
            if room is not None and len(ids) + ANSWER > room:
                long += 1
                continue
            state = full.method.link([], ids)
            answer, expected = state.generate_with_logits(**settings)
            for kind in KINDS if group not in KINDS else (group,):
                spans = finders[kind].find(ids)
                if not spans:
                    continue
                prompt = with_segments(ids, spans)
                share = sum(map(len, prompt.segments)) / len(ids)
                for spec, method in methods.items():
                    picaches = method.compile([list(segment) for segment in prompt.segments])
                    gaps = [list(gap) for gap in prompt.gaps]
                    linked = method.link(picaches, list(prompt.query), prefix_ids=list(prompt.prefix), gaps=gaps)
                    kl = float(kl_divergence(expected, linked.answer_logits(answer[: len(expected)])).mean())
                    name = kind if group in KINDS else f"{group}/{kind}"
                    found.setdefault((spec, name), []).append((kl, share))
    if long:
        logger.warning("%d prompts have no room in the model's %d positions", long, room)
    if not found:
        raise ValueError(f"no segment of {LEAST} tokens or more is found in these prompts")
    verdicts = []
    for (spec, kind), rows in found.items():
        kls, shares = zip(*rows, strict=True)
        verdicts.append(KindVerdict(spec, kind, len(rows), fmean(kls), bootstrap(kls)[1], fmean(shares)))
    return verdicts


def kinds_below(verdicts: Sequence[KindVerdict], method: str, threshold: float) -> list[str]:
    """The kinds whose KL is below a threshold with all of its interval, in every group of prompts that has them."""
    own = [verdict for verdict in verdicts if verdict.method == method]
    measured = {kind: [v for v in own if v.kind.rpartition("/")[2] == kind] for kind in KINDS}
    return [kind for kind, rows in measured.items() if rows and all(row.high < threshold for row in rows)]


def read_prompts(path: Path) -> list[Messages]:
    """A file of JSON lines: lists of messages, or bodies of requests with ``messages``. Raises ValueError."""
    found: list[Messages] = []
    for number, line in enumerate(read_text(path).split("\n"), 1):  # other line ends may stand in a string
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            messages = row["messages"] if isinstance(row, dict) else row
            if not isinstance(messages, list) or not all(isinstance(each, dict) for each in messages):
                raise ValueError("messages are a list of objects")
        except (KeyError, ValueError) as error:
            raise ValueError(f"{path}, line {number}: {type(error).__name__}: {error}") from error
        found.append(messages)
    return found


def made_prompts(count: int) -> dict[str, list[Messages]]:
    """Prompts of each kind, of texts that come with Python: its help topics, its source, schemas of its functions."""
    rng = random.Random(0)
    texts = {kind: _TEXTS[kind](rng) for kind in KINDS}
    made: dict[str, list[Messages]] = {}
    for kind in KINDS:
        made[kind] = []
        for number in range(count):
            passages = "\n\n".join(f"[{place + 1}]\n{next(texts[kind])}" for place in range(PIECES))
            made[kind].append([{"role": "user", "content": f"{passages}\n\n{_QUESTIONS[kind][number % 2]}"}])
    made[CHAT] = []
    for _ in range(count):
        turns = []
        for place in range(PIECES):
            turns.append({"role": "user", "content": f"Tell me something new, number {place + 1}."})
            turns.append({"role": "assistant", "content": next(texts["prose"])})
        turns.append({"role": "user", "content": "Which of your answers was the most useful for a beginner, and why?"})
        made[CHAT].append(turns)
    return made


# one about all of them, and one whose answer needs to know which text stands where
_QUESTIONS = {
    "prose": ("What are these texts about?", "Say in one sentence what the second text is about."),
    "code": ("How do these functions belong together?", "Say in one sentence what the second function does."),
    "json": ("Which of these tools would you call to work with text, and how?", "What does the second tool do?"),
    "logs": ("What went wrong in these logs, and when did it begin?", "How does the third log end?"),
}


def _prose(rng: random.Random) -> Iterator[str]:
    from pydoc_data.topics import topics

    paragraphs = [text.replace("\n", " ") for topic in topics.values() for text in topic.split("\n\n")]
    long = [text for text in paragraphs if 70 <= len(text.split()) <= 160 and kind_of(text) == "prose"]
    while True:
        yield from rng.sample(long, len(long))


def _functions() -> list[Callable[..., Any]]:
    import bisect
    import difflib
    import fractions
    import heapq
    import shutil
    import statistics

    modules = (bisect, difflib, fractions, heapq, json, os, random, shutil, statistics, textwrap)
    found = [f for m in modules for f in vars(m).values() if inspect.isfunction(f) and f.__module__ == m.__name__]
    return [function for function in found if function.__doc__]


def _code(rng: random.Random) -> Iterator[str]:
    sources = []
    for function in _functions():
        with suppress(OSError):  # some are made as they are imported
            sources.append(textwrap.dedent(inspect.getsource(function)))
    right = [text.strip() for text in sources if 12 <= text.count("\n") <= 40 and kind_of(text) == "code"]
    while True:
        yield from rng.sample(right, len(right))


def _schemas(rng: random.Random) -> Iterator[str]:
    schemas = []
    for function in _functions():
        parameters = inspect.signature(function).parameters.values()
        properties = {
            each.name: {"type": "string", "description": f"of {function.__name__}, {each.kind.description}"}
            for each in parameters
        }
        described = inspect.getdoc(function) or ""
        made = {"name": function.__name__, "description": described[:500],
                "parameters": {"type": "object", "properties": properties}}  # fmt: skip
        if len(described) > 150:
            schemas.append(json.dumps({"type": "function", "function": made}))
    while True:
        yield from rng.sample(schemas, len(schemas))


def _logs(rng: random.Random) -> Iterator[str]:
    now = datetime(2026, 3, 1)
    while True:
        lines = []
        for _ in range(8):
            now += timedelta(milliseconds=rng.randint(1, 90_000))
            level, what = rng.choice(["INFO", "INFO", "DEBUG", "WARNING", "ERROR"]), os.strerror(rng.randint(1, 30))
            said = f"{what}: worker {rng.randint(1, 16)}, request {rng.getrandbits(32):08x}, {rng.randint(1, 999)} ms"
            lines.append(f"{now.isoformat(' ', 'milliseconds')} {level} server.{rng.choice('abcd')}: {said}")
        yield "\n".join(lines)


_TEXTS: dict[str, Callable[[random.Random], Iterator[str]]] = {
    "prose": _prose, "code": _code, "json": _schemas, "logs": _logs
}  # fmt: skip

"""Methods against full recompute, question by question: their answers, and their distributions at its answer's tokens.

Full recompute answers a question greedily. Its answer is then forced through every method's state in one pass, which
gives KL and top-1 agreement at each of its tokens. Where the method's likeliest token is the answer's everywhere, its
own greedy answer is the same, and nothing has to be decoded; else it answers for itself. All methods get a question
before the next one comes, and share a store: a document is compiled once for all methods that compile alike, and
however early the run is broken off, all have answered the same questions.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from comb.backbones.identity import one_walk, weights_fingerprint
from comb.documents.document import DocumentLike, Example
from comb.engine.decoding import trim
from comb.engine.engine import PICEngine, default_store
from comb.engine.report import cache_bytes
from comb.evaluation.record import Journal
from comb.evaluation.setting import AnswerRules, Setting
from comb.evaluation.table import or_refused
from comb.methods.decode_state import DecodeState

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReferenceAnswer:
    """What full recompute answered."""

    token_ids: tuple[int, ...]
    logits: Tensor  # that each token was chosen from, [tokens, vocabulary]
    greedy: bool  # whether each token is the likeliest there (settings of the model may have changed logits)
    facts: Mapping[str, int]  # what it cost, as `linked` says it


def compare(
    setting: Setting,
    examples: Sequence[Example],
    specs: Sequence[str],
    journal: Journal,
    *,
    rules: AnswerRules,
    answers: int | None = None,
    title: str = "",
    progress: bool = True,
) -> dict[str, str]:
    """Adds a row per question and method to `journal`, but for those it has already.

    A row has ``method``, ``question``, ``kl`` in nats and ``top1`` (means over the ``tokens`` of full recompute's
    answer; none of the three where its prompt has no room), ``computed``, ``recomputed`` and ``document_tokens``,
    ``cache_bytes``, and, for the first `answers` questions, the method's ``text``.

    Args:
        specs: methods as `Setting.engine` takes them; "none" is the control without documents.
        answers: how many questions are answered, the others being for KL alone; None: all.

    Returns:
        Why methods can't run here, by name.
    """
    reference = setting.engine("full")
    settings, store = rules.settings(reference), default_store(setting.model)
    engines: dict[str, PICEngine] = {}
    refused: dict[str, str] = {}
    for spec in specs:
        with or_refused(refused, spec):
            engines[spec] = setting.engine(spec, store)
    names = {spec: made_by(engine) for spec, engine in engines.items()}
    # of a question that a method has twice the last row counts, as in `summarize`
    found = {(r["method"], r["question"]): (r["made_by"], "text" in r) for r in journal.rows if "computed" in r}
    limit = len(examples) if answers is None else answers
    room, warm, without = reference.method.max_prompt_tokens, False, 0
    for number, example in enumerate(tqdm(examples, title, unit="question", leave=False, disable=not progress)):
        question, answered = question_name(number, example), number < limit
        # a row without an answer is made again if an answer is wanted now
        enough = {spec: ((name, True), (name, answered)) for spec, name in names.items()}
        missing = [spec for spec in engines if found.get((spec, question)) not in enough[spec]]
        if not missing:
            continue
        with one_walk():
            expected = None
            if room is None or setting.prompt_tokens(example) + rules.max_new_tokens <= room:
                with linked(reference, *setting.request("full", example)) as (state, facts):
                    token_ids, logits = state.generate_with_logits(**settings)
                own = trim(token_ids, settings)
                expected = ReferenceAnswer(own, logits, logits.argmax(-1).tolist() == list(own), facts)
            without += expected is None
            if not warm:  # a prefix is kept for all methods, and the first one would count it
                warm = True
                for spec in missing:
                    with or_refused({}), linked(engines[spec], *setting.request(spec, example)):
                        pass
            for spec in missing:
                with or_refused(refused, spec):
                    row = _row(setting, spec, engines[spec], example, expected, settings, rules, answered)
                    journal.add({"method": spec, "made_by": names[spec], "question": question, **row})
                if spec in refused:
                    del engines[spec]
    if without:
        logger.warning("no KL of %d questions: full recompute has no room for their prompts", without)
    return refused


def measure_times(
    setting: Setting, examples: Sequence[Example], specs: Sequence[str], journal: Journal, questions: int
) -> None:
    """Adds rows of times to `journal`, but for those it has: one request at a time, method by method.

    A row has ``method``, ``question``, and seconds from the call to the first token, ``cold`` with nothing kept, and
    ``cached``, asked again.

    Args:
        questions: of how many of the examples, no two of which share a document, so that each is cold when first asked.
    """
    chosen, seen = dict[str, Example](), set[Any]()
    for number, example in enumerate(examples):
        if len(chosen) < questions and not seen & set(example.documents):
            seen |= set(example.documents)
            chosen[question_name(number, example)] = example
    if len(chosen) < questions:
        logger.info("times are taken of %d questions: no more of them have different documents", len(chosen))
    found = {(row["method"], row["question"]): row["made_by"] for row in journal.rows if "cold" in row}
    for spec in specs if chosen else ():
        engine = setting.engine(spec)
        name = made_by(engine)
        missing = [question for question in chosen if found.get((spec, question)) != name]
        for question in missing[:1]:  # warm-up: allocations, lazy initialisation
            setting.engine(spec).ask(*setting.request(spec, chosen[question]), max_new_tokens=1)
        for question in missing:
            engine.prefixes.clear()  # what stands in front of the documents is kept for all engines on a backbone
            request = setting.request(spec, chosen[question])
            cold, cached = (engine.ask(*request, max_new_tokens=1).report.ttft_s for _ in range(2))
            journal.add({"method": spec, "made_by": name, "question": question, "cold": cold, "cached": cached})


def question_name(number: int, example: Example) -> str:
    """What rows call the question at this place. One that was edited, or has other documents, has another name."""
    asked = sha256(repr((example.query, example.documents)).encode()).hexdigest()[:8]
    return f"{number}:{example.id or ''}:{asked}"


def made_by(engine: PICEngine) -> str:
    """A short name for the weights and parameters behind an engine's answers: other ones are asked anew."""
    weights, backbone = "", engine.method.backbone
    with suppress(ValueError):  # weights that accelerate has elsewhere have no bits to look at
        weights = weights_fingerprint(backbone, settings=False)
    template = [getattr(engine.tokenizer, "chat_template", None), engine.prompt_builder.chat_template_kwargs]
    named = [engine.method.fingerprint, weights, json.dumps(template, sort_keys=True, default=str)]
    return sha256("\x1f".join(named).encode()).hexdigest()[:12]


def _row(
    setting: Setting, spec: str, engine: PICEngine, example: Example, expected: ReferenceAnswer | None,
    settings: Mapping[str, Any], rules: AnswerRules, answered: bool,
) -> dict[str, Any]:  # fmt: skip
    if spec == "full" and expected is not None:
        row: dict[str, Any] = {"tokens": len(expected.logits), "kl": 0.0, "top1": 1.0, **expected.facts}
        return {**row, "text": rules.text(engine, expected.token_ids)} if answered else row
    with linked(engine, *setting.request(spec, example)) as (state, facts):
        row, token_ids = dict(facts), None
        if expected is not None:
            logits = state.answer_logits(expected.token_ids)
            same = logits.argmax(-1) == expected.logits.argmax(-1)
            kl = float(kl_divergence(expected.logits, logits).mean())
            row = {"tokens": len(logits), "kl": kl, "top1": float(same.float().mean()), **row}
            if expected.greedy and bool(same.all()):
                token_ids = expected.token_ids
        if answered:
            if token_ids is None:
                token_ids = trim(state.generate_with_logits(**settings)[0], settings)
            row["text"] = rules.text(engine, token_ids)
    return row


@contextmanager
def linked(
    engine: PICEngine, question: str, documents: Sequence[DocumentLike]
) -> Iterator[tuple[DecodeState, dict[str, int]]]:
    """The state for `question` over `documents`, and what it cost: the steps of `ask` up to decoding."""
    on = engine.with_encoder(None)
    segments, prompt = engine.prepare(question, engine.segments_of(documents), encoder=on)
    with (
        engine.acquired(segments, encoder=on) as (references, _),
        engine.linked([(segments, prompt)], references, encoder=on) as (state, _),
    ):
        uses = None if state.uses is None else state.uses[0]
        facts = {
            "computed": sum(state.computed),
            "recomputed": state.recomputed_tokens,
            "document_tokens": sum(len(segment.token_ids) for segment in segments),
            "cache_bytes": cache_bytes(segments, uses, references),
        }
        yield state, facts


def kl_divergence(reference: Tensor, logits: Tensor) -> Tensor:
    """KL(reference || other) in nats per row: [rows, vocabulary] twice -> [rows], in float64.

    Distributions are taken in float32, as sampling does; a token that the reference rules out counts nothing.
    """
    p, q = reference.float().log_softmax(-1), logits.float().log_softmax(-1)
    weights = p.double().exp()
    return torch.where(weights > 0, weights * (p.double() - q.double()), 0.0).sum(-1)

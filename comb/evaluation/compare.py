"""Methods against full recompute, question by question: their answers, and their distributions at its answer's tokens.

Full recompute answers a question greedily. Its answer is then forced through every method's state in one pass, which
gives KL and top-1 agreement at each of its tokens. Where the method's likeliest token is the answer's everywhere, its
own greedy answer is the same, and nothing has to be decoded; else it answers for itself. All methods get a question
before the next one comes, and share a store: a document is compiled once for all methods that compile alike, and
however early the run is broken off, all have answered the same questions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from comb.documents.document import DocumentLike, Example, stopping_tokens, until_stop
from comb.engine.construction import default_store
from comb.engine.decoding import trim
from comb.engine.engine import PICEngine
from comb.engine.report import cache_bytes
from comb.evaluation.journal import Journal
from comb.evaluation.run import Setting
from comb.methods.base import DecodeState

REFUSALS = (ValueError, NotImplementedError, MemoryError, torch.OutOfMemoryError)
"""What a method raises that can't run on a model, or has no room; other methods go on."""


@dataclass(frozen=True)
class AnswerRules:
    """How long an answer may be, and where it ends before the model's own end token.

    Args:
        stop: characters that end an answer, each of them; the answer is what stands in front. Empty: none.
    """

    max_new_tokens: int = 48
    stop: str = ""

    def settings(self, engine: PICEngine) -> dict[str, Any]:
        """For ``generate``, greedy: every token whose text holds a character of `stop` is an end token."""
        settings = engine.settings({"max_new_tokens": self.max_new_tokens})
        if self.stop:
            own = settings["eos_token_id"]
            own = [] if own is None else own if isinstance(own, list) else [own]
            settings["eos_token_id"] = [*own, *stopping_tokens(engine.tokenizer, self.stop)]
        return settings

    def text(self, engine: PICEngine, token_ids: Sequence[int]) -> str:
        """An answer's tokens as the text that is scored."""
        text = str(engine.tokenizer.decode(list(token_ids), skip_special_tokens=True))
        return until_stop(text, self.stop)


@dataclass(frozen=True)
class ReferenceAnswer:
    """What full recompute answered.

    Args:
        logits: that each token was chosen from. [tokens, vocabulary]
        greedy: whether each token is the likeliest there (settings of the model may have changed logits).
    """

    token_ids: tuple[int, ...]
    logits: Tensor
    greedy: bool


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
    answer), ``computed``, ``recomputed`` and ``document_tokens``, ``cache_bytes``, and, for the first `answers`
    questions, the method's ``text``.

    Args:
        specs: methods as `Setting.engine` takes them; "none" is the control without documents.
        answers: how many questions are answered, the others being for KL alone; None: all.

    Returns:
        Why methods can't run here, by name.
    """
    reference = setting.engine("full")
    settings, store = rules.settings(reference), default_store(setting.model)
    engines, refused = {}, {}
    for spec in specs:
        try:
            engines[spec] = setting.engine(spec, store)
        except REFUSALS as error:
            refused[spec] = " ".join(str(error).split())
    found = {
        (row["method"], row["made_by"], row["question"]): "text" in row for row in journal.rows if "computed" in row
    }
    limit = len(examples) if answers is None else answers
    warm = False
    for number, example in enumerate(tqdm(examples, title, unit="question", leave=False, disable=not progress)):
        question, answered = question_name(number, example), number < limit
        # a row without an answer is made again if an answer is wanted now
        missing = [s for s, e in engines.items() if not _has(found.get((s, made_by(e), question)), answered)]
        if not missing:
            continue
        with linked(reference, *setting.request("full", example)) as (state, _):
            token_ids, logits = state.generate_with_logits(**settings)
        own = trim(token_ids, settings, 1)
        expected = ReferenceAnswer(own, logits, logits.argmax(-1).tolist() == list(own))
        if not warm:  # a head is kept for all methods, and the first one would count it
            warm = True
            for spec in missing:
                with suppress(*REFUSALS), linked(engines[spec], *setting.request(spec, example)):
                    pass
        for spec in missing:
            try:
                row = _row(setting, spec, engines[spec], example, expected, settings, rules, answered)
            except REFUSALS as error:
                refused[spec] = " ".join(str(error).split()) or type(error).__name__
                del engines[spec]
            else:
                journal.add({"method": spec, "made_by": made_by(engines[spec]), "question": question, **row})
    return refused


def question_name(number: int, example: Example) -> str:
    """What rows call the question at this place."""
    return f"{number}:{example.id or sha256(example.query.encode()).hexdigest()[:8]}"


def made_by(engine: PICEngine) -> str:
    """A short name for the weights and parameters behind an engine's answers: another adapter is asked anew."""
    return sha256(engine.method.fingerprint.encode()).hexdigest()[:12]


def _has(text: bool | None, wanted: bool) -> bool:
    return text is not None and (text or not wanted)


def _row(
    setting: Setting, spec: str, engine: PICEngine, example: Example, expected: ReferenceAnswer,
    settings: Mapping[str, Any], rules: AnswerRules, answered: bool,
) -> dict[str, Any]:  # fmt: skip
    with linked(engine, *setting.request(spec, example)) as (state, facts):
        logits = expected.logits if spec == "full" else state.answer_logits(expected.token_ids)
        same = logits.argmax(-1) == expected.logits.argmax(-1)
        row: dict[str, Any] = {
            "tokens": len(logits),
            "kl": float(kl_divergence(expected.logits, logits).mean()),
            "top1": float(same.float().mean()),
            **facts,
        }
        if answered:
            decode = spec != "full" and not (expected.greedy and bool(same.all()))
            token_ids = state.generate_with_logits(**settings)[0] if decode else expected.token_ids
            row["text"] = rules.text(engine, trim(list(token_ids), settings, 1))
    return row


@contextmanager
def linked(
    engine: PICEngine, question: str, documents: Sequence[DocumentLike]
) -> Iterator[tuple[DecodeState, dict[str, int]]]:
    """The state for `question` over `documents`, and what it cost: the steps of `ask` up to decoding."""
    on = engine.with_encoder(None)
    prepared = engine.prepare(question, engine.segments_of(documents), encoder=on)
    with engine.acquired(prepared.segments, encoder=on) as acquired:
        state = engine.method_of(on).link_batch([engine.link_request(prepared, acquired, encoder=on)])
        try:
            uses = None if state.uses is None else state.uses[0]
            yield (
                state,
                {
                    "computed": sum(state.computed),
                    "recomputed": state.recomputed_tokens,
                    "document_tokens": sum(len(segment.token_ids) for segment in prepared.segments),
                    "cache_bytes": cache_bytes(prepared.segments, uses, acquired.references),
                },
            )
        finally:
            state.release()


def kl_divergence(reference: Tensor, logits: Tensor) -> Tensor:
    """KL(reference || other) in nats per row: [rows, vocabulary] twice -> [rows], in float64.

    Distributions are taken in float32, as sampling does; a token that the reference rules out counts nothing.
    """
    p, q = reference.float().log_softmax(-1), logits.float().log_softmax(-1)
    weights = p.double().exp()
    return torch.where(weights > 0, weights * (p.double() - q.double()), 0.0).sum(-1)

"""Examples -> answers -> one `MethodResult` per method: quality over all examples, time to first token over a few.

Quality is measured in batches where a method has them. Times are measured one request at a time, after a warm-up, each
example first with an empty store (cold) and then again (cached).
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tqdm import tqdm

from comb.cache.store import PICacheStore
from comb.documents.document import Document, Example, PromptBuilder, until_stop
from comb.engine.engine import PICEngine
from comb.evaluation.metrics import agreement, score
from comb.kernels.mac.config import MacConfig

logger = logging.getLogger(__name__)

NO_DOCUMENTS = "none"
"""A control in place of a method: the backbone is asked without any document."""


@dataclass(frozen=True)
class Timing:
    """Seconds: the median of `n` measurements with the quartiles around it."""

    median: float
    low: float
    high: float
    n: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Timing | None:
        """None where nothing was measured."""
        return cls.over(seconds) if seconds else None

    @classmethod
    def over(cls, seconds: Sequence[float]) -> Timing:
        """Of at least one measurement."""
        if len(seconds) == 1:
            return cls(seconds[0], seconds[0], seconds[0], 1)
        low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
        return cls(median, low, high, len(seconds))


@dataclass(frozen=True)
class MethodResult:
    """What one method reached.

    Args:
        method: its name; "none" is the control without documents.
        n: questions answered.
        em, f1, rouge_l: means in 0..1.
        answer_tokens: mean length of an answer.
        ttft_cold_s: time to first token with nothing in the store.
        ttft_cached_s: the same request again.
        cache_bytes_per_document_token: size of what is kept; 0 for methods that keep nothing.
        computed_tokens: all tokens that passed through the backbone for a question, mean, but for compiling documents.
        recomputed_tokens: of these, documents' tokens.
        seconds: for all answers, times to first token apart.
        predictions: the answers, in the order of the examples.
        note: anything else a reader has to know.
        intervals: 95% bootstrap intervals of em, f1 and rouge_l over the questions.
        same, rouge_l_full: share of answers that are `full`'s, and ROUGE-L with those; None where it wasn't asked.
        kl, closed: nats per token from `full` at its answers, and 1 - KL over that of "none", of `kl_questions`; None
            where they weren't measured (`summary.with_divergence`).
    """

    method: str
    n: int
    em: float
    f1: float
    rouge_l: float
    answer_tokens: float
    ttft_cold_s: Timing | None
    ttft_cached_s: Timing | None
    cache_bytes_per_document_token: float
    computed_tokens: float
    recomputed_tokens: float
    seconds: float
    predictions: tuple[str, ...] = ()
    note: str = ""
    intervals: dict[str, tuple[float, float]] = field(default_factory=dict)
    same: float | None = None
    rouge_l_full: float | None = None
    kl: float | None = None
    closed: float | None = None
    kl_questions: int = 0

    def to_dict(self) -> dict[str, Any]:
        """The fields by name, for tables and JSON."""
        return dict(vars(self))


def evaluate(
    model: tuple[Any, Any],
    examples: Sequence[Example],
    methods: Sequence[str] = ("full", "comb"),
    *,
    max_new_tokens: int = 48,
    batch_size: int = 32,
    timing_examples: int = 8,
    builder: PromptBuilder | None = None,
    progress: bool = True,
) -> list[MethodResult]:
    """Compares methods on the same examples, greedily decoded.

    Args:
        model: a model and its tokenizer. Every method gets a fresh engine with an empty store.
        methods: names from ``comb.methods.names()`` (with parameters, as ``"legolink:16"``), or "none" for the
            control without documents.
        builder: how prompts are written, if not by the tokenizer's chat template alone.
        timing_examples: of how many examples, with no document in common, times are taken; 0 takes none.

    Raises:
        ValueError: if there is no example or no method, a method is unknown or doesn't fit the model, or no prompt has
            room. Single questions whose prompts are too long for one of the methods are left out for all of them.
    """
    setting, examples, note = prepared(model, examples, methods, max_new_tokens, builder)
    if note:
        logger.warning(note)
    results = []
    for method in methods:
        quality = _quality(setting, method, examples, max_new_tokens, batch_size, progress)
        cold, cached = first_token_times(setting, method, disjoint(examples, timing_examples))
        results.append(replace(quality, ttft_cold_s=Timing.of(cold), ttft_cached_s=Timing.of(cached)))
    results = _beside_full(results)
    return [replace(results[0], note=note), *results[1:]]


def rehearse(
    model: tuple[Any, Any],
    examples: Sequence[Example],
    methods: Sequence[str],
    *,
    max_new_tokens: int,
    builder: PromptBuilder | None = None,
) -> None:
    """Asks each method for one token, so that what `evaluate` would refuse is known before a long run.

    Raises:
        ValueError: as `evaluate` does.
    """
    setting, examples, _ = prepared(model, examples, methods, max_new_tokens, builder)
    for method in methods:
        setting.engine(method).ask(*setting.request(method, examples[0]), max_new_tokens=1)


def prepared(
    model: tuple[Any, Any],
    examples: Sequence[Example],
    methods: Sequence[str],
    max_new_tokens: int,
    builder: PromptBuilder | None,
) -> tuple[Setting, list[Example], str]:
    """The setting, the examples that have room, and what to say of the others. Raises ValueError as `evaluate`."""
    if not examples:
        raise ValueError("no examples to evaluate on")
    if not methods:
        raise ValueError("no methods to compare: name at least one, for example full")
    weights, tokenizer = model
    setting = Setting(weights, tokenizer, builder or PromptBuilder(tokenizer))
    return setting, *_with_room(setting, examples, methods, max_new_tokens)


def _beside_full(results: Sequence[MethodResult]) -> list[MethodResult]:
    """The same results, with how far their answers agree with those of `full`, where that is among them."""
    full = next((result for result in results if result.method == "full"), None)
    if full is None:
        return list(results)
    found = []
    for result in results:
        same, alike = agreement(result.predictions, full.predictions)
        found.append(replace(result, same=statistics.fmean(same), rouge_l_full=statistics.fmean(alike)))
    return found


def _with_room(
    setting: Setting, examples: Sequence[Example], methods: Sequence[str], max_new_tokens: int
) -> tuple[list[Example], str]:
    """The examples whose prompts and answers fit the backbone with every method, and what to say of the others."""
    rooms: dict[bool, int] = {}  # with documents in the prompt, and without
    for name in methods:
        # an unknown method fails here, before anything is computed
        method = setting.engine(name).method
        if method.max_prompt_tokens is not None:
            reads_documents = name != NO_DOCUMENTS and not method.uses_encoder
            room = method.max_prompt_tokens - max_new_tokens
            rooms[reads_documents] = min(rooms.get(reads_documents, room), room)
    kept = list(examples)
    for documents, room in rooms.items():
        if not (kept := setting.fitting(kept, room, documents=documents)):
            whose = "with documents" if documents else "without documents"
            advice = "ask with fewer or shorter documents, or compare comb and none" if documents else "ask for less"
            raise ValueError(
                f"no question fits: beside an answer of {max_new_tokens} tokens there is room for {max(room, 0)}, and "
                f"all prompts {whose} are longer; {advice}"
            )
    if len(kept) == len(examples):
        return kept, ""
    left_out, least = len(examples) - len(kept), min(rooms.values())
    return kept, f"left out for all methods: {left_out} of {len(examples)} questions, prompts of over {least} tokens"


@dataclass(frozen=True)
class Setting:
    """What all methods of one comparison share: model, tokenizer, and how examples become requests."""

    model: Any
    tokenizer: Any
    builder: PromptBuilder
    query_template: str = "{query}"
    splitter: str | None = None
    mac: MacConfig | None = None

    def engine(self, method: str, store: PICacheStore | None = None) -> PICEngine:
        """A fresh engine; ``naive@fixed:128`` is a method with a splitter of its own.

        Raises:
            ValueError: where the method is unknown or doesn't fit the model.
        """
        name, _, splitter = ("full" if method == NO_DOCUMENTS else method).partition("@")
        splitter = splitter or self.splitter or ""
        extra: dict[str, Any] = {"splitter": splitter} if splitter else {}
        extra |= {"prompt_builder": self.builder, "mac": self.mac}
        return PICEngine(self.model, self.tokenizer, method=name, store=store, **extra)

    def fitting(self, examples: Sequence[Example], most_tokens: int, *, documents: bool = True) -> list[Example]:
        """Those whose prompts, with or without their documents in them, are no longer."""

        def tokens(example: Example) -> int:
            segments = [self.builder.segment(document) for document in example.documents]
            prompt = self.builder.build(self.request("full", example)[0], segments)
            return len(prompt.flat if documents else prompt.query)

        return [example for example in examples if tokens(example) <= most_tokens]

    def request(self, method: str, example: Example) -> tuple[str, Sequence[Document]]:
        """Question and documents; no documents for the control "none"."""
        documents = () if method == NO_DOCUMENTS else example.documents
        return self.query_template.replace("{query}", example.query), documents


def _quality(
    setting: Setting, method: str, examples: Sequence[Example], max_new_tokens: int, batch_size: int, progress: bool
) -> MethodResult:
    """All answers, in batches; without times to first token."""
    engine, start, answers = setting.engine(method), time.perf_counter(), []
    with tqdm(total=len(examples), desc=method, unit="question", disable=not progress, leave=False) as bar:
        for first in range(0, len(examples), batch_size):
            requests = [setting.request(method, example) for example in examples[first : first + batch_size]]
            answers += engine.ask_batch(requests, max_new_tokens=max_new_tokens)
            bar.update(len(requests))
    seconds = time.perf_counter() - start
    predictions = tuple(until_stop(answer.text, setting.builder.stop) for answer in answers)
    scores = score(predictions, [example.references for example in examples])
    reports = [answer.report for answer in answers]
    document_tokens = sum(document.tokens for report in reports for document in report.documents)
    return MethodResult(
        method, scores.n, scores.em, scores.f1, scores.rouge_l,
        answer_tokens=statistics.fmean(report.answer_tokens for report in reports),
        ttft_cold_s=None, ttft_cached_s=None,
        cache_bytes_per_document_token=sum(report.cache_bytes for report in reports) / max(1, document_tokens),
        computed_tokens=statistics.fmean(report.computed_tokens - report.compiled_tokens for report in reports),
        recomputed_tokens=statistics.fmean(report.recomputed_tokens for report in reports),
        seconds=seconds, predictions=predictions, intervals=dict(scores.intervals),
    )  # fmt: skip


def first_token_times(setting: Setting, method: str, examples: Sequence[Example]) -> tuple[list[float], list[float]]:
    """Seconds to the first token, one request at a time: cold, and asked again."""

    def first_token(engine: PICEngine, example: Example, *, cold: bool = False) -> float:
        if cold:
            engine.heads.clear()
        question, documents = setting.request(method, example)
        return engine.ask(question, documents, max_new_tokens=1).report.ttft_s

    for example in examples[:1]:  # warm-up: allocations, lazy initialisation
        first_token(setting.engine(method), example)
    engine = setting.engine(method)
    found = [(first_token(engine, example, cold=True), first_token(engine, example)) for example in examples]
    return [cold for cold, _ in found], [cached for _, cached in found]


def disjoint(examples: Sequence[Example], count: int) -> list[Example]:
    """Up to `count` examples no two of which share a document, so that each is cold when first asked."""
    seen: set[Any] = set()
    chosen: list[Example] = []
    for example in examples:
        if len(chosen) == count:
            break
        if not seen & set(example.documents):
            seen |= set(example.documents)
            chosen.append(example)
    if len(chosen) < count:
        logger.info("times are taken of %d examples: no more of them have different documents", len(chosen))
    return chosen

"""`comb bench methods`: every method on the same questions, one request at a time (EPIC sec. 5.2, synchronous).

Quality and times come from `comb.evaluation`; here are added peak memory, divergence from full recompute, and rows for
methods that can't run on this model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from tqdm import tqdm

from comb.bench.fidelity import Fidelity, measure_fidelity
from comb.bench.memory import peak_memory
from comb.bench.request import linked
from comb.cache.store import StoreFullError
from comb.documents.datasets import Counts
from comb.documents.document import Example
from comb.engine.engine import PICEngine
from comb.evaluation.run import MethodResult, Setting, disjoint, evaluate

REFUSALS = (ValueError, NotImplementedError, StoreFullError, MemoryError, torch.OutOfMemoryError)
"""What stops one method, not the comparison."""


def compare(
    setting: Setting,
    examples: Sequence[Example],
    methods: Sequence[str],
    *,
    max_new_tokens: int = 48,
    batch_size: int = 8,
    timing_examples: int = 8,
    kl_examples: int = 32,
    memory: bool = True,
    progress: bool = True,
) -> list[MethodResult]:
    """One result per method, in order; a method that can't run here has its reason in ``refused``.

    Args:
        kl_examples: divergence from full recompute is taken over so many examples; 0 takes none.
        memory: whether peak memory is taken, of the first example, with its documents compiled already.
    """

    def run(method: str) -> MethodResult:
        [result] = evaluate(
            (setting.model, setting.tokenizer),
            examples,
            [method],
            max_new_tokens=max_new_tokens,
            batch_size=batch_size,
            timing_examples=timing_examples,
            query_template=setting.query_template,
            document_template=setting.builder.document_template,
            splitter=setting.splitter,
            progress=progress,
        )
        few = len(disjoint(examples, timing_examples))
        note = f"times are of {few} examples: no more of them have different documents" if few < timing_examples else ""
        peak = _peak(setting.engine(method), setting.request(method, examples[0])) if memory else None
        return replace(result, peak_memory_bytes=peak, note=note)

    results = [or_refused(method, run) for method in tqdm(methods, "methods", disable=not progress, leave=False)]
    measured = [result.method for result in results if not result.refused]
    if kl_examples and measured:
        found = _fidelity(setting, examples[:kl_examples], measured, max_new_tokens, progress)
        results = [_with_fidelity(result, found.get(result.method)) for result in results]
    return results


def or_refused(method: str, run: Callable[[str], MethodResult]) -> MethodResult:
    """The method's result, or a row that says why there is none."""
    try:
        return run(method)
    except REFUSALS as error:
        return MethodResult.refusal(method, one_line(error))


def one_line(error: BaseException) -> str:
    """An error's message without line breaks."""
    return " ".join(str(error).split())


def drop_too_long(setting: Setting, examples: Sequence[Example], max_new_tokens: int, counts: Counts) -> list[Example]:
    """Examples whose whole prompt and answer fit the model's positions; the others are counted as dropped.

    Raises:
        ValueError: if none is left.
    """
    limit = setting.engine("full").method.max_prompt_tokens
    if limit is None:
        return list(examples)
    kept = setting.fitting(examples, limit - max_new_tokens)
    counts.drop(
        f"prompt and {max_new_tokens} new tokens exceed the model's {limit} positions", len(examples) - len(kept)
    )
    if not kept:
        raise ValueError(f"no example fits the model's {limit} positions ({counts}): use fewer or shorter documents")
    return kept


def _peak(engine: PICEngine, request: tuple[str, Sequence[Any]]) -> int:
    engine.ask(*request, max_new_tokens=1)  # compiles, and lets everything lazy happen before we look

    def first_token() -> None:
        with linked(engine, *request) as state:
            state.logits.argmax(-1).cpu()

    return peak_memory(engine.method.backbone.device, first_token)


def _fidelity(
    setting: Setting, examples: Sequence[Example], methods: Sequence[str], max_new_tokens: int, progress: bool
) -> dict[str, Fidelity | str]:
    return measure_fidelity(
        setting.engine("full"),
        {method: setting.engine(method) for method in methods},
        {name: [setting.request(name, example) for example in examples] for name in {"full", *methods}},
        max_new_tokens=max_new_tokens,
        progress=progress,
    )


def _with_fidelity(result: MethodResult, found: Fidelity | str | None) -> MethodResult:
    if found is None:
        return result
    if isinstance(found, str):
        return replace(result, note="; ".join(filter(None, [result.note, found])))
    return replace(result, kl=found.kl, kl_n=found.tokens, top1_agreement=found.top1_agreement)

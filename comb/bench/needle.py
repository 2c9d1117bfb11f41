"""`comb bench needle`: is one fact found wherever it stands? A grid of context lengths and depths per method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from tqdm import tqdm

from comb.bench.comparison import REFUSALS, one_line
from comb.bench.haystack import Case, Haystack
from comb.evaluation.metrics import f1, normalize_answer
from comb.evaluation.run import NO_DOCUMENTS, Setting


@dataclass(frozen=True)
class NeedleCell:
    """One method at one context length and one depth.

    Args:
        tokens, depth: as asked for; depth in percent. placed: where the needles really began, in tokens, and `made`:
            how many tokens there really were, per haystack (documents of a dataset are not cut to fit).
        n: haystacks. f1: mean F1 of the answers. found: share of answers that hold the right one word by word.
        refused: why there is no value.
    """

    method: str
    tokens: int
    depth: float
    n: int = 0
    f1: float | None = None
    found: float | None = None
    placed: tuple[int, ...] = ()
    made: tuple[int, ...] = ()
    answers: tuple[str, ...] = ()
    predictions: tuple[str, ...] = ()
    refused: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def measure_needles(
    setting: Setting,
    haystack: Haystack,
    specs: Sequence[str],
    lengths: Sequence[int],
    depths: Sequence[float],
    *,
    repeats: int = 3,
    max_new_tokens: int = 24,
    progress: bool = True,
) -> list[NeedleCell]:
    """Cells by method, then length, then depth; all methods get the same haystacks.

    Args:
        repeats: haystacks per cell, each with another needle.
    """
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, got {repeats}")
    cells = []
    total = len(specs) * len(lengths) * len(depths)
    with tqdm(total=total, desc="needles", unit="cell", disable=not progress, leave=False) as bar:
        for spec in specs:
            for tokens in lengths:
                for depth in depths:
                    try:
                        cases = [haystack.case(tokens, depth, number) for number in range(repeats)]
                        cells.append(_cell(setting, spec, tokens, depth, cases, max_new_tokens))
                    except REFUSALS as error:
                        cells.append(NeedleCell(spec, tokens, depth, refused=one_line(error)))
                    bar.update()
    return cells


def contains(prediction: str, answer: str) -> bool:
    """Whether the answer's words stand in the prediction, next to each other, both in SQuAD's normal form."""
    return f" {normalize_answer(answer)} " in f" {normalize_answer(prediction)} "


def _cell(
    setting: Setting, spec: str, tokens: int, depth: float, cases: Sequence[Case], max_new_tokens: int
) -> NeedleCell:
    engine = setting.engine(spec)
    predictions = []
    for case in cases:
        documents = () if spec == NO_DOCUMENTS else case.documents
        predictions.append(engine.ask(case.question, documents, max_new_tokens=max_new_tokens).text.strip())
        engine.store.clear()
    pairs = [(prediction, case.answer) for prediction, case in zip(predictions, cases, strict=True)]
    return NeedleCell(
        method=spec,
        tokens=tokens,
        depth=depth,
        n=len(cases),
        f1=fmean(f1(prediction, [answer]) for prediction, answer in pairs),
        found=fmean(contains(prediction, answer) for prediction, answer in pairs),
        placed=tuple(case.needle_token for case in cases),
        made=tuple(case.tokens for case in cases),
        answers=tuple(case.answer for case in cases),
        predictions=tuple(predictions),
    )

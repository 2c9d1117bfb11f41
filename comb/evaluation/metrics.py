"""Answer metrics: SQuAD exact match and F1 over several references, containment, and ROUGE-L; bootstrap intervals.

Exact match and F1 follow the official SQuAD 2.0 evaluation (Rajpurkar et al. 2018); ROUGE-L is the F-measure of the
longest common subsequence of words (Lin 2004, beta = 1, no stemming), as the `rouge-score` package computes it (a test
compares them; the package itself knows no script but the Latin one, and brings nltk along).
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from statistics import fmean

RESAMPLES = 2000  # of a bootstrap
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
# \w without the underscore: rouge-score's [a-z0-9]+ on English text, and still words in other scripts
_ROUGE_WORD = re.compile(r"[^\W_]+")


@dataclass(frozen=True)
class Scores:
    """Means over `n` predictions, each in 0..1, and where they may lie: 95% intervals by `bootstrap`, by name."""

    n: int
    em: float
    f1: float
    rouge_l: float
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)


def normalize_answer(text: str) -> str:
    """SQuAD's normal form: lower case, no ASCII punctuation, no English articles, single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def _of_best(metric: Callable[[str, str], float]) -> Callable[[str, Sequence[str]], float]:
    """A metric of a prediction and one reference, as the best over several."""

    @wraps(metric)
    def best(prediction: str, references: Sequence[str]) -> float:
        if isinstance(references, str):
            raise ValueError("references is a sequence of accepted answers; put a single one in a list")
        if not references:
            raise ValueError(f"no reference to compare with (prediction: {prediction[:60]!r})")
        return max(metric(prediction, reference) for reference in references)

    return best


@_of_best
def exact_match(prediction: str, reference: str) -> float:
    """1.0 if `prediction` equals one of the references in normal form, else 0.0."""
    return float(normalize_answer(prediction) == normalize_answer(reference))


@_of_best
def f1(prediction: str, reference: str) -> float:
    """Best F1 over the words shared with a reference, in 0..1; an empty side matches only an empty side."""
    predicted, expected = normalize_answer(prediction).split(), normalize_answer(reference).split()
    if not predicted or not expected:
        return float(predicted == expected)
    shared = sum((Counter(predicted) & Counter(expected)).values())
    return _f_measure(shared, len(predicted), len(expected))


@_of_best
def contains(prediction: str, reference: str) -> float:
    """1.0 if a reference stands in `prediction` word by word, both in normal form, else 0.0: for models that answer in
    sentences (Mallen et al. 2023 call it accuracy)."""
    words = normalize_answer(reference)
    return float(bool(words) and f" {words} " in f" {normalize_answer(prediction)} ")


@_of_best
def rouge_l(prediction: str, reference: str) -> float:
    """Best ROUGE-L F-measure over the references, in 0..1."""
    predicted, expected = _ROUGE_WORD.findall(prediction.lower()), _ROUGE_WORD.findall(reference.lower())
    if not predicted or not expected:
        return 0.0
    row = [0] * (len(expected) + 1)  # longest common subsequences with each beginning of the expected words
    for word in predicted:
        diagonal = 0
        for column, other in enumerate(expected, start=1):
            above = row[column]
            row[column] = diagonal + 1 if word == other else max(above, row[column - 1])
            diagonal = above
    return _f_measure(row[-1], len(predicted), len(expected))


def agreement(predictions: Sequence[str], others: Sequence[str]) -> tuple[list[float], list[float]]:
    """Per question 1.0 where two ways of answering give the same answer, else 0.0; and their ROUGE-L.

    Accuracy can hold while answers change (arXiv:2601.08343): beside full recompute's answers this says what a method
    changes, whether the model was right or wrong. Two empty answers agree, though neither has a word.
    """
    same = [float(one == other) for one, other in zip(predictions, others, strict=True)]
    pairs = zip(predictions, others, same, strict=True)
    return same, [equal or rouge_l(one, [other]) for one, other, equal in pairs]


def score(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> Scores:
    """All metrics, averaged over the predictions, of which there is one at least."""
    pairs = list(zip(predictions, references, strict=True))
    metrics = {"em": exact_match, "f1": f1, "rouge_l": rouge_l}
    each = {name: [metric(prediction, accepted) for prediction, accepted in pairs] for name, metric in metrics.items()}
    intervals = {name: bootstrap(values) for name, values in each.items()}
    return Scores(n=len(pairs), **{name: fmean(values) for name, values in each.items()}, intervals=intervals)


def bootstrap(values: Sequence[float], weights: Sequence[float] | None = None) -> tuple[float, float]:
    """Where the mean of `values` may lie: the 95% percentile interval of means of resamples (Efron 1979).

    The resamples are the same for the same number of values, so that methods over the same questions are drawn alike;
    of differences between two methods it is the paired bootstrap. Where all values are equal it is a point.

    Args:
        weights: of the values in each mean; by default all are alike.
    """
    import numpy

    generator = numpy.random.default_rng(len(values))
    data = numpy.asarray(values, dtype=float)
    weight = numpy.ones(len(values)) if weights is None else numpy.asarray(weights, dtype=float)
    drawn = generator.integers(len(data), size=(RESAMPLES, len(data)))
    means = (data * weight)[drawn].sum(1) / weight[drawn].sum(1)
    low, high = numpy.quantile(means, [(1 - 0.95) / 2, (1 + 0.95) / 2])
    return float(low), float(high)


def _f_measure(shared: int, predicted: int, expected: int) -> float:
    if shared == 0:
        return 0.0
    precision, recall = shared / predicted, shared / expected
    return 2 * precision * recall / (precision + recall)

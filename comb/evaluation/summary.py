"""What `compare` has written to rows of a table: means with bootstrap intervals, and paired differences to `full`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from comb.documents.document import Example, PromptBuilder
from comb.evaluation.compare import AnswerRules, compare, question_name
from comb.evaluation.journal import Journal
from comb.evaluation.metrics import agreement, bootstrap, contains, exact_match, f1, rouge_l
from comb.evaluation.run import NO_DOCUMENTS, MethodResult, Timing, prepared
from comb.evaluation.table import Column, Row, TextTable, divergence, fixed, ms, percent

QUALITY: dict[str, Callable[[str, Sequence[str]], float]] = {
    "em": exact_match,
    "f1": f1,
    "contains": contains,
    "rouge_l": rouge_l,
}
"""Of an answer and those that count."""
KL_QUESTIONS = 64
"""Of an evaluation, of which KL is taken at most: question by question, it takes as long as the answers."""


def summarize(
    rows: Sequence[Mapping[str, Any]],
    examples: Sequence[Example],
    specs: Sequence[str],
    refused: Mapping[str, str],
    times: Mapping[str, tuple[Sequence[float], Sequence[float]]],
) -> list[Row]:
    """A row per method, in order.

    ``em``, ``f1``, ``contains`` and ``rouge_l`` are means over the ``n`` questions that it and `full` have answered,
    ``same`` and ``rouge_l_full`` compare its answers with those of `full`; ``kl`` and ``top1_agreement`` are means over
    ``kl_n`` tokens of ``kl_questions`` questions, and ``closed`` is 1 - KL over the KL of "none" at the same
    questions. ``intervals`` and ``minus_full`` (mean, low, high) are by question, 95%.

    Args:
        rows: of `compare`, for these `examples`; of a question that a method has twice, the last one counts.
        refused: reasons by method.
        times: seconds to the first token by method, cold and cached.
    """
    asked = {question_name(number, example): example for number, example in enumerate(examples)}
    by_method: dict[str, dict[str, Mapping[str, Any]]] = {spec: {} for spec in specs}
    for row in rows:
        # journals of versions that didn't count all tokens are asked again
        if row["method"] in by_method and row["question"] in asked and "computed" in row:
            by_method[row["method"]][row["question"]] = row
    full = by_method.get("full", {})
    found = []
    for spec in specs:
        own = [(row, full[question], asked[question]) for question, row in by_method[spec].items() if question in full]
        reason = refused.get(spec, "" if own else "no question was asked")
        cold, cached = times.get(spec, ((), ()))
        found.append(
            {
                "method": spec,
                "refused": reason,
                "note": "",
                **({} if reason else _means(own)),
                "ttft_cold_s": Timing.of(cold),
                "ttft_cached_s": Timing.of(cached),
            }
        )
    nothing = by_method.get(NO_DOCUMENTS, {})
    for row in found:
        mine = by_method[row["method"]]
        both = [(mine[question], nothing[question]) for question in mine if question in nothing and question in full]
        if row.get("kl") is not None and any(none["kl"] for _, none in both):
            least = [max(none["kl"] * none["tokens"], 1e-9) for _, none in both]
            left = [each["kl"] * each["tokens"] / none for (each, _), none in zip(both, least, strict=True)]
            row["closed"] = 1 - sum(share * none for share, none in zip(left, least, strict=True)) / sum(least)
            low, high = bootstrap(left, least)
            row["intervals"]["closed"] = (1 - high, 1 - low)
    return found


def with_divergence(
    model: tuple[Any, Any],
    examples: Sequence[Example],
    results: Sequence[MethodResult],
    *,
    max_new_tokens: int = 48,
    builder: PromptBuilder | None = None,
    progress: bool = True,
) -> list[MethodResult]:
    """What `evaluate` found, with KL to full recompute over the first `KL_QUESTIONS` questions; arguments as there."""
    specs = list(dict.fromkeys(["full", *(result.method for result in results), NO_DOCUMENTS]))
    journal = Journal(None, {})
    try:
        setting, fitting, _ = prepared(model, examples, specs, max_new_tokens, builder)
    except ValueError as error:  # full recompute has no room, where an encoder has
        return [replace(results[0], note=_joined(results[0].note, f"No KL: {error}.")), *results[1:]]
    asked, rules = fitting[:KL_QUESTIONS], AnswerRules(max_new_tokens, setting.builder.stop)
    refused = compare(setting, asked, specs, journal, rules=rules, answers=0, title="KL", progress=progress)
    found = {row["method"]: row for row in summarize(journal.rows, asked, specs, refused, {})}
    measured = []
    for result in results:
        row = found[result.method]
        ends = {key: row["intervals"][key] for key in ("kl", "closed") if key in row.get("intervals", {})}
        why = f"No KL of {result.method}: {row['refused']}." if row["refused"] else ""
        values = {name: row[name] for name in ("kl", "closed", "kl_questions") if name in row}
        note, intervals = _joined(result.note, why), result.intervals | ends
        measured.append(replace(result, note=note, intervals=intervals, **values))
    return measured


def _joined(*texts: str) -> str:
    return " ".join(filter(None, texts))


def _means(questions: Sequence[tuple[Mapping[str, Any], Mapping[str, Any], Example]]) -> dict[str, Any]:
    """Of (the method's row, that of `full`, the question)."""
    answered = [(row, full, example) for row, full, example in questions if "text" in row and "text" in full]
    means: dict[str, Any] = {"n": len(answered), "intervals": {}, "minus_full": {}}

    def mean(name: str, values: Sequence[float], weights: Sequence[float] | None = None) -> None:
        total = [1.0] * len(values) if weights is None else weights
        means[name] = sum(v * w for v, w in zip(values, total, strict=True)) / sum(total)
        means["intervals"][name] = bootstrap(values, weights)

    if answered:
        for name, metric in QUALITY.items():
            values = [metric(row["text"], example.references) for row, _, example in answered]
            of_full = [metric(full["text"], example.references) for _, full, example in answered]
            mean(name, values)
            gaps = [value - other for value, other in zip(values, of_full, strict=True)]
            means["minus_full"][name] = (fmean(gaps), *bootstrap(gaps))
        same, alike = agreement(*zip(*((row["text"], full["text"]) for row, full, _ in answered), strict=True))
        mean("same", same)
        mean("rouge_l_full", alike)
    tokens = [row["tokens"] for row, _, _ in questions]
    mean("kl", [row["kl"] for row, _, _ in questions], tokens)
    mean("top1_agreement", [row["top1"] for row, _, _ in questions], tokens)
    documents = sum(row["document_tokens"] for row, _, _ in questions)
    return means | {
        "kl_n": sum(tokens),
        "kl_questions": len(questions),
        "computed_tokens": fmean(row["computed"] for row, _, _ in questions),
        "recomputed_tokens": fmean(row["recomputed"] for row, _, _ in questions),
        "document_tokens": documents / len(questions),
        "cache_bytes_per_document_token": sum(row["cache_bytes"] for row, _, _ in questions) / max(1, documents),
    }


def _of(mapping: str, name: str) -> Callable[[Row], Any]:
    """The value of one metric in a row's ``intervals`` or ``minus_full``."""
    return lambda row: (row.get(mapping) or {}).get(name)


def _between(form: Callable[[float], str]) -> Callable[[tuple[float, ...]], str]:
    """Writes the two ends of an interval, which are its last two numbers."""
    return lambda interval: "..".join(map(form, interval[-2:]))


def _points(gap: float) -> str:
    return f"{100 * gap:+.1f}"


_SCORES = (
    Column("method", "method", names=True),
    Column("EM", "em", percent),
    Column("F1", "f1", percent),
    Column("holds", "contains", percent, "the answer holds a right one word by word"),
    Column("R-L", "rouge_l", percent, "ROUGE-L"),
    Column("= full", "same", percent, "the same answer as full recompute's"),
    Column("R-L full", "rouge_l_full", percent, "ROUGE-L with full recompute's answer; all these in %"),
    Column("KL", "kl", divergence, "from full recompute's next-token distribution, nats per token of its own answer"),
    Column("closed", "closed", percent, "share of the KL without documents that is gone, %"),
    Column("top-1", "top1_agreement", percent, "how often both have the same likeliest token, %"),
    Column("cold ms", "ttft_cold_s", ms, "time to first token, median ±half the distance of the quartiles"),
    Column("cached ms", "ttft_cached_s", ms, "the same, asked again"),
    Column("B/token", "cache_bytes_per_document_token", fixed(0), "bytes of cache per document token"),
    Column("computed", "computed_tokens", fixed(0), "tokens that passed through the backbone per question"),
)
_GAPS = (
    Column("method", "method", names=True),
    Column("EM", _of("minus_full", "em"), _between(_points)),
    Column("F1", _of("minus_full", "f1"), _between(_points)),
    Column("holds", _of("minus_full", "contains"), _between(_points)),
    Column("R-L", _of("minus_full", "rouge_l"), _between(_points)),
    Column("= full", _of("intervals", "same"), _between(lambda share: f"{100 * share:.0f}")),
    Column("KL", _of("intervals", "kl"), _between(divergence)),
    Column("top-1", _of("intervals", "top1_agreement"), _between(percent)),
)


def comparison_tables(rows: Sequence[Row], title: str = "") -> list[TextTable]:
    """The scores of `summarize`, and below them how far they are from those of `full`, with intervals."""
    timed = any(row["ttft_cold_s"] for row in rows)
    scores = [column for column in _SCORES if timed or not str(column.value).startswith("ttft")]
    told = next((row for row in rows if not row["refused"]), None)
    remarks = []
    if told is not None:
        remarks.append(
            f"{told['n']} questions of {told['document_tokens']:.0f} document tokens; KL and top-1 over "
            f"{told['kl_n']} tokens of {told['kl_questions']} answers."
        )
        if different := [row["method"] for row in rows if not row["refused"] and row["n"] != told["n"]]:
            remarks.append(f"Not all of the questions: {', '.join(different)}.")
    gaps = [row for row in rows if row["method"] != "full" and not row["refused"]]
    how = (
        "95% intervals by bootstrap over questions. EM, F1, holds, R-L: of the paired difference to full recompute, in "
        "percentage points."
    )
    return [TextTable(title, scores, rows, remarks), TextTable(f"{title}: intervals", _GAPS, gaps, [how])]

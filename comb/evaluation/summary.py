"""What `compare` has written to rows of a table: means with bootstrap intervals, and paired differences to `full`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from comb.documents.document import Example
from comb.evaluation.compare import compare, measure_times, question_name
from comb.evaluation.metrics import agreement, bootstrap, contains, exact_match, f1, rouge_l
from comb.evaluation.record import Journal
from comb.evaluation.setting import NO_DOCUMENTS, AnswerRules, Setting
from comb.evaluation.table import Column, Row, TextTable, Timing, divergence, fixed, ms, percent

QUALITY: dict[str, Callable[[str, Sequence[str]], float]] = {
    "em": exact_match,
    "f1": f1,
    "contains": contains,
    "rouge_l": rouge_l,
}
"""Of an answer and those that count."""


def summarize(
    rows: Sequence[Mapping[str, Any]], examples: Sequence[Example], specs: Sequence[str], refused: Mapping[str, str]
) -> list[Row]:
    """A row per method, in order.

    ``em``, ``f1``, ``contains`` and ``rouge_l`` are means over the ``n`` questions that it has answered, and `full`, if
    that is asked; ``same`` and ``rouge_l_full`` compare its answers with those of `full`; ``kl`` and ``top1_agreement``
    are means over ``kl_n`` tokens of ``kl_questions`` questions, and ``closed`` is 1 - KL over the KL of "none" at the
    same questions. ``intervals`` and ``minus_full`` (mean, low, high) are by question, 95%. ``ttft_cold_s`` and
    ``ttft_cached_s`` are timings.

    Args:
        rows: of `compare` and `measure_times`, for these `examples`; of a question that a method has twice, the last
            one counts.
        refused: reasons by method.
    """
    asked = {question_name(number, example): example for number, example in enumerate(examples)}
    by_method, times = ({spec: dict[str, Mapping[str, Any]]() for spec in specs} for _ in range(2))
    for row in rows:
        if row["method"] in by_method and row["question"] in asked:
            (times if "cold" in row else by_method)[row["method"]][row["question"]] = row
    full, nothing = by_method.get("full"), by_method.get(NO_DOCUMENTS, {})
    found = []
    for spec in specs:
        mine = {name: row for name, row in by_method[spec].items() if full is None or name in full}
        own = [(row, None if full is None else full[name], asked[name]) for name, row in mine.items()]
        reason = refused.get(spec, "" if own else "no question was asked")
        made: Row = {"method": spec, "refused": reason, **({} if reason else _means(own))}
        for name in ("cold", "cached"):
            seconds = [row[name] for row in times[spec].values()]
            made[f"ttft_{name}_s"] = Timing.of(seconds) if seconds else None
        both = [(mine[name], nothing[name]) for name in mine if "kl" in nothing.get(name, {})]
        if "kl" in made and any(none["kl"] for _, none in both):
            least = [max(none["kl"] * none["tokens"], 1e-9) for _, none in both]
            left = [each["kl"] * each["tokens"] / none for (each, _), none in zip(both, least, strict=True)]
            made["closed"] = 1 - sum(share * none for share, none in zip(left, least, strict=True)) / sum(least)
            low, high = bootstrap(left, least)
            made["intervals"]["closed"] = (1 - high, 1 - low)
        found.append(made)
    return found


TIMED = 8
"""Questions of which times to the first token are measured."""


def compared(setting: Setting, examples: Sequence[Example], specs: Sequence[str], *, rules: AnswerRules) -> list[Row]:
    """The rows of `summarize` for a comparison that nothing is kept of; in each also the method's ``predictions``."""
    journal = Journal(None, {})
    refused = compare(setting, examples, specs, journal, rules=rules)
    measure_times(setting, examples, [spec for spec in specs if spec not in refused], journal, TIMED)
    rows = summarize(journal.rows, examples, specs, refused)
    for row in rows:
        row["predictions"] = [r["text"] for r in journal.rows if r["method"] == row["method"] and "text" in r]
    return rows


def _means(questions: Sequence[tuple[Mapping[str, Any], Mapping[str, Any] | None, Example]]) -> dict[str, Any]:
    """Of (the method's row, that of `full` if it is asked, the question)."""
    answered = [
        (row, full, each) for row, full, each in questions if "text" in row and (full is None or "text" in full)
    ]
    means: dict[str, Any] = {"n": len(answered), "intervals": {}, "minus_full": {}}

    def mean(name: str, values: Sequence[float], weights: Sequence[float] | None = None) -> None:
        total = [1.0] * len(values) if weights is None else weights
        means[name] = sum(v * w for v, w in zip(values, total, strict=True)) / sum(total)
        means["intervals"][name] = bootstrap(values, weights)

    texts = [(row["text"], full["text"], each.references) for row, full, each in answered if full is not None]
    for name, metric in QUALITY.items() if answered else ():
        mean(name, [metric(row["text"], each.references) for row, _, each in answered])
        if texts:
            gaps = [metric(own, right) - metric(other, right) for own, other, right in texts]
            means["minus_full"][name] = (fmean(gaps), *bootstrap(gaps))
    if texts:
        same, alike = agreement([own for own, _, _ in texts], [other for _, other, _ in texts])
        mean("same", same)
        mean("rouge_l_full", alike)
    measured = [row for row, _, _ in questions if "kl" in row]
    tokens = [row["tokens"] for row in measured]
    if measured:
        mean("kl", [row["kl"] for row in measured], tokens)
        mean("top1_agreement", [row["top1"] for row in measured], tokens)
    documents = sum(row["document_tokens"] for row, _, _ in questions)
    return means | {
        "kl_n": sum(tokens),
        "kl_questions": len(measured),
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
    Column("closed", _of("intervals", "closed"), _between(percent)),
    Column("top-1", _of("intervals", "top1_agreement"), _between(percent)),
)


def comparison_tables(rows: Sequence[Row], title: str = "") -> list[TextTable]:
    """The scores of `summarize`, and below them how far they are from those of `full`, with intervals."""
    timed = any(row["ttft_cold_s"] for row in rows)
    scores = [column for column in _SCORES if timed or not str(column.value).startswith("ttft")]
    told = next((row for row in rows if not row["refused"]), None)
    remarks = []
    if told is not None:
        kl = f"KL and top-1 over {told['kl_n']} tokens of {told['kl_questions']} answers"
        without = "no KL, full recompute has no room for the prompts"
        remarks.append(
            f"{told['n']} questions of {told['document_tokens']:.0f} document tokens; "
            f"{kl if told['kl_questions'] else without}."
        )
        if different := [row["method"] for row in rows if not row["refused"] and row["n"] != told["n"]]:
            remarks.append(f"Not all of the questions: {', '.join(different)}.")
    compared = [row for row in rows if row["method"] != "full" and not row["refused"]]
    how = (
        "95% intervals by bootstrap over questions. EM, F1, holds, R-L: of the paired difference to full recompute, in "
        "percentage points."
    )
    return [TextTable(title, scores, rows, remarks), TextTable(f"{title}: intervals", _GAPS, compared, [how])]

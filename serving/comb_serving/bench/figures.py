"""From records to rows of the tables: percentiles, throughput, ratios with intervals, and the slope of memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from comb.bench.harness import Row
from comb.evaluation.table import Timing
from comb_serving.bench.client import RequestRecord


def summarize(
    records: Sequence[RequestRecord], server: str, phase: str, *, clients: int = 0, rate: float | None = None,
    window_s: float = 0.0,
) -> dict[str, Any]:  # fmt: skip
    """The figures of one phase, times in seconds over good answers; without one only the errors are counted.

    ``throughput`` is good answers per second, from the start to the last token, or to the end of arrivals. ``late_p99``
    is of sending behind arrival: what the client itself could not keep up with.

    Args:
        clients: of a closed loop. rate: of arrivals per second, in an open one.
        window_s: of arrivals; a phase lasts at least so long, also if the last request came earlier.
    """
    good = [record for record in records if not record.error]
    ttft = [record.ttft_s for record in good]
    lasted = max([window_s, *(record.due_s + record.total_s for record in good)])
    return {
        "server": server, "phase": phase, "clients": clients, "rate": rate,
        "n": len(good), "errors": len(records) - len(good),
        **{f"ttft_p{percent}": percentile(ttft, percent) for percent in (50, 90, 95, 99)},
        "throughput": len(good) / lasted if lasted else None,
        "late_p99": percentile([record.late_s for record in good], 99),
        "hits": sum(record.hits for record in good), "encoded": sum(record.encoded for record in good),
    }  # fmt: skip


def alike(records: Sequence[RequestRecord], others: Sequence[RequestRecord]) -> dict[str, float | None]:
    """How far answers are from others to the same prompts, both greedy.

    ``same``: the share of equal texts. ``kl``: KL(others || records) of the first token, in nats, over the tokens that
    others find likeliest and one class for all else; what isn't among the likeliest here counts as the last of them, so
    it is too little rather than too much.
    """
    by = {record.number: record for record in others if not record.error}
    pairs = [(record, by[record.number]) for record in records if not record.error and record.number in by]
    if not pairs:
        return {"same": None, "kl": None}
    same = float(np.mean([record.text == other.text for record, other in pairs]))
    return {"same": same, "kl": float(np.mean([_divergence(other.first, record.first) for record, other in pairs]))}


def _divergence(expected: Mapping[str, float], found: Mapping[str, float]) -> float:
    """KL of log-probabilities by token and of what remains."""
    if not expected or not found:
        return math.nan
    least = min(found.values())
    pairs = [(math.exp(value), math.exp(found.get(token, least))) for token, value in expected.items()]
    rest = [max(1e-9, 1 - sum(side)) for side in zip(*pairs, strict=True)]
    return math.fsum(p * math.log(p / q) for p, q in [*pairs, (rest[0], rest[1])])


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Interpolated between order statistics; None of nothing."""
    return float(np.percentile(values, percent)) if len(values) else None


def ratio(above: Sequence[float], below: Sequence[float], *, resamples: int = 2000, seed: int = 0) -> Timing | None:
    """Ratio of two samples' medians, with its 95% bootstrap percentile interval as low and high (Efron 1979).

    Both are resampled on their own. None where one of them is empty.
    """
    if not above or not below:
        return None
    rng = np.random.default_rng(seed)

    def drawn(values: Sequence[float]) -> Any:
        array = np.asarray(values)
        return np.median(array[rng.integers(len(array), size=(resamples, len(array)))], axis=1)

    low, high = np.percentile(drawn(above) / drawn(below), [2.5, 97.5])
    return Timing(float(np.median(above) / np.median(below)), float(low), float(high), len(above) + len(below))


def sustained(rows: Sequence[Row], server: str, slo_s: float) -> float | None:
    """The highest rate of arrivals at which p90 of TTFT was within the SLO, without an error."""
    kept = [row["rate"] for row in rows if row["server"] == server and row["rate"] and row["n"]
            and row["ttft_p90"] <= slo_s and not row["errors"]]  # fmt: skip
    return max(kept, default=None)


def growth(samples: Sequence[Row], part: str | None = None) -> float | None:
    """Bytes of memory per request, of one part or of all; None with fewer than three samples.

    By least squares over the later half of the requests: in the earlier one pool and caches fill.
    """
    half = max((sample["requests"] for sample in samples), default=0) / 2
    late = [sample for sample in samples if sample["requests"] >= half]
    if len({sample["requests"] for sample in late}) < 3:
        return None
    nbytes = [sum(s["parts"].values()) if part is None else s["parts"].get(part, 0) for s in late]
    return float(np.polyfit([sample["requests"] for sample in late], nbytes, 1)[0])

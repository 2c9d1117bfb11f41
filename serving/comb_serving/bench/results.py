"""From records to figures: percentiles, throughput, ratios with intervals, and the slope of memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from comb_serving.bench.client import Record


@dataclass(frozen=True)
class PhaseResult:
    """One server in one phase; times in seconds, over good answers.

    Args:
        clients: of a closed loop. rate: of arrivals per second, in an open one.
        throughput: good answers per second, from the start to the last token, or the end of arrivals.
        late_p99: of sending behind arrival: what the client itself could not keep up with.
        hits, encoded: documents. cached_share: of prompt tokens, taken from a cache.
        skipped: why it wasn't run.
    """

    server: str
    phase: str
    clients: int = 0
    rate: float | None = None
    n: int = 0
    errors: int = 0
    ttft_p50: float | None = None
    ttft_p90: float | None = None
    ttft_p99: float | None = None
    tpot_p50: float | None = None
    total_p50: float | None = None
    total_p99: float | None = None
    throughput: float | None = None
    late_p99: float | None = None
    hits: int = 0
    encoded: int = 0
    cached_share: float = 0.0
    skipped: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Ratio:
    """A ratio with the 95% interval it may lie in."""

    value: float
    low: float
    high: float


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Interpolated between order statistics; None of nothing."""
    return float(np.percentile(values, percent)) if len(values) else None


def summarize(
    records: Sequence[Record],
    server: str,
    phase: str,
    *,
    clients: int = 0,
    rate: float | None = None,
    window_s: float = 0.0,
) -> PhaseResult:
    """The figures of one phase. Without a good answer only the errors are counted.

    Args:
        window_s: of arrivals; a phase lasts at least so long, also if the last request came earlier.
    """
    good = [record for record in records if not record.error]
    ttft, total = [record.ttft_s for record in good], [record.total_s for record in good]
    tpot = [record.tpot_s for record in good if record.tpot_s is not None]
    lasted = max([window_s, *(record.due_s + record.total_s for record in good)])
    prompt = sum(record.prompt_tokens for record in good)
    return PhaseResult(
        server, phase, clients, rate, len(good), len(records) - len(good),
        ttft_p50=percentile(ttft, 50), ttft_p90=percentile(ttft, 90), ttft_p99=percentile(ttft, 99),
        tpot_p50=percentile(tpot, 50), total_p50=percentile(total, 50), total_p99=percentile(total, 99),
        throughput=len(good) / lasted if lasted else None,
        late_p99=percentile([record.late_s for record in good], 99),
        hits=sum(record.hits for record in good), encoded=sum(record.encoded for record in good),
        cached_share=sum(record.cached_tokens for record in good) / prompt if prompt else 0.0,
    )  # fmt: skip


def ratio(
    above: Sequence[float], below: Sequence[float], percent: float = 50, *, resamples: int = 2000, seed: int = 0
) -> Ratio | None:
    """Ratio of two samples' percentiles, with its bootstrap percentile interval (Efron 1979).

    Both are resampled on their own. None where one of them is empty.
    """
    if not above or not below:
        return None
    rng = np.random.default_rng(seed)

    def drawn(values: Sequence[float]) -> Any:
        array = np.asarray(values)
        return np.percentile(array[rng.integers(len(array), size=(resamples, len(array)))], percent, axis=1)

    low, high = np.percentile(drawn(above) / drawn(below), [2.5, 97.5])
    return Ratio(float(np.percentile(above, percent) / np.percentile(below, percent)), float(low), float(high))


def sustained(results: Sequence[PhaseResult], server: str, slo_s: float) -> PhaseResult | None:
    """The highest rate of arrivals at which the SLO was kept: p90 of TTFT, and no error."""
    kept = [
        result
        for result in results
        if result.server == server
        and result.rate is not None
        and not result.errors
        and result.ttft_p90 is not None
        and result.ttft_p90 <= slo_s
    ]
    return max(kept, key=lambda result: result.rate or 0.0, default=None)


@dataclass(frozen=True)
class Memory:
    """A server's resident memory at one moment, in bytes.

    Args:
        seconds: since its start. requests: answered in the running phase.
        parts: proportional set size by what a process does.
    """

    server: str
    phase: str
    seconds: float
    requests: int
    parts: dict[str, int]

    @property
    def nbytes(self) -> int:
        """Of all processes."""
        return sum(self.parts.values())

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def growth(samples: Sequence[Memory], part: str | None = None) -> float | None:
    """Bytes per request, of one part or of all; None with fewer than three samples.

    By least squares over the later half of the requests: in the earlier one pool and caches fill.
    """
    half = max((sample.requests for sample in samples), default=0) / 2
    late = [sample for sample in samples if sample.requests >= half]
    if len({sample.requests for sample in late}) < 3:
        return None
    nbytes = [sample.nbytes if part is None else sample.parts.get(part, 0) for sample in late]
    return float(np.polyfit([sample.requests for sample in late], nbytes, 1)[0])

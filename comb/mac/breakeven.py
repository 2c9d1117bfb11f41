"""Whether MAC pays: a model of one layer's attention time from bytes read and measured constants (paper eq. 9).

Reading p keys less must pay for reading K queries, the band, and what a step costs whatever it reads. Query heads that
share a key/value head read as far back as the worst of them, so at a hit rate h per head only h^g of the groups of g
heads skip anything.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from comb.kernels.mac.config import MacConfig


@dataclass(frozen=True)
class AttentionShape:
    """What decides how many bytes a layer's attention reads."""

    heads: int
    kv_heads: int
    width: int
    value_width: int = 0
    bytes_per_number: int = 2

    @property
    def key_bytes(self) -> int:
        """Of one cached token: its keys and values."""
        return self.kv_heads * (self.width + (self.value_width or self.width)) * self.bytes_per_number

    @property
    def query_bytes(self) -> int:
        """Of one kept query, all heads."""
        return self.heads * self.width * self.bytes_per_number


@dataclass(frozen=True)
class Costs:
    """Constants of one machine: seconds per layer and step besides reading, and bytes per second while reading."""

    exact_s: float
    mac_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        if min(self.exact_s, self.mac_s) < 0 or not self.bytes_per_s > 0:
            raise ValueError(f"costs are seconds of at least 0 and a positive bandwidth, got {self}")


PAPER_H100 = Costs(exact_s=12e-6, mac_s=60e-6, bytes_per_s=2.2e12)
"""Read off the paper's Table 5 (LLaMA-3.1-8B, batch 1): 71.6 and 234.2 us exact at 32K and 120K, 63.6 us with MAC."""


def fit_costs(exact: Sequence[tuple[float, float]], mac: Sequence[tuple[float, float]]) -> Costs:
    """Constants of a machine from measured (bytes read, seconds) of exact attention and of MAC's steps.

    Bandwidth and exact attention's fixed cost by the line of least squared relative errors; MAC's fixed cost is the
    median of what its steps take longer than reading at that bandwidth does.

    Raises:
        ValueError: where exact attention's time doesn't grow with what it reads.
    """
    weights = [1 / seconds**2 for _, seconds in exact]
    total = sum(weights)
    mean = sum(w * size for w, (size, _) in zip(weights, exact, strict=True)) / total
    mean_s = sum(w * seconds for w, (_, seconds) in zip(weights, exact, strict=True)) / total
    spread = sum(w * (size - mean) ** 2 for w, (size, _) in zip(weights, exact, strict=True))
    together = sum(w * (size - mean) * (s - mean_s) for w, (size, s) in zip(weights, exact, strict=True))
    if not spread or together <= 0:
        raise ValueError("exact attention's time must grow with what it reads: measure several contexts or batches")
    rate = together / spread
    return Costs(
        exact_s=max(0.0, mean_s - rate * mean),
        mac_s=max(0.0, median(seconds - rate * size for size, seconds in mac)),
        bytes_per_s=1 / rate,
    )


def step_seconds(
    context: int, rows: int, hit_rate: float, shape: AttentionShape, config: MacConfig, costs: Costs
) -> tuple[float, float]:
    """Seconds that a layer's attention takes for one token of `rows` requests: exact, and with MAC."""
    together = hit_rate ** (shape.heads // shape.kv_heads)
    read = together * min(context, config.hit_keys()) + (1 - together) * context
    return _seconds(context, read, rows, shape, config, costs)


def pays_reading(share: float, context: int, rows: int, shape: AttentionShape, config: MacConfig, costs: Costs) -> bool:
    """Whether a step with MAC takes no longer than an exact one if key/value heads read this share of their keys."""
    exact, mac = _seconds(context, share * context, rows, shape, config, costs)
    return mac <= exact


def _seconds(
    context: int, read: float, rows: int, shape: AttentionShape, config: MacConfig, costs: Costs
) -> tuple[float, float]:
    exact = costs.exact_s + rows * context * shape.key_bytes / costs.bytes_per_s
    searched = config.window * shape.query_bytes
    return exact, costs.mac_s + rows * (read * shape.key_bytes + searched) / costs.bytes_per_s


def pays(context: int, rows: int, hit_rate: float, shape: AttentionShape, config: MacConfig, costs: Costs) -> bool:
    """Whether a step with MAC takes no longer than an exact one."""
    exact, mac = step_seconds(context, rows, hit_rate, shape, config, costs)
    return mac <= exact


def least_context(
    rows: int, hit_rate: float, shape: AttentionShape, config: MacConfig, costs: Costs, most: int = 2**21
) -> int | None:
    """The shortest context at which MAC pays; None if it doesn't up to `most` tokens.

    MAC's advantage never shrinks as the context grows, so halving finds it.
    """
    least = bisect_left(range(most + 1), True, key=lambda context: pays(context, rows, hit_rate, shape, config, costs))
    return least if least <= most else None

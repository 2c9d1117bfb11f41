"""What MAC did, per layer: acceptance, what was skipped, keys read, audits (paper app. B.3)."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from comb.kernels.mac.mac_config import MacConfig
from comb.kernels.mac.step import MacStep


@dataclass(frozen=True)
class LayerReport:
    """One layer. Means are over decode steps, rows and query heads."""

    layer: int
    searches: int = 0  # row-head pairs that were searched for a match
    hit_rate: float = 0.0  # share of them that had one (the paper's acceptance)
    keys_read: int = 0
    keys_exact: int = 0  # what exact attention would have read
    group_keys_read: int = 0  # by a kernel that reads key/value heads once for all their query heads
    group_keys_exact: int = 0
    audits: int = 0
    error_mean: float | None = None  # of the layer's output against exact attention, relative
    error_max: float | None = None
    off: str = ""  # why the layer is no longer reused


@dataclass(frozen=True)
class MacReport:
    """A session, or a part of one."""

    steps: int  # decode steps, of all rows at once
    prompts: int  # passes over more than one token
    layers: tuple[LayerReport, ...]  # those that were reused at all
    exact: dict[str, int] = field(default_factory=dict)  # attention calls of decode steps left to it, by reason
    events: dict[str, int] = field(default_factory=dict)  # how often rings were emptied, by reason
    nbytes: int = 0  # of the rings

    @property
    def hit_rate(self) -> float:
        """Over all layers and heads."""
        searches = sum(layer.searches for layer in self.layers)
        return sum(layer.hit_rate * layer.searches for layer in self.layers) / searches if searches else 0.0

    @property
    def read_share(self) -> float:
        """Keys read over what exact attention reads, in the layers and steps that MAC took part in; 1 without any."""
        exact = sum(layer.keys_exact for layer in self.layers)
        return sum(layer.keys_read for layer in self.layers) / exact if exact else 1.0

    @property
    def error_max(self) -> float | None:
        """The worst audit of any layer; None without audits."""
        return max((layer.error_max for layer in self.layers if layer.error_max is not None), default=None)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        done = "all exact"
        if self.layers:
            error = "no audit" if self.error_max is None else f"worst audited error {self.error_max:.3f}"
            done = f"{100 * self.hit_rate:.1f}% hits, {100 * self.read_share:.1f}% of keys read, {error}"
        parts = [f"MAC: {self.steps} steps, {done}"]
        if self.exact:
            reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(self.exact.items()))
            parts.append(f"left to exact attention: {reasons}")
        if off := [f"layer {layer.layer} ({layer.off})" for layer in self.layers if layer.off]:
            parts.append(f"switched off: {', '.join(off)}")
        return "; ".join(parts)


class LayerCounts:
    """Running sums of one layer, on the device where its attention runs, so that no step waits for them."""

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros(6, dtype=torch.long, device=device)
        self.errors: list[float] = []

    def add(self, done: MacStep, config: MacConfig) -> None:
        heads, groups = done.keys_read.shape[1], done.groups
        searched, length = (done.position >= config.min_length).sum(), (done.position + 1).sum()
        read = done.keys_read.sum(), heads * length, done.group_keys_read.sum(), groups * length
        self.sums += torch.stack([heads * searched, done.match.hit.sum(), *read])

    def audit(self, done: MacStep, exact: Tensor) -> float:
        """Notes how far a step is from exact attention [B, H, V]: the error relative to that, of the worst row.

        Norms are over all heads (paper sec. 5.6).
        """
        exact = exact.to(done.output.dtype)
        difference = (done.output - exact).flatten(1).norm(dim=-1)
        error = float((difference / exact.flatten(1).norm(dim=-1).clamp_min(1e-30)).max())
        self.errors.append(error)
        return error

    def report(self, layer: int, off: str) -> LayerReport:
        """Sums and means so far, of a layer that is `off` for a reason, or isn't."""
        searches, hits, read, exact, group_read, group_exact = self.sums.tolist()
        return LayerReport(
            layer=layer,
            searches=searches,
            hit_rate=hits / searches if searches else 0.0,
            keys_read=read,
            keys_exact=exact,
            group_keys_read=group_read,
            group_keys_exact=group_exact,
            audits=len(self.errors),
            error_mean=fmean(self.errors) if self.errors else None,
            error_max=max(self.errors, default=None),
            off=off,
        )

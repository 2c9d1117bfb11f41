"""What MAC attention may reuse: window, band, threshold, and the caps that keep reuse of reuse from drifting."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

KERNELS = ("auto", "triton", "torch")
RING_DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
_NOT_PER_LAYER = ("layers", "audit_every", "audit_bound", "graphs", "break_even")


@dataclass(frozen=True)
class MacConfig:
    """Parameters of Match-Amend-Complete attention. All lengths are in tokens.

    Args:
        window: K, how many of the latest queries are kept and searched.
        band: r, how many keys in front of a summary's end are read again (paper sec. 3.4).
        tau: threshold of a match, in 0..1: the squared distance of two queries of width d must be below
            2 d (1 - tau)^2 (paper eq. 3). 1 never matches.
        sink: F, first keys that are never part of a summary and always read.
        min_length: m, below which all keys are read.
        max_chain: how many matches a summary may be away from the query that read its keys: 1 lets only summaries
            made by a full read be reused, None sets no bound (the paper has none).
        max_drift: the distances along such a chain must together pass the threshold.
        max_gap: how far back a match may lie; None: as far as the window.
        gate: a second threshold, of the same form as `tau`, that the queries must pass after their rotary embedding as
            well (paper app. A.3, two-gate acceptance); None: they needn't. Costs a ring of rotated queries.
        ring_dtype: of the kept queries and summaries; auto is float32 (float64 under a float64 model).
            Log-sum-exps are never kept in fewer than 32 bits.
        kernels: what computes a step: the Triton kernels where they can (auto: on a GPU; triton: also on a CPU under
            Triton's interpreter, for tests), or always the plain step (torch).
        graphs: decode steps at fixed addresses, on a GPU captured as a CUDA graph and replayed (`comb.mac.graphs`).
            On a CPU they read all keys, for the sake of fixed sizes: to test them.
        break_even: leaves steps in which exact attention is faster to it, by costs that are given or measured where the
            model runs (`comb.mac.breakeven`); False reuses whatever it costs.
        audit_every: decode steps between audits, which also compute exact attention; 0 for none.
        audit_bound: relative error of a layer's output above which an audit switches the layer off; None: never.
        layers: other values for single layers, by index: ``{3: {"tau": 0.6}, 7: {"enabled": False}}``.

    Raises:
        ValueError: for a value out of range, or an unknown key in `layers`.
    """

    window: int = 512
    band: int = 256
    tau: float = 0.45
    sink: int = 0
    min_length: int = 2048
    max_chain: int | None = 1
    max_drift: bool = True
    max_gap: int | None = None
    gate: float | None = None
    ring_dtype: str = "auto"
    kernels: str = "auto"
    graphs: bool = False
    break_even: bool = True
    audit_every: int = 64
    audit_bound: float | None = 0.25
    layers: Mapping[int, Mapping[str, Any]] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        least = {"window": 1, "band": 1, "sink": 0, "min_length": 0, "max_chain": 1, "max_gap": 1, "audit_every": 0}
        for name, bound in least.items():
            value = getattr(self, name)
            if value is None and name in ("max_chain", "max_gap"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < bound:
                raise ValueError(f"{name} must be a whole number of at least {bound}, got {value!r}")
        for name in ("max_drift", "graphs", "break_even"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if not 0 <= self.tau <= 1:
            raise ValueError(f"tau must lie in 0..1 (1 never matches), got {self.tau!r}")
        if self.gate is not None and not 0 <= self.gate <= 1:
            raise ValueError(f"gate must lie in 0..1 (1 never matches) or be None, got {self.gate!r}")
        if self.audit_bound is not None and not self.audit_bound >= 0:
            raise ValueError(f"audit_bound must be a relative error of at least 0 or None, got {self.audit_bound!r}")
        for name, choices in (("ring_dtype", RING_DTYPES), ("kernels", KERNELS)):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}")
        allowed = {"enabled", *(item.name for item in fields(self) if item.name not in _NOT_PER_LAYER)}
        for layer, values in self.layers.items():
            unknown = sorted(set(values) - allowed)
            if unknown:
                raise ValueError(f"layer {layer} has no {unknown[0]!r}; it may have: {', '.join(sorted(allowed))}")
            self.for_layer(layer)

    @classmethod
    def context(cls, **changes: Any) -> Self:
        """The paper's preset for long prompts with short answers: K 1024, r 256, tau 0.45 (sec. 5.2)."""
        return cls(**{"window": 1024, "band": 256, "tau": 0.45, **changes})

    @classmethod
    def generation(cls, **changes: Any) -> Self:
        """The paper's preset for long answers: K 1024, r 256, tau 0.75 (sec. 5.2)."""
        return cls(**{"window": 1024, "band": 256, "tau": 0.75, **changes})

    @classmethod
    def parse(cls, text: str) -> Self:
        """``"context"``, ``"generation"``, ``"generation:tau=0.8,window=256,max_chain=none"``.

        Raises:
            ValueError: for an unknown preset or key, or a value that isn't one.
        """
        preset, _, rest = text.partition(":")
        presets = {"context": cls.context, "generation": cls.generation}
        if preset not in presets:
            raise ValueError(f"MAC's presets are {' and '.join(presets)} (parameters follow a colon), not {preset!r}")
        kinds = {item.name: item.type for item in fields(cls) if item.name != "layers"}
        changes: dict[str, Any] = {}
        for part in filter(None, (part.strip() for part in rest.split(","))):
            name, equals, value = part.partition("=")
            if name not in kinds or not equals:
                raise ValueError(f"MAC has no parameter {part!r}; it takes: {', '.join(f'{k}=' for k in kinds)}")
            changes[name] = _value(name, str(kinds[name]), value)
        return presets[preset](**changes)

    def uncapped(self) -> Self:
        """The same without bounds on chains and drift, as published."""
        return replace(self, max_chain=None, max_drift=False)

    def for_layer(self, layer: int) -> Self | None:
        """The parameters of one layer; None where it is switched off."""
        values = dict(self.layers.get(layer, {}))
        if not values.pop("enabled", True):
            return None
        return replace(self, layers={}, **values)

    def threshold(self, width: int) -> float:
        """Squared distance below which queries of `width` channels match: 2 d (1 - tau)^2."""
        return 2 * width * (1 - self.tau) ** 2

    @property
    def keeps_rotated(self) -> bool:
        """Whether the rings hold queries after their rotary embedding, too."""
        return self.gate is not None

    def hit_keys(self) -> int:
        """Most keys that a hit reads, whatever the context: sink, band, and as much again as a match lies back."""
        reach = min(self.window, self.max_gap or self.window)
        return self.sink + self.band + reach


def chance_tau(rate: float, width: int) -> float:
    """The tau at which unrelated queries match with probability `rate`, were they white noise (paper app. B.1).

    By Wilson and Hilferty's approximation of the chi-square quantile.

    Raises:
        ValueError: for a rate outside of 0..1.
    """
    if not 0 < rate < 1:
        raise ValueError(f"rate must lie between 0 and 1, got {rate!r}")
    from statistics import NormalDist

    spread = 2 / (9 * width)
    quantile = width * max(0.0, 1 - spread + NormalDist().inv_cdf(rate) * math.sqrt(spread)) ** 3
    return min(1.0, max(0.0, 1 - math.sqrt(quantile / width)))


def _value(name: str, kind: str, text: str) -> Any:
    if "None" in kind and text.lower() == "none":
        return None
    if kind == "bool":
        if text.lower() not in ("true", "false"):
            raise ValueError(f"{name} is true or false, not {text!r}")
        return text.lower() == "true"
    try:
        return text if kind == "str" else float(text) if "float" in kind else int(text)
    except ValueError:
        raise ValueError(f"{name} takes a number, got {text!r}") from None

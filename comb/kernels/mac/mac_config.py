"""What MAC attention may reuse: window, band, threshold, and the caps that keep reuse of reuse from drifting."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from torch import Tensor

KERNELS = ("auto", "triton", "torch")
RING_DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True)
class MacConfig:
    """Parameters of Match-Amend-Complete attention. All lengths are in tokens.

    Args:
        window: K, how many of the latest queries are kept and searched.
        band: r, how many keys in front of a summary's end are read again (paper sec. 3.4).
        tau: threshold of a match, in 0..1: the squared distance of two queries of width d must be below
            2 d (1 - tau)^2 (paper eq. 3). 1 never matches.
        sink: F, first keys that are never part of a summary and always read.
        min_length: m, below which all keys are read: where exact attention is faster, which depends on the machine
            (docs/mac.md).
        max_chain: how many matches a summary may be away from the query that read its keys: 1 lets only summaries
            made by a full read be reused, None sets no bound (the paper has none).
        max_drift: the distances along such a chain must together pass the threshold.
        max_gap: how far back a match may lie; None: as far as the window.
        ring_dtype: of the kept queries and summaries; auto is float32 (float64 under a float64 model).
            Log-sum-exps are never kept in fewer than 32 bits.
        kernels: what computes a step: the Triton kernels where they can (auto: on a GPU; triton: also on a CPU under
            Triton's interpreter, for tests), or always the plain step (torch).
        audit_every: decode steps between audits, which also compute exact attention; 0 for none.
        audit_bound: relative error of a layer's output above which an audit switches the layer off; None: never.

    Raises:
        ValueError: for a value out of range.
    """

    window: int = 512
    band: int = 256
    tau: float = 0.45
    sink: int = 0
    min_length: int = 8192
    max_chain: int | None = 1
    max_drift: bool = True
    max_gap: int | None = None
    ring_dtype: str = "auto"
    kernels: str = "auto"
    audit_every: int = 64
    audit_bound: float | None = 0.25

    def __post_init__(self) -> None:
        least = {"window": 1, "band": 1, "sink": 0, "min_length": 0, "max_chain": 1, "max_gap": 1, "audit_every": 0}
        for name, bound in least.items():
            value = getattr(self, name)
            if value is None and name in ("max_chain", "max_gap"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < bound:
                raise ValueError(f"{name} must be a whole number of at least {bound}, got {value!r}")
        if not isinstance(self.max_drift, bool):
            raise ValueError(f"max_drift must be True or False, got {self.max_drift!r}")
        if not 0 <= self.tau <= 1:
            raise ValueError(f"tau must lie in 0..1 (1 never matches), got {self.tau!r}")
        if self.audit_bound is not None and not self.audit_bound >= 0:
            raise ValueError(f"audit_bound must be a relative error of at least 0 or None, got {self.audit_bound!r}")
        for name, choices in (("ring_dtype", RING_DTYPES), ("kernels", KERNELS)):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}")

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
        kinds = {item.name: item.type for item in fields(cls)}
        changes: dict[str, Any] = {}
        for part in filter(None, (part.strip() for part in rest.split(","))):
            name, equals, value = part.partition("=")
            if name not in kinds or not equals:
                raise ValueError(f"MAC has no parameter {part!r}; it takes: {', '.join(f'{k}=' for k in kinds)}")
            kind = str(kinds[name])
            if "None" in kind and value.lower() == "none":
                changes[name] = None
            elif kind == "bool":
                if value.lower() not in ("true", "false"):
                    raise ValueError(f"{name} is true or false, not {value!r}")
                changes[name] = value.lower() == "true"
            else:
                try:
                    changes[name] = value if kind == "str" else float(value) if "float" in kind else int(value)
                except ValueError:
                    raise ValueError(f"{name} takes a number, got {value!r}") from None
        return presets[preset](**changes)

    def uncapped(self) -> Self:
        """The same without bounds on chains and drift, as published."""
        return replace(self, max_chain=None, max_drift=False)

    def threshold(self, width: int) -> float:
        """Squared distance below which queries of `width` channels match: 2 d (1 - tau)^2."""
        return 2 * width * (1 - self.tau) ** 2

    def end(self, position: Tensor) -> Tensor:
        """E(p) = max(p + 1 - r, 0): one behind the last key of the summary that position p leaves."""
        return (position + 1 - self.band).clamp_min(0)

"""What `comb info` shows of a hybrid backbone: its linear layers' families, and what a compiled segment costs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from comb.backbones.exclusive import exclusive
from comb.hybrid.compile import compile_segment
from comb.hybrid.support import HybridSupport, find_hybrid_support, is_hybrid
from comb.linking.positions import UnmovableError

_SHORT, _LONG = 16, 32


@dataclass(frozen=True)
class SegmentBytes:
    """Bytes of one compiled segment: `states`, `transitions` and `columns` whatever its length, and `per_token`."""

    states: int
    transitions: int
    columns: int
    per_token: int

    @property
    def fixed(self) -> int:
        """All that doesn't depend on the segment's length."""
        return self.states + self.transitions + self.columns

    @property
    def break_even(self) -> int | None:
        """Tokens from which on keys and values outweigh the states; None where a layer has no keys."""
        return -(-self.fixed // self.per_token) if self.per_token else None


def segment_bytes(model: Any, support: HybridSupport) -> SegmentBytes:
    """Measured on two made-up segments. The caller holds the model's lock (`exclusive`)."""
    sizes = []
    for tokens in (_SHORT, _LONG):
        picache = compile_segment(model, support, "", [1] * tokens, head=0, tail=0)
        counted: Counter[str] = Counter()
        for name, tensor in picache.tensors().items():
            part = name.partition(".")[0]
            place = part if part in ("state", "columns", "keys", "values", "token_ids", "interior") else "transition"
            counted[place] += tensor.nbytes
        sizes.append(counted)
    short, long = sizes
    growth = sum(long[part] - short[part] for part in ("keys", "values"))
    return SegmentBytes(long["state"], long["transition"], long["columns"], growth // (_LONG - _SHORT))


def describe_hybrid(model: Any) -> dict[str, str]:
    """Rows of the table; none for a model without linear layers."""
    if not is_hybrid(model):
        return {}
    try:
        with exclusive(model):
            support = find_hybrid_support(model)
            cost = segment_bytes(model, support)
    except UnmovableError as reason:
        return {"hybrid linking": f"refused: {reason}"}
    families = Counter(
        layer.family + (" with rotary positions" if layer.rotation else "") for layer in support.linear.values()
    )
    both = len(set(support.linear) & set(support.attention))
    layers = f"{len(support.linear)} linear, {len(support.attention)} with keys and values, {both} of them both"
    rows = {
        "hybrid layers": f"{layers}; " + ", ".join(f"{count} {name}" for name, count in families.most_common()),
        "seams": f"at least {max(0, support.kernel - 1)} tokens at a segment's head"
        + (", taken one by one" if support.step else ""),
        "cache per segment": f"{cost.fixed:,d} bytes (S {cost.states:,d}, T {cost.transitions:,d}, columns "
        f"{cost.columns:,d}) and {cost.per_token:,d} per token of its interior",
    }
    if cost.break_even:
        rows["short segments"] = f"below {cost.break_even:,d} tokens most of a segment's bytes are its states"
    return rows

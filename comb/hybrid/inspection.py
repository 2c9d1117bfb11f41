"""What `comb info` shows of a hybrid backbone: its linear layers' families, and what a compiled segment costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from comb.backbones.exclusive import exclusive
from comb.hybrid.compile import compile_segment
from comb.hybrid.support import find_hybrid_support, is_hybrid
from comb.linking.positions import UnmovableError

_TOKENS = 32


def describe_hybrid(model: Any) -> dict[str, str]:
    """Rows of the table; none for a model without linear layers."""
    if not is_hybrid(model):
        return {}
    try:
        with exclusive(model):
            support = find_hybrid_support(model)
            picache = compile_segment(model, support, "", [1] * _TOKENS, head=0, tail=0)
    except UnmovableError as reason:
        return {"hybrid linking": f"refused: {reason}"}
    families = Counter(
        layer.family + (" with rotary positions" if layer.rotation else "") for layer in support.linear.values()
    )
    both = len(set(support.linear) & set(support.attention))
    layers = f"{len(support.linear)} linear, {len(support.attention)} with keys and values, {both} of them both"
    parts = list(picache.linear.values())
    states, columns = (_nbytes(getattr(part, name) for part in parts) for name in ("state", "columns"))
    transitions = _nbytes(None if part.transition is None else part.transition.tensor for part in parts)
    fixed = states + transitions + columns
    per_token = _nbytes(tensor for pair in picache.attention.values() for tensor in pair) // _TOKENS
    rows = {
        "hybrid layers": f"{layers}; " + ", ".join(f"{count} {name}" for name, count in families.most_common()),
        "seams": f"at least {max(0, support.kernel - 1)} tokens at a segment's head"
        + (", taken one by one" if support.step else ""),
        "cache per segment": f"{fixed:,d} bytes (S {states:,d}, T {transitions:,d}, columns {columns:,d}) and "
        f"{per_token:,d} per token of its interior",
    }
    if per_token:
        rows["short segments"] = f"below {-(-fixed // per_token):,d} tokens most of a segment's bytes are its states"
    return rows


def _nbytes(tensors: Iterable[Tensor | None]) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)

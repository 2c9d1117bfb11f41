"""HybridPICache: one compiled segment of a hybrid backbone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Self

import torch
from torch import Tensor

from comb.cache.picache import PICache, register_kind
from comb.hybrid.transition import TRANSITIONS, Transition


@dataclass(frozen=True, eq=False)
class SegmentState:
    """What a segment's interior does to one linear layer."""

    columns: Tensor | None = None  # [C, at most kernel], raw ones in front of the convolution, of its last tokens
    state: Tensor | None = None  # S in the layout of the layer's own cache, at the segment's own positions
    transition: Transition | None = None  # T; None without a state, and in a prefix: nothing comes before


@register_kind
@dataclass(frozen=True, eq=False, repr=False)
class HybridPICache(PICache):
    """A segment's token ids, and of its interior [start, end): states of linear layers, keys and values of the others.

    Args:
        token_ids: [tokens] int64, the whole segment.
        start, end: the interior; empty (start == end) when the seams cover the segment.
        linear: by number of the cache layer.
        attention: keys and values [kv_heads, interior, head_dim] by number of the cache layer.
        behind: tokens that the segment was compiled behind; nothing of them is kept.
    """

    token_ids: Tensor
    start: int
    end: int
    linear: dict[int, SegmentState] = field(default_factory=dict)
    attention: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    behind: int = 0
    kind: ClassVar[str] = "hybrid"

    def __post_init__(self) -> None:
        if self.token_ids.ndim != 1 or not len(self.token_ids) or not 0 <= self.start <= self.end <= self.num_tokens:
            raise ValueError(
                "HybridPICache expects token_ids [tokens >= 1] and an interior inside of them, got "
                f"{list(self.token_ids.shape)} and [{self.start}, {self.end})"
            )
        for layer, (keys, values) in self.attention.items():
            if keys.shape[:2] != values.shape[:2] or keys.shape[1] != self.end - self.start:
                raise ValueError(
                    f"HybridPICache expects keys and values of the interior's {self.end - self.start} tokens; "
                    f"layer {layer} has {list(keys.shape)} and {list(values.shape)}"
                )

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def compiled_at(self) -> int:
        """Position of the interior's first token while it was compiled."""
        return self.behind + self.start

    def tensors(self) -> dict[str, Tensor]:
        tensors = {
            "token_ids": self.token_ids,
            # the third once said that it may stand at the start of a prompt alone
            "interior": torch.tensor([self.start, self.end, 0, self.behind], device=self.token_ids.device),
        }
        for layer, part in self.linear.items():
            if part.columns is not None:
                tensors[f"columns.{layer}"] = part.columns
            if part.state is not None:
                tensors[f"state.{layer}"] = part.state
            if part.transition is not None:
                tensors[f"{part.transition.family}.{layer}"] = part.transition.tensor
        for layer, (keys, values) in self.attention.items():
            tensors[f"keys.{layer}"], tensors[f"values.{layer}"] = keys, values
        return tensors

    @classmethod
    def from_tensors(cls, fingerprint: str, tensors: Mapping[str, Tensor]) -> Self:
        start, end, leading, behind = tensors["interior"].tolist()
        if leading:
            raise ValueError("made for the start of a prompt alone, by an earlier version: compile the document again")
        parts: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            part, dot, number = name.partition(".")
            if dot:
                parts.setdefault(int(number), {})[part] = tensor
        linear: dict[int, SegmentState] = {}
        attention: dict[int, tuple[Tensor, Tensor]] = {}
        for layer, held in sorted(parts.items()):
            if "keys" in held:
                attention[layer] = held.pop("keys"), held.pop("values")
            if not held:
                continue
            columns, state, transition = held.pop("columns", None), held.pop("state", None), None
            if held:
                ((family, tensor),) = held.items()
                transition = TRANSITIONS.get(family)(tensor)
            linear[layer] = SegmentState(columns, state, transition)
        return cls(fingerprint, tensors["token_ids"], start, end, linear, attention, behind)

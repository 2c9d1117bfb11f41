"""HYPIC: segments of a hybrid backbone linked by their states' transitions, with seams recomputed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, get_args

import torch

from comb.backbones.forward import counted_passes
from comb.backbones.identity import exclusive
from comb.cache.picache import PICache
from comb.hybrid.caches import is_hybrid
from comb.hybrid.compile import compile_segment
from comb.hybrid.link import Mode, link_segments
from comb.hybrid.packed import linker_for
from comb.hybrid.picache import HybridPICache
from comb.hybrid.support import HybridSupport, find_hybrid_support
from comb.linking.cache import fork_cache
from comb.linking.support import check_keys_cached
from comb.methods.base import LinkRequest
from comb.methods.decode_state import DecodeState, PastState
from comb.methods.fronts import TakesFront, TrainedFront
from comb.methods.prefix import behind_prefix
from comb.methods.registry import register
from comb.methods.selection import TokenCount

_STORAGE = {"float32": torch.float32, "float16": torch.float16}


@register("hypic")
class Hypic(TakesFront):
    """Reuses states, keys and values of every segment's interior; both its ends are computed again when it is linked.

    Exact for one document at the start of a prompt, in the first linear layer for any documents, and everywhere when
    the seams cover the documents. Deeper layers of several documents drift, as their tokens didn't see each other. The
    prefix is the paper's leading segment: kept whole, with the states at its end.

    Args:
        w: seam tokens at either end; at a segment's start at least a convolution's kernel - 1 where the model has one.
        mode: the paper's ablation: ``seam`` (all of it) | ``rotation`` (no seams) | ``transition`` (nor are keys
            turned to their places) | ``addition`` (nor are transitions applied).
        compose: False leaves out transitions alone, in any mode: states are added up.
        storage: dtype of states and dense transitions, ``float32`` or the compact ``float16``.
        front: `TakesFront`; needs a seam, in which the prompt's first document gets its own beginning.

    Source: HYPIC sec. 4.2, eq. 6 to 8, and sec. 4.3.

    Raises:
        ValueError: when the model is no hybrid, or can't be linked; the message says why.
    """

    positional: ClassVar[tuple[str, ...]] = ("w",)
    compile_name = "hybrid"
    unquantizable = (
        "keeps states and transitions, whose errors every later segment inherits (storage=float16 halves them)"
    )

    def __init__(
        self,
        model: Any,
        *,
        w: int = 8,
        mode: Mode = "seam",
        compose: bool = True,
        storage: str = "float32",
        **parameters: Any,
    ) -> None:
        super().__init__(model, **parameters)
        if mode not in get_args(Mode):
            raise ValueError(f"{self.name}:mode is one of {', '.join(get_args(Mode))}, got {mode!r}")
        if storage not in _STORAGE:
            raise ValueError(f"{self.name}:storage is one of {', '.join(_STORAGE)}, got {storage!r}")
        if not isinstance(compose, bool):
            raise ValueError(f"{self.name}:compose is true or false, got {compose!r}")
        TokenCount().check(f"{self.name}:w", w)
        self.mode, self.compose, self.storage = mode, compose, storage
        self.seams = self.support.seams(w) if mode == "seam" else (0, 0)
        if isinstance(self.front, TrainedFront) and self.support.step is not None:
            raise ValueError(f"{self.name}:front is tokens with this model: its scans can't start from a state")
        if self.front.token_ids and not self.seams[0]:
            raise ValueError(
                f"{self.name}:front needs a seam at the start of each document (w of 1 or more, mode=seam): a "
                "prompt that begins with one has no other beginning"
            )

    def check_model(self) -> None:
        if is_hybrid(self.backbone):
            _ = self.support
            return
        check_keys_cached(self.backbone)
        raise ValueError(
            f"method {self.name!r} is for hybrid models, and {type(self.backbone).__name__} has no linear-attention"
            " layers: use method='attnlink' or 'legolink'"
        )

    @property
    def support(self) -> HybridSupport:
        """How this model is linked; asked anew when its weights have changed."""
        return find_hybrid_support(self.backbone)

    @property
    def fingerprint(self) -> str:
        return f"{super().fingerprint}/{self.seams[0]}+{self.seams[1]}/{self.storage}"

    def compile(self, segments: Sequence[Sequence[int]]) -> list[PICache]:
        """One HybridPICache per segment, each from a forward pass of its own."""
        self.check_segments(segments)
        fingerprint, support = self.fingerprint, self.support
        with exclusive(self.backbone):
            begun = self.front.begun(self.backbone, support)
            return [
                compile_segment(
                    self.backbone, support, fingerprint, ids, seams=self.seams,
                    front=self.front.token_ids, begun=begun, dtype=_STORAGE[self.storage],
                )
                for ids in segments
            ]  # fmt: skip

    def link_row(self, row: LinkRequest, past: PastState | None = None) -> DecodeState:
        support = self.support
        picaches = self.owned(
            row, past, HybridPICache,
            links="states, keys and values of a hybrid", made_by="another model, or with other seams or another dtype",
        )  # fmt: skip
        with exclusive(self.backbone), counted_passes() as passed:
            past, prefix_tokens, row = behind_prefix(self, row, past)
            linked = link_segments(
                self.backbone, support, picaches, row.fresh, mode=self.mode, compose=self.compose,
                before=() if past is None else past.token_ids, cache=None if past is None else fork_cache(past.cache),
                linker_type=linker_for(self.backbone, support),
            )  # fmt: skip
        input_ids, attention_mask = self.tensors([linked.token_ids])
        return DecodeState(
            self.backbone, input_ids, attention_mask, past_key_values=linked.cache, recomputed=(linked.recomputed,),
            passed=passed.tokens, prefix_tokens=prefix_tokens, seconds=linked.seconds, step=support.step,
        )  # fmt: skip


@register("addition")
class Addition(Hypic):
    """Adds every segment's state to the one before, as if the segment forgot nothing of it; recomputes nothing.

    The same as ``hypic:mode=addition``, under the papers' name, and linked from the same PICaches.

    Args:
        rotate: turns keys to their places (``hypic:mode=rotation,compose=false``), as the paper's baseline doesn't.
            What composition is worth shows against this.
        storage: as for `hypic`.

    Source: HYPIC sec. 3.1 and 6.3.
    """

    positional = ()

    def __init__(self, model: Any, *, rotate: bool = False, storage: str = "float32", **parameters: Any) -> None:
        if not isinstance(rotate, bool):
            raise ValueError(f"addition:rotate is true or false, got {rotate!r}")
        super().__init__(model, mode="rotation" if rotate else "addition", compose=False, storage=storage, **parameters)

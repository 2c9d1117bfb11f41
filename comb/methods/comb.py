"""COMB: a trained encoder compiles documents, gated cross-attention blocks in the backbone read them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch

from comb.backbones.forward import counted_passes
from comb.backbones.identity import exclusive
from comb.cache.picache import CrossPICache, PICache
from comb.methods.base import LinkRequest, Method
from comb.methods.decode_state import DecodeState, PastState, pass_size, why_not_continue
from comb.methods.prefix import behind_prefix
from comb.methods.registry import register
from comb.waits import all_finite


@register("comb")
class Comb(Method):
    """Documents as keys and values of the cross blocks; the decoder's own prompt is prefix + query.

    With an adapter of `CombConfig.exact_prefix` the prefix reads no documents, and is cached as any method's.

    Position-independent by construction: segments are encoded alone from position zero, and cross-attention has no
    positions, so neither the order of the documents nor their neighbours matter.

    Source: COMB sec. 3 (encoder and cross blocks).

    Raises:
        ValueError: when the model has no encoder.
    """

    uses_encoder = True

    def __init__(self, model: Any, **parameters: Any) -> None:
        super().__init__(model, **parameters)
        if not callable(getattr(model, "encode", None)) or not hasattr(model, "max_document_tokens"):
            raise ValueError(
                f"method 'comb' needs a model with a trained encoder, {type(model).__name__} is a plain backbone: make "
                "one with CombForCausalLM.from_backbone(...) and train it with `comb train`, load a trained one with "
                "CombForCausalLM.from_pretrained(...), or use method='full' or 'prefix'"
            )

    @property
    def fingerprint(self) -> str:
        return str(self.model.fingerprint)

    @property
    def sink_tokens(self) -> int:
        return int(self.model.config.encoder_config.sink_tokens)

    @property
    def max_segment_tokens(self) -> int | None:
        return int(self.model.max_document_tokens)

    def compile(self, segments: Sequence[Sequence[int]]) -> list[PICache]:
        """One CrossPICache per segment."""
        with exclusive(self.model):
            picaches: list[PICache] = list(self.model.encode([list(segment) for segment in segments]))
        if all_finite(tensor for picache in picaches for tensor in picache.tensors().values()):
            return picaches
        for index, picache in enumerate(picaches):
            broken = [name for name, tensor in picache.tensors().items() if not bool(torch.isfinite(tensor).all())]
            if broken:
                raise ValueError(
                    f"the encoder gave NaN or infinite {' and '.join(broken)} for segment {index + 1} of "
                    f"{len(segments)}: the adapter's weights are damaged or overflow in {self.dtype}"
                )
        return picaches

    def link_batch(self, rows: Sequence[LinkRequest]) -> DecodeState:
        """Left-padded rows of the decoder's own tokens, and what they read. One row goes on from its cached prefix."""
        prompts = [self._prompt(row) for row in rows]
        # the last token always reads: what is asked about documents stands behind them
        prefixes = [min(len(row.prefix_ids), len(prompt) - 1) if row.picaches else 0
                 for row, prompt in zip(rows, prompts, strict=True)]  # fmt: skip
        exact = self.model.config.exact_prefix and any(prefixes)
        if exact and len(rows) == 1 and prefixes[0] == len(rows[0].prefix_ids):
            with exclusive(self.model), counted_passes() as passed:
                past, prefix_tokens, _ = behind_prefix(self, rows[0], None)
                if past is not None:
                    state = self._behind(past, prompts[0], rows[0])
                    state.passed, state.prefix_tokens = state.passed + passed.tokens, prefix_tokens
                    return state
        input_ids, attention_mask = self.tensors(prompts)
        state = DecodeState(self.model, input_ids, attention_mask, recomputed=(0,) * len(rows))
        state.prefixes = prefixes if exact else None
        return self._reading(state, rows)

    def why_not_continue(self) -> str:
        reason = why_not_continue(self.backbone)
        if not reason and pass_size(self.backbone) is not None:
            reason = "its scan can't start from a state, and takes no documents token by token"
        return reason

    def continue_row(self, past: PastState, row: LinkRequest) -> DecodeState:
        """The query goes on; `row` is whole, with all documents of the conversation."""
        return self._behind(past, self._prompt(row), row)

    def _behind(self, past: PastState, prompt: Sequence[int], row: LinkRequest) -> DecodeState:
        state = self.continue_tokens(past, prompt[len(past.token_ids) :])
        state.model = self.model
        return self._reading(state, [row])

    def _reading(self, state: DecodeState, rows: Sequence[LinkRequest]) -> DecodeState:
        """The state, with its rows' documents."""
        if any(row.picaches for row in rows):
            state.documents = [list(row.picaches) for row in rows]
        return state

    def _prompt(self, row: LinkRequest) -> list[int]:
        """The tokens of a row that aren't documents'. Raises ValueError for another model's, and too many of them."""
        for picache in row.picaches:
            if not isinstance(picache, CrossPICache):
                raise ValueError(f"method 'comb' links CrossPICaches, got a {type(picache).__name__}")
            self.model.check_picache(picache)
        prompt = list(chain.from_iterable(row.fresh))
        self.check_prompt(0, len(prompt))
        return prompt

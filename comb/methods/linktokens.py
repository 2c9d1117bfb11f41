"""Link tokens: documents compiled behind learned ones; nothing is recomputed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from comb.backbones.adapter import trained_method
from comb.backbones.exclusive import exclusive
from comb.cache.picache import DecoderPICache, PICache
from comb.documents.document import Prompt
from comb.methods import register
from comb.methods.decoder import Decoder


@register("linktokens")
class LinkTokens(Decoder):
    """`naive` over documents that were compiled behind n learned tokens.

    These take the place of what a document misses when it is compiled alone: the attention sink, and what usually
    stands in front of it. They come with an adapter (`comb.linktokens`), which says how many there are, and whether
    their keys and values stay in front of the document (`kept`) or are dropped, as LegoLink-0's dummies are.

    Source: KVLink (arXiv:2502.16002), whose link tokens are computed at link time, and KV Packet (arXiv:2604.13226),
    whose trained wrappers are not; the keys and values as parameters are prefix tuning's (Li and Liang 2021).

    Raises:
        ValueError: when the model has no link tokens.
    """

    compile_name = "linktokens"
    exact_for_one = False

    def __init__(self, model: Any, **parameters: Any) -> None:
        if trained_method(model) != self.name:
            raise ValueError(
                f"method 'linktokens' needs a model with trained link tokens, {type(model).__name__} has none: train "
                "some with `comb train configs/linktokens-smollm2-135m.yaml`, load an adapter that has them, or use "
                "method='naive'"
            )
        super().__init__(model, **parameters)
        if self.primer:
            raise ValueError("linktokens compiles behind its link tokens and takes no primer")

    @property
    def fingerprint(self) -> str:
        return str(self.model.fingerprint)

    @property
    def max_segment_tokens(self) -> int | None:
        longest = super().max_segment_tokens
        return None if longest is None else longest - self.model.num_link_tokens

    def compile(self, segments: Sequence[Sequence[int]]) -> list[PICache]:
        """One DecoderPICache per segment, of its link tokens and its own; errors as of `Decoder.compile`."""
        with exclusive(self.backbone):
            compiled: list[Any] = super().compile(segments)
            if not self.model.config.kept:
                return compiled
            [front] = self.front()
            return [_behind(front, each) for each in compiled]

    def front(self) -> list[DecoderPICache]:
        """The link tokens."""
        keys, values = zip(*self.model.link_front(), strict=True)
        return [DecoderPICache(self.fingerprint, keys, values, torch.tensor(self._placeholders))]

    @property
    def drops_front(self) -> bool:
        return not self.model.config.kept

    @property
    def compiled_from(self) -> int:
        return int(self.model.num_link_tokens) if self.drops_front else 0

    def decoder_prompt(self, prompt: Prompt) -> Prompt:
        if not self.model.config.kept:
            return prompt
        return replace(prompt, segments=tuple((*self._placeholders, *segment) for segment in prompt.segments))

    @property
    def _placeholders(self) -> list[int]:
        return [self.model.placeholder_id] * self.model.num_link_tokens


def _behind(front: DecoderPICache, segment: DecoderPICache) -> DecoderPICache:
    """Both as one."""
    keys, values = (
        tuple(torch.cat(pair, dim=1) for pair in zip(getattr(front, name), getattr(segment, name), strict=True))
        for name in ("keys", "values")
    )
    assert front.token_ids is not None
    assert segment.token_ids is not None
    return DecoderPICache(front.fingerprint, keys, values, torch.cat([front.token_ids, segment.token_ids]))

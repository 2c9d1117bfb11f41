"""Link tokens: documents compiled behind learned ones; nothing is recomputed."""

from __future__ import annotations

from typing import Any

import torch

from comb.backbones.adapter import trained_method
from comb.cache.picache import DecoderPICache
from comb.methods import register
from comb.methods.decoder import Decoder


@register("linktokens")
class LinkTokens(Decoder):
    """`naive` over documents that were compiled behind n learned tokens.

    These take the place of what a document misses when it is compiled alone: the attention sink, and what usually
    stands in front of it. They come with an adapter (`comb.linktokens`), which says how many there are. Linked prompts
    don't hold them: they are dropped, as LegoLink-0's dummies are.

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

    def front(self) -> list[DecoderPICache]:
        """The link tokens."""
        keys, values = zip(*self.model.link_front(), strict=True)
        ids = torch.full((self.compiled_from,), self.model.placeholder_id)
        return [DecoderPICache(self.fingerprint, keys, values, ids)]

    @property
    def drops_front(self) -> bool:
        return True

    @property
    def compiled_from(self) -> int:
        return int(self.model.num_link_tokens)

"""Block: documents that see only themselves, for backbones that were fine-tuned to read them so."""

from __future__ import annotations

import logging
from typing import Any

from comb.methods import register
from comb.methods.decoder import Decoder

logger = logging.getLogger(__name__)


@register("block")
class Block(Decoder):
    """Block attention: exactly what a model computes under a block-diagonal mask with a last block that sees all.

    The same computation as `naive` with rotation. On a backbone trained under that mask nothing is lost; on any other
    it is `naive`, and a warning says so. ``block_attention: true`` in its configuration marks such a backbone.

    Source: the block-attention baseline of COMB sec. 5 (Block-Attention, Ma et al. 2024).
    """

    def __init__(self, model: Any, **parameters: Any) -> None:
        super().__init__(model, **parameters)
        trained = getattr(self.backbone.config, "block_attention", False)
        if not trained and not self.backbone.__dict__.setdefault("_comb_block_warned", False):
            self.backbone.__dict__["_comb_block_warned"] = True
            logger.warning(
                "method 'block' is meant for a backbone fine-tuned with block attention; the configuration of this one "
                "doesn't say that it was (block_attention: true), so expect the quality of 'naive'"
            )

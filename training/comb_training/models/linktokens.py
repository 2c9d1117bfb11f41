"""Method `linktokens`: a few vectors in front of every document train on the frozen backbone.

A row is the whole prompt and its answer; its documents see themselves and their link tokens, as they are linked.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle, islice
from typing import Any

from comb.backbones.loading import load_config
from comb.backbones.primer import primer_ids
from comb.backbones.rotary import configured_primer_limit
from comb.backbones.tokenizer import load_tokenizer
from comb.linktokens.modeling import LinkTokensForCausalLM
from comb_training.config import Config
from comb_training.models.adapter import AdapterTraining, trained_options
from comb_training.models.loading import device_of, dtype_of
from comb_training.models.method import training_methods
from comb_training.models.rows import RowTraining


def starting_tokens(backbone: str, count: int | None) -> list[int]:
    """What fresh link tokens start as: the passage that ``primed`` compiles behind, or its last `count` tokens."""
    passage = primer_ids(True, load_tokenizer(backbone), configured_primer_limit(load_config(backbone)))
    return passage if count is None else list(islice(cycle(reversed(passage)), count))[::-1]


@training_methods.register("linktokens")
class LinkTokensTraining(RowTraining, AdapterTraining):
    """Source: KV Packet (arXiv:2604.13226); docs/linktokens.md says what is other here."""

    adapter = LinkTokensForCausalLM
    published_part = "front"

    def load(self, config: Config) -> LinkTokensForCausalLM:
        """Fresh link tokens on the configured backbone, or those of `model.init_from`."""
        if config.train.lora_rank is not None:
            raise ValueError("train.lora_rank: link tokens are no layers; leave it out with train.method=linktokens")
        if config.model.init_from is None:
            dtype, options = dtype_of(config.model.dtype), trained_options(config)
            start = starting_tokens(config.model.backbone, options.pop("num_link_tokens", None))
            model = LinkTokensForCausalLM.from_backbone(config.model.backbone, dtype=dtype, token_ids=start, **options)
        else:
            model = self.continued(config)
        loaded: LinkTokensForCausalLM = model.to(device_of(config))
        loaded.trainable_support()
        return loaded

    def bare(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        return {**inputs, "linked": False}

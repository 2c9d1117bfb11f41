"""Method `linktokens`: a few vectors in front of every document train on the frozen backbone.

A row is the whole prompt and its answer; its documents see themselves and their link tokens, as they are linked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import Any

import torch

from comb.backbones.rotary import front_limit
from comb.backbones.tokenizer import front_ids, load_tokenizer
from comb.documents.document import Prompt
from comb.linking.masks import FRESH, PADDING
from comb.linktokens.modeling import LinkTokensForCausalLM
from comb_training.config import Config
from comb_training.data.batches import Collator, TrainingExample
from comb_training.models.method import TrainingMethod, device_of, dtype_of, plain_config, trained_options


@dataclass
class RowCollator(Collator):
    """Whole prompts with their answers, padded; `segments` [B, T] tells the documents apart."""

    def __call__(self, examples: Sequence[TrainingExample]) -> dict[str, Any]:
        batch: dict[str, Any] = self.rows([(example.prompt.flat, example) for example in examples])
        if self.full_prompts:
            batch["full_prompts"] = {name: tensor.clone() for name, tensor in batch.items()}
        segments = torch.full(batch["input_ids"].shape, PADDING)
        for index, example in enumerate(examples):
            prompt = example.prompt
            segments[index, : len(prompt.flat) + len(example.target)] = FRESH
            for number, (position, length) in enumerate(prompt.spans, 1):
                segments[index, position : position + length] = number
        batch["segments"] = segments
        return batch


def starting_tokens(backbone: str, count: int | None) -> list[int]:
    """What fresh link tokens start as: the passage that ``primed`` compiles behind, or its last `count` tokens."""
    passage = front_ids("prose", load_tokenizer(backbone), front_limit(plain_config(backbone)))
    return passage if count is None else list(islice(cycle(reversed(passage)), count))[::-1]


class LinkTokensTraining(TrainingMethod):
    """Source: KV Packet (arXiv:2604.13226); docs/linktokens.md says what is other here."""

    adapter = LinkTokensForCausalLM
    collator = RowCollator

    def load(self, config: Config) -> LinkTokensForCausalLM:
        """Fresh link tokens on the configured backbone, or those of `model.init_from`."""
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

    def row(self, example: TrainingExample) -> TrainingExample:
        """The same question as a row that holds its documents."""
        return replace(example, prompt=Prompt(example.prompt.flat, (), ()))

"""What the ways of training (`train.method`) differ in; everything else is the same for all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from comb.documents.datasets import Counts
from comb_training.config import Config
from comb_training.data.batches import Collator, TrainingExample
from comb_training.models.block_attention import BlockAttentionModel, BlockCollator, whole_prompt
from comb_training.models.loading import load_block_model, load_model


@dataclass(frozen=True)
class Way:
    """One way of training.

    Args:
        load: the model that trains, as configured.
        collator: of its batches.
        row: of an example, the tokens that go through the backbone: what a batch's budget counts.
        rows_hold_documents: a row may then be longer than the backbone's positions.
        part: submodule whose frozen weights are published with the trained ones where LoRA is merged.
        plain: the backbone as it was before training, for as long as the context lasts.
        answering: of the model that trains, the one that answers by the method of the same name.
        save_trained: ``(model, folder, tokenizer, weights)`` writes the trained weights to resume from.
    """

    load: Callable[[Config], Any]
    collator: type[Collator]
    row: Callable[[TrainingExample], TrainingExample]
    rows_hold_documents: bool
    part: str
    plain: Callable[[Any], AbstractContextManager[Any]]
    answering: Callable[[Any], Any]
    save_trained: Callable[[Any, Path, Any, Mapping[str, Tensor]], None]

    def fitting(
        self, examples: Sequence[TrainingExample], model: Any, config: Config, counts: Counts
    ) -> Sequence[TrainingExample]:
        """Without examples whose row is longer than `data.max_prompt_tokens` or the backbone's positions; counted."""
        if not self.rows_hold_documents:
            return examples
        longest: int = model.config.get_text_config().max_position_embeddings
        longest = min(longest, config.data.max_prompt_tokens or longest)
        kept = [example for example in examples if len(example.prompt.flat) + len(example.target) <= longest]
        counts.drop(f"prompt and answer of more than {longest} tokens", len(examples) - len(kept))
        return kept


def _save_adapter(model: Any, folder: Path, tokenizer: Any, weights: Mapping[str, Tensor]) -> None:
    model.save_pretrained(folder, tokenizer=tokenizer, state_dict=weights)


WAYS = {
    "comb": Way(
        load=load_model,
        collator=Collator,
        row=lambda example: example,
        rows_hold_documents=False,
        part="encoder",
        plain=lambda model: nullcontext(model.backbone),
        answering=lambda model: model,
        save_trained=_save_adapter,
    ),
    "block": Way(
        load=load_block_model,
        collator=BlockCollator,
        row=whole_prompt,
        rows_hold_documents=True,
        part="backbone",
        plain=BlockAttentionModel.plain,
        answering=lambda model: model.backbone,
        save_trained=BlockAttentionModel.save_trained,
    ),
}

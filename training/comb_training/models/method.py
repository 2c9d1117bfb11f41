"""What the methods of training (`train.method`) differ in: which adapter trains beside the backbone, on which rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch

from comb.backbones.loading import resolve_name
from comb.documents.datasets import Counts
from comb.registry import Registry
from comb_training.config import Config
from comb_training.data.batches import Collator, TrainingExample
from comb_training.models.loading import device_of, dtype_of, shaping_options


class TrainingMethod(ABC):
    """A method of training: which adapter trains, and on which rows."""

    adapter: ClassVar[Any]
    """Class of the adapter."""
    collator: ClassVar[type[Collator]] = Collator
    """Makes the batches."""

    @abstractmethod
    def load(self, config: Config) -> Any:
        """The model that trains, as configured. Raises ValueError for options that make no sense together."""

    def continued(self, config: Config) -> Any:
        """The adapter of `model.init_from` on its backbone, ready to be trained on. Raises ValueError for options that
        would shape another one."""
        assert config.model.init_from is not None
        if shaping := sorted(shaping_options(self.adapter, config.model.options).keys() - {"adapter_dtype"}):
            raise ValueError(f"model.options {', '.join(shaping)} can't change the adapter of model.init_from")
        model = self.adapter.from_pretrained(
            resolve_name(config.model.init_from), dtype=dtype_of(config.model.dtype), **trained_options(config)
        )
        model.requires_grad_(True).backbone.requires_grad_(False)
        return model

    def fitted(self, model: Any, config: Config, examples: Sequence[TrainingExample], resume: str | Path | None) -> Any:
        """The model as it starts training on `examples`: what is measured on them."""
        return model

    @abstractmethod
    def bare(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """A batch's inputs without its documents."""

    def row(self, example: TrainingExample) -> TrainingExample:
        """Of an example, the tokens that go through the backbone: what a batch's budget counts."""
        return example

    def fitting(
        self, examples: Sequence[TrainingExample], model: Any, config: Config, counts: Counts
    ) -> Sequence[TrainingExample]:
        """The examples whose rows the backbone can take; those left out are counted."""
        return examples


training_methods: Registry[type[TrainingMethod]] = Registry("training method", "comb_training.models")


def training_method(name: str) -> TrainingMethod:
    """The method called `name`. Raises ValueError naming the known ones."""
    return training_methods.get(name)()


def trained_options(config: Config) -> dict[str, Any]:
    """Of `model.options`, those of an adapter that trains, and where its backbone is loaded to."""
    # trained weights stay in float32 whatever the backbone's: small updates, of gates above all, are not lost
    options = {"adapter_dtype": torch.float32, **config.model.options}
    device = device_of(config)
    if device.type == "cuda" and config.train.deepspeed is None:  # ZeRO-3 loads each rank's part, and takes no map
        # whether documents can be linked is tried out, in a dozen passes: of an 8B model minutes of a CPU
        options.setdefault("device_map", {"": device})
    return options

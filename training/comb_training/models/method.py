"""What the methods of training (`train.method`) differ in; everything else is the same for all of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn

from comb.documents.datasets import Counts
from comb.registry import Registry
from comb_training.config import Config
from comb_training.data.batches import Collator, TrainingExample


class TrainingMethod(ABC):
    """A method of training: which model trains, on which rows, and what of it is kept."""

    collator: ClassVar[type[Collator]] = Collator
    """Makes the batches."""
    published_part: ClassVar[str]
    """Submodule whose frozen weights are published with the trained ones where LoRA is merged."""

    adapter: ClassVar[Any] = None
    """Class of the adapter that it trains; None where the backbone itself trains."""
    measures_closed: ClassVar[bool] = False
    """Whether a batch can be run without its documents, which is what `eval_closed` is measured against."""

    @abstractmethod
    def load(self, config: Config) -> Any:
        """The model that trains, as configured. Raises ValueError for options that make no sense together."""

    def fitted(self, model: Any, config: Config, examples: Sequence[TrainingExample], resume: str | Path | None) -> Any:
        """The model as it starts training on `examples`: what is measured on them or solved for in closed form."""
        return model

    def compiled_parts(self, model: Any) -> Sequence[nn.Module]:
        """Modules that `train.torch_compile` compiles, each for itself."""
        return ()

    @abstractmethod
    def plain_backbone(self, model: Any) -> AbstractContextManager[Any]:
        """The backbone as it was before training, for as long as the context lasts."""

    @abstractmethod
    def save_trained(self, model: Any, folder: Path, tokenizer: Any, weights: Mapping[str, Tensor]) -> None:
        """Writes the trained weights to resume from (`load_trainable` reads them)."""

    def bare(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """A batch's inputs without its documents; only where `measures_closed`."""
        raise NotImplementedError

    def answering(self, model: Any) -> Any:
        """Of the model that trains, the one that answers by the inference method of the same name."""
        return model

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

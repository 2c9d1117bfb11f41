"""One stage of a run that has several (`train.stages`)."""

from __future__ import annotations

from typing import Any

from pydantic import Field
from pydantic.dataclasses import dataclass

from comb_training.config.types import KNOWN_KEYS, Options

OF_THE_RUN = ("stages", "method", "output_dir", "deepspeed")
"""Keys of `train` that hold for all stages."""


@dataclass(frozen=True, config=KNOWN_KEYS)
class StageConfig:
    """What is other in a stage than in the run's sections; it starts from the adapter of the stage before.

    Its optimizer and its schedule, warm-up included, begin anew.

    Raises:
        ValueError: for a name that can't be a folder's, or a key that holds for all stages.
    """

    name: str
    """What the stage is called, in folders, tables and plots."""
    data: Options = Field(default_factory=dict)
    """Keys of `data`. With a `dataset` or a `mixture` of its own, the keys that say which rows are read start from
    their defaults; how text is written stays."""
    train: Options = Field(default_factory=dict)
    """Keys of `train`. With one of `steps`, `epochs` and `max_seconds`, the run's own three don't hold."""

    def __post_init__(self) -> None:
        if not self.name or not self.name.replace("-", "").replace("_", "").isalnum():
            raise ValueError(f"train.stages: a name is letters, digits, - and _, not {self.name!r}")
        if given := sorted(set(OF_THE_RUN) & self.train.keys()):
            raise ValueError(
                f"train.stages, {self.name}: train.{given[0]} holds for all stages: set it outside of them"
            )

    def sections(self, data: dict[str, Any], train: dict[str, Any]) -> dict[str, dict[str, Any]]:
        """The stage's sections, from those of the run."""
        data, train = dict(data), {name: value for name, value in train.items() if name != "stages"}
        if "dataset" in self.data:
            _leave_out(data, "mixture", "epoch_examples", "max_repeats", "num_documents", "options")
        if "mixture" in self.data:
            _leave_out(data, "dataset", "num_documents", "options")
        lengths = ("steps", "epochs", "max_seconds")
        if not self.train.keys().isdisjoint(lengths):
            _leave_out(train, *lengths)
        return {"data": data | self.data, "train": train | self.train}


def _leave_out(section: dict[str, Any], *names: str) -> None:
    for name in names:
        section.pop(name, None)

"""The sections of a training run's configuration; `data` and `train` have files of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field, StrictBool, StrictInt, TypeAdapter
from pydantic.dataclasses import dataclass

from comb_training.config.data import DataConfig
from comb_training.config.train import TrainConfig
from comb_training.config.types import KNOWN_KEYS, AtLeastOne, AtLeastZero, Items, Options


@dataclass(frozen=True, config=KNOWN_KEYS)
class ModelConfig:
    """The backbone and the shape of the encoder that is trained on it (of other methods, `options` alone)."""

    backbone: str = "nano"
    """Hub id, folder, or registered name of the frozen backbone."""
    num_encoder_layers: AtLeastOne | None = None
    """Layers of the encoder; null: 8 (the paper)."""
    cross_attention_layers: Items[StrictInt] | None = None
    """Backbone layers with a cross block in front of them; null: evenly spread, one per encoder layer."""
    measured_cross_layers: AtLeastOne | None = None
    """Instead of naming them: so many, in front of the layers through which the backbone reads documents. That is
    measured on some of the training examples before the run; see docs/training.md."""
    encoder_causal: StrictBool = False
    """A causal mask inside the encoder (the paper's equation); false is bidirectional, as in the published code."""
    dtype: str = "float32"
    """Weights' dtype: float32, bfloat16, float16 or auto."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: a GPU where there is one. (CUDA_VISIBLE_DEVICES chooses among several.)"""
    init_from: str | None = None
    """An adapter folder to go on from, instead of a fresh encoder."""
    cpu_threads: AtLeastOne | None = None
    """Threads of torch on a CPU; null is torch's default. Tiny models are fastest with one: more only wait."""
    options: Options = Field(default_factory=dict)
    """More keyword arguments of `CombForCausalLM.from_backbone`, or `LinkTokensForCausalLM.from_backbone`."""

    def __post_init__(self) -> None:
        if self.measured_cross_layers is not None:
            for name in ("cross_attention_layers", "init_from"):
                if getattr(self, name) is not None:
                    raise ValueError(f"model.measured_cross_layers and model.{name} both say where cross blocks are")

    @property
    def first_cross_layers(self) -> Sequence[int] | None:
        """The layers that are named; as many as will be measured, anywhere; or None."""
        count = self.measured_cross_layers
        return self.cross_attention_layers if count is None else range(count)


@dataclass(frozen=True, config=KNOWN_KEYS)
class EvalConfig:
    """The evaluation on held-out groups after training."""

    methods: Items[str] = ("full", "comb", "none")
    """Methods to compare; "none" is the control without documents."""
    limit: AtLeastZero = 100
    """Held-out examples at most; 0: no evaluation."""
    max_new_tokens: AtLeastOne = 48
    """Longest answer."""
    timing_examples: AtLeastZero = 8
    """Examples of which the time to the first token is measured, one request at a time; 0 measures none."""


@dataclass(frozen=True, config=KNOWN_KEYS)
class Config:
    """One training run."""

    model: ModelConfig = Field(default_factory=ModelConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    eval: EvalConfig = Field(default_factory=EvalConfig)

    def __post_init__(self) -> None:
        method = self.train.method
        if method != "comb":
            if self.eval == EvalConfig():
                object.__setattr__(self, "eval", EvalConfig(methods=("full", method, "none")))
            if "comb" in self.eval.methods:
                raise ValueError(
                    f"eval.methods has comb, but train.method={method} trains no encoder; use full, {method}, none"
                )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for YAML and JSON."""
        return TypeAdapter(Config).dump_python(self, mode="json")  # type: ignore[no-any-return]  # a dict

    def changed(self) -> dict[str, Any]:
        """`to_dict` without keys that have their defaults, except for what is trained on what."""
        usual, shown = Config().to_dict(), self.to_dict()
        return {
            name: {
                key: value
                for key, value in section.items()
                if value != usual[name][key] or key in ("backbone", "dataset", "output_dir")
            }
            for name, section in shown.items()
        }

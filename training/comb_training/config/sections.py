"""The sections of a training run's configuration; `data` has a file of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field, StrictBool, StrictInt, TypeAdapter
from pydantic.dataclasses import dataclass

from comb_training.config.data import DataConfig
from comb_training.config.types import (
    KNOWN_KEYS,
    AboveZero,
    AtLeastOne,
    AtLeastZero,
    Items,
    NotNegative,
    Options,
    Positive,
    Share,
)


@dataclass(frozen=True, config=KNOWN_KEYS)
class TrainConfig:
    """Optimisation. Training stops at the first of `steps`, `epochs` and `max_seconds` that is reached."""

    method: Literal["comb", "linktokens"] = "comb"
    """comb trains an encoder and cross blocks on the frozen backbone, linktokens a few vectors in front of every
    document."""
    steps: AboveZero | None = None
    """Optimizer steps."""
    epochs: Positive | None = None
    """Passes over the data."""
    max_seconds: Positive | None = None
    """Wall-clock seconds of optimisation; the learning rate then follows the clock."""
    batch_size: AtLeastOne = 32
    """Questions per forward pass and rank, at most."""
    batch_document_tokens: AboveZero | None = None
    """Tokens of different documents per forward pass and rank, at most; null: no limit."""
    batch_query_tokens: AboveZero | None = None
    """Questions times tokens of the longest one (query and answer) per forward pass and rank, at most; null: no limit.
    With either budget, examples of like length share a batch."""
    gradient_accumulation_steps: AtLeastOne = 1
    """Forward passes per optimizer step."""
    learning_rate: NotNegative = 2e-3
    """Peak learning rate of everything but the gates, which learn ten times as fast."""
    warmup: Share = 0.05
    """Share of the run in which the learning rate rises linearly."""
    objective: Literal["answers", "attention"] = "answers"
    """answers: as the weights below say. attention: what cross blocks add to hidden states becomes what documents in
    the prompt add there, in the backbone's own attention, at every target token: a first stage, over long targets."""
    ce_weight: NotNegative = 1.0
    """Weight of the cross-entropy on the answers; 0 with `kl_weight` distils alone, which sharpens nothing."""
    kl_weight: NotNegative = 0.0
    """Weight of the divergence from the backbone that reads the documents in its prompt, beside the cross-entropy; it
    costs a forward pass over the full prompts."""
    kl_top_k: AtLeastOne = 64
    """Likeliest tokens of the backbone that the divergence tells apart; all others count as one."""
    lora_rank: AtLeastOne | None = None
    """LoRA of this rank on the encoder's layers instead of training them in full; what is published is merged."""
    weight_decay: NotNegative = 0.01
    """AdamW's, on matrices only (not on norms, biases and gates)."""
    max_grad_norm: NotNegative = 1.0
    """Gradients are clipped to this norm; 0 turns clipping off."""
    gradient_checkpointing: StrictBool = False
    """Less memory for more time."""
    bf16: StrictBool = False
    """Mixed precision (autocast to bfloat16); under DeepSpeed its own configuration decides."""
    deepspeed: str | None = None
    """A DeepSpeed configuration (JSON), passed through as it is: see configs/deepspeed. Needs `torchrun`."""
    max_bad_steps: AtLeastZero = 0
    """Batches with a NaN or infinite loss that are left out (each is kept in a file) before the run stops."""
    seed: StrictInt = 0
    """Initialisation of new weights, and the order of the data."""
    answers: Literal["on_policy", "gold"] = "on_policy"
    """on_policy trains on the backbone's own greedy answers with the documents in its prompt; gold on the data's."""
    answer_max_new_tokens: AtLeastOne = 48
    """Longest answer the backbone may give."""
    answer_batch_size: AtLeastOne = 64
    """Questions answered at once by the backbone."""
    answers_dir: str | None = None
    """Folder where answers are kept for the next run; null is answers in output_dir."""
    teacher: str | None = None
    """Hub id, folder or registered name of another model that answers in the backbone's place."""
    logging_steps: AtLeastOne = 5
    """Steps between two loss records."""
    save_steps: AboveZero | None = None
    """Steps between two resumable checkpoints; null writes the final adapter only."""
    eval_steps: AboveZero | None = None
    """Steps between two records of the loss on held-out examples (`eval.limit` of them); null: none."""
    save_total_limit: AtLeastZero = 2
    """Older resumable checkpoints are removed; 0 keeps all."""
    output_dir: str = "out/comb"
    """Folder of the adapter, training.json and the loss plot."""
    report_to: Items[str] = ()
    """tensorboard, wandb, trackio: whatever is installed. The run is called as its output_dir."""

    def __post_init__(self) -> None:
        if self.steps is None and self.epochs is None and self.max_seconds is None:
            object.__setattr__(self, "epochs", 1.0)
        if self.objective == "attention" and self.kl_weight:
            raise ValueError("train.kl_weight has no effect with train.objective=attention: leave it out")
        if self.ce_weight == self.kl_weight == 0:
            raise ValueError("train.ce_weight and train.kl_weight are both 0: there is nothing to learn")
        if self.teacher is not None and self.answers != "on_policy":
            raise ValueError(f"train.teacher answers only with train.answers=on_policy, not {self.answers!r}")


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


@dataclass(frozen=True, config=KNOWN_KEYS)
class Config:
    """One training run."""

    model: ModelConfig = Field(default_factory=ModelConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    eval: EvalConfig = Field(default_factory=EvalConfig)

    def __post_init__(self) -> None:
        if self.train.eval_steps is not None and self.eval.limit == 0:
            raise ValueError(
                "train.eval_steps measures held-out examples and eval.limit=0 takes none: --no-eval leaves out the "
                "evaluation behind the training alone; train.eval_steps=null measures nothing"
            )
        method = self.train.method
        if method != "comb":
            if self.train.objective == "attention":
                raise ValueError("train.objective=attention is of cross blocks, which train.method=comb has")
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

"""How a run optimises, what it keeps, and when it ends."""

from __future__ import annotations

from typing import Literal

from pydantic import StrictBool, StrictInt
from pydantic.dataclasses import dataclass

from comb_training.config.types import (
    KNOWN_KEYS,
    AboveZero,
    AtLeastOne,
    AtLeastZero,
    Items,
    NotNegative,
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
    """Peak learning rate of everything but the gates."""
    gate_learning_rate_multiplier: NotNegative = 10.0
    """The gates start at zero and decide how soon the encoder is heard: they learn faster by this factor."""
    warmup: Share = 0.05
    """Share of the run in which the learning rate rises linearly."""
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
        if self.ce_weight == self.kl_weight == 0:
            raise ValueError("train.ce_weight and train.kl_weight are both 0: there is nothing to learn")
        if self.teacher is not None and self.answers != "on_policy":
            raise ValueError(f"train.teacher answers only with train.answers=on_policy, not {self.answers!r}")

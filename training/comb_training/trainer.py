"""`CombTrainer`: transformers' Trainer for an encoder on a frozen backbone, in one process.

What it changes: parameter groups (gates learn faster, only matrices decay), a learning rate that can follow the
clock, the order of the data, checkpoints without the backbone, and a loss that is not a number stops the run.

The loss is the mean over all target tokens of an optimizer step: the Trainer counts them over the accumulated batches
and `target_loss` divides a sum by that count. So neither the split into forward passes nor the padding changes the
gradient. It is computed here from the logits, not by the backbone, because not every backbone takes the count.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm
from transformers import (
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from comb_training.batches import IGNORED, Collator, DocumentOrderSampler, TrainingExample
from comb_training.config import TrainConfig

logger = logging.getLogger(__name__)

UNLIMITED_STEPS = 10**9  # for runs that only the clock ends


class TrainingDivergedError(RuntimeError):
    """The loss became NaN or infinite."""


class Schedule:
    """Linear warm-up, then a cosine down to `final`, as a factor of the peak learning rate.

    Progress is the greater of steps done / steps and seconds used / `max_seconds`. So a run that the clock ends
    gets its whole cool-down however fast the machine is; its learning rates then depend on the machine, which a
    run limited by steps avoids. A callable object, because `LambdaLR` saves the state of objects (`used` goes on
    after a resume).
    """

    # in slots, so that `LambdaLR` saves `used` alone: a resumed run may have another length
    __slots__ = ("__dict__", "final", "max_seconds", "steps", "warmup")

    def __init__(self, steps: int, max_seconds: float | None, warmup: float, final: float) -> None:
        self.steps = steps
        self.max_seconds = max_seconds
        self.warmup = warmup
        self.final = final
        self.used = 0.0  # seconds of optimisation so far

    def progress(self, step: int) -> float:
        """0 at the start, 1 at the end."""
        clock = 0.0 if self.max_seconds is None else self.used / self.max_seconds
        return min(1.0, max(step / self.steps, clock))

    def __call__(self, step: int) -> float:
        # the first update has done nothing yet, but its learning rate must not be zero
        progress = max(self.progress(step), min(1.0, 1 / self.steps))
        if self.max_seconds is not None:
            progress = max(progress, 1e-3)
        if progress < self.warmup:
            return progress / self.warmup
        rest = (progress - self.warmup) / (1 - self.warmup)
        return self.final + (1 - self.final) * 0.5 * (1 + math.cos(math.pi * rest))


class CombTrainer(Trainer):
    """Trains what is trainable in `model` on tokenised examples, as `TrainConfig` says.

    Args:
        model: a `CombForCausalLM` (any model that takes ``documents=`` and ``labels=`` will do).
        tokenizer: saved beside the adapter; its pad token (or else its end token) fills the rows.
        together: see `DocumentOrderSampler`.

    Raises:
        ValueError: if nothing is trainable, there is no example, or one has no documents.
    """

    optimizer: torch.optim.Optimizer | None
    lr_scheduler: LambdaLR | None

    def __init__(
        self,
        model: nn.Module,
        config: TrainConfig,
        examples: Sequence[TrainingExample],
        tokenizer: Any,
        *,
        use_cpu: bool = True,
        together: int = 8,
        progress: bool = True,
        callbacks: Sequence[TrainerCallback] = (),
    ) -> None:
        if not examples:
            raise ValueError("no examples to train on")
        if not all(example.segments for example in examples):
            raise ValueError("an example without documents gives the encoder no gradient: leave it out")
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise ValueError("the model has no trainable parameter: make one with CombForCausalLM.from_backbone")
        self.comb_config = config
        self.trained_model: Any = model  # `self.model` may be wrapped by then
        self.sampler = DocumentOrderSampler(examples, seed=config.seed, together=together)
        steps = total_steps(config, len(examples))
        self.schedule = Schedule(steps, config.max_seconds, config.warmup, config.final_learning_rate)
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        super().__init__(
            model=model,
            args=_arguments(config, steps, use_cpu=use_cpu),
            train_dataset=list(examples),
            data_collator=Collator(int(pad)),
            processing_class=tokenizer,
            compute_loss_func=target_loss,
        )
        self.model_accepts_loss_kwargs = False  # the count is for target_loss, the model must not be given it
        for default in (PrinterCallback, ProgressCallback):
            self.remove_callback(default)
        self.add_callback(_EpochCallback(self.sampler))
        self.add_callback(_ClockCallback(self.schedule))
        if progress:
            self.add_callback(_ProgressBar(self.schedule))
        for callback in callbacks:
            self.add_callback(callback)

    @property
    def losses(self) -> list[tuple[int, float]]:
        """(step, mean loss per target token since the record before), as logged."""
        return [(int(row["step"]), row["loss"]) for row in self.state.log_history if "loss" in row]

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        if self.optimizer is None:
            config = self.comb_config
            self.optimizer = torch.optim.AdamW(
                parameter_groups(
                    self.trained_model,
                    learning_rate=config.learning_rate,
                    gate_multiplier=config.gate_learning_rate_multiplier,
                    weight_decay=config.weight_decay,
                ),
                lr=config.learning_rate,
                betas=(0.9, config.adam_beta2),
            )
        return self.optimizer

    def create_scheduler(self, *args: Any, **kwargs: Any) -> LambdaLR:
        if self.lr_scheduler is None:
            optimizer: torch.optim.Optimizer = kwargs.get("optimizer") or self.create_optimizer()
            self.lr_scheduler = LambdaLR(optimizer, [self.schedule] * len(optimizer.param_groups))
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> DocumentOrderSampler:
        return self.sampler

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss: Tensor = super().training_step(*args, **kwargs)
        if not bool(torch.isfinite(loss)):
            rate = self._get_learning_rate()
            raise TrainingDivergedError(
                f"the loss is {loss.item()} at step {self.state.global_step + 1} (learning rate {rate:.2e}): "
                "nothing was saved after the last checkpoint. Lower train.learning_rate, or look for NaN in the "
                "weights the run started from"
            )
        return loss

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        # the adapter alone; and no training_args.bin, which pickles every argument, tokens included
        folder = output_dir if output_dir is not None else self.comb_config.output_dir
        check_finite(self.trained_model)
        self.trained_model.save_pretrained(folder, tokenizer=self.processing_class)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        load_trainable(self.trained_model if model is None else model, resume_from_checkpoint)


def check_finite(model: nn.Module) -> None:
    """Raises TrainingDivergedError if a trained weight is NaN or infinite, so that no such adapter is written."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not bool(torch.isfinite(parameter).all()):
            raise TrainingDivergedError(
                f"{name} holds NaN or infinity after training, nothing was saved: lower train.learning_rate, or train "
                "in another precision"
            )


def target_loss(outputs: Any, labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
    """Cross-entropy over target tokens: their sum divided by `num_items_in_batch`, or their mean without it.

    Args:
        outputs: with ``logits`` [rows, tokens, vocabulary].
        labels: [rows, tokens], -100 where nothing is to be learned.
    """
    targets = labels[:, 1:]
    counted = targets != IGNORED
    # only the rows that count are turned into float32: a vocabulary of float32 logits per token is large
    logits = outputs.logits[:, :-1][counted].float()
    if num_items_in_batch is None:
        return nn.functional.cross_entropy(logits, targets[counted])
    return nn.functional.cross_entropy(logits, targets[counted], reduction="sum") / num_items_in_batch


def parameter_groups(
    model: nn.Module, *, learning_rate: float, gate_multiplier: float, weight_decay: float
) -> list[dict[str, Any]]:
    """Optimizer groups: matrices (with decay), norms and biases (without), gates (without, faster).

    Gates are the parameters whose name ends in "gate".
    """
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    gates = [parameter for name, parameter in named if name.endswith("gate")]
    others = [parameter for name, parameter in named if not name.endswith("gate")]
    groups = [
        {"params": [p for p in others if p.ndim >= 2], "lr": learning_rate, "weight_decay": weight_decay},
        {"params": [p for p in others if p.ndim < 2], "lr": learning_rate, "weight_decay": 0.0},
        {"params": gates, "lr": learning_rate * gate_multiplier, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def load_trainable(model: nn.Module, folder: str | Path) -> None:
    """Loads a checkpoint's trained parameters into `model`; the frozen ones are already there.

    Raises:
        ValueError: if the checkpoint holds other parameters than the model trains.
    """
    weights = load_file(Path(folder) / "model.safetensors")
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    missing, surplus = sorted(trained - set(weights)), sorted(set(weights) - set(model.state_dict()))
    if missing or surplus:
        raise ValueError(
            f"{folder} doesn't fit this model: missing {missing[:3] or 'nothing'}, not known "
            f"{surplus[:3] or 'nothing'}; resume with the configuration the checkpoint was made with"
        )
    model.load_state_dict(weights, strict=False)


def total_steps(config: TrainConfig, examples: int) -> int:
    """Optimizer steps of the whole run: the least of `steps` and `epochs`, unlimited if only the clock ends it."""
    per_epoch = math.ceil(math.ceil(examples / config.batch_size) / config.gradient_accumulation_steps)
    limits = [UNLIMITED_STEPS]
    if config.steps is not None:
        limits.append(config.steps)
    if config.epochs is not None:
        limits.append(max(1, math.ceil(config.epochs * per_epoch)))
    return min(limits)


def _arguments(config: TrainConfig, steps: int, *, use_cpu: bool) -> TrainingArguments:
    arguments = TrainingArguments(
        output_dir=config.output_dir,
        max_steps=steps,
        per_device_train_batch_size=config.batch_size,
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        learning_rate=config.learning_rate,
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
        gradient_checkpointing=config.gradient_checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False} if config.gradient_checkpointing else None,
        bf16=config.bf16,
        seed=config.seed,
        data_seed=config.seed,
        use_cpu=use_cpu,
        logging_steps=config.logging_steps,
        logging_first_step=True,
        logging_nan_inf_filter=False,  # it would hide what training_step must see
        save_strategy="no" if config.save_steps is None else "steps",
        save_steps=config.save_steps or 500,
        save_total_limit=config.save_total_limit,
        report_to=list(config.report_to) or "none",
        remove_unused_columns=False,
        dataloader_pin_memory=not use_cpu,
        disable_tqdm=True,
        hub_token=None,
    )
    _ = arguments.device  # settles the device, then
    arguments._n_gpu = min(1, arguments.n_gpu)  # one process drives one GPU: no silent DataParallel
    return arguments


class _EpochCallback(TrainerCallback):
    """Tells the sampler its epoch; the Trainer loses that call when it resumes in the middle of one."""

    def __init__(self, sampler: DocumentOrderSampler) -> None:
        self.sampler = sampler

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.sampler.set_epoch(int(state.epoch or 0))


class _ClockCallback(TrainerCallback):
    """Counts the seconds of optimisation for the schedule, and ends the run when they are used up."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.last = 0.0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.last = time.monotonic()

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        now = time.monotonic()
        self.schedule.used += now - self.last
        self.last = now

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        limit = self.schedule.max_seconds
        if limit is not None and self.schedule.used >= limit:
            control.should_training_stop = True
        if control.should_training_stop or state.global_step >= state.max_steps:
            control.should_log = True  # the last steps count too


class _ProgressBar(TrainerCallback):
    """One bar over the run, in steps or in seconds, with the last logged loss beside the first one."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.bar: tqdm[Any] | None = None
        self.first: float | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.bar = tqdm(
            total=1000, desc="training", bar_format="{desc} {percentage:3.0f}%|{bar:30}| {elapsed}{postfix}"
        )

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.bar is not None:
            self.bar.update(int(1000 * self.schedule.progress(state.global_step)) - self.bar.n)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        if self.bar is not None and logs and "loss" in logs:
            self.first = logs["loss"] if self.first is None else self.first
            self.bar.set_postfix_str(f"step {state.global_step}, loss {logs['loss']:.3f} (first {self.first:.3f})")

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.bar is not None:
            self.bar.close()

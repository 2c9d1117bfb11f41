"""`CombTrainer`: transformers' Trainer for an encoder on a frozen backbone, on one process or many.

What it changes: parameter groups (gates learn faster, only matrices decay), a learning rate that can follow the
clock, batches under token budgets, checkpoints without the backbone that are whole or not there, and a loss that is
not a number. Precision, sharding and offloading under DeepSpeed are its own configuration's, passed through as it is.

The loss is the mean over all target tokens of an optimizer step, on all ranks: the Trainer counts them over the
accumulated batches and ranks, and `target_loss` divides a sum by that count. So neither the split into forward passes
nor padding nor the number of ranks changes the gradient. It is computed here from the logits, not by the backbone,
because not every backbone takes the count.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import (
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.integrations.deepspeed import deepspeed_load_checkpoint
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from comb_training.config import TrainConfig
from comb_training.data.batches import IGNORED, TrainingExample
from comb_training.models import training_method
from comb_training.models.checkpoints import (
    PARTIAL,
    WRITE_ERRORS,
    CheckpointError,
    TrainingDivergedError,
    check_finite,
    check_names,
    checkpoints,
    load_trainable,
    remove_old,
)
from comb_training.models.lora import lora_layers, merged
from comb_training.trainer import distributed
from comb_training.trainer.callbacks import ClockCallback, EpochCallback, JsonLines, ProgressBar, TerminationCallback
from comb_training.trainer.losses import Teacher, target_logits_only, target_loss
from comb_training.trainer.sampler import BatchSampler, Budget
from comb_training.trainer.schedule import Schedule, total_steps

logger = logging.getLogger(__name__)

LOG = "log.jsonl"
"""File in the run's folder that holds every record of its log."""


class CombTrainer(Trainer):
    """Trains what is trainable in `model` on tokenised examples, as `TrainConfig` says.

    Args:
        model: a `CombForCausalLM` (or a `PreTrainedModel` that takes ``documents=``), or a `BlockAttentionModel`.
        tokenizer: saved beside the adapter; its pad token (or else its end token) fills the rows.
        heldout: examples whose loss is logged every `eval_steps`.
        answer: scores that are logged with it.
        together: see `BatchSampler`.

    Raises:
        ValueError: if nothing is trainable, there is no example, or one has no documents or is over the budget.
    """

    optimizer: torch.optim.Optimizer | None
    lr_scheduler: LambdaLR | None
    control: TrainerControl

    def __init__(
        self,
        model: nn.Module,
        config: TrainConfig,
        examples: Sequence[TrainingExample],
        tokenizer: Any,
        *,
        heldout: Sequence[TrainingExample] = (),
        answer: Callable[[], dict[str, float]] | None = None,
        use_cpu: bool = True,
        together: int = 8,
        progress: bool = True,
        callbacks: Sequence[TrainerCallback] = (),
    ) -> None:
        if not examples:
            raise ValueError("no examples to train on")
        if not all(example.segments for example in examples):
            raise ValueError("an example without documents teaches nothing about them: leave it out")
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise ValueError("the model has no trainable parameter: make one with CombForCausalLM.from_backbone")
        if config.eval_steps is not None and not heldout:
            raise ValueError("train.eval_steps needs held-out examples, and there is none")
        if config.kl_weight > 0:
            _check_teacher_reads(model, [*examples, *heldout])
        self.comb_config = config
        self.method = training_method(config.method)
        self.trained_model: Any = model  # `self.model` may be wrapped by then
        self.sampler = batch_sampler(examples, config, together=together)
        if self.sampler.left_out:
            logger.warning(
                "every epoch leaves out %d batches, others each time: the rest makes whole steps of %d rank(s) x %d "
                "forward passes", self.sampler.left_out, distributed.world_size(), config.gradient_accumulation_steps,
            )  # fmt: skip
        steps = total_steps(config, self.sampler.steps_per_epoch)
        self.schedule = Schedule(steps, config.max_seconds, config.warmup, config.final_learning_rate)
        self.termination = TerminationCallback()
        self._answer = answer
        self.bad_batches = 0
        self._bad_now = False
        self._teacher: Teacher | None = None
        self._tokens = self._logged_tokens = 0
        self._logged_at = 0.0
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        super().__init__(
            model=model,
            args=_arguments(config, steps, use_cpu=use_cpu),
            train_dataset=list(examples),
            eval_dataset=list(heldout) or None,
            data_collator=self.method.collator(int(pad), full_prompts=config.kl_weight > 0),
            processing_class=tokenizer,
            compute_loss_func=self._target_loss,
        )
        self.model_accepts_loss_kwargs = False  # the count is for target_loss, the model must not be given it
        self._loss_shifts_labels = True  # target_loss does: what the Trainer counts is what it sums over
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_hook(self._unless_bad)
        for default in (PrinterCallback, ProgressCallback):
            self.remove_callback(default)
        self.add_callback(EpochCallback(self.sampler))
        self.add_callback(ClockCallback(self.schedule))
        self.add_callback(self.termination)
        if distributed.is_main():
            self.add_callback(JsonLines(Path(config.output_dir) / LOG))
        if progress and distributed.is_main():
            self.add_callback(ProgressBar(self.schedule))
        for callback in callbacks:
            self.add_callback(callback)

    @property
    def losses(self) -> list[tuple[int, float]]:
        """(step, mean loss per target token since the record before), as logged."""
        return [(int(row["step"]), row["loss"]) for row in self.state.log_history if "loss" in row]

    @property
    def terminated(self) -> bool:
        """Whether a signal ended the run before its time; there is a checkpoint to go on from."""
        return self.termination.terminated

    def train_or_finish(self, checkpoint: str | Path | None) -> None:
        """Trains, from `checkpoint` on if there is one; a checkpoint of the last step is only loaded."""
        if checkpoint is not None:
            state = TrainerState.load_from_json(str(Path(checkpoint) / TRAINER_STATE_NAME))
            if state.global_step >= self.schedule.steps:
                logger.warning(
                    "%s is of step %d and the run has %d: nothing is left to train", checkpoint, state.global_step,
                    self.schedule.steps,
                )  # fmt: skip
                load_trainable(self.trained_model, checkpoint)
                self.state = state
                return
        self.train(resume_from_checkpoint=str(checkpoint) if checkpoint is not None else None)

    # --- optimiser and data ----------------------------------------------------------------------------------

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

    def get_train_dataloader(self) -> DataLoader[Any]:
        loader = DataLoader(
            self.train_dataset,
            batch_sampler=self.sampler,
            collate_fn=self.data_collator,
            pin_memory=self.args.dataloader_pin_memory,
        )
        prepared: DataLoader[Any] = self.accelerator.prepare(loader)
        return prepared

    # --- one forward and backward pass -------------------------------------------------------------------------

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        self._tokens += _tokens(inputs)
        try:
            loss: Tensor = super().training_step(model, inputs, *args, **kwargs)
        except (torch.OutOfMemoryError, RuntimeError, MemoryError) as error:
            if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "allocate memory" in str(error):
                raise RuntimeError(
                    f"out of memory at step {self.state.global_step + 1} in a batch of {_describe(inputs)}: lower "
                    "train.batch_document_tokens, train.batch_query_tokens or train.batch_size (and raise "
                    "train.gradient_accumulation_steps), or set train.gradient_checkpointing"
                ) from error
            raise
        finally:
            self._bad_now = False
        return loss

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """A batch whose loss is not a number on some rank adds nothing to any gradient, up to `max_bad_steps`."""
        batch = dict(inputs)
        inputs = dict(inputs)
        self._teacher = self._ask_teacher(inputs.pop("full_prompts", None))
        with target_logits_only(self.trained_model, inputs["labels"]):
            result = super().compute_loss(model, inputs, *args, **kwargs)
        loss: Tensor = result[0] if isinstance(result, tuple) else result
        if not model.training:
            return result
        finite = bool(torch.isfinite(loss))
        if distributed.all_true(finite):
            return result
        self._bad_now = True
        self.bad_batches += 1
        where = "another rank" if finite else str(self._keep_bad(batch, loss))
        message = (
            f"the loss is {loss.item()} at step {self.state.global_step + 1} (learning rate "
            f"{self._get_learning_rate():.2e}; the batch is kept in {where})"
        )
        if self.bad_batches > self.comb_config.max_bad_steps:
            raise TrainingDivergedError(
                f"{message}: nothing was saved after the last checkpoint. Lower train.learning_rate, or look for NaN "
                "in the weights the run started from"
            )
        logger.warning("%s: left out, %d of %d allowed", message, self.bad_batches, self.comb_config.max_bad_steps)
        return loss.nan_to_num(0.0, 0.0, 0.0)

    def _target_loss(self, outputs: Any, labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        weight = self.comb_config.kl_weight
        return target_loss(outputs, labels, num_items_in_batch, teacher=self._teacher, weight=weight)

    @torch.no_grad()
    def _ask_teacher(self, prompts: dict[str, Tensor] | None) -> Teacher | None:
        """What the plain backbone says with the documents in its prompt."""
        if prompts is None:
            return None
        ids, mask = prompts["input_ids"], prompts["attention_mask"]
        with (
            self.method.plain_backbone(self.trained_model) as backbone,
            target_logits_only(backbone, prompts["labels"]),
        ):
            logits = backbone(input_ids=ids, attention_mask=mask, use_cache=False).logits
        return Teacher.of(logits, prompts["labels"], self.comb_config.kl_top_k)

    def _unless_bad(self, gradient: Tensor) -> Tensor | None:
        # zero times NaN is NaN: what goes backward from a bad loss must be replaced, not scaled
        return torch.zeros_like(gradient) if self._bad_now else None

    def _keep_bad(self, inputs: dict[str, Any], loss: Tensor) -> Path:
        path = Path(self.comb_config.output_dir) / (
            f"bad-batch-step-{self.state.global_step + 1}-rank-{distributed.rank()}.pt"
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"step": self.state.global_step + 1, "loss": loss.item(), "inputs": _on_cpu(inputs)}, path)
        return path

    def compute_loss_context_manager(self) -> AbstractContextManager[Any]:
        # DeepSpeed's own autocast wraps its engine, which evaluation doesn't call
        if self.is_deepspeed_enabled and not self.trained_model.training:
            settings = _deepspeed_settings(self.comb_config).get("torch_autocast", {})
            if settings.get("enabled"):
                dtype = getattr(torch, str(settings.get("dtype", "bfloat16")).removeprefix("torch."))
                return torch.autocast(self.args.device.type, dtype)
        context: AbstractContextManager[Any] = super().compute_loss_context_manager()
        return context

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Adds how many tokens (of different documents, queries and answers, no padding) a second all ranks train."""
        if "loss" in logs:
            now = time.monotonic()
            [tokens] = distributed.summed(self._tokens - self._logged_tokens)
            if self._logged_at and now > self._logged_at:
                logs["tokens_per_second"] = round(tokens / (now - self._logged_at), 1)
            self._logged_tokens, self._logged_at = self._tokens, now
        super().log(logs, *args, **kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Mean loss per target token of the held-out examples, over all ranks, and what `answer` says; logged."""
        model = self.trained_model
        examples: Any = self.eval_dataset
        sampler = batch_sampler(examples, self.comb_config, ranks=1, accumulation=1)
        loss = count = 0.0
        was_training = model.training
        model.eval()
        try:
            batches = sampler.batches(0)
            # every rank runs as many passes: sharded weights are gathered by all of them together
            rounds = -(-len(batches) // distributed.world_size())
            for place in range(rounds):
                turn = place * distributed.world_size() + distributed.rank()
                batch = batches[min(turn, len(batches) - 1)]
                inputs = self._prepare_inputs(self.data_collator([examples[index] for index in batch]))
                labels = inputs.pop("labels")
                inputs.pop("full_prompts", None)
                with torch.no_grad(), self.compute_loss_context_manager(), target_logits_only(model, labels):
                    value = float(target_loss(model(**inputs), labels))
                if turn < len(batches):
                    tokens = int((labels[:, 1:] != IGNORED).sum())
                    loss, count = loss + value * tokens, count + tokens
            scores = self._scores()
        finally:
            model.train(was_training)
        loss, count = distributed.summed(loss, count)
        metrics = {"eval_loss": loss / count, **scores}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _scores(self) -> dict[str, float]:
        if self._answer is None:
            return {}
        if self.is_deepspeed_enabled and self.accelerator.state.deepspeed_plugin.zero_stage == 3:
            logger.warning("train.eval_answers: no answers under ZeRO-3, which has the weights in parts; only the loss")
            self._answer = None
            return {}
        return self._answer()

    # --- checkpoints --------------------------------------------------------------------------------------------

    def trained_weights(self) -> dict[str, Tensor]:
        """The trained parameters in full, on the CPU; DeepSpeed's float32 master weights. Collective."""
        named = [(name, parameter) for name, parameter in self.trained_model.named_parameters()]
        trained = [(name, parameter) for name, parameter in named if parameter.requires_grad]
        if not self.is_deepspeed_enabled or getattr(self, "deepspeed", None) is None:
            return {name: parameter.detach().cpu() for name, parameter in trained}
        from deepspeed.utils import safe_get_full_fp32_param

        return {name: safe_get_full_fp32_param(parameter).cpu() for name, parameter in trained}

    def adapter_weights(self) -> dict[str, Tensor]:
        """What is published: the trained parameters, and with LoRA what it trains beside, merged. Collective.

        With LoRA, other ranks than the first get the trained parameters only.
        """
        weights, layers = self.trained_weights(), lora_layers(self.trained_model)
        if not layers:
            return weights
        base = {}
        part = self.method.published_part
        for name, parameter in self.trained_model.get_submodule(part).named_parameters(prefix=part):
            if not parameter.requires_grad:
                with _whole(parameter):
                    if distributed.is_main():
                        base[name] = parameter.detach().cpu().clone()
        return merged(weights, base, layers) if distributed.is_main() else weights

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes the adapter alone, and no training_args.bin, which pickles every argument, tokens included."""
        folder = output_dir if output_dir is not None else self.comb_config.output_dir
        # a checkpoint to resume from holds what trains, under the names it trains by
        weights = self.trained_weights() if _internal_call else self.adapter_weights()
        check_finite(weights)
        if not self.args.should_save:
            return
        if _internal_call:
            self.method.save_trained(self.trained_model, Path(folder), self.processing_class, weights)
        else:
            self.trained_model.save_pretrained(folder, tokenizer=self.processing_class, state_dict=weights)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        # written aside and renamed when it is whole, so that a killed run leaves no half of one
        run = Path(self.comb_config.output_dir)
        name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        if distributed.is_main():
            shutil.rmtree(run / PARTIAL, ignore_errors=True)
        distributed.barrier()
        try:
            with mock.patch.object(self, "_get_output_dir", return_value=str(run / PARTIAL)):
                super()._save_checkpoint(model, trial)
        except WRITE_ERRORS as error:
            if isinstance(error, TrainingDivergedError):
                raise
            shutil.rmtree(run / PARTIAL, ignore_errors=True)
            newest = [path.name for path in checkpoints(run)][-1:]
            raise CheckpointError(
                f"the checkpoint of step {self.state.global_step} could not be written to {run} ({error}); "
                f"{f'{newest[0]} is intact: make room, then go on with --resume auto' if newest else 'make room'}"
            ) from error
        distributed.barrier()
        if distributed.is_main():
            shutil.rmtree(run / name, ignore_errors=True)  # of a longer run in the same folder
            (run / PARTIAL / name).rename(run / name)
            (run / PARTIAL).rmdir()
            if self.comb_config.save_total_limit:
                remove_old(run, self.comb_config.save_total_limit)
        distributed.barrier()

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        load_trainable(self.trained_model if model is None else model, resume_from_checkpoint)

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        if not self.is_deepspeed_enabled:
            return super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        if resume_from_checkpoint is not None:
            check_names(self.trained_model, resume_from_checkpoint)
        if self.accelerator.state.deepspeed_plugin.zero_stage == 3:
            self.trained_model.agree_on_passes = distributed.agree_on_passes
        with _without_frozen_weights():
            prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        engine = self.model_wrapped
        engine.save_checkpoint = functools.partial(engine.save_checkpoint, exclude_frozen_parameters=True)
        engine.module_state_dict = functools.partial(_without_tied, engine.module_state_dict, engine.module)
        # a matrix that is both embedding and head would be gathered in the autocast's dtype in some steps and in its
        # own in others, and a resumed run would not be the same run
        vars(self.trained_model.get_input_embeddings().weight).pop("comm_dtype", None)
        return prepared


def batch_sampler(
    examples: Sequence[TrainingExample],
    config: TrainConfig,
    *,
    together: int = 8,
    ranks: int | None = None,
    accumulation: int | None = None,
) -> BatchSampler:
    """The sampler that `config` describes, for this run's ranks unless others are named."""
    return BatchSampler(
        [training_method(config.method).row(example) for example in examples],
        Budget(config.batch_size, config.batch_document_tokens, config.batch_query_tokens),
        seed=config.seed,
        together=together,
        ranks=distributed.world_size() if ranks is None else ranks,
        accumulation=config.gradient_accumulation_steps if accumulation is None else accumulation,
    )


@contextmanager
def _without_frozen_weights() -> Iterator[None]:
    """The Trainer asks DeepSpeed for every weight of the model in a checkpoint, unless it is peft's."""
    lenient: Callable[..., None] = lambda engine, path, load_module_strict=True: deepspeed_load_checkpoint(  # noqa: E731
        engine, path, load_module_strict=False
    )
    with mock.patch("transformers.trainer.deepspeed_load_checkpoint", lenient):
        yield


def _whole(parameter: nn.Parameter) -> AbstractContextManager[Any]:
    """Inside, a parameter that ZeRO-3 has sharded is whole."""
    if not hasattr(parameter, "ds_id"):
        return nullcontext()
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters

    context: AbstractContextManager[Any] = GatheredParameters([parameter])
    return context


def _without_tied(state_dict: Callable[..., dict[str, Any]], module: nn.Module, **kwargs: Any) -> dict[str, Any]:
    """DeepSpeed leaves out a frozen matrix under its first name only; a tied head would stay."""
    named = module.named_parameters(remove_duplicate=False)
    frozen = {name for name, parameter in named if not parameter.requires_grad}
    return {name: value for name, value in state_dict(**kwargs).items() if name not in frozen}


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


def _arguments(config: TrainConfig, steps: int, *, use_cpu: bool) -> TrainingArguments:
    if config.deepspeed is not None:
        _check_deepspeed(use_cpu)
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
        # DeepSpeed's own autocast keeps trained weights in float32; asking for both would be two of them
        bf16=config.bf16 and "torch_autocast" not in _deepspeed_settings(config),
        deepspeed=config.deepspeed,
        ddp_find_unused_parameters=False,
        average_tokens_across_devices=True,
        # batches are counted and shared out by BatchSampler, and none is repeated
        accelerator_config={"even_batches": False, "split_batches": False, "dispatch_batches": False},
        seed=config.seed,
        data_seed=config.seed,
        use_cpu=use_cpu,
        logging_steps=config.logging_steps,
        logging_first_step=True,
        logging_nan_inf_filter=False,  # it would hide what training_step must see
        save_strategy="no" if config.save_steps is None else "steps",
        save_steps=config.save_steps or 500,
        save_total_limit=None,  # older checkpoints go when the new one has its name
        eval_strategy="no" if config.eval_steps is None else "steps",
        eval_steps=config.eval_steps,
        report_to=list(config.report_to) or "none",
        run_name=config.run_name,
        remove_unused_columns=False,
        dataloader_pin_memory=not use_cpu,
        disable_tqdm=True,
        hub_token=None,
    )
    _ = arguments.device  # settles the device, then
    arguments._n_gpu = min(1, arguments.n_gpu)  # one process drives one GPU: no silent DataParallel
    return arguments


def _check_teacher_reads(model: Any, examples: Sequence[TrainingExample]) -> None:
    """Raises ValueError if a prompt with its documents has no room in the backbone's positions."""
    limit = getattr(model.backbone.config.get_text_config(), "max_position_embeddings", None)
    long = [e for e in examples if limit is not None and len(e.prompt.flat) + len(e.target) > limit]
    if long:
        raise ValueError(
            f"train.kl_weight: {len(long)} examples are longer with their documents than the backbone's {limit} "
            f"positions (example {long[0].id}, for one): lower data.num_documents or data.max_document_tokens, or use "
            "train.answers=on_policy with data.max_prompt_tokens, which drops them"
        )


def _check_deepspeed(use_cpu: bool) -> None:
    """Raises ValueError where DeepSpeed can't run, before it says so in its own words."""
    if "LOCAL_RANK" not in os.environ:
        raise ValueError(
            "train.deepspeed needs a launcher, also for one process: torchrun --nproc_per_node 1 -m "
            "comb_training.train CONFIG ..."
        )
    try:
        import deepspeed.ops
    except ImportError as error:
        raise ValueError("train.deepspeed: DeepSpeed is not installed (pip install 'comb-pic[train]')") from error
    if use_cpu:
        # a shared-memory operator for CPU ranks that only its inference uses; building it needs a compiler and a minute
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def _deepspeed_settings(config: TrainConfig) -> dict[str, Any]:
    if config.deepspeed is None:
        return {}
    try:
        settings = json.loads(Path(config.deepspeed).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"train.deepspeed={config.deepspeed!r} is no DeepSpeed configuration: {error}") from error
    return settings if isinstance(settings, dict) else {}


def _tokens(inputs: dict[str, Any]) -> int:
    """Tokens of different documents and of unpadded rows."""
    documents = {id(tensor): len(tensor) for row in inputs.get("documents", ()) for tensor in row}
    return int(inputs["attention_mask"].sum()) + sum(documents.values())


def _describe(inputs: dict[str, Any]) -> str:
    rows, tokens = inputs["input_ids"].shape
    documents = {id(tensor): len(tensor) for row in inputs.get("documents", ()) for tensor in row}
    return (
        f"{rows} rows of up to {tokens} tokens over {len(documents)} documents of {sum(documents.values())} tokens "
        f"(the longest {max(documents.values(), default=0)})"
    )


def _on_cpu(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return {key: _on_cpu(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_on_cpu(item) for item in value]
    return value

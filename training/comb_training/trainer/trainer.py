"""`CombTrainer`: a plain loop on accelerate for an encoder on a frozen backbone, on one process or many.

The loss is the mean over all target tokens of an optimizer step, on all ranks: they are counted first, and each batch's
sum is divided by that count. So neither the split into forward passes nor padding nor the number of ranks changes the
gradient.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import Tensor, nn
from transformers import set_seed
from transformers.trainer import OPTIMIZER_NAME, TRAINER_STATE_NAME
from transformers.utils import CONFIG_NAME

from comb.backbones.adapter import check_fingerprint
from comb.backbones.damage import explained
from comb.backbones.identity import weights_fingerprint
from comb.model.adapter import floating
from comb_training.config import TrainConfig
from comb_training.data.batches import IGNORED, TrainingExample
from comb_training.models import training_method
from comb_training.models.method import padding_id
from comb_training.trainer import distributed
from comb_training.trainer.accelerator import load_engine, make_accelerator, settle_engine, trained_weights
from comb_training.trainer.checkpoints import (
    MAY_CHANGE,
    RANDOM_STATE,
    CheckpointError,
    check_finite,
    check_names,
    checkpoints,
    load_trainable,
    new_checkpoint,
    reading,
)
from comb_training.trainer.distributed import asked_to_stop
from comb_training.trainer.objective import Objective
from comb_training.trainer.optimizer import LearningRateSchedule, adamw, total_steps
from comb_training.trainer.run_log import RunLog
from comb_training.trainer.sampler import BatchSampler

logger = logging.getLogger(__name__)


class CombTrainer:
    """Trains what is trainable in `model` on tokenised examples, as `TrainConfig` says. Raises ValueError as
    `BatchSampler` does.

    Args:
        model: as `TrainingMethod.load` gives it.
        tokenizer: saved beside the adapter; its pad token (or else its end token) fills the rows.
        heldout: examples whose loss is logged before the first step, behind the last, and every `eval_steps`.
        settings: the run's whole configuration, for trackers, and to tell what a resumed run changes.
    """

    def __init__(
        self,
        model: nn.Module,
        config: TrainConfig,
        examples: Sequence[TrainingExample],
        tokenizer: Any,
        *,
        heldout: Sequence[TrainingExample] = (),
        settings: Mapping[str, Any] | None = None,
        use_cpu: bool = True,
        progress: bool = True,
    ) -> None:
        self.model: Any = model
        self.config = config
        self.examples = examples
        self.heldout = heldout
        self.tokenizer = tokenizer
        self.sampler = BatchSampler(examples, config)
        if self.sampler.left_out:
            logger.warning(
                "every epoch leaves out %d batches, others each time: the rest makes whole steps of %d rank(s) x %d "
                "forward passes", self.sampler.left_out, distributed.world_size(), config.gradient_accumulation_steps,
            )  # fmt: skip
        steps = total_steps(config, self.sampler.steps_per_epoch)
        self.schedule = LearningRateSchedule(steps, config.max_seconds, config.warmup)
        self.collate = training_method(config.method).collator(
            padding_id(tokenizer, model.backbone),
            full_prompts=config.kl_weight > 0,
            exact_prefix=getattr(model.config, "exact_prefix", False),
        )
        self.accelerator = make_accelerator(config, use_cpu=use_cpu)
        plugin = self.accelerator.state.deepspeed_plugin
        self.sharded = plugin is not None  # DeepSpeed keeps weights or their optimizer in parts
        self.optimizer: Any = adamw(model, config)
        self._peak_rates = [group["lr"] for group in self.optimizer.param_groups]
        self.objective = Objective(model, config)
        self.settings = settings or {}
        self.log = RunLog(config, self.schedule, self.accelerator, settings=self.settings, progress=progress)
        self.step = 0  # optimizer steps done
        self._made_by = {"ranks": distributed.world_size(), "zero_stage": plugin and plugin.zero_stage}
        self.terminated = ""
        """The signal that ended the run before its time, SIGTERM or SIGINT; there is a checkpoint to go on from."""
        self._fresh = True  # its folder has no checkpoint of this run yet
        self._wrapped: Any = model  # as DDP or DeepSpeed call it, from `train` on
        self._loss = torch.zeros((), device=self.accelerator.device)  # this rank's share since the last record
        self._data = {"examples": _digest(examples), "heldout": _digest(heldout)}
        with suppress(ValueError):  # weights that accelerate has elsewhere have no bits to look at
            self._data["backbone"] = weights_fingerprint(model.backbone, settings=False)

    @property
    def ended_by(self) -> str:
        """steps, clock, or the signal that came."""
        return self.terminated or ("steps" if self.step >= self.schedule.steps else "clock")

    @property
    def losses(self) -> list[tuple[int, float]]:
        """(step, mean loss per target token since the record before), as logged."""
        return self.logged("loss")

    def logged(self, name: str) -> list[tuple[int, float]]:
        """(step, value) of the records that have a value of this name."""
        return [(row["step"], row[name]) for row in self.log.history if name in row]

    # --- the loop -----------------------------------------------------------------------------------------------

    def train(self, checkpoint: str | Path | None = None) -> None:
        """Trains, from `checkpoint` on if there is one; a checkpoint of the last step is only loaded.

        Raises:
            TrainingDivergedError: if the loss becomes NaN or infinite.
            CheckpointError: if a checkpoint can't be written.
        """
        if checkpoint is not None:
            self._read_state(Path(checkpoint))
            if self.schedule.over(self.step):
                logger.warning("%s is of step %d, the run's last: nothing is left to train", checkpoint, self.step)
                load_trainable(self.model, checkpoint)
                return
        set_seed(self.config.seed)
        if self.config.gradient_checkpointing:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if self._made_by["zero_stage"] == 3:
            self.model.agree_on_passes = distributed.agree_on_passes
        self._wrapped, self.optimizer = self.accelerator.prepare(self.model, self.optimizer)
        if self.config.method == "linktokens":  # its backbone counts as another one where it was moved or synchronised
            self.model.trainable_support()
        if self.sharded:
            settle_engine(self._wrapped, self.model)
        if checkpoint is not None:
            folder = Path(checkpoint)
            settings = [dict(group, params=None) for group in self.optimizer.param_groups]
            if self.sharded:
                check_names(self.model, folder)
                load_engine(self._wrapped, folder)
            else:
                load_trainable(self.model, folder)
                with reading(folder, OPTIMIZER_NAME):
                    state = torch.load(folder / OPTIMIZER_NAME, map_location="cpu", weights_only=True)
                    self.optimizer.load_state_dict(state)
            for group, its in zip(self.optimizer.param_groups, settings, strict=True):
                group.update(its, params=group["params"])  # the configuration may have changed since
            path = folder / RANDOM_STATE.format(distributed.rank())
            if not path.is_file():  # of an earlier version, which didn't write down how many
                raise ValueError(f"{path} is not there: resume with as many processes as wrote the checkpoint")
            with reading(folder, path.name):
                state = torch.load(path, weights_only=True)
                torch.set_rng_state(state["cpu"])
                self._loss += state["loss"]
            if torch.cuda.is_available() and state["cuda"]:
                torch.cuda.set_rng_state_all(state["cuda"])
        self._set_learning_rates()
        self.log.start(self.step)
        try:
            with asked_to_stop() as asked:
                self._run(asked)
        finally:
            self.log.close()

    def _run(self, asked: Callable[[], str]) -> None:
        config, over = self.config, False
        logged_at = self.losses[-1][0] if self.losses else 0
        batches = self._batches()
        if self.step == 0:
            with self.log.paused("held-out, untrained"):
                self.evaluate()
        self._wrapped.train()
        self.schedule.start()
        while not over:
            rate = self.optimizer.param_groups[0]["lr"]
            norm = self._train_step(list(islice(batches, config.gradient_accumulation_steps)), rate)
            self.log.advance(self.step)
            self.terminated = asked()
            over = bool(self.terminated) or self.schedule.over(self.step)
            if over or self.step == 1 or self.step % config.logging_steps == 0:  # the last steps count too
                [loss] = distributed.summed(float(self._loss))
                record = {"loss": loss / (self.step - logged_at), "learning_rate": rate}
                record |= {} if norm is None else {"grad_norm": float(norm)}
                record["epoch"] = self.step / self.sampler.steps_per_epoch
                self.log.write(self.step, record | self.log.tokens_per_second())
                self._loss, logged_at = torch.zeros_like(self._loss), self.step
            if self.terminated:  # saved first: who sent the signal may not wait for the evaluation
                self.save_checkpoint()
            if over or (config.eval_steps and self.step % config.eval_steps == 0):
                with self.log.paused("held-out"):
                    self.evaluate()
            if not self.terminated and config.save_steps and (over or self.step % config.save_steps == 0):
                self.save_checkpoint()
            self.schedule.start()  # neither scoring nor saving is optimisation
        if not self.terminated and (came := asked()):  # during the last score: what is left is for --resume
            self.terminated = came
            if not config.save_steps:
                self.save_checkpoint()

    def _batches(self) -> Iterator[dict[str, Any]]:
        """This rank's batches from the step on that comes next, epoch after epoch without end."""
        while True:
            epoch, steps = divmod(self.step, self.sampler.steps_per_epoch)
            mine = self.sampler.batches(epoch)[distributed.rank() :: distributed.world_size()]
            for batch in mine[steps * self.config.gradient_accumulation_steps :]:
                yield self.collate([self.examples[index] for index in batch])

    @distributed.noticing_ends()
    def _train_step(self, batches: Sequence[dict[str, Any]], rate: float) -> Tensor | float | None:
        """One optimizer step; the norm of its gradient, unless DeepSpeed doesn't tell."""
        [targets] = distributed.summed(sum(int((batch["labels"][:, 1:] != IGNORED).sum()) for batch in batches))
        # accelerate divides by the passes, and DDP and DeepSpeed by the ranks: for means, but these are sums
        scale = len(batches) * self.accelerator.num_processes
        for batch in batches:
            # equal documents of a batch are one tensor
            documents = list({id(each): len(each) for row in batch.get("documents", ()) for each in row}.values())
            self.log.count(int(batch["attention_mask"].sum()) + sum(documents))
            try:
                with self.accelerator.accumulate(self._wrapped):
                    inputs = send_to_device(batch, self.accelerator.device)
                    loss = self.objective(self._wrapped, inputs, targets, step=self.step + 1, rate=rate)
                    self.accelerator.backward(loss * scale)
            except (RuntimeError, MemoryError) as error:
                if isinstance(error, torch.OutOfMemoryError | MemoryError) or "allocate memory" in str(error):
                    rows, tokens = batch["input_ids"].shape
                    raise RuntimeError(
                        f"out of memory at step {self.step + 1} in a batch of {rows} rows of up to {tokens} tokens "
                        f"over {len(documents)} documents of {sum(documents)} tokens (the longest "
                        f"{max(documents, default=0)}): lower train.batch_document_tokens, train.batch_query_tokens or "
                        "train.batch_size (and raise train.gradient_accumulation_steps)"
                        f"{', or set train.gradient_checkpointing' * self.model.supports_gradient_checkpointing}"
                    ) from error
                raise
            self._loss += loss.detach()
        # DeepSpeed has clipped already, and only tells the norm
        norm: Tensor | float | None = self.accelerator.clip_grad_norm_(
            self._wrapped.parameters(), self.config.max_grad_norm or float("inf")
        )
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.tick()
        self.step += 1
        self._set_learning_rates()
        return norm

    def _set_learning_rates(self) -> None:
        factor = self.schedule(self.step)
        for group, peak in zip(self.optimizer.param_groups, self._peak_rates, strict=True):
            group["lr"] = peak * factor

    def evaluate(self) -> dict[str, float]:
        """`Objective.heldout_losses` of the held-out examples, if there are any; logged. Collective."""
        if not self.heldout:
            return {}
        batches = BatchSampler(self.heldout, self.config, ranks=1, accumulation=1).batches(0)
        was_training = self.model.training
        self.model.eval()
        try:
            chosen = [[self.heldout[index] for index in batch] for batch in batches]
            record = self.objective.heldout_losses(chosen, self.collate, self.accelerator)
        finally:
            self.model.train(was_training)
        self.log.write(self.step, record)
        return record

    # --- what it starts from and what it leaves -----------------------------------------------------------------

    def save_checkpoint(self) -> None:
        """Writes what a run goes on from to ``checkpoint-N`` of the run's folder. Collective."""
        folder = Path(self.config.output_dir)
        keep = self.config.save_total_limit
        place = new_checkpoint(folder, self.step, keep=keep, first=self._fresh)
        with self.log.paused("saving"), place as path:
            trained = trained_weights(self.model, sharded=self.sharded)
            check_finite(trained)
            cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
            state = {"cpu": torch.get_rng_state(), "cuda": cuda, "loss": self._loss.item()}
            torch.save(state, path / RANDOM_STATE.format(distributed.rank()))
            if self.sharded:
                with distributed.noticing_ends():
                    self._wrapped.save_checkpoint(str(path), exclude_frozen_parameters=True)
            if distributed.is_main():
                # an adapter folder, which can be asked like the one of a finished run
                self.model.save_pretrained(path, tokenizer=self.tokenizer, state_dict=trained)
                if not self.sharded:
                    torch.save(self.optimizer.state_dict(), path / OPTIMIZER_NAME)
                run = {"global_step": self.step, "seconds": self.schedule.used, "log_history": self.log.history}
                run |= {"settings": self.settings, "run": self.log.run, "made_by": self._made_by, **self._data}
                (path / TRAINER_STATE_NAME).write_text(json.dumps(run), encoding="utf-8")
        self._fresh = False

    def _read_state(self, folder: Path) -> None:
        """How far the run was. Raises ValueError if `folder` doesn't tell."""
        if not (folder / TRAINER_STATE_NAME).is_file():
            raise ValueError(
                f"{folder} is no checkpoint, it holds no {TRAINER_STATE_NAME}: give a checkpoint-N folder, or auto for "
                "the newest of train.output_dir"
            )
        with reading(folder, TRAINER_STATE_NAME):
            state = json.loads((folder / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
            self.step, self.schedule.used = int(state["global_step"]), float(state["seconds"])
            self.log.history = state["log_history"]
            self.log.run = state.get("run", self.log.run)
        self._fresh = False
        made_by = state.get("made_by", self._made_by)
        if made_by != self._made_by and not self.schedule.over(self.step):  # else it is only loaded
            raise ValueError(
                f"{folder} was made by {_processes(**made_by)}, and this run is {_processes(**self._made_by)}: resume "
                "with as many processes, and as DeepSpeed was then"
            )
        with reading(folder, CONFIG_NAME):
            adapter = json.loads((folder / CONFIG_NAME).read_text(encoding="utf-8"))
            known, name = adapter.get("backbone_fingerprint"), adapter["backbone_name_or_path"]
        if known is not None:
            try:  # what it has learned, and its scores, would be of other weights
                with explained(folder):
                    check_fingerprint(self.model.backbone, known, name)
            except ValueError as error:
                raise ValueError(f"{folder} can't go on: {error}") from error
        if state.get("examples", self._data["examples"]) != self._data["examples"]:
            logger.warning("%s is of a run over other examples: some may be trained on more often than others", folder)
        if state.get("backbone", own := self._data.get("backbone")) != own:  # its fingerprint is of a few values
            logger.warning("%s was trained on other weights of the backbone, or in another dtype, than here", folder)
        if state.get("heldout", self._data["heldout"]) != self._data["heldout"]:
            logger.warning("%s was scored on other held-out questions: those scores are left out", folder)
            self.log.history = [row for row in self.log.history if "eval_loss" not in row]
        its = state.get("settings")
        changed = [
            f"{section}.{key}"
            for section in (("model", "data", "train") if self.settings and its else ())
            for key, value in self.settings[section].items()
            if key not in MAY_CHANGE and its[section].get(key, value) != value
        ]
        if changed:
            logger.warning(
                "%s was made with other values of %s: it goes on with the new ones", folder, ", ".join(changed)
            )

    def save_model(self, folder: str | Path) -> None:
        """Writes what is published: the trained weights in the backbone's dtype. Collective.

        In that dtype they are loaded and served, and documents then take no more bytes than the backbone's own. Raises
        TrainingDivergedError if one of them is NaN or infinite, CheckpointError if they can't be written.
        """
        dtype = floating(self.model.backbone.dtype)
        weights = {name: each.to(dtype) for name, each in trained_weights(self.model, sharded=self.sharded).items()}
        check_finite(weights)
        if distributed.is_main():
            try:
                self.model.save_pretrained(folder, tokenizer=self.tokenizer, state_dict=weights)
            except OSError as error:
                newest = [] if self._fresh else [path.name for path in checkpoints(self.config.output_dir)][-1:]
                go_on = f"go on from {newest[0]} with --resume auto" if newest else "train again"
                raise CheckpointError(f"the adapter could not be saved: {error}; make room, then {go_on}") from error


def _digest(examples: Sequence[TrainingExample]) -> str:
    """Tells examples from others, and from the same in another order: an epoch goes on by their numbers."""
    whole = hashlib.sha256()
    for row in examples:
        whole.update(repr((row.prompt, row.target, row.given)).encode())
    return whole.hexdigest()


def _processes(ranks: int, zero_stage: int | None) -> str:
    return f"{ranks} process(es) {'without DeepSpeed' if zero_stage is None else f'with ZeRO-{zero_stage}'}"

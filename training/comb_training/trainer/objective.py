"""The loss of a batch: in training, the teacher beside it, where it is not a number; and on held-out questions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import Tensor, nn

from comb.evaluation.metrics import bootstrap
from comb_training.config import TrainConfig
from comb_training.data.batches import IGNORED, TrainingExample
from comb_training.models import training_method
from comb_training.trainer import distributed
from comb_training.trainer.accelerator import engine_autocast
from comb_training.trainer.checkpoints import TrainingDivergedError
from comb_training.trainer.losses import Teacher, target_logits_only, target_loss, token_losses


class Objective:
    """The loss of batches of `model`'s training."""

    def __init__(self, model: Any, config: TrainConfig) -> None:
        self.model = model
        self.config = config

    def __call__(self, wrapped: nn.Module, batch: dict[str, Any], targets: float, *, step: int, rate: float) -> Tensor:
        """The batch's share of the step's loss: the sum over its target tokens divided by `targets`. Collective. Raises
        TrainingDivergedError if the loss is not a number on some rank.

        Args:
            wrapped: the model as it is called in training (DDP's or DeepSpeed's).
            targets: target tokens of the whole step, on all ranks.
            step, rate: for the error: which step this is, and its learning rate.
        """
        inputs = dict(batch)
        labels, prompts = inputs.pop("labels"), inputs.pop("full_prompts", None)
        teacher = self.ask_teacher(prompts) if prompts is not None else None
        with target_logits_only(self.model, labels):
            outputs = wrapped(**inputs)
        weights = {"weight": self.config.kl_weight, "ce_weight": self.config.ce_weight}
        loss = target_loss(outputs, labels, targets, teacher=teacher, **weights)
        finite = bool(torch.isfinite(loss))
        if distributed.all_true(finite):
            return loss
        where: str | Path = "another rank"
        if not finite:
            where = Path(self.config.output_dir) / f"bad-batch-step-{step}-rank-{distributed.rank()}.pt"
            where.parent.mkdir(parents=True, exist_ok=True)
            torch.save({"step": step, "loss": loss.item(), "inputs": send_to_device(batch, "cpu")}, where)
        raise TrainingDivergedError(
            f"the loss is {loss.item()} at step {step} (learning rate {rate:.2e}; the batch is kept in {where}): "
            "nothing was saved after the last checkpoint. Lower train.learning_rate, or look for NaN in the weights "
            "the run started from"
        )

    @torch.no_grad()
    def ask_teacher(self, prompts: dict[str, Tensor]) -> Teacher:
        """What the plain backbone says with the documents in its prompt."""
        labels = prompts["labels"]
        with target_logits_only(self.model.backbone, labels):
            logits = self.model.backbone(
                input_ids=prompts["input_ids"], attention_mask=prompts["attention_mask"], use_cache=False
            ).logits
        return Teacher.of(logits, labels, self.config.kl_top_k)

    @torch.no_grad()
    def heldout_losses(
        self,
        batches: Sequence[Sequence[TrainingExample]],
        collate: Callable[[Sequence[TrainingExample]], dict[str, Any]],
        accelerator: Accelerator,
    ) -> dict[str, float]:
        """Mean loss per target token of examples that are not trained on (``eval_loss``). Collective.

        Where batches have full prompts also how much of the way from no documents to documents in the prompt the model
        goes, ``eval_closed`` = 1 - ``eval_kl`` / ``eval_kl_none``: KL(full || model) and KL(full || none) in nats per
        target token (`losses.divergence`); and its 95% interval by bootstrap over the examples, ``eval_closed_low`` and
        ``_high``.

        `batches` are the same on every rank.
        """
        model, bare_inputs = self.model, training_method(self.config.method).bare
        starts = [0, *accumulate(map(len, batches))]
        found = torch.zeros(starts[-1], 4, dtype=torch.float64)  # of each example: target tokens, and sums over them
        ranks, rank = distributed.world_size(), distributed.rank()
        # every rank runs as many passes: sharded weights are gathered by all of them together
        for place in range(rank, -(-len(batches) // ranks) * ranks, ranks):
            inputs = send_to_device(collate(batches[min(place, len(batches) - 1)]), accelerator.device)
            labels, prompts = inputs.pop("labels"), inputs.pop("full_prompts", None)
            with engine_autocast(accelerator):
                # in front of the model's passes: the teacher's rows are longer, and it selects targets in the same head
                teacher = None if prompts is None else self.ask_teacher(prompts)
                with target_logits_only(model, labels):
                    values = [token_losses(outputs := model(**inputs), labels)]
                    if teacher is not None:
                        bare = model(**bare_inputs(inputs))
                        values += [token_losses(said, labels, teacher) for said in (outputs, bare)]
            if place < len(batches):
                rows = (labels[:, 1:] != IGNORED).nonzero()[:, 0].cpu() + starts[place]
                for column, value in enumerate([torch.ones(len(rows)), *values]):
                    found[:, column].index_add_(0, rows, value.double().cpu())
        found = torch.tensor(distributed.summed(*found.flatten().tolist()), dtype=torch.float64).view_as(found)
        count, loss, kl, none = found.sum(0).tolist()
        record = {"eval_loss": loss / count}
        if prompts is None:
            return record
        least = found[:, 3].clamp_min(1e-9)
        low, high = bootstrap((found[:, 2] / least).tolist(), least.tolist())
        closed = {"eval_closed": 1 - kl / max(none, 1e-9), "eval_closed_low": 1 - high, "eval_closed_high": 1 - low}
        return record | {"eval_kl": kl / count, "eval_kl_none": none / count} | closed

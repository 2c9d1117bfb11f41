"""How well the model in training does on held-out questions: its loss, all ranks sharing them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import accumulate
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import Tensor

from comb.evaluation.metrics import bootstrap
from comb_training.data.batches import IGNORED, TrainingExample
from comb_training.trainer import distributed
from comb_training.trainer.accelerator import engine_autocast
from comb_training.trainer.attention_targets import AttentionTargets, attention_targets
from comb_training.trainer.losses import Teacher, target_logits_only, token_losses


@torch.no_grad()
def heldout_losses(
    model: Any,
    batches: Sequence[Sequence[TrainingExample]],
    collate: Callable[[Sequence[TrainingExample]], dict[str, Any]],
    accelerator: Accelerator,
    ask_teacher: Callable[[dict[str, Tensor]], Teacher],
    leave_out: Callable[[dict[str, Any]], dict[str, Any]],
    *,
    attention: bool,
) -> dict[str, float]:
    """Mean loss per target token of examples that are not trained on (``eval_loss``). Collective.

    Where batches have full prompts also how much of the way from no documents to documents in the prompt the model
    goes, ``eval_closed`` = 1 - ``eval_kl`` / ``eval_kl_none``: KL(full || model) and KL(full || none) in nats per
    target token (`losses.divergence`); and its 95% interval by bootstrap over the examples, ``eval_closed_low`` and
    ``_high``.

    Args:
        batches: the same on every rank.
        ask_teacher: what the backbone says that has the documents in its prompt.
        leave_out: of a batch's inputs, those without its documents.
        attention: also ``eval_r2_LAYER`` of every cross block, the share of what documents add to the hidden state in
            the backbone's own attention that the block adds (`attention_targets`), and ``eval_r2``, their mean.
    """
    starts = [0, *accumulate(map(len, batches))]
    found = torch.zeros(starts[-1], 4, dtype=torch.float64)  # of each example: target tokens, and sums over them
    layers: list[int] = model.config.cross_attention_layers if attention else []
    missed = torch.zeros(len(layers), dtype=torch.float64)  # of each cross block, summed over target tokens
    ranks, rank = distributed.world_size(), distributed.rank()
    # every rank runs as many passes: sharded weights are gathered by all of them together
    for place in range(rank, -(-len(batches) // ranks) * ranks, ranks):
        inputs = send_to_device(collate(batches[min(place, len(batches) - 1)]), accelerator.device)
        labels, prompts = inputs.pop("labels"), inputs.pop("full_prompts", None)
        with engine_autocast(accelerator):
            # in front of the model's passes: the teacher's rows are longer, and it selects targets in the same head
            watched = attention_targets(model, prompts) if attention else nullcontext(list[AttentionTargets]())
            with watched as wanted:
                teacher = None if prompts is None else ask_teacher(prompts)
            added = model(documents=inputs["documents"], states=[each.states for each in wanted]) if wanted else []
            with target_logits_only(model, labels):
                values = [token_losses(outputs := model(**inputs), labels)]
                if teacher is not None:
                    bare = model(**leave_out(inputs))
                    values += [token_losses(said, labels, teacher) for said in (outputs, bare)]
        if place < len(batches):
            rows = (labels[:, 1:] != IGNORED).nonzero()[:, 0].cpu() + starts[place]
            for column, value in enumerate([torch.ones(len(rows)), *values]):
                found[:, column].index_add_(0, rows, value.double().cpu())
            for column, (each, block) in enumerate(zip(wanted, added, strict=True)):
                missed[column] += each.errors(block).sum().double().cpu()
    found = torch.tensor(distributed.summed(*found.flatten().tolist()), dtype=torch.float64).view_as(found)
    count, loss, kl, none = found.sum(0).tolist()
    record = {"eval_loss": loss / count}
    if layers:
        shares = [1 - error / count for error in distributed.summed(*missed.tolist())]
        record |= {"eval_r2": sum(shares) / len(shares)} | {
            f"eval_r2_{layer}": share for layer, share in zip(layers, shares, strict=True)
        }
    if prompts is None:
        return record
    least = found[:, 3].clamp_min(1e-9)
    low, high = bootstrap((found[:, 2] / least).tolist(), least.tolist())
    closed = {"eval_closed": 1 - kl / max(none, 1e-9), "eval_closed_low": 1 - high, "eval_closed_high": 1 - low}
    return record | {"eval_kl": kl / count, "eval_kl_none": none / count} | closed

"""One training run from one configuration: backbone -> data -> answers -> train -> adapter folder.

The folder holds the adapter and the tokenizer (a normal Hugging Face checkpoint), ``training.json`` (how it was made:
argv, versions, commit, configuration, counts, losses) and ``loss.png``.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from comb.backbones.unpublished import public
from comb.documents.datasets import Counts
from comb.documents.document import Example
from comb.evaluation.metrics import Scores
from comb.evaluation.plot import plot_training
from comb.evaluation.record import environment, write_training
from comb.evaluation.setting import Setting, drop_too_long
from comb.hub.facts import RESULTS
from comb.hub.push import refresh_card
from comb_training.answers import answer_prepared
from comb_training.config import Config
from comb_training.data.batches import TrainingExample, join_questions
from comb_training.data.mixture import ConfiguredSide
from comb_training.data.sources import with_whole_paths
from comb_training.data.token_statistics import TokenStatistics, statistics_by_set
from comb_training.models import training_method
from comb_training.models.method import device_of
from comb_training.trainer import distributed
from comb_training.trainer.checkpoints import alone_in, checkpoint_to_resume
from comb_training.trainer.prepare import PreparedRun, prepare, tokenized
from comb_training.trainer.sampler import check_budgets
from comb_training.trainer.trainer import CombTrainer

logger = logging.getLogger(__name__)

LOSS_PLOT = "loss.png"
OBJECTIVES = {
    (True, False): "cross-entropy, nats per target token",
    (False, True): "KL to full recompute, nats per target token",
    (True, True): "cross-entropy + KL to full recompute, weighted, nats per target token",
}
"""What `ce_weight` and `kl_weight` minimise."""


@dataclass
class TrainResult:
    """What a run gave."""

    output_dir: Path
    model: Any  # as it was trained; None when it is sharded (ZeRO-3) or this process isn't the first: load `output_dir`
    tokenizer: Any
    # what training.json holds. Of its values ``losses`` and ``heldout_losses`` are (step, mean loss per target
    # token), as `train.eval_steps` asked for them; ``seconds`` is of optimisation, ``answer_seconds`` of answering
    # before; ``teacher``: how the backbone's own answers score against the data's, None when trained on gold answers
    record: dict[str, Any]
    counts: Counts  # what happened to the data's rows
    terminated: str  # the signal that ended the run before its time, SIGTERM or SIGINT, or ""
    checkpoint: Path | None = None  # where it is to go on then. It is an adapter, too, with its own training.json


def run_training(
    config: Config,
    *,
    resume: str | Path | None = None,
    progress: bool = True,
    prepared: Callable[[PreparedRun], None] | None = None,
) -> TrainResult:
    """Trains as `config` says, and writes the adapter folder.

    Args:
        prepared: called on the first process when the data is read, before anything is answered or trained.
        resume: a ``checkpoint-N`` folder of an earlier run of the same configuration (see train.save_steps), or
            ``auto`` for the newest.

    Raises:
        ValueError: as `prepare` does, for a checkpoint that isn't there, and while another run writes into the folder.
        TrainingDivergedError: if the loss becomes NaN or infinite.
    """
    checkpoint = checkpoint_to_resume(config.train, resume)
    run = prepare(config, resume=checkpoint)
    logger.info("data: %s", run.counts)
    if prepared is not None and distributed.is_main():
        prepared(run)
    with alone_in(Path(config.train.output_dir)):
        return _trained(run, checkpoint, progress)


def _trained(run: PreparedRun, checkpoint: Path | None, progress: bool) -> TrainResult:
    config = run.config
    heldout: Sequence[TrainingExample] = []
    scored: dict[str, int] = {}
    if config.eval.limit:  # measured before the first step, behind the last and, with `train.eval_steps`, in between
        heldout, counts = tokenized(config, run.builder, run.model, split="heldout")
        logger.info("held-out data: %s", counts)
        if not heldout:
            raise ValueError(f"no held-out example is left to measure on ({counts}); eval.limit=0 measures nothing")
        # rows stay whole in the split, but retrieval brings a document into many of them
        theirs = {segment for example in heldout for segment in example.segments}
        also_trained_on = len(theirs.intersection(chain.from_iterable(each.segments for each in run.examples)))
        scored = {"examples": len(heldout), "documents": len(theirs), "also_trained_on": also_trained_on}
        if also_trained_on and distributed.is_main():
            logger.warning(
                "%d of %d documents of the held-out questions stand in rows that are trained on, too: their scores say "
                "little of new documents (rows of one `group` stay on one side; or hold out a file, heldout.jsonl)",
                also_trained_on, len(theirs),
            )  # fmt: skip
    asked = run.examples
    if config.train.answers == "on_policy":  # not the data's answers, and how long they are isn't known yet
        asked = [replace(example, target=()) for example in asked]
    check_budgets([*asked, *heldout], config.train)
    start = time.monotonic()
    examples, teacher = _targets(run, progress)
    answer_seconds = time.monotonic() - start
    trainer = CombTrainer(
        run.model,
        config.train,
        examples,
        run.tokenizer,
        heldout=heldout,
        settings=config.to_dict(),
        use_cpu=device_of(config).type == "cpu",
        progress=progress,
    )
    trainable, total = run.model.num_trainable_parameters()  # before ZeRO-3 takes them apart
    trainer.train(checkpoint)
    run.model.eval()
    sets = statistics_by_set(examples) if config.data.mixture else {}
    rows = [row for row in trainer.log.history if "eval_loss" in row]
    measured = [{name.removeprefix("eval_"): row[name] for name in row if name != "time"} for row in rows]
    # a resumed run's first score may be of others, or, with another train.kl_weight, of less
    comparable = bool(measured) and measured[0]["step"] == 0 and measured[0].keys() >= measured[-1].keys()
    begun = {"start": measured[0]} if comparable else {}
    record = {
        **environment(seed=config.train.seed),
        "config": with_whole_paths(config),
        "files": run.files,
        "ranks": distributed.world_size(),
        "parameters": {"trainable": trainable, "all": total},
        "data": run.counts.to_dict(),
        "tokens": asdict(TokenStatistics.of(examples)),
        "tokens_by_set": {name: asdict(of_set) for name, of_set in sets.items()},
        "teacher": asdict(teacher) if teacher else None,
        "steps": trainer.step,
        "seconds": round(trainer.schedule.used, 2),
        "answer_seconds": round(answer_seconds, 2),
        "losses": trainer.losses,
        "ended_by": trainer.ended_by,
        "heldout": {**scored, **begun, "end": measured[-1]} if measured else {},
        "heldout_losses": trainer.logged("eval_loss"),
        "heldout_kl": trainer.logged("eval_kl"),
        "heldout_closed": trainer.logged("eval_closed"),
    }
    model = run.model if distributed.is_main() and not trainer.sharded else None
    folder = Path(config.train.output_dir)
    result = TrainResult(folder, model, run.tokenizer, record, run.counts, trainer.terminated)
    if trainer.terminated:
        result.checkpoint = folder / f"{PREFIX_CHECKPOINT_DIR}-{trainer.step}"
        if distributed.is_main():
            _write_record(config, record, result.checkpoint)
    else:
        trainer.save_model(folder)
        # scores of an adapter that was in this folder before don't hold for this one, and the card would show them
        if distributed.is_main():
            for results in folder.glob(RESULTS):
                results.unlink()
                results.with_suffix(".png").unlink(missing_ok=True)
        if model is not None:  # what is evaluated is what was written
            result.model = type(model).from_pretrained(folder, backbone=model.backbone)
        if distributed.is_main():
            _write_record(config, record, folder)
        trainer.log.end(trainer.step, trainer.ended_by)
    # while it is set, transformers loads every model in parts (ZeRO-3), over ranks that are gone now
    unset_hf_deepspeed_config()
    distributed.leave()
    return result


def _write_record(config: Config, record: dict[str, Any], folder: Path) -> None:
    """training.json, the plot of its losses, and the card, which tells what it says."""
    write_training(folder, record)
    train, divergences = config.train, dict(record["heldout_kl"])
    minimised = [
        (step, train.ce_weight * loss + train.kl_weight * divergences.get(step, 0.0))
        for step, loss in record["heldout_losses"]
        if divergences or not train.kl_weight  # else the divergence wasn't measured
    ]
    try:
        plot_training(
            record["losses"], folder / LOSS_PLOT, heldout=minimised, closed=record["heldout_closed"],
            loss=OBJECTIVES[train.ce_weight > 0, train.kl_weight > 0],
            title=public(f"{config.model.backbone}: {config.data.label}", here=True),
        )  # fmt: skip
    except ImportError:
        logger.warning("no loss plot: matplotlib is not installed (pip install 'comb-pic[demo]')")
    refresh_card(folder)


Questions = tuple[list[Example], Counts]
"""Examples that methods are compared on, and what happened to the rows."""


def evaluation_questions(setting: Setting, config: Config, split: str = "heldout") -> Questions:
    """One side of the configured data, as it is evaluated, questions as the query template writes them. Raises
    ValueError if there is none, a method is unknown or doesn't fit the model, or no prompt has room."""
    length = getattr(setting.model, "max_document_tokens", None)  # a plain backbone has none
    examples, counts = ConfiguredSide(config.data, setting.builder, length, split, config.eval.limit).examples()
    return drop_too_long(setting, examples, config.eval.methods, config.eval.max_new_tokens, counts), counts


def rehearse_evaluation(run: PreparedRun) -> Questions:
    """The questions of the evaluation that stands behind a run; what it would refuse is refused here. Raises ValueError
    as `evaluation_questions` does, and for a method that can't answer."""
    setting = Setting(run.model, run.tokenizer, run.builder)
    questions = evaluation_questions(setting, run.config)
    if run.config.train.deepspeed is None:  # which may have the weights in parts
        run.model.eval()
        for method in run.config.eval.methods:
            setting.engine(method).ask(*setting.request(method, questions[0][0]), max_new_tokens=1)
    return questions


def _targets(run: PreparedRun, progress: bool) -> tuple[Sequence[TrainingExample], Scores | None]:
    """The rows to learn with what they shall answer; on policy, also how the backbone's answers score."""
    data, train = run.config.data, run.config.train
    examples, scores, method = run.examples, None, training_method(train.method)
    if train.answers == "on_policy":
        targets = answer_prepared(run, progress=progress)
        examples, scores = targets.examples, targets.scores
    if not examples:
        raise ValueError(f"no example is left after answering: {run.counts}")
    if scores is not None:
        logger.info("the answers trained on: %.1f%% exact match with the data's", 100 * scores.em)
    longest = method.longest_row(run.model, run.config)
    rows = join_questions(examples, data.questions_per_row, run.builder, longest=longest)
    run.counts.note("asked behind another question, in its row", len(examples) - len(rows))
    return method.fitting(rows, run.model, run.config, run.counts), scores  # an answer may be longer than the data's


if __name__ == "__main__":  # torchrun ... -m comb_training.train CONFIG ...: the same as comb train
    from comb.cli.main import main

    main(["train", *sys.argv[1:]])

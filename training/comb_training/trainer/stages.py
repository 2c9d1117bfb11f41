"""The stages of a run: what each one is, where a resumed run goes on, and what all of them say together.

A stage is a run of its own, in a folder of its own below the run's (the last one's is the run's), and starts from the
adapter of the one before. A run without `train.stages` is one stage.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from comb.evaluation.record import read_training
from comb_training.config import Config, config_from_dict
from comb_training.models import training_method
from comb_training.models.loading import shaping_options
from comb_training.trainer import distributed
from comb_training.trainer.checkpoints import changed_keys, checkpoints
from comb_training.trainer.run_log import LENGTHS, how_it_ended

logger = logging.getLogger(__name__)

TRAINING_JSON = "training.json"
"""What a stage has ended with: its record."""
FOLDER = "stages"
AUTO = "auto"
CURVES = ("losses", "heldout_losses", "heldout_kl", "heldout_closed", "heldout_em", "heldout_f1")
"""Values of a record that are (step, value)."""


@dataclass(frozen=True)
class RunStage:
    """One stage, ready to be run but for the adapter it starts from.

    Args:
        name: empty where the run has no stages. config: the whole of its configuration, without stages.
    """

    name: str
    config: Config

    @property
    def folder(self) -> Path:
        """Where its adapter, its record and its checkpoints are."""
        return Path(self.config.train.output_dir)

    def after(self, before: RunStage) -> RunStage:
        """The same, starting from the adapter of `before`; what shapes an adapter is in that."""
        shaping = shaping_options(training_method(self.config.train.method).adapter, self.config.model.options)
        model = replace(
            self.config.model,
            init_from=str(before.folder),
            cross_attention_layers=None,
            measured_cross_layers=None,
            fit_passages=0,
            options={name: value for name, value in self.config.model.options.items() if name not in shaping},
        )
        return replace(self, config=replace(self.config, model=model))


def run_stages(config: Config) -> list[RunStage]:
    """The stages of a run, in order. Raises ValueError for a stage whose sections have a mistake."""
    train = config.train
    if not train.stages:
        return [RunStage("", config)]
    sections = config.to_dict()
    found = []
    for number, stage in enumerate(train.stages, 1):
        own = stage.sections(sections["data"], sections["train"])
        if number < len(train.stages):
            own["train"]["output_dir"] = str(Path(train.output_dir) / FOLDER / f"{number}-{stage.name}")
        # answers are found by their prompts: stages that ask the same share them
        own["train"]["answers_dir"] = own["train"]["answers_dir"] or str(Path(train.output_dir) / "answers")
        if train.report_to:
            own["train"]["run_name"] = f"{train.run_name or train.output_dir}/{stage.name}"
        found.append(RunStage(stage.name, config_from_dict({**sections, **own}, f"train.stages, {stage.name}")))
    return found


@dataclass(frozen=True)
class StartingPoint:
    """Where a run begins or goes on: at which stage, and from which of its checkpoints, if from one.

    Args:
        records: of the stages before, which are finished.
    """

    stage: int = 0
    checkpoint: Path | None = None
    records: Sequence[dict[str, Any]] = ()


def starting_point(stages: Sequence[RunStage], resume: str | Path | None) -> StartingPoint:
    """Where a run with this ``--resume`` begins. Without one, what stages have left from another run is removed.

    Args:
        resume: a ``checkpoint-N`` folder, ``auto`` for the newest one of the stage that was not finished, or None.

    Raises:
        ValueError: for a folder that isn't there, or isn't a checkpoint of any stage, and for ``auto`` where nothing is
            left to train.
    """
    if resume is None:
        if not stages[-1].name and (found := checkpoints(stages[-1].folder)):
            logger.warning(
                "%s of an earlier run goes when this one writes its first: stop it and add --resume auto to go on from "
                "there, or choose another train.output_dir", found[-1],
            )  # fmt: skip
        if stages[-1].name and distributed.is_main():  # or a later --resume would take them for this run's
            for old in (stages[-1].folder / FOLDER, *checkpoints(stages[-1].folder)):
                shutil.rmtree(old, ignore_errors=True)
        return StartingPoint()
    if str(resume) != AUTO:
        path = Path(resume)
        if not path.is_dir():
            raise ValueError(f"there is no checkpoint folder {str(resume)!r} to resume from")
        # without stages a checkpoint may have been moved elsewhere
        own = [n for n, stage in enumerate(stages) if stage.folder.resolve() == path.resolve().parent]
        if not own and len(stages) > 1:
            raise ValueError(
                f"{path} is no checkpoint of a stage: they are in {', '.join(str(s.folder) for s in stages)}"
            )
        number = own[0] if own else 0
        return StartingPoint(number, path, [_record(stage) for stage in stages[:number]])
    records: list[dict[str, Any]] = []
    for stage in stages[:-1]:
        if not (stage.folder / TRAINING_JSON).is_file():
            break
        records.append(_record(stage))
    stage = stages[len(records)]
    found = checkpoints(stage.folder)
    if (ended := how_it_ended(stage.folder)) is not None:
        given = {name: getattr(stage.config.train, name) for name in LENGTHS}
        if not found or given == {name: ended[name] for name in LENGTHS}:
            longer = "max_seconds" if ended["ended_by"] == "clock" else "steps" if given["steps"] else "epochs"
            more = f"raise train.{longer}" if found else "it would need a checkpoint (train.save_steps), and left none"
            raise ValueError(
                f"--resume auto: the run in {stage.folder} is finished, after {ended['step']} steps. To go on with it "
                f"{more}; or train its adapter further in another folder: model.init_from={stage.folder} "
                "train.output_dir=..."
            )
    if not found:
        where = f"the run starts with stage {stage.name}" if records else "the run starts from the beginning"
        logger.warning("--resume auto: no checkpoint-N in %s, %s", stage.folder, where)
    return StartingPoint(len(records), found[-1] if found else None, records)


def _record(stage: RunStage) -> dict[str, Any]:
    """What a finished stage has left. Raises ValueError if it isn't finished."""
    try:
        record = read_training(stage.folder)
    except ValueError as error:
        raise ValueError(f"stage {stage.name} is not finished: {error}; use --resume auto") from error
    if record is None:
        path = stage.folder / TRAINING_JSON
        raise ValueError(f"stage {stage.name} is not finished: there is no {path}; use --resume auto")
    changed = changed_keys(stage.config.to_dict(), record["config"], "data", "train")
    if changed:
        logger.warning(
            "stage %s is finished and stays as it is, though %s changed: start without --resume to train it again",
            stage.name, ", ".join(changed),
        )  # fmt: skip
    return record


def joined(config: Config, stages: Sequence[RunStage], records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One record of all stages so far: the last one's, with steps counted through, sums, and each stage's own beside.

    ``stages`` holds, per stage, its ``name``, the ``first_step`` before which it began, its first and last of the
    ``losses``, and the rest of its record without curves.
    """
    parts, first = [], 0
    curves: dict[str, list[Any]] = {name: [] for name in CURVES}
    for stage, record in zip(stages, records, strict=False):
        own = {name: value for name, value in record.items() if name not in CURVES}
        losses = [loss for _, loss in record["losses"]]
        parts.append({"name": stage.name, "first_step": first, "losses": losses[:1] + losses[-1:], **own})
        for name, curve in curves.items():
            curve += [(first + step, value) for step, value in record.get(name, ())]
        first += record["steps"]
    counted = ("seconds", "answer_seconds", "bad_batches")
    sums = {name: round(sum(record[name] for record in records), 2) for name in counted}
    return {**records[-1], "config": config.to_dict(), "steps": first, **sums, **curves, "stages": parts}

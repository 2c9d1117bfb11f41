"""Checkpoints to resume from, in the run's folder: whole under their names, or not there; without the frozen backbone.

One holds the trained weights, the optimizer's state, the random state of every rank, and ``trainer_state.json``: step,
seconds of optimisation, records of the log.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import SAFE_WEIGHTS_NAME

from comb.files import failed_to_write
from comb.hub.facts import RESULTS, TRAINING
from comb_training.config import TrainConfig
from comb_training.trainer import distributed
from comb_training.trainer.run_log import LENGTHS, how_it_ended, last_run

logger = logging.getLogger(__name__)

AUTO = "auto"
"""``--resume`` with the newest checkpoint of the run's folder."""
PARTIAL = "partial"
"""Subfolder in which a checkpoint is written before it gets its name; a leftover of a killed run is removed."""
RANDOM_STATE = "rng_state_{}.pth"
"""File of a rank's random state."""
MAY_CHANGE = (
    "path", "output_dir", "answers_dir", "answer_batch_size", "report_to",
    "logging_steps", "save_steps", "save_total_limit", "eval_steps", "cpu_threads", "device",
)  # fmt: skip
"""Keys that say where things are and what is shown, not what is learned."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written; those of before are intact."""


class TrainingDivergedError(RuntimeError):
    """The loss or a weight became NaN or infinite."""


def checkpoints(run: str | Path) -> list[Path]:
    """The complete checkpoints of a run, oldest step first."""
    found = [path for path in Path(run).glob("*") if re.fullmatch(rf"{PREFIX_CHECKPOINT_DIR}-\d+", path.name)]
    return sorted(found, key=lambda path: int(path.name.rsplit("-", 1)[1]))


def checkpoint_to_resume(train: TrainConfig, resume: str | Path | None) -> Path | None:
    """The checkpoint that a run with this ``--resume`` goes on from; None for a run from the beginning. `resume`: a
    ``checkpoint-N`` folder, ``auto`` for the newest of the run's own, or None. Raises ValueError for a folder that
    isn't there, and for ``auto`` where nothing is left to train."""
    folder = Path(train.output_dir)
    found = checkpoints(folder)
    if resume is None:
        if found:
            logger.warning(
                "%s of an earlier run goes when this one writes its first: stop it and add --resume auto to go on from "
                "there, or choose another train.output_dir", found[-1],
            )  # fmt: skip
        if (folder / TRAINING).is_file() and distributed.is_main():
            scores = ", ".join(sorted(path.name for path in folder.glob(RESULTS)))
            logger.warning(
                "%s holds an adapter that was trained before: this run replaces it when it ends%s. To keep it, choose "
                "another train.output_dir", folder, f", and deletes its scores ({scores})" if scores else "",
            )  # fmt: skip
        return None
    if str(resume) != AUTO:
        if not Path(resume).is_dir():
            raise ValueError(f"there is no checkpoint folder {str(resume)!r} to resume from")
        return Path(resume)
    if (ended := how_it_ended(folder)) is not None:
        given = {name: getattr(train, name) for name in LENGTHS}
        if not found or given == {name: ended[name] for name in LENGTHS}:
            longer = "max_seconds" if ended["ended_by"] == "clock" else "steps" if given["steps"] else "epochs"
            more = f"raise train.{longer}" if found else "it would need a checkpoint (train.save_steps), and left none"
            raise ValueError(
                f"--resume auto: the run in {folder} is finished, after {ended['step']} steps. To go on with it "
                f"{more}; or train its adapter further in another folder: model.init_from={folder} "
                "train.output_dir=..."
            )
    if not found:
        logger.warning("--resume auto: no checkpoint-N in %s, the run starts from the beginning", folder)
        return None
    begun = last_run(folder)
    for newest in reversed(found):  # killed before it had removed them, a run leaves an earlier one's beside its own
        its = None
        with suppress(OSError, ValueError, AttributeError):  # what is wrong with it is said when it is resumed from
            its = json.loads((newest / TRAINER_STATE_NAME).read_text(encoding="utf-8")).get("run")
        if its is None or begun in (None, its):
            return newest
    logger.warning("--resume auto: %s is of an earlier run, and the last one left none: it begins again", found[-1])
    return None


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Keeps other runs out of a run's folder, whose files would be of both. Raises ValueError if one is in it."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        if distributed.is_main():
            with suppress(OSError):  # a file system without locks
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise ValueError(
                        f"train.output_dir: another run is writing to {folder}: wait for its end, or choose another"
                    ) from None
        yield
    finally:
        os.close(descriptor)


@contextmanager
def new_checkpoint(run: Path, step: int, *, keep: int, first: bool = False) -> Iterator[Path]:
    """A folder to write the checkpoint of `step` in; it gets its name when the block has ended without an error.

    So a killed run leaves no half of one. Collective. `keep`: so many of the newest checkpoints stay, all with 0; those
    of later steps go, and behind the `first` of a fresh run all others. Raises CheckpointError if writing fails; the
    checkpoints of before are intact.
    """
    name = f"{PREFIX_CHECKPOINT_DIR}-{step}"
    folder = run / PARTIAL / name
    try:
        if distributed.is_main():
            shutil.rmtree(run / PARTIAL, ignore_errors=True)
            folder.mkdir(parents=True)
        distributed.barrier()
        yield folder
    except (TrainingDivergedError, distributed.ProcessEndedError):
        raise
    except Exception as error:
        if not (failed_to_write(error) or isinstance(error, RuntimeError)):  # the latter is torch's
            raise
        shutil.rmtree(run / PARTIAL, ignore_errors=True)
        go_on = "make room"
        for newest in checkpoints(run)[-1:]:
            whose, resume = (" of an earlier run", newest) if first else ("", AUTO)
            go_on = f"{newest.name}{whose} is intact: make room, then go on from there with --resume {resume}"
        raise CheckpointError(
            f"the checkpoint of step {step} could not be written to {run} ({error}); {go_on}"
        ) from error
    distributed.barrier()
    if distributed.is_main():
        # what goes leaves its name at once: removed there, half of one would be found if the run is killed meanwhile
        gone = run / PARTIAL / "gone"
        gone.mkdir()
        if (run / name).exists():
            (run / name).rename(gone / name)
        folder.rename(run / name)
        found = checkpoints(run)
        own = found.index(run / name) + 1
        before = own - 1 if first else max(0, own - keep) if keep else 0
        # those of later steps are of a longer run in the same folder, and --resume auto would take them for this one's
        for old in [*found[own:], *found[:before]]:
            old.rename(gone / old.name)
        shutil.rmtree(run / PARTIAL, ignore_errors=True)
    distributed.barrier()


@contextmanager
def reading(folder: Path, file: str = "") -> Iterator[None]:
    """Says of a checkpoint that can't be read which file of it that is, and what to do. Raises ValueError."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # JSON, safetensors, zip files and pickles have each their own
        said = str(error).partition("\n")[0]
        others = [each for each in checkpoints(folder.parent) if each != folder]
        go_on = f"go on from another checkpoint (--resume {others[-1]}), or " if others else ""
        raise ValueError(
            f"{folder / file} can't be read ({type(error).__name__}: {said}): if it is damaged or cut off, {go_on}"
            "begin again without --resume"
        ) from error


def check_names(model: nn.Module, folder: str | Path) -> None:
    """Raises ValueError if a checkpoint holds other parameters than `model` trains, or of other shapes."""
    path = Path(folder) / SAFE_WEIGHTS_NAME
    with reading(path.parent, path.name), safe_open(path, framework="pt") as file:
        saved = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - it is no mapping
    own = dict(model.named_parameters())
    trained = {name for name, parameter in own.items() if parameter.requires_grad}
    missing, surplus = sorted(trained - saved.keys()), sorted(saved.keys() - own.keys())
    # of what ZeRO-3 keeps in parts, the whole's
    shapes = {name: tuple(getattr(own[name], "ds_shape", own[name].shape)) for name in trained & saved.keys()}
    other = sorted(name for name, shape in shapes.items() if saved[name] != shape)
    if missing or surplus or other:
        raise ValueError(
            f"{folder} doesn't fit this model: missing {missing[:3] or 'nothing'}, not known "
            f"{surplus[:3] or 'nothing'}, of another shape {other[:3] or 'nothing'}; resume with the configuration the "
            "checkpoint was made with"
        )


def load_trainable(model: nn.Module, folder: str | Path) -> None:
    """Loads a checkpoint's trained parameters into `model`; the frozen ones are already there. Raises ValueError if the
    checkpoint holds other parameters than the model trains."""
    check_names(model, folder)
    path = Path(folder) / SAFE_WEIGHTS_NAME
    with reading(path.parent, path.name):
        model.load_state_dict(load_file(path), strict=False)


def check_finite(weights: Mapping[str, Tensor]) -> None:
    """Raises TrainingDivergedError if a trained weight is NaN or infinite, so that no such adapter is written."""
    for name, weight in weights.items():
        if not bool(torch.isfinite(weight).all()):
            raise TrainingDivergedError(
                f"{name} holds NaN or infinity after training, nothing was saved: lower train.learning_rate, or train "
                "in another precision"
            )

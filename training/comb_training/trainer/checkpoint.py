"""Checkpoints to resume from, in the run's folder: whole under their names, or not there.

One holds the trained weights, the optimizer's state, the random state of every rank, and ``trainer_state.json``: step,
seconds of optimisation, records of the log.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from comb_training.models.checkpoints import (
    PARTIAL,
    WRITE_ERRORS,
    CheckpointError,
    TrainingDivergedError,
    checkpoints,
    remove_old,
)
from comb_training.trainer import distributed

STATE = "trainer_state.json"
OPTIMIZER = "optimizer.pt"


@contextmanager
def new_checkpoint(run: Path, step: int, *, keep: int) -> Iterator[Path]:
    """A folder to write the checkpoint of `step` in; it gets its name when the block has ended without an error.

    So a killed run leaves no half of one. Collective.

    Args:
        keep: so many of the newest checkpoints stay, all with 0.

    Raises:
        CheckpointError: if writing fails; the checkpoints of before are intact.
    """
    name = f"{PREFIX_CHECKPOINT_DIR}-{step}"
    folder = run / PARTIAL / name
    if distributed.is_main():
        shutil.rmtree(run / PARTIAL, ignore_errors=True)
        folder.mkdir(parents=True)
    distributed.barrier()
    try:
        yield folder
    except TrainingDivergedError:
        raise
    except WRITE_ERRORS as error:
        shutil.rmtree(run / PARTIAL, ignore_errors=True)
        newest = [path.name for path in checkpoints(run)][-1:]
        raise CheckpointError(
            f"the checkpoint of step {step} could not be written to {run} ({error}); "
            f"{f'{newest[0]} is intact: make room, then go on with --resume auto' if newest else 'make room'}"
        ) from error
    distributed.barrier()
    if distributed.is_main():
        shutil.rmtree(run / name, ignore_errors=True)  # of a longer run in the same folder
        folder.rename(run / name)
        (run / PARTIAL).rmdir()
        if keep:
            remove_old(run, keep)
    distributed.barrier()


def save_random_state(folder: Path) -> None:
    """This rank's."""
    state = {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []}
    torch.save(state, folder / f"rng_state_{distributed.rank()}.pth")


def load_random_state(folder: Path) -> None:
    """This rank's. Raises ValueError if the checkpoint is of fewer ranks."""
    path = folder / f"rng_state_{distributed.rank()}.pth"
    if not path.is_file():
        raise ValueError(f"{path} is not there: resume with as many processes as wrote the checkpoint")
    state = torch.load(path, weights_only=True)
    torch.set_rng_state(state["cpu"])
    if torch.cuda.is_available() and state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])


def read_state(folder: Path) -> dict[str, Any]:
    """``trainer_state.json``. Raises ValueError if it is not there or damaged."""
    try:
        state: dict[str, Any] = json.loads((folder / STATE).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"{folder} is no checkpoint to resume from ({error})") from error
    return state

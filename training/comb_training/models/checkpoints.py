"""Resumable checkpoints: complete or not there, and without the frozen backbone."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

PARTIAL = "partial"
"""Subfolder in which a checkpoint is written before it gets its name; a leftover of a killed run is removed."""

WEIGHTS = "model.safetensors"
"""File of the trained parameters in a checkpoint."""

WRITE_ERRORS = (OSError, RuntimeError, SafetensorError)
"""What writing on a full disk raises: Python's, torch's and safetensors'."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written; those of before are intact."""


class TrainingDivergedError(RuntimeError):
    """The loss or a weight became NaN or infinite."""


def checkpoints(folder: str | Path) -> list[Path]:
    """The complete checkpoints of a run, oldest step first."""
    found = [path for path in Path(folder).glob(f"{PREFIX_CHECKPOINT_DIR}-*") if re.fullmatch(r"\d+", _step(path))]
    return sorted(found, key=lambda path: int(_step(path)))


def _step(path: Path) -> str:
    return path.name.rsplit("-", 1)[1]


def remove_old(folder: str | Path, keep: int) -> None:
    """Removes all but the `keep` newest checkpoints."""
    for path in checkpoints(folder)[:-keep]:
        shutil.rmtree(path, ignore_errors=True)


def check_names(model: nn.Module, folder: str | Path) -> None:
    """Raises ValueError if a checkpoint holds other parameters than `model` trains."""
    with safe_open(Path(folder) / WEIGHTS, framework="pt") as file:
        saved = set(file.keys())
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    missing, surplus = sorted(trained - saved), sorted(saved - set(model.state_dict()))
    if missing or surplus:
        raise ValueError(
            f"{folder} doesn't fit this model: missing {missing[:3] or 'nothing'}, not known "
            f"{surplus[:3] or 'nothing'}; resume with the configuration the checkpoint was made with"
        )


def load_trainable(model: nn.Module, folder: str | Path) -> None:
    """Loads a checkpoint's trained parameters into `model`; the frozen ones are already there.

    Raises:
        ValueError: if the checkpoint holds other parameters than the model trains.
    """
    check_names(model, folder)
    with safe_open(Path(folder) / WEIGHTS, framework="pt") as file:
        model.load_state_dict({name: file.get_tensor(name) for name in file.keys()}, strict=False)  # noqa: SIM118


def check_finite(weights: Mapping[str, Tensor]) -> None:
    """Raises TrainingDivergedError if a trained weight is NaN or infinite, so that no such adapter is written."""
    for name, weight in weights.items():
        if not bool(torch.isfinite(weight).all()):
            raise TrainingDivergedError(
                f"{name} holds NaN or infinity after training, nothing was saved: lower train.learning_rate, or train "
                "in another precision"
            )

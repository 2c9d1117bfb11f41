"""Results as JSON that says how they were made: argv, versions, commit, machine."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("comb-pic", "transformers", "tokenizers", "safetensors", "accelerate", "vllm")


def environment(**settings: Any) -> dict[str, Any]:
    """What a number was made with: argv, versions, commit, machine, and the `settings` given (seed, data, ...)."""
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    installed = {dist.name.lower(): dist.version for dist in metadata.distributions() if dist.name}
    versions = {package: installed[package] for package in PACKAGES if package in installed}
    return {
        "argv": sys.argv,
        # torch says what it was built for, which its metadata may not name
        "versions": {"python": platform.python_version(), "torch": torch.__version__, **versions},
        "commit": _commit(),
        "machine": {"system": platform.platform(), "cpus": os.cpu_count(), "gpus": gpus},
        **settings,
    }


def write_results(path: str | Path, results: Iterable[Any], **settings: Any) -> None:
    """Writes results (plain rows, or objects with `to_dict`) with `environment` as JSON, atomically."""
    rows = [row if isinstance(row, Mapping) else row.to_dict() for row in results]
    write_json(path, {**environment(**settings), "results": rows})


def write_json(path: str | Path, content: Mapping[str, Any]) -> None:
    """Writes JSON atomically: a reader never sees half a file."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp{os.getpid()}")
    temporary.write_text(json.dumps(content, indent=2, default=_plain) + "\n", encoding="utf-8")
    temporary.replace(path)


def check_writable(folder: str | Path, *names: str) -> None:
    """Raises ValueError unless files of these names (patterns) can be written into a folder, which may not be there."""
    folder = Path(folder).absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise ValueError(f"{there} is no folder that can be written to ({error.strerror})") from error
    for path in (path for name in names for path in folder.glob(name) if path.is_dir()):
        raise ValueError(f"{path} is a folder, where a file is to be written: take it away")


def _plain(value: Any) -> Any:
    """Dataclasses (times with their quartiles) by their fields; paths and dtypes by their names."""
    return vars(value) if hasattr(value, "__dataclass_fields__") else str(value)


def _commit() -> str | None:
    """The commit of the source tree, "-dirty" behind it if files differ; None when not run from one."""
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12", "--match="],
            cwd=Path(__file__).resolve().parent, capture_output=True, text=True, timeout=10, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return described.stdout.strip() or None

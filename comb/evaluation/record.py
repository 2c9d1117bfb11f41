"""Results as JSON that says how they were made; and journals: rows of a run that may be broken off and gone on with."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from comb.backbones.unpublished import public, read_private, write_private
from comb.files import read_json, write_whole
from comb.hub.facts import TRAINING

PACKAGES = ("comb-pic", "transformers", "tokenizers", "safetensors", "accelerate", "vllm")


def environment(**settings: Any) -> dict[str, Any]:
    """What a number was made with: argv, versions, commit, machine, and the `settings` given (seed, data, ...).

    It is published with the number, so folders and files are there by their names alone.
    """
    import torch

    called = Path(sys.argv[0])
    # ``python -m package.module`` has the module's file here
    program = f"python -m {called.parent.name}.{called.stem}" if called.suffix == ".py" else called.name
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    installed = {dist.name.lower(): dist.version for dist in metadata.distributions() if dist.name}
    versions = {package: installed[package] for package in PACKAGES if package in installed}
    commit = None  # not run from a source tree
    with suppress(OSError, subprocess.SubprocessError):
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12", "--match="],
            cwd=Path(__file__).resolve().parent, capture_output=True, text=True, timeout=10, check=True,
        )  # fmt: skip
        commit = described.stdout.strip() or None
    return {
        "argv": [program, *public(sys.argv[1:], here=True)],
        # torch says what it was built for, which its metadata may not name
        "versions": {"python": platform.python_version(), "torch": torch.__version__, **versions},
        "commit": commit,
        "machine": {"system": platform.platform(), "cpus": os.cpu_count(), "gpus": gpus},
        **public(settings, here=True),
    }


def write_results(path: str | Path, rows: Sequence[Mapping[str, Any]], **settings: Any) -> None:
    """Writes the rows of a table with `environment` as JSON, atomically."""
    write_json(path, {**environment(**settings), "results": rows})


def write_training(folder: Path, record: Mapping[str, Any]) -> None:
    """Writes ``training.json``; its configuration as it is here, with paths, is kept beside for `read_training`."""
    write_json(folder / TRAINING, public(record, here=True))
    write_private(folder, training={"config": record["config"], "of": _content(folder)})


def read_training(folder: str | Path) -> dict[str, Any] | None:
    """What `write_training` wrote, with the paths if it was here; None if there is nothing.

    Raises:
        ValueError: for a damaged file.
    """
    folder = Path(folder)
    if not (folder / TRAINING).is_file():
        return None
    record = read_json(folder / TRAINING, "give what it would say as options, or train again")
    if not isinstance(record.get("config"), dict):
        raise ValueError(f"{folder / TRAINING} is damaged, it has no config: give what it would say as options")
    kept = read_private(folder).get("training", {})
    # of another file, the paths are somebody else's
    return {**record, "config": kept["config"]} if kept.get("of") == _content(folder) else record


def _content(folder: Path) -> str:
    return hashlib.sha256((folder / TRAINING).read_bytes()).hexdigest()


def write_json(path: str | Path, content: Mapping[str, Any]) -> None:
    """Writes JSON atomically: a reader never sees half a file. Raises OSError, which names it."""

    def plain(value: Any) -> Any:
        """Dataclasses (times with their quartiles) by their fields; paths and dtypes by their names."""
        return vars(value) if hasattr(value, "__dataclass_fields__") else str(value)

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, f"{json.dumps(content, indent=2, default=plain)}\n".encode(), mode=0o666)  # less the umask


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


class Journal:
    """Rows that were written before, and those that are added now.

    Args:
        path: of the file; None keeps rows in memory only.
        made_with: what all rows depend on. It is the file's first line.

    Raises:
        ValueError: for a file whose rows were made with something else.
    """

    def __init__(self, path: Path | None, made_with: Mapping[str, Any]) -> None:
        self.path = path
        self.rows: list[dict[str, Any]] = []
        expected = json.loads(json.dumps(made_with))
        if path is None:
            return
        content = path.read_bytes() if path.exists() else b""
        end = content.rfind(b"\n") + 1
        if end < len(content):  # a broken-off run has left half a line
            with path.open("r+b") as file:
                file.truncate(end)
        if end:
            try:
                # not splitlines: JSON strings may hold U+2028 and the like
                first, *self.rows = map(json.loads, content[:end].decode("utf-8").split("\n")[:-1])
            except ValueError as error:  # of JSON, or of UTF-8
                raise ValueError(
                    f"{path} is damaged, line by line it is not JSON ({error}): choose another --out, or remove it"
                ) from error
            differing = [name for name in {**expected, **first} if first.get(name) != expected.get(name)]
            if differing:
                name = differing[0]
                raise ValueError(
                    f"{path} holds answers that were made with {name}={first.get(name)!r}, now it is "
                    f"{expected.get(name)!r}: choose another --out, or remove the file"
                )
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._write(expected)

    def add(self, row: dict[str, Any]) -> None:
        """One more row, which is on disk when this returns."""
        self.rows.append(row)
        if self.path is not None:
            self._write(row)

    def _write(self, row: Mapping[str, Any]) -> None:
        assert self.path is not None
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())

"""Rows of a set on the Hugging Face Hub: ``hf://org/name?config=...&split=...&revision=...``, all three optional."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from comb.documents.datasets import HUB, MissingDataError

_ADVICE = (
    ", and that the Hub can be reached (HF_HUB_OFFLINE not set; HF_TOKEN for sets that ask for it). Without network, "
    "download it elsewhere (hf download {name} --repo-type dataset --local-dir FOLDER/{name}): a mixture takes it by "
    f"data.path=FOLDER, comb bench by --data FOLDER, and anything by {HUB}FOLDER/{{name}} with the full path"
)


def on_hub(path: str | Path | None) -> bool:
    """Whether the path names a set on the Hugging Face Hub."""
    return str(path).startswith(HUB)


def load_hub_rows(path: str, dataset: str) -> Any:
    """The rows, as mappings. What follows ``hf://`` may also be a folder here (``hf:///data/name``).

    Raises:
        ValueError: for a name that is none, without the package datasets, or when it can't load the set
            (`MissingDataError` where the Hub can't be reached).
    """
    name, options = _parse(path, dataset)
    try:
        from datasets import load_dataset  # type: ignore[import-untyped]
    except ImportError as error:
        raise ValueError(
            f"dataset {dataset!r}: {path} needs the package datasets: pip install 'comb-pic[train]' (or datasets)"
        ) from error
    try:
        loaded: Any = load_dataset(
            name, options.get("config"), revision=options.get("revision"), split=options.get("split")
        )
    except Exception as error:  # the network, rights, a script in the repository, the files: each has its own type
        told = error.__cause__ if type(error).__name__ == "DatasetGenerationError" and error.__cause__ else error
        reason = next(iter(str(told).strip().splitlines()), "")
        advice = "" if name.startswith("/") else _ADVICE.format(name=name)
        kind = MissingDataError if isinstance(told, ConnectionError) else ValueError  # a dry run goes on without it
        raise kind(
            f"dataset {dataset!r}: {path} can't be loaded ({type(told).__name__}: {reason}). Check name, config and "
            f"split{advice}"
        ) from error
    if isinstance(loaded, Mapping):
        if len(loaded) != 1:
            raise ValueError(
                f"dataset {dataset!r}: {path} has the splits {', '.join(loaded)}: add split=... to the path"
            )
        loaded = next(iter(loaded.values()))
    return loaded


def _parse(path: str, dataset: str) -> tuple[str, dict[str, str]]:
    name, _, query = path.removeprefix(HUB).partition("?")
    parts = [part.partition("=") for part in query.split("&")] if query else []
    wrong = ["".join(part) for part in parts if part[0] not in ("config", "split", "revision") or not part[2]]
    if wrong or not name.strip("/"):
        what = f"has {wrong[0]!r}" if wrong else "names no set"
        raise ValueError(f"dataset {dataset!r}: {path} {what}; expected {HUB}org/name?config=...&split=...")
    return name, {key: unquote(value) for key, _, value in parts}

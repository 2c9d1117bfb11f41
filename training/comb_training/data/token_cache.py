"""Tokenised examples are made once and kept in a folder of files (`comb_training.data.token_file`).

A file is named by a hash of all that decides what is in it (`cache_key`): when something of it changes,
another file is made, and the old one stays until somebody removes it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from comb.cache.atomic import hub_folder
from comb_training.data.batches import TrainingExample
from comb_training.data.cache_key import digest, plain
from comb_training.data.token_file import DamagedCacheError, TrainingExamples, write

logger = logging.getLogger(__name__)


def default_folder() -> Path:
    """The folder in the Hugging Face cache; HF_HOME moves it."""
    return hub_folder("tokens")


def cached(
    folder: str | Path | None,
    name: str,
    key: Mapping[str, Any],
    build: Callable[[], tuple[list[TrainingExample], dict[str, Any]]],
) -> tuple[Sequence[TrainingExample], dict[str, Any]]:
    """The examples under `key`, from the folder or built and kept there, and their counts.

    Nothing that happens to the folder stops a run: where a file can't be written or read, the examples that were built
    are given as they are, and a warning says so. Several processes may do this at once; the last file stays.

    Args:
        folder: None is `default_folder`.
        name: how the file's name starts, for people who look into the folder.
        key: JSON values that decide what the examples are.
        build: examples and counts (JSON values); whatever it raises is raised.
    """
    safe = "".join(letter if letter.isalnum() or letter in "-_" else "-" for letter in name)[:40]
    path = Path(folder if folder is not None else default_folder()) / f"{safe}-{digest(plain(key))[:32]}.safetensors"
    try:
        found = TrainingExamples(path, key)
    except FileNotFoundError:
        pass
    except (DamagedCacheError, OSError) as error:
        logger.warning("%s is damaged or can't be read (%s): the examples are tokenised again", path, error)
    else:
        logger.info("%s: %d tokenised examples found in %s", name, len(found), path)
        return found, found.counts
    examples, counts = build()
    if not examples:
        return examples, counts
    try:
        write(path, examples, counts, key)
        return TrainingExamples(path, key), counts
    except (ValueError, OSError) as error:
        logger.warning("tokenised examples could not be kept in %s (%s); going on without", path, error)
        return examples, counts

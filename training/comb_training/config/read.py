"""A `Config` from YAML, from nested values, and from ``section.key=value`` on the command line.

A key that is not known is an error that names the nearest one: a misspelt option must never be ignored.
"""

from __future__ import annotations

import copy
import difflib
import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from comb.backbones.tracebacks import named
from comb.evaluation.record import read_training
from comb.files import OnceEach, read_text
from comb.hub.facts import TRAINING
from comb_training.config.sections import (
    Config,
    DataConfig,
    EvalConfig,
    MixtureEntry,
    ModelConfig,
    TrainConfig,
    other_rows,
)

logger = logging.getLogger(__name__)

SECTIONS: dict[str, type] = {"model": ModelConfig, "data": DataConfig, "train": TrainConfig, "eval": EvalConfig}

COMMAND_LINE = "the command line"

EXPECTED = {
    "int_type": "must be a whole number, not {input!r}",
    "float_type": "must be a number, not {input!r}",
    "finite_number": "must be a finite number, not {input!r}",
    "bool_type": "must be true or false, not {input!r}",
    "string_type": "must be a text, not {input!r}",
    "tuple_type": "must be a list, not {input!r}",
    "dict_type": "must be a section of keys, not {input!r}",
    "dataclass_type": "is a section of keys, got {input!r}",
    "greater_than": "must be greater than {gt}, not {input!r}",
    "less_than": "must be less than {lt}, not {input!r}",
    "greater_than_equal": "must be at least {ge}, not {input!r}",
    "literal_error": "is one of {expected}, not {input!r}",
}
"""What was expected, by pydantic's name of the mistake."""


def load_config(path: str | Path | None, overrides: Sequence[str] = ()) -> Config:
    """Reads a YAML file and applies ``section.key=value`` overrides (values are YAML: ``train.steps=20``).

    ``data=mine.jsonl``, or a list, takes the place of all keys that say which rows are read (`other_rows`), and
    ``model=NAME`` is ``model.backbone=NAME``. Raises ValueError for a missing or malformed file, an unknown key (naming
    the nearest one and the file), or a value of the wrong type.
    """
    content: dict[str, Any] = {}
    source = COMMAND_LINE
    if path is not None:
        source = str(path)
        if not Path(path).is_file():
            raise ValueError(f"there is no configuration file {source!r}")
        try:
            content = yaml.load(read_text(path), OnceEach)
        except (yaml.YAMLError, RecursionError) as error:
            said = str(error).replace('in "<unicode string>", ', "in ")
            raise ValueError(f"{source} is not YAML: {said}") from error
        if content is None:
            raise ValueError(f"{source} is empty: write sections model, data, train and eval, or see configs/ for some")
        if not isinstance(content, dict):
            raise ValueError(f"{source}: expected sections model, data, train and eval, got {type(content).__name__}")
        if empty := [name for name in SECTIONS if name in content and not content[name]]:
            raise ValueError(
                f"{source}: {empty[0]} has no keys: write some below it, indented, or leave {empty[0]} out"
            )
    if isinstance(content.get("data"), str | list):
        content["data"] = other_rows({}, content["data"])
    for item in _ordered(overrides):
        # its key and its value are checked alone first, so that a mistake in them is not blamed on the file
        _validate(_override({}, item), COMMAND_LINE, alone=True)
        content = _override(content, item)
    return config_from_dict(content, source)


def of_file(path: str | Path, overrides: Sequence[str] = ()) -> AbstractContextManager[None]:
    """For what is done as a file says: an error of comb's own about one of its values begins with its name."""
    return named(path, " and the command line" if overrides else "")


def config_from_dict(content: Mapping[str, Any], source: str = "configuration") -> Config:
    """A `Config` from nested plain values. Raises ValueError as `load_config` does."""
    config = _validate(content, source)
    assert config is not None
    return config


def override(config: Config, items: Sequence[str]) -> Config:
    """`config` with ``section.key=value`` items applied, the last one winning. Raises ValueError as `load_config`."""
    content: dict[str, Any] = config.to_dict()
    for item in _ordered(items):
        content = _override(content, item)
    return config_from_dict(content, COMMAND_LINE)


def _ordered(items: Sequence[str]) -> list[str]:
    """``data=...`` and ``model=...`` first: ``data.limit=5``, before or behind it, is of its rows."""
    return sorted(items, key=lambda item: item.partition("=")[0].strip() not in ("data", "model"))


def _override(content: Mapping[str, Any], item: str) -> dict[str, Any]:
    """`content` with one ``section.key=value`` applied; unknown keys are left to `_validate`."""
    name, equals, text = item.partition("=")
    if not equals or not name.strip():
        raise ValueError(f"expected section.key=value, got {item!r} (for example train.steps=20)")
    try:
        value = yaml.safe_load(text) if text else None
    except yaml.YAMLError as error:
        raise ValueError(f"{item!r}: the value is not YAML ({error})") from error
    if name.strip() in SECTIONS and not value:  # a shell's variable that isn't set: defaults would stand in for it
        raise ValueError(f"{item!r} is empty: give it a value, or leave it out")
    changed = copy.deepcopy(dict(content))
    target = changed
    *parents, key = name.strip().split(".")
    for parent in parents:
        if target.get(parent) is None:
            target[parent] = {}
        target = target[parent]
        if not isinstance(target, dict):
            raise ValueError(f"{item!r}: {parent} is a value and has no keys")
    if name.strip() == "model" and isinstance(value, str):
        value = {**(target.get("model") or {}), "backbone": value}
    if name.strip() == "data" and isinstance(value, str | list):
        value = other_rows(target.get("data") or {}, value)
    target[key] = value
    return changed


def _validate(content: Mapping[str, Any], source: str, *, alone: bool = False) -> Config | None:
    """The configuration, or a ValueError with all mistakes. `alone`: it is a part of one only: whether values fit
    together can't be told, and None is returned if not."""
    try:
        return TypeAdapter(Config).validate_python(content)
    except ValidationError as error:
        mistakes = [item for item in error.errors() if not (alone and item["type"] == "value_error")]
        if not mistakes:
            return None
        raise ValueError("; ".join(f"{source}: {_describe(item)}" for item in mistakes)) from error


def _describe(mistake: Any) -> str:
    location, mistaken = mistake["loc"], mistake["type"]
    if mistaken == "value_error":  # of a section's own checks, which name their keys
        return str(mistake["ctx"]["error"])
    name = ".".join(map(str, location))
    for part in location:
        if isinstance(part, int):
            name = name.replace(f".{part}", f"[{part}]", 1)
    if mistaken == "unexpected_keyword_argument":
        *section, key = location
        kind = MixtureEntry if "mixture" in section else SECTIONS[section[0]] if section else Config
        known = [field.name for field in fields(kind)]
        close = [name.removesuffix(key) + match for match in difflib.get_close_matches(key, known, n=1)]
        # a right key in the wrong section is the other common slip
        close += [f"{other}.{key}" for other, kind in SECTIONS.items() if key in {field.name for field in fields(kind)}]
        meant = f"did you mean {' or '.join(close)}?" if close else f"known keys: {', '.join(sorted(known))}"
        return f"unknown key {name}; {meant}"
    if mistaken == "missing":
        return f"{name.rpartition('.')[0]} needs a {location[-1]}"
    context = dict(mistake.get("ctx", {}))
    context["expected"] = str(context.get("expected")).replace(" or ", ", ")
    expected = EXPECTED.get(mistaken, "{input!r}: " + mistake["msg"].replace("{", "{{").replace("}", "}}"))
    return f"{name} {expected.format(input=mistake['input'], **context)}"


def trained_config(folder: str | Path) -> Config | None:
    """The configuration an adapter was trained with, from its training.json; None if there is none.

    Its device is not that of this machine, and keys that there are no more say nothing of how it is asked; those that
    were not set aren't even named.
    """
    record = read_training(folder)
    if record is None:
        return None

    config, gone = dict[str, Any](), list[str]()
    for section, keys in record["config"].items():
        if section in SECTIONS and isinstance(keys, dict):
            known = {field.name for field in fields(SECTIONS[section])}
            gone += [f"{section}.{key}" for key, value in keys.items() if key not in known and value is not None]
            # an earlier version's method `block` trained a backbone, which is asked as any other
            known -= {"device", "method"} if keys.get("method") == "block" else {"device"}
            keys = {key: value for key, value in keys.items() if key in known}
        config[section] = keys
    source = str(Path(folder) / TRAINING)
    if gone:
        logger.warning("%s: no keys any more, and passed over: %s", source, ", ".join(gone))
    return config_from_dict(config, source)

"""What `comb train` and `comb eval` left in an adapter's folder, as the values a card shows."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult

from comb.backbones.unpublished import public
from comb.documents.datasets import hub_id
from comb.hub.redaction import known_secrets, redact_json

TRAINING, RESULTS = "training.json", "results*.json"
METRICS = (("em", "exact_match", "exact match"), ("f1", "f1", "F1"), ("rouge_l", "rouge", "ROUGE-L"))
"""Key in the results, the Hub's metric, its name for people."""


def read_training(folder: Path) -> dict[str, Any] | None:
    """The record that `comb train` wrote, None without one. Raises ValueError if it is damaged.

    Added are ``command``, ``datasets``, pairs of names and their ids on the Hub, and ``frozen``, of all parameters.
    """
    record = _read(folder / TRAINING)
    if record is None:
        return None
    config, counts, frozen = record.get("config") or {}, record.get("parameters") or {}, None
    if {"all", "trainable"} <= counts.keys() and (config.get("train") or {}).get("lora_rank") is None:
        # with LoRA the encoder's own weights are frozen too, and belong to the adapter all the same
        frozen = counts["all"] - counts["trainable"]
    sets = dict.fromkeys((str(data["dataset"]), hub_id(data["dataset"], data.get("path"))) for data in _sets(config))
    return {**record, "command": _command(record), "datasets": list(sets), "frozen": frozen}


def read_evaluations(folder: Path) -> list[dict[str, Any]]:
    """The results that `comb eval` wrote into the folder, scores from 0 to 1. Raises ValueError if a file is damaged.

    Added are ``command``, ``dataset``, its name or names, and ``hub_id``.
    """
    found = []
    for path in sorted(folder.glob(RESULTS)):
        record = _read(path)
        if record is not None and "results" in record:
            parts = list(_sets(record.get("config")))
            names = dict.fromkeys(str(part["dataset"]) for part in parts)
            id = hub_id(parts[0]["dataset"], parts[0].get("path")) if len(names) == 1 else None
            dataset = ", ".join(names) or path.stem
            found.append({**record, "command": _command(record), "dataset": dataset, "hub_id": id})
    return found


def eval_results(evaluations: list[dict[str, Any]]) -> list[EvalResult]:
    """The scores as the Hub's model index: percent, one entry per dataset, method and metric."""
    return [
        EvalResult(
            task_type="question-answering",
            dataset_type=evaluation["hub_id"] or evaluation["dataset"],
            dataset_name=evaluation["dataset"],
            dataset_split=evaluation.get("split"),
            metric_type=metric,
            metric_name=f"{label}, method {row['method']}, {row.get('n', 0)} questions",
            metric_value=round(100 * row[key], 2),
            metric_args={"method": row["method"], "questions": row.get("n", 0)},
        )
        for evaluation in evaluations
        for row in evaluation["results"]
        for key, metric, label in METRICS
        if row.get(key) is not None
    ]


def _read(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        content = json.loads(redact_json(path.read_bytes(), known_secrets()))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is damaged ({error}): remove it, or write it again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} should be a JSON object, it is a {type(content).__name__}")
    argv = content.pop("argv", None)  # whose program is told by its folder
    found: dict[str, Any] = public(content)
    return found if argv is None else {**found, "argv": argv}


def _sets(config: Any) -> Iterator[Mapping[str, Any]]:
    """Every part of a configuration that names a dataset: those of a mixture, or the one there is; and of stages."""
    if not isinstance(config, Mapping):
        return
    for stage in (config.get("train") or {}).get("stages") or ():
        yield from _sets({"data": {"path": (config.get("data") or {}).get("path"), **stage["data"]}})
    data = config.get("data")
    if isinstance(data, Mapping):
        parts = data.get("mixture") or [data]
        yield from (part for part in parts if isinstance(part, Mapping) and isinstance(part.get("dataset"), str))


def _command(record: Mapping[str, Any]) -> str:
    program, *arguments = map(str, record.get("argv") or ["?"])
    arguments = public(arguments)
    path = Path(program)
    if program.startswith("python -m "):
        return " ".join([program, *map(shlex.quote, arguments)])
    # records of before have sys.argv[0], which of `python -m package.module` is the module's file
    program = f"python -m {path.parent.name}.{path.stem}" if path.suffix == ".py" else shlex.quote(path.name)
    return " ".join([program, *map(shlex.quote, arguments)])

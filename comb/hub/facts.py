"""What `comb train` and `comb eval` left in an adapter's folder, as the values a card shows."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from comb.backbones.unpublished import public
from comb.documents.datasets import HUB, hub_id
from comb.files import read_json
from comb.hub.redaction import known_secrets, redact_json

if TYPE_CHECKING:
    from huggingface_hub import EvalResult

TRAINING, RESULTS = "training.json", "results*.json"
METRICS = (
    ("em", "exact_match", "exact match", 100),
    ("f1", "f1", "F1", 100),
    ("rouge_l", "rouge", "ROUGE-L", 100),
    ("kl", "kl_divergence", "KL to full recompute, nats per token", 1),
    ("closed", "kl_closed", "share of the KL without documents closed", 100),
)
"""Key in the results, the Hub's metric or ours, its name for people, and by what it is multiplied."""


def read_training(folder: Path) -> dict[str, Any] | None:
    """The record that `comb train` wrote, None without one. Raises ValueError if it is damaged.

    Added are ``datasets``, pairs of names and their ids on the Hub, and ``frozen``, of all parameters.
    """
    record = _read(folder / TRAINING)
    if record is None:
        return None
    config, counts, frozen = record.get("config") or {}, record.get("parameters") or {}, None
    if {"all", "trainable"} <= counts.keys():
        frozen = counts["all"] - counts["trainable"]
    sets = dict.fromkeys((_name(data), hub_id(data["dataset"], data.get("path"))) for data in _sets(config))
    return {**record, "datasets": list(sets), "frozen": frozen}


def read_evaluations(folder: Path) -> list[dict[str, Any]]:
    """The results that `comb eval` wrote into the folder, scores from 0 to 1. Raises ValueError if a file is damaged.

    Added are ``dataset``, its name or names, and ``hub_id``.
    """
    found = []
    for path in sorted(folder.glob(RESULTS)):
        record = _read(path)
        if record is not None and "results" in record:
            parts = list(_sets(record.get("config")))
            names = dict.fromkeys(map(_name, parts))
            id = hub_id(parts[0]["dataset"], parts[0].get("path")) if len(names) == 1 else None
            dataset = ", ".join(names) or path.stem
            found.append({**record, "dataset": dataset, "hub_id": id})
    return found


def eval_results(evaluations: list[dict[str, Any]], own: str) -> list[EvalResult]:
    """The scores as the Hub's model index, one entry per dataset, method and metric: percent, KL in nats.

    Args:
        own: the adapter's method. Scores of others are the backbone's, and not in it.
    """
    from huggingface_hub import EvalResult

    found = []
    for evaluation in evaluations:
        for row in evaluation["results"]:
            for key, metric, label, scale in METRICS if re.split("[:@]", row["method"])[0] == own else ():
                if row.get(key) is None:
                    continue
                questions = int(row.get("kl_questions" if key in ("kl", "closed") else "n") or 0)
                result = EvalResult(
                    task_type="question-answering",
                    dataset_type=evaluation["hub_id"] or evaluation["dataset"],
                    dataset_name=evaluation["dataset"],
                    dataset_split=evaluation.get("split"),
                    metric_type=metric,
                    metric_name=f"{label}, method {row['method']}, {questions} questions",
                    metric_value=round(scale * row[key], 2 if scale > 1 else 4),
                    metric_args={"method": row["method"], "questions": questions},
                )
                found.append(result)
    return found


def _read(path: Path) -> dict[str, Any] | None:
    """A record without secrets and paths, and with its ``command``; None where there is none."""
    if not path.is_file():
        return None
    written = json.dumps(read_json(path, "remove it, or write it again")).encode()
    content = json.loads(redact_json(written, known_secrets()))
    program, *arguments = map(str, content.pop("argv", None) or ["?"])
    if not program.startswith("python -m "):
        # records of before have sys.argv[0], which of `python -m package.module` is the module's file
        place = Path(program)
        program = f"python -m {place.parent.name}.{place.stem}" if place.suffix == ".py" else shlex.quote(place.name)
    return {**public(content), "command": " ".join([program, *map(shlex.quote, public(arguments))])}


def _name(part: Mapping[str, Any]) -> str:
    """What a set is called: a person's own by its file, not by the reader of such files."""
    name, path = str(part["dataset"]), part.get("path")
    if name == "jsonl" and path:
        name = str(path)
    return name if name.startswith(HUB) else Path(name).name


def _sets(config: Any) -> Iterator[Mapping[str, Any]]:
    """Every part of a configuration that names a dataset: those of a mixture, or the one there is."""
    data = config.get("data") if isinstance(config, Mapping) else None
    if isinstance(data, Mapping):
        parts = data.get("mixture") or [data]
        yield from (part for part in parts if isinstance(part, Mapping) and isinstance(part.get("dataset"), str))

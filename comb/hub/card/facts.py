"""What `comb train` and `comb eval` left in an adapter's folder, as the values a card shows."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import EvalResult

from comb.documents.datasets import hub_id
from comb.hub.redaction import known_secrets, redact_json

TRAINING, RESULTS = "training.json", "results*.json"
METRICS = (("em", "exact_match", "exact match"), ("f1", "f1", "F1"), ("rouge_l", "rouge", "ROUGE-L"))
"""Key in the results, the Hub's metric, its name for people."""


# key of TrainConfig -> what a table cell says of its value
_SETTINGS = {
    "learning_rate": "peak learning rate {}", "batch_size": "{} questions per batch and rank",
    "gradient_accumulation_steps": "{} batches per step", "weight_decay": "weight decay {}",
    "lora_rank": "LoRA of rank {} on the encoder, merged",
}  # fmt: skip


class Evaluation(NamedTuple):
    """One results file; `rows` are its results as they stand there, scores from 0 to 1."""

    dataset: str
    hub_id: str | None
    split: str | None
    command: str
    rows: tuple[dict[str, Any], ...]


class Training(NamedTuple):
    """What the training run's record says; None where it says nothing.

    `datasets` are names of the registry with their ids on the Hub, `options` the configuration's section ``train``.
    """

    command: str
    record: dict[str, Any]
    datasets: tuple[tuple[str, str | None], ...]
    options: dict[str, Any]
    settings: tuple[str, ...]
    frozen_parameters: int | None


def read_training(folder: Path) -> Training | None:
    """The record that `comb train` wrote; None if there is none. Raises ValueError if it is damaged."""
    record = _read(folder / TRAINING)
    if record is None:
        return None
    config = record.get("config") or {}
    options = config.get("train") or {}
    parameters = record.get("parameters") or {}
    frozen = None
    if {"all", "trainable"} <= parameters.keys() and options.get("lora_rank") is None:
        # with LoRA the encoder's own weights are frozen too, and belong to the adapter all the same
        frozen = parameters["all"] - parameters["trainable"]
    sets = dict.fromkeys((str(data["dataset"]), hub_id(data["dataset"], data.get("path"))) for data in _sets(config))
    settings = tuple(text.format(options[name]) for name, text in _SETTINGS.items() if options.get(name) is not None)
    return Training(_command(record), record, tuple(sets), options, settings, frozen)


def read_evaluations(folder: Path) -> tuple[Evaluation, ...]:
    """The results that `comb eval` wrote into the folder. Raises ValueError if a file is damaged."""
    found = []
    for path in sorted(folder.glob(RESULTS)):
        record = _read(path)
        if record is None or "results" not in record:
            continue
        parts = list(_sets(record.get("config")))
        names = dict.fromkeys(str(part["dataset"]) for part in parts)
        id = hub_id(parts[0]["dataset"], parts[0].get("path")) if len(names) == 1 else None
        rows = tuple(record["results"])
        found.append(Evaluation(", ".join(names) or path.stem, id, record.get("split"), _command(record), rows))
    return tuple(found)


def eval_results(evaluations: tuple[Evaluation, ...]) -> list[EvalResult]:
    """The scores as the Hub's model index: percent, one entry per dataset, method and metric."""
    return [
        EvalResult(
            task_type="question-answering",
            dataset_type=evaluation.hub_id or evaluation.dataset,
            dataset_name=evaluation.dataset,
            dataset_split=evaluation.split,
            metric_type=metric,
            metric_name=f"{label}, method {row['method']}, {row.get('n', 0)} questions",
            metric_value=round(100 * row[key], 2),
            metric_args={"method": row["method"], "questions": row.get("n", 0)},
        )
        for evaluation in evaluations
        for row in evaluation.rows
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
    return content


def _sets(config: Any) -> Iterator[Mapping[str, Any]]:
    """Every part of a configuration that names a dataset: those of a mixture, or the one there is."""
    data = config.get("data") if isinstance(config, Mapping) else None
    if isinstance(data, Mapping):
        parts = data.get("mixture") or [data]
        yield from (part for part in parts if isinstance(part, Mapping) and isinstance(part.get("dataset"), str))


def _command(record: Mapping[str, Any]) -> str:
    program, *arguments = map(str, record.get("argv") or ["?"])
    path = Path(program)
    # sys.argv[0] of `python -m package.module` is the module's file
    program = f"python -m {path.parent.name}.{path.stem}" if path.suffix == ".py" else shlex.quote(path.name)
    return " ".join([program, *map(shlex.quote, arguments)])

"""`comb demo --model NAME`: a real language model asked about real passages, with an adapter trained before.

Ten questions over four passages each (`comb_training.cli.passages`), put as the adapter was trained: its training.json
says how, or, where there is no adapter, the recipe in configs/. Each method answers twice, with nothing kept and
again; the answers stand side by side, and one table at the end says how often they are right.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape

from comb.backbones.half_precision import is_slow
from comb.backbones.tokenizer import load_tokenizer
from comb.documents.document import Example
from comb.evaluation.compare import AnswerRules
from comb.evaluation.metrics import contains
from comb.evaluation.run import NO_DOCUMENTS, Setting, Timing
from comb.evaluation.table import Column, Row, TextTable, fixed, ms, percent
from comb_training.cli.passages import demo_questions
from comb_training.config import Config, load_config, trained_config
from comb_training.data.mixture import prompt_builder
from comb_training.models.loading import device_of, dtype_of, load_checkpoint

METHODS = ("full", "comb", "primed", "legolink:16", NO_DOCUMENTS)

_CHECKOUT = Path(__file__).parents[3]
CONFIGS = _CHECKOUT / "configs"
ADAPTERS = _CHECKOUT / "training" / "adapters"
"""Adapters that the project has trained; neither they nor configs/ are in the wheel."""

_ANSWERS = (
    Column("method", "method", names=True),
    Column("answer", "text", names=True),
    Column("first token ms", "cold", ms),
    Column("cached ms", "cached", ms),
)
_SCORES = (
    Column("method", "method", names=True),
    Column("holds", "contains", percent, "the answer holds the right one word by word, %"),
    Column("= full", "same", percent, "the same answer as full recompute's, %"),
    Column("cold ms", "ttft_cold_s", ms, "time to first token, median ±half the distance of the quartiles"),
    Column("cached ms", "ttft_cached_s", ms, "the same, asked again"),
    Column("B/token", "bytes", fixed(0), "bytes of cache per document token"),
)


def run_real_demo(model_name: str, adapter: Path | None, console: Console) -> list[Row]:
    """Asks, prints the answers and the table, and returns the table's rows.

    Args:
        model_name: what configs/ has a recipe for. adapter: its folder; None is the committed one, if there is one.

    Raises:
        ValueError: for an adapter folder that isn't one, or a model without adapter and recipe.
    """
    start = time.monotonic()
    folder = ADAPTERS / f"comb-{model_name}" if adapter is None else adapter
    config, found = _how_to_ask(model_name, folder, given=adapter is not None)
    if not found:
        console.print(
            f"[yellow]No trained adapter in {folder}: comb is left out.[/yellow] To train one: comb train "
            f"configs/{model_name}.yaml; then comb demo --model {model_name} --adapter "
            f"{config.train.output_dir}"
        )
    place = str(folder) if found else config.model.backbone
    device, dtype = device_of(config), dtype_of(config.model.dtype)
    if device.type == "cpu" and isinstance(dtype, torch.dtype) and is_slow(dtype):
        config = replace(config, model=replace(config.model, dtype="float32"))
    model = load_checkpoint(place, config)
    tokenizer = load_tokenizer(place, model)
    setting = Setting(model, tokenizer, prompt_builder(config.data, tokenizer), config.data.query_template)
    rules = AnswerRules(config.train.answer_max_new_tokens, config.data.stop)
    settings = rules.settings(setting.engine("full"))
    methods = [name for name in METHODS if found or name != "comb"]
    examples = demo_questions()
    console.rule(f"{model_name}: {len(examples)} questions over {len(examples[0].documents)} passages each")
    for name in methods:  # warm-up: allocations, lazy initialisation
        _answer_twice(setting, name, examples[-1], settings, rules)
    asked: list[Row] = []
    for number, example in enumerate(examples, 1):
        answered = [_answer_twice(setting, name, example, settings, rules) for name in methods]
        for row in answered:
            row["same"] = float(row["text"] == answered[0]["text"])
        asked += answered
        console.print(f"\n[bold]{number}. {escape(example.query)}[/bold]   (right: {escape(example.answer)})")
        console.print(TextTable("", _ANSWERS, answered))
    rows = [_mean(name, [row for row in asked if row["method"] == name]) for name in methods]
    remark = (
        f"{len(examples)} questions are an impression, no measurement: comb bench methods --config "
        "configs/evaluation.yaml takes hundreds, with intervals."
    )
    console.rule("All questions")
    console.print(TextTable(model_name, _SCORES, rows, [remark]))
    console.print(f"All in {time.monotonic() - start:.0f} s; nothing was trained.")
    return rows


def _how_to_ask(model_name: str, folder: Path, *, given: bool) -> tuple[Config, bool]:
    """The configuration that says how questions are put, and whether `folder` holds an adapter."""
    found = (folder / "config.json").is_file()
    if given and not found:
        raise ValueError(f"--adapter {folder}: expected an adapter's folder with a config.json, as `comb train` writes")
    trained = trained_config(folder) if found else None
    if trained is not None:
        return trained, True
    recipe = CONFIGS / f"{model_name}.yaml"
    if not recipe.is_file():
        raise ValueError(
            f"how to ask {model_name!r} isn't known: there is no recipe {recipe}, and no adapter with a training.json "
            f"in {folder}. Run in a checkout with --model smollm2-135m, or give an adapter's folder with --adapter"
        )
    return load_config(recipe), found


def _answer_twice(
    setting: Setting, method: str, example: Example, settings: Mapping[str, Any], rules: AnswerRules
) -> Row:
    """A method's answer with seconds to its first token, with nothing kept from before and asked again."""
    engine, request = setting.engine(method), setting.request(method, example)
    engine.heads.clear()  # what stands in front of the documents is kept for all engines on a backbone
    cold, cached = (engine.ask(*request, **settings) for _ in range(2))
    text = rules.text(engine, cold.token_ids)
    documents = sum(document.tokens for document in cold.report.documents)
    return {
        "method": method,
        "text": text,
        "contains": contains(text, example.references),
        "cold": cold.report.ttft_s,
        "cached": cached.report.ttft_s,
        "bytes": cold.report.cache_bytes / max(1, documents),
    }


def _mean(method: str, rows: Sequence[Row]) -> Row:
    return {
        "method": method,
        **{name: fmean(row[name] for row in rows) for name in ("contains", "same", "bytes")},
        "ttft_cold_s": Timing.of([row["cold"] for row in rows]),
        "ttft_cached_s": Timing.of([row["cached"] for row in rows]),
    }

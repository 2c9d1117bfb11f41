"""`comb demo --model NAME`: a real language model asked about real passages, with an adapter trained before.

Ten questions over four passages each (passages.yaml), put as the adapter was trained: its training.json says how, or,
where there is no adapter, the recipe in configs/. The methods' answers stand side by side; one table at the end says
how often they are right, how far they are from full recompute, and what they cost.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import torch
import yaml
from rich.console import Console
from rich.markup import escape

from comb.backbones.loading import is_slow
from comb.backbones.tokenizer import load_tokenizer
from comb.documents.document import Document, Example
from comb.evaluation.compare import compare, measure_times, question_name
from comb.evaluation.record import Journal
from comb.evaluation.setting import NO_DOCUMENTS, AnswerRules, Setting
from comb.evaluation.summary import comparison_tables, summarize
from comb.evaluation.table import Column, TextTable, divergence
from comb_training.config import Config, load_config, trained_config
from comb_training.data.mixture import prompt_builder
from comb_training.models.method import device_of, dtype_of, load_checkpoint

_CHECKOUT = Path(__file__).parents[3]
CONFIGS = _CHECKOUT / "configs"
ADAPTERS = _CHECKOUT / "training" / "adapters"
"""Adapters that the project has trained; neither they nor configs/ are in the wheel."""

_ANSWERS = (
    Column("method", "method", names=True),
    Column("answer", "text", names=True),
    Column("KL", "kl", divergence),
)


def run_real_demo(model_name: str, adapter: Path | None, console: Console) -> None:
    """Asks, and prints the answers and the table.

    Args:
        model_name: what configs/ has a recipe for. adapter: its folder; None is the committed one, if there is one.

    Raises:
        ValueError: for an adapter folder that isn't one, or a model without adapter and recipe.
    """
    start = time.monotonic()
    folder = ADAPTERS / f"linktokens-{model_name}" if adapter is None else adapter
    config, found = _how_to_ask(model_name, folder, given=adapter is not None)
    if not found:
        console.print(
            f"[yellow]No trained adapter in {folder}: it is left out.[/yellow] To train one: comb train "
            f"configs/linktokens-{model_name}.yaml; then comb demo --model {model_name} --adapter "
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
    methods = ["full", *([config.train.method] if found else []), "primed", "legolink:16", NO_DOCUMENTS]
    examples = demo_questions()
    journal, refused = Journal(None, {}), dict[str, str]()
    console.rule(f"{model_name}: {len(examples)} questions over {len(examples[0].documents)} passages each")
    for number, example in enumerate(examples):
        # those before stand in the journal, and are not asked again
        refused = compare(setting, examples[: number + 1], methods, journal, rules=rules, progress=False)
        answered = [row for row in journal.rows if row["question"] == question_name(number, example)]
        console.print(f"\n[bold]{number + 1}. {escape(example.query)}[/bold]   (right: {escape(example.answer)})")
        console.print(TextTable("", _ANSWERS, answered))
    measure_times(setting, examples, [name for name in methods if name not in refused], journal, len(examples))
    table = comparison_tables(summarize(journal.rows, examples, methods, refused), model_name)[0]
    remark = (
        f"{len(examples)} questions are an impression, no measurement: comb bench methods --config "
        "configs/evaluation.yaml takes hundreds, with intervals."
    )
    console.rule("All questions")
    console.print(replace(table, remarks=[*table.remarks, remark]))
    console.print(f"All in {time.monotonic() - start:.0f} s; nothing was trained.")


def _how_to_ask(model_name: str, folder: Path, *, given: bool) -> tuple[Config, bool]:
    """The configuration that says how questions are put, and whether `folder` holds an adapter."""
    found = (folder / "config.json").is_file()
    if given and not found:
        raise ValueError(f"--adapter {folder}: expected an adapter's folder with a config.json, as `comb train` writes")
    trained = trained_config(folder) if found else None
    if trained is not None:
        return trained, True
    recipe = CONFIGS / f"linktokens-{model_name}.yaml"
    if not recipe.is_file():
        raise ValueError(
            f"how to ask {model_name!r} isn't known: there is no recipe {recipe}, and no adapter with a training.json "
            f"in {folder}. Run in a checkout with --model smollm2-135m, or give an adapter's folder with --adapter"
        )
    return load_config(recipe), found


DOCUMENTS = 4
_OTHERS = (3, 5, 8)  # how many places further on the passages stand that a question gets beside its own


def demo_questions() -> list[Example]:
    """A question about each passage, over it and three others; the right one stands at each place in turn."""
    rows = yaml.safe_load(Path(__file__).with_name("passages.yaml").read_text(encoding="utf-8"))
    passages = [Document(row["text"], id=f"passage-{number}") for number, row in enumerate(rows)]
    questions = []
    for number, row in enumerate(rows):
        documents = [passages[(number + further) % len(passages)] for further in _OTHERS]
        documents.insert(number % DOCUMENTS, passages[number])
        questions.append(Example(tuple(documents), row["question"], row["answer"], id=f"passage-{number}"))
    return questions

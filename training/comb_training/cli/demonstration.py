"""`comb demo`: the whole story on a CPU in minutes (`run_demo`), or a real language model asked (`run_real_demo`)."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch
import typer
import yaml
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel

from comb.backbones.tokenizer import load_tokenizer
from comb.backbones.torch_private import is_slow_here
from comb.documents.datasets import read_dataset
from comb.documents.document import Document, Example, PromptBuilder
from comb.engine.engine import PICEngine
from comb.evaluation.compare import compare, measure_times, question_name
from comb.evaluation.plot import Quality, draw
from comb.evaluation.record import Journal, write_results
from comb.evaluation.setting import NO_DOCUMENTS, AnswerRules, Setting
from comb.evaluation.summary import compared, comparison_tables, summarize
from comb.evaluation.table import Column, FittedTable, TextTable, divergence
from comb.hub.push import refresh_card
from comb.model.modeling import CombForCausalLM
from comb_training.cli.train import exit_status
from comb_training.config import Config, DataConfig, ModelConfig, TrainConfig, load_config, trained_config
from comb_training.data.mixture import prompt_builder
from comb_training.models.method import device_of, dtype_of, load_checkpoint
from comb_training.nano import CHECKPOINT
from comb_training.train import LOSS_PLOT, run_training

METHODS = ("full", "prefix", "comb", "none")
NEEDED = 0.9  # COMB's exact match, as a share of full recompute's
MAX_NEW_TOKENS = 48


def demo_config(output_dir: str | Path, train_steps: int, seed: int) -> Config:
    """The paper's form: two encoder layers, and a cross block in front of two of the backbone's six."""
    return Config(
        model=ModelConfig(backbone="nano", num_encoder_layers=2, device="cpu", cpu_threads=1),
        data=DataConfig(dataset="nano", seed=seed, options={"scenes": 2400, "questions": 8}),
        train=TrainConfig(steps=train_steps, batch_size=64, learning_rate=8e-3, seed=seed, output_dir=str(output_dir)),
    )


def run_demo(folder: Path, *, train_steps: int, questions: int, seed: int, console: Console) -> bool:
    """Trains the nano backbone's encoder on its own answers, saves it, loads it again from disk, asks, compares.

    Writes adapter, results.json and plots to `folder`. Raises ValueError if the nano backbone's checkpoint is not
    there.

    Args:
        train_steps: of the optimizer: so that a slow machine takes longer, and comes to the same.
        questions: held-out questions in the final table.

    Returns:
        Whether `comb` reached `NEEDED` of `full`.
    """
    start = time.monotonic()
    config = demo_config(folder, train_steps, seed)
    if not (CHECKPOINT / "config.json").is_file():
        raise ValueError(f"the nano backbone is not there ({CHECKPOINT}): run scripts/pretrain-nano to make it")
    console.rule("Training an encoder on the backbone's own answers")
    result = run_training(config)
    if result.terminated:  # an adapter in the folder is an earlier run's
        console.print(
            f"stopped by {result.terminated}: the same command begins again, with its answers", soft_wrap=True
        )
        raise typer.Exit(exit_status(result.terminated))
    record, losses = result.record, result.record["losses"]
    trainable, total = record["parameters"]["trainable"], record["parameters"]["all"]
    console.print(f"data: {result.counts}")
    console.print(
        f"backbone frozen with {total - trainable:,} parameters, {trainable:,} trained; "
        f"{record['tokens']['examples']} answers generated in {record['answer_seconds']:.0f} s "
        f"({100 * record['teacher']['em']:.1f}% exactly right)"
    )
    console.print(
        f"loss {losses[0][1]:.3f} -> {losses[-1][1]:.3f} in {record['steps']} steps, {record['seconds']:.0f} s"
    )

    console.rule("Questions over documents, with the adapter loaded from disk")
    model = CombForCausalLM.from_pretrained(folder)
    tokenizer = load_tokenizer(folder, model)
    heldout = list(read_dataset("nano", split="heldout", seed=seed, limit=questions))
    engine = PICEngine(model, tokenizer, method="comb")
    engine.ask("Who?", ["Nobody is here."], max_new_tokens=1)  # warm-up, so that the first time shown is a fair one
    first = {example.group: example for example in reversed(heldout)}  # question of each set of documents
    for example in sorted(first.values(), key=heldout.index)[:3]:
        documents = "\n".join(f"{number}. {document.text}" for number, document in enumerate(example.documents, 1))
        console.print(Panel(documents, title=f"{len(example.documents)} documents", title_align="left"))
        console.print(f"[bold]{example.query}[/bold]   (right: {example.answer})")
        lines = []
        for name, encoder in (("encoder on, cold", True), ("encoder on, cached", True), ("encoder off", False)):
            answer = engine.ask(example.query, example.documents, encoder=encoder, max_new_tokens=MAX_NEW_TOKENS)
            report, states = answer.report, [document.state for document in answer.report.documents]
            summary = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
            lines.append((name, answer.text, summary, str(report.prompt_tokens), f"{1000 * report.ttft_s:.1f} ms"))
        heads = ("", "answer", "documents", "prompt tokens", "first token")
        console.print(FittedTable(heads, lines, left=heads[:3]))

    console.rule("Comparison on held-out names")
    setting = Setting(model, tokenizer, PromptBuilder(tokenizer))
    rows = compared(setting, heldout, METHODS, rules=AnswerRules(MAX_NEW_TOKENS))
    title = f"nano backbone, {len(heldout)} held-out questions over 4 to 8 documents"
    for table in comparison_tables(rows, title):
        console.print(table)
    write_results(folder / "results.json", rows, seed=seed, split="heldout", config=config.to_dict())
    refresh_card(folder)
    plots = ""
    with suppress(ImportError):  # matplotlib is optional
        draw([Quality(rows)], folder / "results.png", title="nano backbone, held-out names")
        plots = f", results.png and {LOSS_PLOT}"
    em = {row["method"]: row["em"] for row in rows}
    passed = bool(em["comb"] >= NEEDED * em["full"])
    verdict = "[green]reached[/green]" if passed else "[red]missed[/red]"
    console.print(
        f"COMB answers {100 * em['comb']:.1f}% exactly, full recompute {100 * em['full']:.1f}%: "
        f"{100 * em['comb'] / max(em['full'], 1e-9):.0f}% of it, goal of {100 * NEEDED:.0f}% {verdict}."
    )
    console.print(f"Adapter, results.json{plots} are in {folder}/. All in {time.monotonic() - start:.0f} s.")
    return passed


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
    """Asks a real language model about real passages, with an adapter trained before, and prints answers and a table.

    Ten questions over four passages each (passages.yaml), put as the adapter was trained: its training.json says how,
    or, where there is no adapter, the recipe in configs/. The methods' answers stand side by side; one table at the end
    says how often they are right, how far they are from full recompute, and what they cost. `model_name`: what configs/
    has a recipe for; `adapter`: its folder, None: the committed one, if there is one. Raises ValueError for an adapter
    folder that isn't one, or a model without adapter and recipe.
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
    if device.type == "cpu" and isinstance(dtype, torch.dtype) and is_slow_here(dtype):
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

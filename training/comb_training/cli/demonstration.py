"""`comb demo`: the whole story on a CPU in minutes.

The nano backbone gets an encoder, which is trained on the backbone's own answers, saved, and loaded again from disk.
Then questions over documents: encoder on and off, cold and cached. It ends with one comparison, and fails if COMB
does not reach 90% of what full recompute reaches.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.panel import Panel

from comb.backbones.tokenizer import load_tokenizer
from comb.documents.datasets import read_dataset
from comb.documents.document import Example, PromptBuilder
from comb.engine.engine import Answer, PICEngine
from comb.evaluation.plot import Quality, draw
from comb.evaluation.record import write_results
from comb.evaluation.setting import AnswerRules, Setting
from comb.evaluation.summary import compared, comparison_tables
from comb.evaluation.table import FittedTable
from comb.hub.push import refresh_card
from comb.model.modeling import CombForCausalLM
from comb_training.config import Config, DataConfig, ModelConfig, TrainConfig
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
    """Trains, saves, reloads, asks, compares; writes adapter, results.json and plots to `folder`.

    Args:
        train_steps: of the optimizer: so that a slow machine takes longer, and comes to the same.
        questions: held-out questions in the final table.

    Returns:
        Whether `comb` reached `NEEDED` of `full`.

    Raises:
        ValueError: if the nano backbone's checkpoint is not there.
    """
    start = time.monotonic()
    config = demo_config(folder, train_steps, seed)
    _train(config, console)

    console.rule("Questions over documents, with the adapter loaded from disk")
    model = CombForCausalLM.from_pretrained(folder)
    tokenizer = load_tokenizer(folder, model)
    heldout = list(read_dataset("nano", split="heldout", seed=seed, limit=questions))
    _ask(model, tokenizer, _shown(heldout), console)

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


def _train(config: Config, console: Console) -> None:
    from comb_training.nano import CHECKPOINT

    if not (CHECKPOINT / "config.json").is_file():
        raise ValueError(f"the nano backbone is not there ({CHECKPOINT}): run scripts/pretrain-nano to make it")
    console.rule("Training an encoder on the backbone's own answers")
    result = run_training(config)
    record, losses = result.record, result.record["losses"]
    trainable, total = record["parameters"]["trainable"], record["parameters"]["all"]
    console.print(f"data: {result.counts}")
    console.print(
        f"backbone frozen with {total - trainable:,} parameters, {trainable:,} trained; "
        f"{result.statistics.examples} answers generated in {record['answer_seconds']:.0f} s"
        + (f" ({100 * result.teacher.em:.1f}% exactly right)" if result.teacher else "")
    )
    if losses:
        console.print(
            f"loss {losses[0][1]:.3f} -> {losses[-1][1]:.3f} in {record['steps']} steps, {record['seconds']:.0f} s"
        )


def _shown(examples: Sequence[Example]) -> list[Example]:
    """The first question of three different sets of documents."""
    first = {example.group: example for example in reversed(examples)}
    return sorted(first.values(), key=examples.index)[:3]


def _ask(model: CombForCausalLM, tokenizer: Any, examples: Sequence[Example], console: Console) -> None:
    engine = PICEngine(model, tokenizer, method="comb")
    engine.ask("Who?", ["Nobody is here."], max_new_tokens=1)  # warm-up, so that the first time shown is a fair one
    for example in examples:
        documents = "\n".join(f"{number}. {document.text}" for number, document in enumerate(example.documents, 1))
        console.print(Panel(documents, title=f"{len(example.documents)} documents", title_align="left"))
        console.print(f"[bold]{example.query}[/bold]   (right: {example.answer})")
        answers = {
            "encoder on, cold": engine.ask(example.query, example.documents, max_new_tokens=MAX_NEW_TOKENS),
            "encoder on, cached": engine.ask(example.query, example.documents, max_new_tokens=MAX_NEW_TOKENS),
            "encoder off": engine.ask(example.query, example.documents, encoder=False, max_new_tokens=MAX_NEW_TOKENS),
        }
        console.print(_answer_table(answers))


def _answer_table(answers: dict[str, Answer]) -> FittedTable:
    lines = []
    for name, answer in answers.items():
        report = answer.report
        states = [document.state for document in report.documents]
        summary = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
        lines.append((name, answer.text, summary, str(report.prompt_tokens), f"{1000 * report.ttft_s:.1f} ms"))
    heads = ("", "answer", "documents", "prompt tokens", "first token")
    return FittedTable(heads, lines, left=heads[:3])

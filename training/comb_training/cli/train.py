"""`comb train`: a run from one file, or what it would be."""

from __future__ import annotations

import shlex
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from comb_training.cli.evaluate import check_methods, show_evaluation, show_heldout

if TYPE_CHECKING:
    from comb_training.train import Questions
    from comb_training.trainer.prepare import PreparedRun

console = Console()


def train(
    config: Annotated[Path, typer.Argument(help="YAML file; see configs/.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            help="data=mine.jsonl (or a folder, org/name on the Hub, [several]) in the place of the file's data; "
            "section.key=value, for example train.steps=20",
            metavar="[KEY=VALUE]...",
        ),
    ] = None,
    resume: Annotated[str | None, typer.Option(help="A checkpoint-N folder, or auto for the newest one.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show configuration, parameters, memory and data; train nothing.")
    ] = False,
    evaluation: Annotated[bool, typer.Option("--eval/--no-eval", help="Evaluate on held-out data at the end.")] = True,
) -> None:
    """Fine-tune an encoder for a frozen backbone."""
    from comb_training.config import load_config, of_file

    settings = load_config(config, overrides or [])

    # takes seconds, so behind what can be wrong with the options
    import yaml
    from rich.syntax import Syntax

    from comb_training.data.token_statistics import data_table
    from comb_training.models.method import load_checkpoint
    from comb_training.train import rehearse_evaluation, run_training
    from comb_training.trainer import distributed

    wanted = evaluation
    evaluation = wanted and settings.eval.limit > 0 and bool(settings.eval.methods)
    with of_file(config, overrides or []):
        if evaluation:
            check_methods(settings)
        if dry_run:
            from comb_training.plan import blocks, plan

            planned = plan(settings)
            if not distributed.is_main():
                return
            text = yaml.safe_dump(settings.changed(), sort_keys=False, width=console.width - 20, allow_unicode=True)
            # YAML folds behind the word that is over its width; one longer still is the terminal's to wrap: all can be
            # copied
            console.print(Syntax("", "yaml", background_color="default").highlight(text), soft_wrap=True)
            console.print("[dim]All other keys have their defaults (training/comb_training/config).[/]\n")
            for block in blocks(planned):
                console.print(block)
            return
    questions: list[Questions] = []

    def prepared(run: PreparedRun) -> None:
        console.print(f"data: {escape(str(run.counts))}")
        console.print(data_table(run.examples, by_set=bool(settings.data.mixture)))
        if evaluation:  # what can't be evaluated is an error now, not when the training is done
            questions.append(rehearse_evaluation(run))

    try:
        with of_file(config, overrides or []):
            result = run_training(settings, resume=resume, prepared=prepared)
    except KeyboardInterrupt:
        console.print("stopped: what isn't in a checkpoint-N is lost, but for the backbone's answers")
        raise typer.Exit(exit_status("SIGINT")) from None
    if not distributed.is_main():
        raise typer.Exit(exit_status(result.terminated))
    if settings.train.answers == "on_policy":  # answering drops examples, too
        console.print(f"data, answered: {escape(str(result.counts))}")
    record = result.record
    if record["teacher"] is not None:
        console.print(f"the backbone's own answers: {100 * record['teacher']['em']:.1f}% exact match with the data's")
    if losses := [loss for _, loss in record["losses"]]:
        console.print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {record['steps']} steps, {record['seconds']:.0f} s")
    show_heldout(record["heldout"])
    if result.terminated:
        again = [*distributed.launcher(), str(config), *(overrides or []), "--resume", "auto"]
        again += [] if wanted else ["--no-eval"]
        console.print(
            f"stopped by {result.terminated} after step {record['steps']}; the adapter as it is: "
            f"{escape(str(result.checkpoint))}; to go on:\n{escape(shlex.join(again))}",
            soft_wrap=True,
        )
        raise typer.Exit(exit_status(result.terminated))
    console.print(f"adapter: {escape(str(result.output_dir))}")
    if not evaluation:
        console.print("no evaluation: --no-eval, or eval.methods or eval.limit leaves none")
        return
    model = result.model
    if model is None:  # it was sharded; what was written is whole
        model = load_checkpoint(str(result.output_dir), settings)
    show_evaluation(model, result.tokenizer, settings, result.output_dir / "results.json", questions=questions[0])


def exit_status(signal_name: str) -> int:
    """Exit status of a run that a signal ended, as shells give it: a scheduler must not take it for done."""
    return 128 + signal.Signals[signal_name] if signal_name else 0

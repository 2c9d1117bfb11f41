"""The commands train, answers, eval and demo: arguments in, printed results out, no logic of their own."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

if TYPE_CHECKING:
    from comb_training.answers import Targets
    from comb_training.config import Config
    from comb_training.plan import Plan
    from comb_training.trainer.prepare import PreparedRun

console = Console()
logger = logging.getLogger(__name__)

TERMINATED = 143
"""Exit status of a run that SIGTERM ended, as shells give it: a scheduler must not take it for done."""

WRITING_KEYS = (
    "document_template", "query_template", "max_document_tokens", "max_query_tokens", "splitter", "seed", "cache",
    "cache_dir",
)  # fmt: skip


def train(
    config: Annotated[Path, typer.Argument(help="YAML file; see configs/.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="section.key=value, for example train.steps=20", metavar="[KEY=VALUE]...")
    ] = None,
    resume: Annotated[
        str | None, typer.Option(help="A checkpoint-N folder, or auto for the newest one (needs train.save_steps).")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show configuration, parameters, memory and data; train nothing.")
    ] = False,
    evaluation: Annotated[bool, typer.Option("--eval/--no-eval", help="Evaluate on held-out data at the end.")] = True,
) -> None:
    """Fine-tune an encoder for a frozen backbone."""
    from comb_training.config import load_config
    from comb_training.models.loading import load_checkpoint
    from comb_training.train import run_training
    from comb_training.trainer import distributed

    settings = load_config(config, overrides or [])
    if dry_run:
        from comb_training.plan import plan

        _show_plan(plan(settings))
        return
    result = run_training(settings, resume=_checkpoint(resume, settings), prepared=_show_data)
    if not distributed.is_main():
        raise typer.Exit(TERMINATED if result.terminated else 0)
    if settings.train.answers == "on_policy":  # answering drops examples, too
        console.print(f"data, answered: {escape(str(result.counts))}")
    if result.teacher is not None:
        console.print(f"the backbone's own answers: {100 * result.teacher.em:.1f}% exact match with the data's")
    if result.losses:
        console.print(
            f"loss {result.losses[0][1]:.4f} -> {result.losses[-1][1]:.4f} in {result.steps} steps, "
            f"{result.seconds:.0f} s"
        )
    if result.terminated:
        console.print(
            f"stopped by SIGTERM after step {result.steps}; the checkpoint is in {escape(str(result.output_dir))}, "
            "go on with --resume auto"
        )
        raise typer.Exit(TERMINATED)
    console.print(f"adapter: {escape(str(result.output_dir))}")
    if evaluation and settings.eval.limit > 0:
        model = result.model
        if model is None:  # it was sharded; what was written is whole
            model = load_checkpoint(str(result.output_dir), settings)
        _evaluate(model, result.tokenizer, settings, result.output_dir / "results.json")


def answers(
    config: Annotated[Path, typer.Argument(help="YAML file; see configs/.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="section.key=value, for example data.limit=100", metavar="[KEY=VALUE]...")
    ] = None,
    engine: Annotated[str, typer.Option(help="transformers, vllm, or auto: vllm where it is installed.")] = "auto",
    vllm: Annotated[
        list[str] | None, typer.Option(help="key=value for vllm.LLM, for example tensor_parallel_size=4")
    ] = None,
    show: Annotated[int, typer.Option(help="Answers to print.")] = 2,
) -> None:
    """Let the backbone (or train.teacher) answer the training questions; `comb train` finds the answers.

    Can be stopped at any time and started again. Under torchrun each rank answers its share.
    """
    from comb_training.answers import answer_prepared, choose_engine
    from comb_training.config import load_config, override
    from comb_training.trainer.prepare import prepare

    settings = load_config(config, overrides or [])
    chosen = choose_engine(engine)
    if vllm and chosen != "vllm":
        raise ValueError(f"--vllm is for vLLM, but the engine is {chosen}")
    if chosen == "vllm":  # the GPU is vLLM's; the weights are loaded here to tell what the answers belong to
        settings = override(settings, ["model.device=cpu"])
    options = dict(_engine_option(item) for item in vllm or [])
    run = prepare(settings)
    _show_answers(answer_prepared(run, engine=chosen, engine_options=options, wait=False), run, show)


def evaluate(
    checkpoint: Annotated[str, typer.Argument(help="Adapter folder or Hub id; or a plain backbone.")],
    dataset: Annotated[
        str | None, typer.Option(help="A dataset's name, or a .jsonl file; default: what the adapter was trained on.")
    ] = None,
    path: Annotated[str | None, typer.Option(help="The dataset's file or folder.")] = None,
    methods: Annotated[str | None, typer.Option(help='Separated by commas; "none" asks without documents.')] = None,
    limit: Annotated[int | None, typer.Option(help="Questions at most.")] = None,
    split: Annotated[str, typer.Option(help="heldout, train or all.")] = "heldout",
    out: Annotated[Path | None, typer.Option(help="JSON for the results; a plot is written beside it.")] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="section.key=value, for example data.num_documents=8")
    ] = None,
) -> None:
    """Compare methods on held-out data: exact match, F1, ROUGE-L, time to first token, bytes of cache."""
    from comb.backbones.tokenizer import load_tokenizer
    from comb_training.config import DataConfig, config_from_dict, override
    from comb_training.models.loading import load_checkpoint
    from comb_training.train import trained_config

    settings = trained_config(checkpoint)
    given: list[str] = []
    if dataset is not None:
        if settings is None:
            settings = config_from_dict({"data": {"dataset": dataset, "path": path}})
        elif own := [entry for entry in settings.data.mixture if dataset in (entry.name, entry.dataset)]:
            settings = replace(
                settings, data=replace(settings.data, mixture=tuple(own), path=path or settings.data.path)
            )
        elif settings.data.dataset == dataset:  # the same split, so that nothing trained on is called held out
            settings = replace(settings, data=replace(settings.data, path=path or settings.data.path))
        else:  # how text is written still holds, which rows to read does not
            kept = {name: getattr(settings.data, name) for name in WRITING_KEYS}
            settings = replace(settings, data=DataConfig(dataset=dataset, path=path, **kept))
    elif settings is None:
        raise ValueError(f"{checkpoint} has no training.json that names its data: use --dataset and --path")
    elif path is not None:
        given.append(f"data.path={json.dumps(path)}")
    if methods is not None:
        given.append(f"eval.methods=[{methods}]")
    if limit is not None:
        given.append(f"eval.limit={limit}")
    settings = override(settings, [*given, *(overrides or [])])
    model = load_checkpoint(checkpoint, settings)
    _evaluate(model, load_tokenizer(checkpoint, model), settings, out, split=split)


def demo(
    output_dir: Annotated[Path, typer.Option(help="Folder for adapter, table and plots.")] = Path("out/demo"),
    train_seconds: Annotated[float, typer.Option(help="Seconds of training.")] = 120.0,
    questions: Annotated[int, typer.Option(help="Held-out questions in the table.")] = 200,
    seed: Annotated[int, typer.Option(help="Of data and training.")] = 0,
) -> None:
    """The whole story on a CPU in minutes: train, save, reload, ask, compare."""
    from comb_training.cli.demo import run_demo

    if not run_demo(output_dir, train_seconds=train_seconds, questions=questions, seed=seed, console=console):
        raise typer.Exit(1)


def _engine_option(item: str) -> tuple[str, Any]:
    import yaml

    name, equals, value = item.partition("=")
    if not equals or not name:
        raise ValueError(f"expected --vllm key=value, got {item!r} (for example tensor_parallel_size=4)")
    return name.replace("-", "_"), yaml.safe_load(value)


def _show_answers(targets: Targets, run: PreparedRun, show: int) -> None:
    answered, settings = targets.answered, targets.answered.settings
    share = f" of rank {targets.share.rank} of {targets.share.ranks}" if targets.share.ranks > 1 else ""
    rate = f", {answered.generated / answered.seconds:.1f} answers/s" if answered.seconds else ""
    by = f" by {answered.engine}" if answered.engine else ""
    pending = f", {targets.pending} left to other ranks" if targets.pending else ""
    console.print(f"answers{share}: {answered.found} found, {answered.generated} generated{by}{rate}{pending}")
    if targets.share.rank > 0:  # the rest is the same on every rank
        return
    console.print(f"data: {run.counts}")
    console.print(
        f"settings: {escape(settings.model)}, {settings.dtype}, weights {settings.weights}, greedy, at most "
        f"{settings.max_new_tokens} tokens, stop tokens {', '.join(map(str, settings.stop_token_ids))}"
    )
    if targets.scores is not None:
        console.print(f"agreement with the data's answers: {100 * targets.scores.em:.1f}% exact match")
    for example, text in list(zip(targets.examples, targets.texts, strict=True))[:show]:
        query = run.tokenizer.decode(example.prompt.tail, skip_special_tokens=True).strip()
        console.print(f"  {escape(query)}\n    answer: {escape(text)}\n    data:   {escape(example.references[0])}")
    console.print(f"kept in {escape(str(targets.folder))}")


def _evaluate(model: Any, tokenizer: Any, settings: Config, out: Path | None, *, split: str = "heldout") -> None:
    """Evaluates, prints the table, and writes JSON and a plot."""
    from comb.evaluation.plot import plot_results
    from comb.evaluation.record import write_results
    from comb.evaluation.table import result_table
    from comb.hub.push import refresh_card
    from comb_training.train import evaluate_heldout

    results, counts = evaluate_heldout(model, tokenizer, settings, split=split)
    console.print(f"{split} data: {counts}")
    console.print(result_table(results, f"{settings.data.label}, {split}"))
    if out is None:
        return
    write_results(out, results, seed=settings.data.seed, split=split, data=counts.to_dict(), config=settings.to_dict())
    refresh_card(out.parent)  # of an adapter beside it, whose card shows the results
    written = [str(out)]
    if any(result.ttft_cold_s is not None for result in results):
        try:
            written.append(str(plot_results(results, out.with_suffix(".png"), title=settings.data.label)))
        except ImportError:
            console.print("no plot: matplotlib is not installed (pip install 'comb-pic\\[demo]')")
    console.print(escape(f"written: {', '.join(written)}"))


def _checkpoint(resume: str | None, settings: Config) -> Path | None:
    """The checkpoint to go on from; None to start. Raises ValueError if the one asked for is not there."""
    if resume is None:
        return None
    from comb_training.trainer.checkpoints import checkpoints

    folder = Path(settings.train.output_dir)
    if resume == "auto":
        found = checkpoints(folder)
        if not found:
            logger.warning("--resume auto: no checkpoint-N in %s, the run starts from the beginning", folder)
        return found[-1] if found else None
    if not Path(resume).is_dir():
        raise ValueError(f"there is no checkpoint folder {resume!r} to resume from")
    return Path(resume)


def _show_plan(run: Plan) -> None:
    import yaml
    from rich.syntax import Syntax

    from comb_training.plan.table import blocks
    from comb_training.trainer import distributed

    if not distributed.is_main():
        return
    console.print(Syntax(yaml.safe_dump(run.config.to_dict(), sort_keys=False), "yaml", background_color="default"))
    for block in blocks(run):
        console.print(block)


def _show_data(run: PreparedRun) -> None:
    """What became of the rows, and how long the examples are."""
    from comb_training.data.token_statistics import data_table

    console.print(f"data: {escape(str(run.counts))}")
    console.print(data_table(run.statistics, run.sets))

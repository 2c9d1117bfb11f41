"""`comb eval`: methods compared on held-out data, and how `comb train` shows the same at its end."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.markup import escape

if TYPE_CHECKING:
    from comb_training.config import Config
    from comb_training.train import Questions

console = Console()


def evaluate(
    checkpoint: Annotated[str, typer.Argument(help="Adapter folder or Hub id; or a plain backbone.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            help="as for comb train: data=mine.jsonl (default: what it was trained on), data.num_documents=8, ...",
            metavar="[KEY=VALUE]...",
        ),
    ] = None,
    methods: Annotated[str | None, typer.Option(help='Separated by commas; "none" asks without documents.')] = None,
    limit: Annotated[int | None, typer.Option(help="Questions at most.")] = None,
    split: Annotated[str, typer.Option(help="heldout, train or all.")] = "heldout",
    out: Annotated[Path | None, typer.Option(help="JSON for the results; a plot is written beside it.")] = None,
    backbone: Annotated[str | None, typer.Option(help="Load the adapter's backbone from here instead.")] = None,
) -> None:
    """Compare methods on held-out data: exact match, F1, ROUGE-L, time to first token, bytes of cache."""
    from comb_training.config import Config, override, trained_config

    settings = trained_config(checkpoint)
    given: list[str] = []
    same = True
    named: str | list[Any] | None = None
    for item in overrides or []:
        key, _, value = item.partition("=")
        if key == "data" and isinstance(rows := yaml.safe_load(value), str | list) and rows:
            named = rows
        else:
            given.append(item)
    if named is not None:
        settings, same = _asked_about(settings or Config(), named)
        if not same and split == "heldout":
            console.print("asked is what a training on these rows would hold out; --split all asks all of them")
    elif settings is None:
        why = "has no training.json" if Path(checkpoint).is_dir() else "is no folder here with a training.json"
        raise ValueError(f"{checkpoint} {why} that names its data: add data=FILE")
    if out is not None and out.suffix == ".png":
        raise ValueError(f"--out {out}: results are JSON, and their plot goes to {out}; name a .json file")
    override(settings, given)

    # takes seconds, so behind what can be wrong with the options
    from comb.backbones.tokenizer import load_tokenizer
    from comb.evaluation.record import check_writable, read_training
    from comb.hub.push import read_card
    from comb.methods import split_specs
    from comb_training.data.sources import file_digests
    from comb_training.models.method import load_checkpoint

    if methods is not None:
        given.append(f"eval.methods={json.dumps(split_specs(methods))}")
    if limit is not None:
        given.append(f"eval.limit={limit}")
    settings = override(settings, given)
    if not settings.eval.methods:
        raise ValueError("eval.methods is empty: name at least one method to compare, for example full")
    if not settings.eval.limit:  # as trained without an evaluation, say
        raise ValueError("eval.limit is 0, so nothing would be asked: add --limit 100, say")
    check_methods(settings)
    if out is not None:
        check_writable(out.parent, out.name, out.with_suffix(".png").name)
        read_card(out.parent)  # of an adapter, whose card will show the results
    trained = read_training(checkpoint) or {}
    files, asked = trained.get("files"), {*file_digests(settings.data)}  # nothing is known of older adapters' files
    if split == "all" and (same or asked & {*(files or ())}):
        console.print("[yellow]asked are rows that it was trained on, too; --split heldout leaves them out[/]")
    if same and split == "heldout" and files is not None and not asked <= {*files}:
        console.print("[yellow]the data isn't what it was at the training: some of what is asked may be trained on[/]")
    model = load_checkpoint(checkpoint, settings, backbone=backbone)
    # what was trained with is in the adapter's own template
    arguments = settings.data.chat_template_kwargs
    tokenizer = load_tokenizer(checkpoint, model, chat_template_kwargs=arguments)
    show_evaluation(model, tokenizer, settings, out, split=split)
    if same:
        show_heldout(trained.get("heldout") or {})


def _asked_about(settings: Config, named: str | Sequence[Any]) -> tuple[Config, bool]:
    """The settings with these rows, and whether they are what was trained on: that stays split as it was, so that none
    of it is called held out."""
    from comb_training.config import config_from_dict
    from comb_training.config.sections import other_rows
    from comb_training.data.sources import Source, sources

    data = settings.data
    if isinstance(named, str):
        wanted, trained_on = Source(None, named, None, {}), sources(data)
        own = [entry for entry in data.mixture if named in (entry.name, entry.dataset)] or [
            entry for entry, source in zip(data.mixture, trained_on, strict=False) if source.reads_as(wanted)
        ]
        if own or data.dataset == named or (not data.mixture and trained_on[0].reads_as(wanted)):
            return replace(settings, data=replace(data, mixture=tuple(own))), True
    content = settings.to_dict()
    return config_from_dict({**content, "data": other_rows(content["data"], named)}), False


def check_methods(settings: Config) -> None:
    """Raises ValueError for a method to compare that there isn't."""
    from comb import methods
    from comb.evaluation.setting import NO_DOCUMENTS

    for method in {*settings.eval.methods} - {NO_DOCUMENTS}:
        methods.parse(method.partition("@")[0])


def show_evaluation(
    model: Any,
    tokenizer: Any,
    settings: Config,
    out: Path | None,
    *,
    split: str = "heldout",
    questions: Questions | None = None,
) -> None:
    """Evaluates, prints the tables, and writes JSON and a plot. `questions`: where they were read before."""
    from comb.evaluation.plot import Quality, draw
    from comb.evaluation.record import write_results
    from comb.evaluation.setting import AnswerRules, Setting
    from comb.evaluation.summary import compared, comparison_tables
    from comb.hub.push import refresh_card
    from comb_training.data.mixture import prompt_builder
    from comb_training.train import evaluation_questions

    setting = Setting(model, tokenizer, prompt_builder(settings.data, tokenizer))
    examples, counts = questions or evaluation_questions(setting, settings, split)
    rules = AnswerRules(settings.eval.max_new_tokens, settings.data.stop)
    rows = compared(setting, examples, settings.eval.methods, rules=rules)
    console.print(escape(f"{split} data: {counts}"))
    for table in comparison_tables(rows, f"{settings.data.label}, {split}"):
        console.print(table)
    if out is None:
        return
    write_results(out, rows, seed=settings.data.seed, split=split, data=counts.to_dict(), config=settings.to_dict())
    written = [str(out)]
    if any(row["ttft_cold_s"] for row in rows):
        try:
            written.append(str(draw([Quality(rows)], out.with_suffix(".png"), title=settings.data.label)))
        except ImportError:
            console.print("no plot: matplotlib is not installed (pip install 'comb-pic\\[demo]')")
    refresh_card(out.parent)  # of an adapter beside it, whose card shows the results, and their plot
    console.print(escape(f"written: {', '.join(written)}"))


def show_heldout(measured: dict[str, Any]) -> None:
    """What the training has gained on its held-out examples."""
    if not measured:
        return
    end, where = measured["end"], f"on {measured['examples']} held-out questions"
    times = [at for at in (measured.get("start"), end) if at]
    if "closed" not in end:
        console.print(f"loss {where}: {' -> '.join(format(at['loss'], '.4f') for at in times)}")
        return
    closed = [
        f"{100 * at['closed']:.1f}% ({100 * at['closed_low']:.1f} to {100 * at['closed_high']:.1f})" for at in times
    ]
    console.print(
        f"KL to full recompute {where}: {' -> '.join(format(at['kl'], '.4f') for at in times)} nats per token, without "
        f"documents {end['kl_none']:.4f}; closed: {', at the start: '.join(reversed(closed))} (at the data's answers)",
        soft_wrap=True,
    )

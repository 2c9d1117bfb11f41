"""`comb eval`: methods compared on held-out data, and how `comb train` shows the same at its end."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

if TYPE_CHECKING:
    from comb_training.config import Config

console = Console()

WRITING_KEYS = (
    "document_template", "query_template", "head", "stop", "max_document_tokens", "max_query_tokens", "splitter",
    "seed", "cache", "cache_dir",
)  # fmt: skip


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
    from comb.evaluation.record import check_out
    from comb.methods import split_specs
    from comb_training.config import DataConfig, config_from_dict, override
    from comb_training.models.loading import load_checkpoint
    from comb_training.train import trained_config

    if out is not None:
        check_out(out)
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
        why = "has no training.json" if Path(checkpoint).is_dir() else "is no folder here with a training.json"
        raise ValueError(f"{checkpoint} {why} that names its data: use --dataset and --path")
    elif path is not None:
        given.append(f"data.path={json.dumps(path)}")
    if methods is not None:
        given.append(f"eval.methods={json.dumps(split_specs(methods))}")
    if limit is not None:
        given.append(f"eval.limit={limit}")
    settings = override(settings, [*given, *(overrides or [])])
    model = load_checkpoint(checkpoint, settings)
    show_evaluation(model, load_tokenizer(checkpoint, model), settings, out, split=split)


def show_evaluation(model: Any, tokenizer: Any, settings: Config, out: Path | None, *, split: str = "heldout") -> None:
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

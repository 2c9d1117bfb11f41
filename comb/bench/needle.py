"""`comb bench needle`: is one fact found wherever it stands? A grid of context lengths and depths per method."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean
from typing import Annotated

import typer
from tqdm import tqdm

from comb.bench.harness import BenchmarkReport, benchmark, or_refused
from comb.bench.haystack import ExampleHaystack, Haystack, TextHaystack
from comb.bench.options import Lengths, MaxNewTokens, Methods, QuestionOptions, integers, numbers, split_methods
from comb.evaluation.metrics import agreement, contains, f1
from comb.evaluation.plot import Grid, Panel
from comb.evaluation.run import NO_DOCUMENTS, Setting
from comb.evaluation.table import Column, Row, TextTable, refusals


@dataclass(frozen=True)
class NeedleOptions(QuestionOptions):
    """Of `comb bench needle`."""

    methods: Methods = "full,naive,legolink:16,cacheblend:0.15"
    lengths: Lengths = "1024,2048,4096"
    depths: Annotated[str, typer.Option(help="where the needle stands, in percent of the context")] = "0,25,50,75,100"
    chunk_tokens: Annotated[int, typer.Option(min=1, help="tokens per chunk of text")] = 512
    repeats: Annotated[int, typer.Option(min=1, help="haystacks per cell, each with another needle")] = 3
    dataset: Annotated[
        str, typer.Option(help="take needles, questions and filler from a dataset's documents instead")
    ] = ""
    max_new_tokens: MaxNewTokens = 24


def tables(rows: Sequence[Row]) -> list[TextTable]:
    """Depth over context length, per method: share of answers that hold the needle, F1 behind it; and what changed."""
    cells = {(row["method"], row["tokens"], row["depth"]): row for row in rows}

    def column(depth: float, names: tuple[str, str]) -> Column:
        return Column(f"{depth:g}%", lambda line: _cell_text(cells.get((line["method"], line["tokens"], depth)), names))

    names = (Column("method", "method", names=True), Column("tokens", "tokens", names=True))
    lines = [{"method": m, "tokens": t} for m, t in dict.fromkeys((row["method"], row["tokens"]) for row in rows)]
    remarks = [
        "Percent of answers that hold the needle, and mean F1 in percent, by depth of the needle. "
        f"{max(row['n'] for row in rows)} haystacks per cell.",
        *refusals((f"{row['method']} at {row['tokens']}", row["refused"]) for row in rows if row["refused"]),
    ]
    depths = sorted({row["depth"] for row in rows})
    scores = [*names, *(column(depth, ("found", "f1")) for depth in depths)]
    found = [TextTable("Needle in a haystack", scores, lines, remarks)]
    if any(row["same"] is not None for row in rows):
        agreed = [*names, *(column(depth, ("same", "rouge_l_full")) for depth in depths)]
        what = "Percent of answers that are full recompute's, and mean ROUGE-L with them."
        found.append(TextTable("Agreement with full recompute", agreed, lines, [what]))
    return found


def panels(rows: Sequence[Row]) -> list[Panel]:
    """One heat map per method: depth over context length."""
    methods = dict.fromkeys(row["method"] for row in rows)
    labels = ("context, tokens", "depth of the needle, %")
    return [
        Grid([row for row in rows if row["method"] == method], "tokens", "depth", "found", method, labels)
        for method in methods
    ]


@benchmark("needle", tables, panels)
def needle(options: NeedleOptions, report: BenchmarkReport) -> None:
    """Needle in a haystack: a grid of context length and depth for every method."""
    specs = split_methods(options.methods)
    lengths, depths = integers(options.lengths, "--lengths"), numbers(options.depths, "--depths", most=100)
    examples = options.read()[0] if options.dataset else []
    setting = options.setting()
    source: Haystack = TextHaystack(setting.tokenizer, options.chunk_tokens, options.seed)
    if examples:
        source = ExampleHaystack(examples, setting.builder, setting.query_template)
    report.heading = f"{options.model}: needles in {options.dataset or 'generated text'}"
    for row in measure_needles(setting, source, specs, lengths, depths, options):
        report.add(row)


def measure_needles(
    setting: Setting, haystack: Haystack, specs: Sequence[str], lengths: Sequence[int], depths: Sequence[float],
    options: NeedleOptions,
) -> Iterator[Row]:  # fmt: skip
    """Rows by method, then length, then depth; all methods get the same haystacks.

    Depths are in percent. ``placed`` is where the needles really began, in tokens, and ``made`` how many tokens there
    really were, per haystack (documents of a dataset are not cut to fit); ``found`` is the share of answers that hold
    the right one word by word. ``same`` and ``rouge_l_full`` compare answers with those of `full`, which comes first.
    """
    cells = list(product(sorted(specs, key=lambda spec: spec != "full"), lengths, depths))
    full: dict[tuple[int, float], list[str]] = {}
    for spec, tokens, depth in tqdm(cells, "needles", unit="cell", leave=False):
        row: Row = {"method": spec, "tokens": tokens, "depth": depth, "n": 0, "f1": None, "found": None, "same": None,
                    "rouge_l_full": None, "refused": ""}  # fmt: skip
        with or_refused(row):
            cases = [haystack.case(tokens, depth, number) for number in range(options.repeats)]
            engine, predictions = setting.engine(spec), []
            for case in cases:
                documents = () if spec == NO_DOCUMENTS else case.documents
                answer = engine.ask(case.question, documents, max_new_tokens=options.max_new_tokens)
                predictions.append(answer.text.strip())
                engine.store.clear()
            if spec == "full":
                full[tokens, depth] = predictions
            row |= {
                "n": len(cases),
                "f1": fmean(f1(text, [case.answer]) for text, case in zip(predictions, cases, strict=True)),
                "found": fmean(contains(text, [case.answer]) for text, case in zip(predictions, cases, strict=True)),
                **_beside(predictions, full.get((tokens, depth))),
                "placed": [case.needle_token for case in cases],
                "made": [case.tokens for case in cases],
                "answers": [case.answer for case in cases],
                "predictions": predictions,
            }
        yield row


def _beside(predictions: Sequence[str], full: Sequence[str] | None) -> Row:
    """Agreement with the answers of `full`, where that was asked."""
    if full is None:
        return {}
    same, alike = agreement(predictions, full)
    return {"same": fmean(same), "rouge_l_full": fmean(alike)}


def _cell_text(row: Row | None, names: tuple[str, str]) -> str | None:
    if row is None or row["refused"]:
        return None if row is None else "refused"
    values = [row[name] for name in names]
    return None if None in values else f"{100 * values[0]:.0f} ({100 * values[1]:.0f})"

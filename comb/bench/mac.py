"""`comb bench mac`: what MAC attention reuses, reads and gets wrong in a model's own answers, with MAC on and off.

Nothing here takes a time: the reference is plain torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Annotated

import typer
from tqdm import tqdm

from comb.bench.harness import BenchmarkReport, benchmark
from comb.bench.options import QuestionOptions
from comb.documents.document import Example
from comb.evaluation.metrics import agreement, contains, score
from comb.evaluation.plot import Lines, Panel
from comb.evaluation.setting import Setting
from comb.evaluation.table import Column, Row, TextTable, fixed, percent
from comb.kernels.mac.mac_config import MacConfig


@dataclass(frozen=True)
class MacOptions(QuestionOptions):
    quality: Annotated[str, typer.Option(help="configurations to answer with, separated by ;")] = (
        "context;generation:tau=0.9;context:audit_bound=0.25"
    )
    common: Annotated[str, typer.Option(help="parameters of all of these, in front of their own")] = (
        "window=64,band=32,min_length=64,audit_every=4,audit_bound=none"
    )
    questions: Annotated[int, typer.Option(min=1, help="of those read, how many are asked as they are")] = 40
    max_new_tokens: Annotated[int, typer.Option(min=1, help="longest answer, in tokens")] = 48


def tables(rows: Sequence[Row]) -> list[TextTable]:
    """One line per task and configuration."""
    columns = (
        Column("task", "task", names=True),
        Column("attention", "name", names=True),
        Column("n", "n"),
        *(Column(f"{name} %", name, percent) for name in ("em", "f1", "found")),
        Column("same %", "same", percent, "answers equal to exact attention's, token for token"),
        Column("R-L exact", "rouge_l_exact", percent, "ROUGE-L with exact attention's answers, %"),
        Column("hits %", "hit_rate", percent),
        Column("read %", "read_share", percent, "of the keys of steps that MAC took part in"),
        Column("worst", "error_max", fixed(2), "the largest relative error that an audit found"),
        Column("exact", "exact_calls", note="attention calls left to exact attention"),
    )
    return [TextTable("Answers with MAC on and off", columns, rows)]


def panels(rows: Sequence[Row]) -> list[Panel]:
    """Hits and keys read by layer (paper Fig. 5)."""
    by_layer = [{"name": row["name"], **layer} for row in rows for layer in row["layers"]]
    shares = {"hit_rate": "hits, % of steps", "read_share": "keys read, %"}
    return [Lines(by_layer, "layer", key, "layer", label, by="name", scale=100) for key, label in shares.items()]


@benchmark("mac", tables, panels)
def measure_mac(options: MacOptions, report: BenchmarkReport) -> None:
    """Reuse of attention while decoding: hits, keys read, errors, and answers with MAC on and off."""
    configs = {}
    for text in options.quality.split(";"):
        preset, _, further = text.partition(":")
        configs[text] = MacConfig.parse(f"{preset}:{options.common},{further}")
    report.heading = f"MAC, {options.common}"
    examples, _ = options.read()
    asked = examples[: options.questions]
    for row in measure_quality(options.setting(), options.dataset, asked, configs, options.max_new_tokens):
        report.add(row)


def measure_quality(
    setting: Setting, task: str, examples: Sequence[Example], configs: Mapping[str, MacConfig], max_new_tokens: int
) -> Iterator[Row]:
    """The questions without MAC ("exact"), then with each configuration, one question at a time.

    ``same`` is the share of answers that are exact attention's token for token, ``found`` of those that hold a right
    one word by word; the others are a `MacReport`'s, over all answers, and in ``layers`` by layer (paper Fig. 5).
    """
    from comb.mac.accounting import MacReport

    exact: list[tuple[int, ...]] = []
    exact_texts: list[str] = []
    for name, config in (("exact", None), *configs.items()):
        engine = replace(setting, mac=config).engine("full")
        answers = [
            engine.ask(*setting.request("full", example), max_new_tokens=max_new_tokens)
            for example in tqdm(examples, f"{task}, {name}", unit="question", leave=False)
        ]
        tokens = [answer.token_ids for answer in answers]
        exact = exact or tokens
        texts = [answer.text.strip() for answer in answers]
        exact_texts = exact_texts or texts
        scores = score(texts, [example.references for example in examples])
        reports = [answer.report.mac for answer in answers if answer.report.mac is not None]
        left = sum((Counter(report.exact) for report in reports), Counter[str]())
        whole = MacReport(0, 0, tuple(layer for report in reports for layer in report.layers))
        yield {
            "task": task, "name": name, "n": len(answers), "em": scores.em, "f1": scores.f1,
            "found": fmean(map(contains, texts, (example.references for example in examples))),
            "same": fmean(own == other for own, other in zip(tokens, exact, strict=True)),
            "rouge_l_exact": fmean(agreement(texts, exact_texts)[1]),
            "hit_rate": whole.hit_rate if whole.layers else None, "error_max": whole.error_max,
            "read_share": whole.read_share if whole.layers else None, "exact_calls": left.total(),
            "layers": [
                {"layer": number, "hit_rate": one.hit_rate, "read_share": one.read_share}
                for number in sorted({layer.layer for layer in whole.layers})
                for one in [MacReport(0, 0, tuple(layer for layer in whole.layers if layer.layer == number))]
            ],
        }  # fmt: skip

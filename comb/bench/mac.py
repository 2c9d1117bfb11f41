"""`comb bench mac`: what MAC attention reuses, reads and gets wrong, on synthetic streams and on a model's own answers.

Streams (`comb.mac.streams`) count keys and errors at the functional level: over context length, threshold,
window and band, and over one long decode with and without the caps. Answers are compared with MAC on and off. Nothing
here takes a time: the reference is plain torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import typer
from tqdm import tqdm

from comb.bench.harness import BenchmarkReport, benchmark
from comb.bench.options import QuestionOptions, integers
from comb.documents.document import Example
from comb.evaluation.metrics import agreement, contains, score
from comb.evaluation.plot import Lines, Panel
from comb.evaluation.setting import Setting
from comb.evaluation.table import Column, Row, TextTable, fixed, percent
from comb.kernels.mac.mac_config import MacConfig

if TYPE_CHECKING:
    from comb.mac.streams import StreamSpec

TAUS, BANDS = (0.15, 0.45, 0.75, 0.85, 0.95), (8, 16, 64, 256)
FAR: dict[str, Any] = {"recency": 7.0, "content": 1.5, "drift": 0.05, "heads": 16, "kv_heads": 4}
"""A stream whose attention isn't all near the cursor, so that old summaries show."""
OPTIONS = tuple(
    f"generation:window=256,{text}"
    for text in (
        *(f"band=64,tau={tau}" for tau in (0.75, 0.8, 0.85, 0.9)), "band=64,max_gap=128", "band=64,max_gap=75",
        "band=128", "band=96",
    )
)  # fmt: skip
"""What buys a smaller error for more keys."""


@dataclass(frozen=True)
class MacOptions(QuestionOptions):
    config: Annotated[str, typer.Option(help="MAC of the streams: a preset and parameters")] = "generation:min_length=0"
    contexts: Annotated[str, typer.Option(help="tokens of the streams' contexts")] = "1024,2048,4096,8192"
    steps: Annotated[int, typer.Option(min=10, help="decode steps of a stream")] = 256
    quality: Annotated[
        str, typer.Option(help="configurations for the model's own answers, separated by ;, or none")
    ] = "context;generation:tau=0.9;context:audit_bound=0.25"
    common: Annotated[str, typer.Option(help="parameters of all of these, in front of their own")] = (
        "window=64,band=32,min_length=64,audit_every=4,audit_bound=none"
    )
    questions: Annotated[int, typer.Option(min=1, help="of those read, how many are asked as they are")] = 40
    max_new_tokens: Annotated[int, typer.Option(min=1, help="longest answer, in tokens")] = 48


def tables(rows: Sequence[Row]) -> list[TextTable]:
    """One line per stream, with the error at both ends of the decode; then one per task and configuration."""
    streams = (
        Column("sweep", "sweep", names=True),
        Column("value", "value", str, names=True),
        Column("hits %", "hit_rate", percent, "of all steps and heads"),
        Column("read %", "read_share", percent, "keys read over what exact attention reads"),
        Column("hit reads", "most_read_on_hit", note="the most keys that any hit read"),
        Column("error", "error_mean", fixed(3), "relative, of the output over all heads, mean over steps"),
        Column("first 10%", lambda row: error_between(row, 0, 0.1), fixed(3)),
        Column("last 10%", lambda row: error_between(row, 0.9, 1), fixed(3)),
    )
    answers = (
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
    asked = [row for row in rows if "task" in row]
    found = [TextTable("Streams", streams, [row for row in rows if "sweep" in row])]
    return [*found, TextTable("Answers with MAC on and off", answers, asked)] if asked else found


def panels(rows: Sequence[Row]) -> list[Panel]:
    """Keys over context; hits, reads and error over the threshold; error over a long decode."""
    by = {name: [row for row in rows if row.get("sweep") == name] for name in ("context", "tau", "drift")}
    keys = {"exact": "exact_per_step", "MAC, mean": "read_per_step", "MAC, most on a hit": "most_read_on_hit"}
    shares = {"hits": "hit_rate", "keys read": "read_share", "relative error": "error_mean"}
    drift = [{"value": row["value"], "end": 10 * part + 10, "error": error_between(row, part / 10, (part + 1) / 10)}
             for row in by["drift"] for part in range(10)]  # fmt: skip
    return [
        Lines(by["context"], "value", keys, "context, tokens", "keys read per head and step", log="xy"),
        Lines(by["tau"], "value", shares, "threshold tau", "% of steps, of keys, of the output", scale=100),
        Lines(drift, "end", "error", "% of the decode", "relative error", by="value"),
    ]


def error_between(row: Row, first: float, last: float) -> float:
    """Mean error of the steps between two shares of the decode, such as 0.9 and 1."""
    errors = row["errors"]
    return fmean(errors[int(first * len(errors)) : max(1, int(last * len(errors)))])


@benchmark("mac", tables, panels)
def measure_mac(options: MacOptions, report: BenchmarkReport) -> None:
    """Reuse of attention while decoding: keys read, errors, drift, and answers with MAC on and off."""
    from comb.mac.streams import StreamSpec

    chosen, contexts = MacConfig.parse(options.config), integers(options.contexts, "--contexts")
    configs = {}
    for text in [] if options.quality == "none" else options.quality.split(";"):
        preset, _, further = text.partition(":")
        configs[text] = MacConfig.parse(f"{preset}:{options.common},{further}")
    spec = StreamSpec(contexts[len(contexts) // 2], options.steps, drift=0.15, seed=options.seed)
    report.heading = (
        f"MAC, {options.config}: streams of {spec.heads} heads, {spec.kv_heads} of keys, width {spec.width}"
    )
    for row in sweep_streams(spec, chosen, contexts):
        report.add(row)
    if not configs:
        return
    examples, _ = options.read()
    asked = examples[: options.questions]
    for row in measure_quality(options.setting(), options.dataset, asked, configs, options.max_new_tokens):
        report.add(row)


def sweep_streams(spec: StreamSpec, config: MacConfig, contexts: Sequence[int]) -> Iterator[Row]:
    """Every sweep around `config` on streams like `spec`: rows of `run_stream`, with ``sweep`` and ``value``."""
    from comb.mac.streams import make_stream, run_stream

    far = replace(spec, **FAR)
    plan: list[tuple[str, float | str, StreamSpec, MacConfig]] = [
        *(("context", value, replace(spec, context=value), config) for value in contexts),
        *(("tau", value, spec, replace(config, tau=value)) for value in TAUS),
        *(("band", value, spec, replace(config, band=value)) for value in BANDS),
        *(
            ("drift", f"{name}, tau {tau:g}", far, replace(caps, tau=tau))
            for tau in (0.45, 0.75, 0.9)
            for name, caps in (("capped", config), ("uncapped", config.uncapped()))
        ),
        *(("options", text, far, replace(MacConfig.parse(text), min_length=0)) for text in OPTIONS),
        ("control", "white noise, tau 0.9", replace(spec, white=True), replace(config, tau=0.9)),
    ]
    for sweep, value, wanted, chosen in tqdm(plan, "streams", unit="stream", leave=False):
        yield {"sweep": sweep, "value": value, **run_stream(make_stream(wanted), chosen)}


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

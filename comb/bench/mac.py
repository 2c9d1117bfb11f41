"""`comb bench mac`: what MAC attention reuses, reads and gets wrong, on synthetic streams and on a model's own answers.

Streams (`comb.bench.mac_stream`) count keys and errors at the functional level: over context length, threshold, window
and band, and over one long decode with and without the caps. Quality is measured on questions, MAC on and off. Nothing
here takes a time: the reference is plain torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Annotated, Any

import typer
from tqdm import tqdm

from comb.bench.harness import BenchmarkReport, benchmark
from comb.bench.haystack import ExampleHaystack
from comb.bench.mac_stream import StreamSpec, error_between, make_stream, run_stream
from comb.bench.needle import contains
from comb.bench.options import MaxNewTokens, QuestionOptions, integers, numbers
from comb.documents.document import Example
from comb.evaluation.metrics import score
from comb.evaluation.plot import Lines, Panel
from comb.evaluation.run import Setting
from comb.evaluation.table import Column, Row, TextTable, fixed, percent
from comb.mac import MacConfig
from comb.mac.accounting import MacReport

FAR: dict[str, Any] = {"recency": 7.0, "content": 1.5, "drift": 0.05, "heads": 16, "kv_heads": 4}
"""A stream whose attention isn't all near the cursor, so that old summaries show."""

SWEEPS = ("context", "tau", "window", "band", "drift", "control")


@dataclass(frozen=True)
class MacOptions(QuestionOptions):
    """Of `comb bench mac`."""

    config: Annotated[str, typer.Option(help="MAC of the streams: a preset and parameters")] = "generation:min_length=0"
    contexts: Annotated[str, typer.Option(help="tokens of context, separated by commas")] = "1024,2048,4096,8192"
    steps: Annotated[int, typer.Option(min=10, help="decode steps of a stream")] = 256
    taus: Annotated[str, typer.Option(help="thresholds")] = "0,0.15,0.3,0.45,0.6,0.75,0.85,0.95"
    windows: Annotated[str, typer.Option(help="windows, in tokens")] = "32,64,128,256,512,1024"
    bands: Annotated[str, typer.Option(help="bands, in tokens")] = "8,16,32,64,128,256,512"
    drift: Annotated[float, typer.Option(help="how far a stream's queries move per token, 0 to 1")] = 0.15
    recency: Annotated[float, typer.Option(help="the latest key's advantage, in nats")] = 10.0
    quality: Annotated[
        str, typer.Option(help="configurations for the model's own answers, separated by ;, or none")
    ] = "context;context:max_chain=none,max_drift=false;generation;generation:tau=0.9;context:audit_bound=0.25"
    common: Annotated[str, typer.Option(help="parameters of all of these, in front of their own")] = (
        "window=64,band=32,min_length=64,audit_every=4,audit_bound=none"
    )
    method: Annotated[str, typer.Option(help="method that links documents for the answers")] = "full"
    questions: Annotated[int, typer.Option(min=1, help="of those read, how many are asked as they are")] = 40
    lengths: Annotated[str, typer.Option(help="tokens of the needles' haystacks")] = "512,1024"
    depths: Annotated[str, typer.Option(help="where the needle stands, in percent")] = "0,25,50,75,100"
    repeats: Annotated[int, typer.Option(min=1, help="haystacks per length and depth")] = 4
    max_new_tokens: MaxNewTokens = 48


def tables(rows: Sequence[Row]) -> list[TextTable]:
    """One line per stream, with the error at both ends of the decode; then one per task and configuration."""

    streams = (
        Column("sweep", "sweep", names=True),
        Column("value", "value", lambda v: v if isinstance(v, str) else f"{v:g}", names=True),
        Column("hits %", "hit_rate", percent, "of all steps and heads"),
        Column("skip %", "skip_ratio", percent, "share of the context not read, misses as 0"),
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
        Column("hits %", "hit_rate", percent),
        Column("read %", "read_share", percent, "of the keys of steps that MAC took part in"),
        Column("worst", "error_max", fixed(2), "the largest relative error that an audit found"),
        Column("exact", "exact_calls", note="attention calls left to exact attention"),
    )
    asked = [row for row in rows if "task" in row]
    found = [TextTable("Streams", streams, [row for row in rows if "sweep" in row])]
    return [*found, TextTable("Answers with MAC on and off", answers, asked)] if asked else found


def panels(rows: Sequence[Row]) -> list[Panel]:
    """Keys over context; hits, reads and error over threshold, window and band (paper Fig. 5 and 9); drift."""
    by = {name: [row for row in rows if row.get("sweep") == name] for name in SWEEPS}
    keys = {"exact": "exact_per_step", "MAC, mean": "read_per_step", "MAC, most on a hit": "most_read_on_hit"}
    shares = {"hits": "hit_rate", "skipped": "skip_ratio", "relative error": "error_mean"}
    of = "% of steps, of context, of the output"
    tenths = [(part / 10, (part + 1) / 10) for part in range(10)]
    drift = [{"value": row["value"], "end": 100 * end, "error": error_between(row, begin, end)}
             for row in by["drift"] for begin, end in tenths]  # fmt: skip
    return [
        Lines(by["context"], "value", keys, "context, tokens", "keys read per head and step", log="xy"),
        Lines(by["tau"], "value", shares, "threshold tau", of, scale=100),
        Lines(by["window"], "value", shares, "window K, tokens", of, scale=100, log="x"),
        Lines(by["band"], "value", shares, "band r, tokens", of, scale=100, log="x"),
        Lines(drift, "end", "error", "% of the decode", "relative error", by="value"),
        Lines(by["tau"], "read_share", "error_mean", "keys read, share of exact", "relative error", by="sweep"),
    ]


@benchmark("mac", tables, panels)
def measure_mac(options: MacOptions, report: BenchmarkReport) -> None:
    """Reuse of attention while decoding: keys read, errors, drift, and answers with MAC on and off."""
    chosen = MacConfig.parse(options.config)
    texts = [] if options.quality == "none" else [text.strip() for text in options.quality.split(";") if text.strip()]
    configs = {text: MacConfig.parse(_with(text, options.common)) for text in texts}
    contexts = integers(options.contexts, "--contexts")
    spec = StreamSpec(
        contexts[len(contexts) // 2], options.steps, drift=options.drift, recency=options.recency, seed=options.seed
    )
    report.heading = (
        f"MAC, {options.config}: streams of {spec.heads} heads, {spec.kv_heads} of keys, width {spec.width}"
    )
    for row in sweep_streams(
        spec, chosen, contexts, numbers(options.taus, "--taus", most=1), integers(options.windows, "--windows"),
        integers(options.bands, "--bands"), replace(spec, **FAR),
    ):  # fmt: skip
        report.add(row)
    if not configs:
        return
    examples, _ = options.read()
    setting = options.setting()
    tasks = [(setting, options.dataset, examples[: options.questions])]
    haystack = ExampleHaystack(examples, setting.builder, setting.query_template)
    # a case holds the question as it is asked, so templates are not applied again
    plain, depths = replace(setting, query_template="{query}"), numbers(options.depths, "--depths", most=100)
    for tokens in integers(options.lengths, "--lengths"):
        cases = [haystack.case(tokens, depth, number) for depth in depths for number in range(options.repeats)]
        needles = [Example(case.documents, case.question, case.answer) for case in cases]
        tasks.append((plain, f"needle {tokens}", needles))
    for own, task, asked in tasks:
        for row in measure_quality(own, task, asked, configs, options):
            report.add(row)


def sweep_streams(
    spec: StreamSpec, config: MacConfig, contexts: Sequence[int], taus: Sequence[float], windows: Sequence[int],
    bands: Sequence[int], drift_spec: StreamSpec,
) -> Iterator[Row]:  # fmt: skip
    """Every sweep around `config` on streams like `spec`: rows of `run_stream`, with ``sweep`` and ``value``.

    Args:
        drift_spec: of the stream on which the caps are compared: one whose attention isn't all near the cursor.
    """
    # where the nearest query is the last one, any window is as good as any other
    apart = replace(spec, cycle=max(windows) // 2)
    plan: list[tuple[str, float | str, StreamSpec, MacConfig]] = [
        *(("context", value, replace(spec, context=value), config) for value in contexts),
        *(("tau", value, spec, replace(config, tau=value)) for value in taus),
        *(("window", value, apart, replace(config, window=value)) for value in windows),
        *(("band", value, spec, replace(config, band=value)) for value in bands),
        *(
            ("drift", f"{name}, tau {tau:g}", drift_spec, replace(caps, tau=tau))
            for tau in (0.45, 0.75, 0.9)
            for name, caps in (("capped", config), ("uncapped", config.uncapped()))
        ),
        ("control", "white noise, tau 0.9", replace(spec, white=True), replace(config, tau=0.9)),
    ]
    for sweep, value, wanted, chosen in tqdm(plan, "streams", unit="stream", leave=False):
        yield {"sweep": sweep, "value": value, **run_stream(make_stream(wanted), chosen)}


def measure_quality(
    setting: Setting, task: str, examples: Sequence[Example], configs: Mapping[str, MacConfig], options: MacOptions
) -> Iterator[Row]:
    """The questions without MAC ("exact"), then with each configuration, one question at a time.

    ``same`` is the share of answers that are exact attention's token for token, ``found`` of those that hold the right
    one word by word.
    """
    exact: list[tuple[int, ...]] = []
    for name, config in (("exact", None), *configs.items()):
        engine = replace(setting, mac=config).engine(options.method)
        answers = []
        for example in tqdm(examples, f"{task}, {name}", unit="question", leave=False):
            query, documents = setting.request(options.method, example)
            answers.append(engine.ask(query, documents, max_new_tokens=options.max_new_tokens))
            engine.store.clear()
        tokens = [answer.token_ids for answer in answers]
        exact = exact or tokens
        texts = [answer.text.strip() for answer in answers]
        scores = score(texts, [example.references for example in examples])
        yield {
            "task": task, "name": name, "n": len(answers), "em": scores.em, "f1": scores.f1,
            "found": fmean(map(contains, texts, (example.answer for example in examples))),
            "same": fmean(own == other for own, other in zip(tokens, exact, strict=True)),
            "answer_tokens": fmean(len(own) for own in tokens),
            **_reuse([answer.report.mac for answer in answers if answer.report.mac is not None]),
        }  # fmt: skip


def _reuse(reports: Sequence[MacReport]) -> Row:
    """What sessions reused, over all of their steps; per layer the means over answers (paper Fig. 5)."""
    layers = [layer for report in reports for layer in report.layers]
    exact = sum(layer.keys_exact for layer in layers)
    by_layer = [[layer for layer in layers if layer.layer == n] for n in sorted({layer.layer for layer in layers})]

    def mean(name: str, own: Sequence[Any]) -> float:
        return float(sum(getattr(one, name) * one.searches for one in own) / max(1, sum(one.searches for one in own)))

    return {
        "hit_rate": mean("hit_rate", layers) if any(layer.searches for layer in layers) else None,
        "read_share": sum(layer.keys_read for layer in layers) / exact if exact else None,
        "error_max": max((report.error_max for report in reports if report.error_max is not None), default=None),
        "exact_calls": sum(sum(report.exact.values()) for report in reports),
        "layer_hits": [mean("hit_rate", own) for own in by_layer],
        "layer_skips": [mean("skip_ratio", own) for own in by_layer],
    }


def _with(text: str, common: str) -> str:
    """``"context:tau=0.9"`` with the common parameters in front of its own, which win where both are given.

    Answers are what is measured, whatever they cost, so the break-even rule isn't asked.
    """
    preset, _, own = text.partition(":")
    return f"{preset}:break_even=false,{common},{own}"

"""`comb bench methods`: every method on the same questions, one request at a time (EPIC sec. 5.2, synchronous).

Quality and times come from `comb.evaluation`; here are added peak memory, how far next-token distributions are from
full recompute's, and rows for methods that can't run on this model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import torch
import typer
from torch import Tensor
from tqdm import tqdm

from comb.bench.harness import BenchmarkReport, benchmark, or_refused
from comb.bench.memory import peak_memory
from comb.bench.options import MaxNewTokens, Memory, Methods, QuestionOptions, split_methods
from comb.bench.work import linked
from comb.documents.document import Document, Example
from comb.engine.engine import PICEngine
from comb.evaluation.plot import METRICS, Quality
from comb.evaluation.run import MethodResult, Setting, disjoint, evaluate
from comb.evaluation.table import Row, result_table


@dataclass(frozen=True)
class MethodsOptions(QuestionOptions):
    """Of `comb bench methods`."""

    methods: Methods = "full,prefix,naive,legolink:2,legolink:16,legolink-0,attnlink:16,cacheblend:0.15"
    limit: Annotated[int, typer.Option(min=1, help="questions at most")] = 50
    max_new_tokens: MaxNewTokens = 48
    batch_size: Annotated[int, typer.Option(min=1, help="questions answered at once, for quality only")] = 8
    timing_examples: Annotated[int, typer.Option(min=0, help="questions of which times are taken")] = 8
    kl_examples: Annotated[int, typer.Option(min=0, help="questions of which KL to full recompute is taken")] = 32
    memory: Memory = True
    metric: Annotated[str, typer.Option(help="of the plot: em, f1 or rouge_l")] = "f1"


@benchmark("methods", lambda results: [result_table(results, "Methods")])
def compare_methods(options: MethodsOptions, report: BenchmarkReport) -> None:
    """Quality, KL to full recompute, TTFT, bytes and memory of every method, one request at a time (EPIC Fig. 6)."""
    if options.metric not in METRICS:
        raise ValueError(f"--metric is one of {', '.join(METRICS)}, not {options.metric!r}")
    specs = split_methods(options.methods)
    setting, examples = options.load_questions(report, options.max_new_tokens)
    report.panels = lambda results: [Quality(results, options.metric)]
    compare(setting, examples, specs, options, report)


def compare(
    setting: Setting, examples: Sequence[Example], specs: Sequence[str], options: MethodsOptions,
    report: BenchmarkReport,
) -> None:  # fmt: skip
    """Adds a `MethodResult` per method, in order; a method that can't run here has its reason in ``refused``."""
    for spec in tqdm(specs, "methods", leave=False):
        row = MethodResult.refusal(spec, "").to_dict()
        with or_refused(row):
            row = _measured(setting, examples, spec, options).to_dict()
        report.add(row)
    found = {row["method"]: row for row in report.rows if not row["refused"]}
    if options.kl_examples and found:
        measure_fidelity(setting, examples[: options.kl_examples], found, max_new_tokens=options.max_new_tokens)


def _measured(setting: Setting, examples: Sequence[Example], spec: str, options: MethodsOptions) -> MethodResult:
    [result] = evaluate(
        (setting.model, setting.tokenizer), examples, [spec],
        max_new_tokens=options.max_new_tokens, batch_size=options.batch_size, timing_examples=options.timing_examples,
        query_template=setting.query_template, document_template=setting.builder.document_template,
        splitter=setting.splitter,
    )  # fmt: skip
    few = len(disjoint(examples, options.timing_examples))
    note = f"times are of {few} examples: no more of them have different documents"
    return replace(
        result,
        peak_memory_bytes=_peak(setting.engine(spec), *setting.request(spec, examples[0])) if options.memory else None,
        note=note if few < options.timing_examples else "",
    )


def _peak(engine: PICEngine, question: str, documents: Sequence[Document]) -> int:
    """Of linking and the first token, with documents compiled already."""
    engine.ask(question, documents, max_new_tokens=1)  # compiles, and lets everything lazy happen before we look

    def first_token() -> None:
        with linked(engine, question, documents) as state:
            state.logits.argmax(-1).cpu()

    return peak_memory(engine.method.backbone.device, first_token)


def measure_fidelity(
    setting: Setting, examples: Sequence[Example], rows: Mapping[str, Row], *, max_new_tokens: int
) -> None:
    """Puts ``kl`` in nats and ``top1_agreement``, means over ``kl_n`` tokens, or a ``note`` of why not, into the rows.

    Full recompute answers greedily; that answer is then forced through every method's state. Logits of one answer are
    all that is held at a time.
    """
    reference, engines = setting.engine("full"), {spec: setting.engine(spec) for spec in rows}
    sums: dict[str, Row] = {spec: {"kl": 0.0, "same": 0, "tokens": 0, "refused": ""} for spec in rows}
    for example in tqdm(examples, "KL", unit="question", leave=False):
        answer = reference.ask(*setting.request("full", example), max_new_tokens=max_new_tokens).token_ids
        expected = _answer_logits(reference, setting.request("full", example), answer)
        for spec, total in sums.items():
            if not total["refused"]:
                with or_refused(total):
                    logits = _answer_logits(engines[spec], setting.request(spec, example), answer)
                    total["kl"] += float(kl_divergence(expected, logits).sum())
                    total["same"] += int((expected.argmax(-1) == logits.argmax(-1)).sum())
                    total["tokens"] += len(expected)
    for spec, total in sums.items():
        if total["refused"]:
            rows[spec]["note"] = f"no KL: {total['refused']}"
        else:
            n = total["tokens"]
            rows[spec].update({"kl": total["kl"] / n, "kl_n": n, "top1_agreement": total["same"] / n})


def kl_divergence(reference: Tensor, logits: Tensor) -> Tensor:
    """KL(reference || other) in nats per row: [rows, vocabulary] twice -> [rows], in float64.

    Distributions are taken in float32, as sampling does; a token that the reference rules out counts nothing.
    """
    p, q = reference.float().log_softmax(-1), logits.float().log_softmax(-1)
    weights = p.double().exp()
    return torch.where(weights > 0, weights * (p.double() - q.double()), 0.0).sum(-1)


def _answer_logits(engine: PICEngine, request: tuple[str, Sequence[Document]], answer: Sequence[int]) -> Tensor:
    """Logits [answer tokens, vocabulary]; leaves nothing in the engine's store."""
    try:
        with linked(engine, *request) as state:
            return state.answer_logits(answer)
    finally:
        engine.store.clear()

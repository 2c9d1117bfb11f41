"""`comb bench mac`: what MAC attention reuses, reads and gets wrong, on synthetic streams and on a model's own answers.

Streams (`comb.bench.mac_stream`) count keys and errors at the functional level: over context length, threshold, window
and band, and over one long decode with and without the caps. Quality is measured on questions, MAC on and off. Nothing
here takes a time: the reference is plain torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any

from tqdm import tqdm

from comb.bench.haystack import Case
from comb.bench.mac_stream import StreamResult, StreamSpec, make_stream, run_stream
from comb.bench.needle import contains
from comb.documents.document import Example
from comb.evaluation.metrics import score
from comb.evaluation.run import Setting
from comb.mac import MacConfig
from comb.mac.accounting import MacReport

SWEEPS = ("context", "tau", "window", "band", "drift", "control")


@dataclass(frozen=True)
class SweepPoint:
    """One stream under one configuration, as a point of a sweep.

    Args:
        sweep: which of `SWEEPS`. value: of what is swept; for "drift" and "control" the name of the line.
    """

    sweep: str
    value: float | str
    result: StreamResult

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {**asdict(self), "read_share": self.result.read_share, "error_mean": self.result.error_mean}


def sweep_streams(
    spec: StreamSpec,
    config: MacConfig,
    *,
    contexts: Sequence[int],
    taus: Sequence[float],
    windows: Sequence[int],
    bands: Sequence[int],
    drift_spec: StreamSpec,
    progress: bool = True,
) -> list[SweepPoint]:
    """Every sweep around `config` on streams like `spec`, whose context is the middle of them.

    Args:
        drift_spec: of the stream on which the caps are compared: one whose attention isn't all near the cursor.
    """
    plan: list[tuple[str, float | str, StreamSpec, MacConfig]] = []
    plan += [("context", value, replace(spec, context=value), config) for value in contexts]
    plan += [("tau", value, spec, replace(config, tau=value)) for value in taus]
    # where the nearest query is the last one, any window is as good as any other
    apart = replace(spec, cycle=max(windows) // 2)
    plan += [("window", value, apart, replace(config, window=value)) for value in windows]
    plan += [("band", value, spec, replace(config, band=value)) for value in bands]
    for tau in (0.45, 0.75, 0.9):
        for name, caps in (("capped", config), ("uncapped", config.uncapped())):
            plan.append(("drift", f"{name}, tau {tau:g}", drift_spec, replace(caps, tau=tau)))
    plan.append(("control", "white noise, tau 0.9", replace(spec, white=True), replace(config, tau=0.9)))
    points = []
    with tqdm(total=len(plan), desc="streams", unit="stream", disable=not progress, leave=False) as bar:
        for sweep, value, wanted, chosen in plan:
            points.append(SweepPoint(sweep, value, run_stream(make_stream(wanted), chosen, f"{sweep} {value}")))
            bar.update()
    return points


@dataclass(frozen=True)
class QualityResult:
    """Questions answered under one configuration.

    Args:
        task: what was asked. name: of the configuration; "exact" is without MAC.
        same: share of answers that are exact attention's, token for token.
        found: share of answers that hold the right one word by word.
        hit_rate, read_share, error_max: over all answers; None without MAC. exact_calls: left to exact attention.
        layer_hits, layer_skips: per layer, mean over answers (paper Fig. 5).
    """

    task: str
    name: str
    n: int
    em: float
    f1: float
    found: float
    same: float
    answer_tokens: float
    hit_rate: float | None = None
    read_share: float | None = None
    error_max: float | None = None
    exact_calls: int = 0
    layer_hits: tuple[float, ...] = ()
    layer_skips: tuple[float, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Task:
    """Questions of one kind."""

    name: str
    examples: tuple[Example, ...]

    @classmethod
    def of_cases(cls, name: str, cases: Sequence[Case]) -> Task:
        """Needles as examples."""
        return cls(name, tuple(Example(case.documents, case.question, case.answer) for case in cases))


def measure_quality(
    setting: Setting,
    tasks: Sequence[Task],
    configs: Mapping[str, MacConfig],
    *,
    method: str = "full",
    max_new_tokens: int = 48,
    progress: bool = True,
) -> list[QualityResult]:
    """Every task without MAC, then with each configuration, one question at a time."""
    results = []
    total = sum(len(task.examples) for task in tasks) * (1 + len(configs))
    with tqdm(total=total, desc="questions", disable=not progress, leave=False) as bar:
        for task in tasks:
            exact: list[tuple[int, ...]] = []
            for name, config in (("exact", None), *configs.items()):
                engine = replace(setting, mac=config).engine(method)
                answers = []
                for example in task.examples:
                    query, documents = setting.request(method, example)
                    answers.append(engine.ask(query, documents, max_new_tokens=max_new_tokens))
                    engine.store.clear()
                    bar.update()
                tokens = [answer.token_ids for answer in answers]
                exact = exact or tokens
                texts = [answer.text.strip() for answer in answers]
                scores = score(texts, [example.references for example in task.examples])
                reports = [answer.report.mac for answer in answers if answer.report.mac is not None]
                results.append(
                    QualityResult(
                        task.name, name, len(answers), scores.em, scores.f1,
                        fmean(map(contains, texts, (example.answer for example in task.examples))),
                        fmean(own == other for own, other in zip(tokens, exact, strict=True)),
                        fmean(len(own) for own in tokens), **_reuse(reports),
                    )
                )  # fmt: skip
    return results


def _reuse(reports: Sequence[MacReport]) -> dict[str, Any]:
    """What sessions reused, over all of their steps."""
    if not reports:
        return {}
    layers = [layer for report in reports for layer in report.layers]
    searches, exact = sum(layer.searches for layer in layers), sum(layer.keys_exact for layer in layers)
    numbers = sorted({layer.layer for layer in layers})
    by_layer = [[layer for layer in layers if layer.layer == number] for number in numbers]

    def mean(values: Sequence[float], weights: Sequence[int]) -> float:
        return sum(v * w for v, w in zip(values, weights, strict=True)) / max(1, sum(weights))

    return {
        "hit_rate": sum(layer.hit_rate * layer.searches for layer in layers) / searches if searches else None,
        "read_share": sum(layer.keys_read for layer in layers) / exact if exact else None,
        "error_max": max((report.error_max for report in reports if report.error_max is not None), default=None),
        "exact_calls": sum(sum(report.exact.values()) for report in reports),
        "layer_hits": tuple(mean([one.hit_rate for one in own], [one.searches for one in own]) for own in by_layer),
        "layer_skips": tuple(mean([one.skip_ratio for one in own], [one.searches for one in own]) for own in by_layer),
    }

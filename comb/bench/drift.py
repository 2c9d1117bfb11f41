"""`comb bench drift`: how far a hybrid's states are from those of full recompute, layer by layer (HYPIC table 4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any

import typer
from tqdm import tqdm

from comb.bench.harness import BenchmarkReport, benchmark, or_refused
from comb.bench.options import Methods, QuestionOptions, split_methods
from comb.bench.work import linked
from comb.documents.document import Example
from comb.evaluation.drift import Drift, drift_of, exact_states
from comb.evaluation.plot import Lines, Panel
from comb.evaluation.run import Setting, Timing
from comb.evaluation.table import Column, Row, TextTable, fixed, spread


@dataclass(frozen=True)
class DriftOptions(QuestionOptions):
    """Of `comb bench drift`."""

    model: Annotated[str, typer.Option(help="folder or Hub id of a hybrid, or nano-hybrid")] = "nano-hybrid"
    methods: Methods = "addition,hypic:mode=rotation,hypic:0,hypic:4,hypic:8,hypic:16"
    limit: Annotated[int, typer.Option(min=1, help="questions at most")] = 50


def measure_drift(setting: Setting, examples: Sequence[Example], specs: Sequence[str]) -> list[Row]:
    """One row per method, all over the same prompts; a method that can't run here says why.

    ``layers`` are the linear layers that keep a state, from the first on: ``error`` is relative, in the Frobenius norm,
    ``degrees`` an angle, both over the prompts.
    """
    rows: list[Row] = [
        {"method": spec, "n": 0, "layers": [], "recomputed_tokens": 0.0, "refused": ""} for spec in specs
    ]
    found: dict[str, list[list[Drift]]] = {spec: [] for spec in specs}
    for example in tqdm(examples, "drift", unit="prompt", leave=False):
        exact = cache(exact_states)  # once for all methods
        for row in rows:
            if not row["refused"]:
                with or_refused(row):
                    drifts, recomputed = _drift(setting, row["method"], example, exact)
                    found[row["method"]].append(drifts)
                    row["recomputed_tokens"] += recomputed / len(examples)
    for row in rows:
        if not row["refused"]:
            row |= {"n": len(examples), "layers": [_over(layer) for layer in zip(*found[row["method"]], strict=True)]}
    return rows


def _drift(setting: Setting, spec: str, example: Example, exact: Any) -> tuple[list[Drift], int]:
    """By layer, and how many document tokens were prefilled again."""
    engine = setting.engine(spec)
    if engine.method.uses_encoder:
        raise ValueError(f"{spec} puts no document into the decoder's states")
    with linked(engine, *setting.request(spec, example)) as state:
        return drift_of(engine.method.backbone, state, exact), state.recomputed_tokens


def _over(prompts: Sequence[Drift]) -> Row:
    error, degrees = (Timing.over([getattr(drift, name) for drift in prompts]) for name in ("error", "degrees"))
    return {"layer": prompts[0].layer, "error": error, "degrees": degrees}


def tables(rows: Sequence[Row]) -> list[TextTable]:
    """One line per method: its first and deepest linear layer."""
    columns = (
        Column("method", "method", names=True),
        Column("first layer, %", lambda row: row["layers"][0]["error"], _percent),
        Column("deepest layer, %", lambda row: row["layers"][-1]["error"], _percent),
        Column("angle, degrees", lambda row: row["layers"][-1]["degrees"], lambda angle: spread(angle, fixed(2))),
        Column("redone", "recomputed_tokens", fixed(0), "document tokens prefilled again per prompt"),
    )
    remarks = [
        "Distance of the state behind the prompt from full recompute's, relative, in the Frobenius norm, and its "
        "direction; median (quartiles) over prompts."
    ]
    for row in [row for row in rows if row["layers"]][:1]:
        layers = ", ".join(str(layer["layer"]) for layer in row["layers"])
        remarks.append(f"{row['n']} prompts; linear layers {layers}.")
    return [TextTable("State drift", columns, rows, remarks)]


def panels(rows: Sequence[Row]) -> list[Panel]:
    """Relative error over depth, quartiles shaded."""
    points = [{"method": row["method"], **layer} for row in rows for layer in row["layers"]]
    return [Lines(points, "layer", "error", "layer", "relative error of the state, %", scale=100)]


@benchmark("drift", tables, panels)
def drift(options: DriftOptions, report: BenchmarkReport) -> None:
    """How far a hybrid's states are from full recompute's, by layer: what composing costs in depth (HYPIC table 4)."""
    specs = split_methods(options.methods, control=False)
    setting, examples = options.load_questions(report)
    for row in measure_drift(setting, examples, specs):
        report.add(row)


def _percent(error: Timing) -> str:
    """``8.9 (8.1-9.6)``; rounding alone is ``<0.001``."""
    return "<0.001" if error.high < 1e-5 else spread(error, lambda share: f"{100 * share:.1f}")

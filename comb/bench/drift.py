"""`comb bench drift`: how far a hybrid's states are from those of full recompute, layer by layer (HYPIC table 4)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Annotated

import typer
from tqdm import tqdm

from comb.bench.harness import BenchmarkReport, benchmark, or_refused
from comb.bench.options import Methods, QuestionOptions, split_methods
from comb.documents.document import Example
from comb.evaluation.plot import Lines, Panel
from comb.evaluation.setting import Setting
from comb.evaluation.table import Column, Row, TextTable, Timing, fixed, spread


@dataclass(frozen=True)
class DriftOptions(QuestionOptions):
    """Of `comb bench drift`."""

    model: Annotated[str, typer.Option(help="folder or Hub id of a hybrid, or nano-hybrid")] = "nano-hybrid"
    methods: Methods = "addition,addition:rotate=true,hypic:mode=rotation,hypic:0,hypic:4,hypic:8,hypic:16"
    limit: Annotated[int, typer.Option(min=1, help="questions at most")] = 50
    full_layers: Annotated[bool, typer.Option(help="--no-full-layers leaves them out, as HYPIC table 4 does")] = True


def measure_drift(setting: Setting, examples: Sequence[Example], specs: Sequence[str]) -> list[Row]:
    """One row per method, all over the same prompts; a method that can't run here says why.

    ``layers`` are the linear layers that keep a state, from the first on: ``error`` is relative, in the Frobenius norm,
    ``degrees`` an angle, both over the prompts.
    """
    from comb.bench.work.state_drift import drift_of, exact_states
    from comb.evaluation.compare import linked

    rows: list[Row] = [{"method": spec, "n": 0, "layers": [], "computed_tokens": 0.0, "refused": ""} for spec in specs]
    found: dict[str, list[list[Row]]] = {spec: [] for spec in specs}
    for example in tqdm(examples, "drift", unit="prompt", leave=False):
        exact = cache(exact_states)  # once for all methods
        for row in rows:
            if not row["refused"]:
                with or_refused(row):
                    engine = setting.engine(row["method"])
                    if engine.method.uses_encoder:
                        raise ValueError(f"{row['method']} puts no document into the decoder's states")
                    with linked(engine, *setting.request(row["method"], example)) as (state, _):
                        found[row["method"]].append(drift_of(engine.method.backbone, state, exact))
                        row["computed_tokens"] += sum(state.computed) / len(examples)
    for row in rows:
        if not row["refused"]:
            row["n"] = len(examples)
            for layer in zip(*found[row["method"]], strict=True):
                over = {name: Timing.over([prompt[name] for prompt in layer]) for name in ("error", "degrees")}
                row["layers"].append({"layer": layer[0]["layer"], **over})
    return rows


def tables(rows: Sequence[Row]) -> list[TextTable]:
    """One line per method: its first and deepest linear layer."""
    columns = (
        Column("method", "method", names=True),
        Column("first layer, %", lambda row: row["layers"][0]["error"], _percent),
        Column("deepest layer, %", lambda row: row["layers"][-1]["error"], _percent),
        Column("angle, degrees", lambda row: row["layers"][-1]["degrees"], lambda angle: spread(angle, fixed(2))),
        Column("computed", "computed_tokens", fixed(0), "tokens that passed through the backbone per prompt"),
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
    from comb.bench.work.state_drift import without_full_layers

    specs = split_methods(options.methods, control=False)
    setting, examples = options.load_questions(report)
    heads = setting.engine("full").heads
    heads.clear()  # one that was computed with all layers, or without
    with nullcontext() if options.full_layers else without_full_layers(setting.model):
        rows = measure_drift(setting, examples, specs)
        heads.clear()
    for row in rows:
        report.add(row)


def _percent(error: Timing) -> str:
    """``8.9 (8.1-9.6)``; rounding alone is ``<0.001``."""
    return "<0.001" if error.high < 1e-5 else spread(error, lambda share: f"{100 * share:.1f}")

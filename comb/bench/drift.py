"""`comb bench drift`: how far a hybrid's states are from those of full recompute, layer by layer (HYPIC table 4)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any

import typer
from tqdm import tqdm

from comb.bench.harness import BenchmarkReport, benchmark
from comb.bench.options import Methods, QuestionOptions, split_methods
from comb.documents.document import Example
from comb.evaluation.plot import Lines, Panel
from comb.evaluation.setting import Setting
from comb.evaluation.table import Column, Row, TextTable, Timing, fixed, or_refused, spread

if TYPE_CHECKING:
    from torch import Tensor

    from comb.methods.decode_state import DecodeState


@dataclass(frozen=True)
class DriftOptions(QuestionOptions):
    model: Annotated[str, typer.Option(help="folder or Hub id of a hybrid, or nano-hybrid")] = "nano-hybrid"
    methods: Methods = "addition,addition:rotate=true,hypic:mode=rotation,hypic:0,hypic:4,hypic:8,hypic:16"
    limit: Annotated[int, typer.Option(min=1, help="questions at most")] = 50
    full_layers: Annotated[bool, typer.Option(help="--no-full-layers leaves them out, as HYPIC table 4 does")] = True


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
    specs = split_methods(options.methods, control=False)
    setting, examples = options.load_questions(report)
    prefixes = setting.engine("full").prefixes
    prefixes.clear()  # one that was computed with all layers, or without
    with nullcontext() if options.full_layers else without_full_layers(setting.model):
        rows = measure_drift(setting, examples, specs)
        prefixes.clear()
    for row in rows:
        report.add(row)


def measure_drift(setting: Setting, examples: Sequence[Example], specs: Sequence[str]) -> list[Row]:
    """One row per method, all over the same prompts; a method that can't run here says why.

    ``layers`` are the linear layers that keep a state, from the first on: ``error`` is relative, in the Frobenius norm,
    ``degrees`` an angle, both over the prompts.
    """
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
                over = {name: Timing.of([prompt[name] for prompt in layer]) for name in ("error", "degrees")}
                row["layers"].append({"layer": layer[0]["layer"], **over})
    return rows


@contextmanager
def without_full_layers(model: Any) -> Iterator[None]:
    """Inside, what stands in front of a layer of full attention alone also comes out of it (HYPIC sec. 6.3).

    Raises:
        ValueError: for a model whose every layer keeps a state.
    """
    from comb.backbones.discovery import decoder_layers, layer_input
    from comb.backbones.identity import backbone_of
    from comb.hybrid.support import find_hybrid_support

    backbone = backbone_of(model)
    layers, linear = decoder_layers(backbone), find_hybrid_support(backbone).linear
    full = [layer for number, layer in enumerate(layers) if number not in linear]
    if not full:
        raise ValueError("every layer of this model keeps a state: there is no full layer to leave out")

    def skip(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        before = layer_input(args, kwargs)
        return (before, *output[1:]) if isinstance(output, tuple) else before

    with ExitStack() as stack:
        for layer in full:
            stack.enter_context(layer.register_forward_hook(skip, with_kwargs=True))
        yield


def exact_states(model: Any, token_ids: Sequence[int]) -> dict[int, Tensor]:
    """States behind these tokens by full recompute, by layer."""
    import torch

    from comb.backbones.forward import empty_cache_of
    from comb.backbones.identity import exclusive
    from comb.hybrid.caches import run

    with exclusive(model), torch.no_grad():
        past = empty_cache_of(model)
        run(model, list(token_ids), past, 0)
        return _states(model, past)


def drift_of(
    model: Any, state: DecodeState, exact: Callable[[Any, tuple[int, ...]], Mapping[int, Tensor]] = exact_states
) -> list[Row]:
    """Drift of a linked prompt behind the tokens that its cache covers (hypic: all but the last).

    Returns:
        By linear layer that keeps a state (convolutions have none), from the first on: ``error``, the relative distance
        from ``exact``'s in the Frobenius norm, and the angle between both in ``degrees``.

    Raises:
        ValueError: where nothing can be compared: no state behind the prompt, or no linear layer that keeps one.
    """
    from comb.backbones.identity import exclusive

    covered = 0 if state.past_key_values is None else int(state.past_key_values.get_seq_length())
    if not covered:
        raise ValueError("this method leaves the whole prompt to the model: there is no state to compare")
    with exclusive(model):
        ours = _states(model, state.past_key_values)
    theirs, found = exact(model, tuple(state.input_ids[0, :covered].tolist())), []
    for number in sorted(ours.keys() & theirs.keys()):
        left, right = ours[number].double().flatten(), theirs[number].double().flatten()
        cosine = float(left @ right / (left.norm() * right.norm()).clamp_min(1e-300))
        error = float((left - right).norm() / right.norm().clamp_min(1e-300))
        found.append({"layer": number, "error": error, "degrees": math.degrees(math.acos(max(-1, min(1, cosine))))})
    if not found:
        raise ValueError("none of this model's layers keeps a state: convolutions alone have no drift")
    return found


def _states(model: Any, past: Any) -> dict[int, Tensor]:
    from comb.hybrid.caches import read_state
    from comb.hybrid.support import find_hybrid_support

    states = ((number, read_state(past, number)[1]) for number in find_hybrid_support(model).linear)
    return {number: state for number, state in states if state is not None}


def _percent(error: Timing) -> str:
    """``8.9 (8.1-9.6)``; rounding alone is ``<0.001``."""
    return "<0.001" if error.high < 1e-5 else spread(error, lambda share: f"{100 * share:.1f}")

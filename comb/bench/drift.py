"""`comb bench drift`: how far a hybrid's states are from those of full recompute, layer by layer (HYPIC table 4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tqdm import tqdm

from comb.bench.comparison import REFUSALS, one_line
from comb.bench.request import linked
from comb.documents import Example
from comb.evaluation.run import Setting, Timing
from comb.hybrid.drift import Drift, drift_of


@dataclass(frozen=True)
class LayerDrift:
    """One linear layer, counted from 0: relative errors of its state, and angles in degrees, over all prompts."""

    layer: int
    error: Timing
    degrees: Timing


@dataclass(frozen=True)
class MethodDrift:
    """One method.

    Args:
        n: prompts. layers: linear layers that keep a state, from the first on.
        recomputed_tokens: document tokens prefilled again per prompt, mean.
        refused: why there is nothing of the above.
    """

    method: str
    n: int = 0
    layers: tuple[LayerDrift, ...] = ()
    recomputed_tokens: float = 0.0
    refused: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def measure_drift(
    setting: Setting, examples: Sequence[Example], specs: Sequence[str], *, progress: bool = True
) -> list[MethodDrift]:
    """One result per method, in order, all over the same prompts; a method that can't run here says why."""
    return [_measured(setting, examples, spec, progress) for spec in tqdm(specs, "methods", disable=not progress)]


def _measured(setting: Setting, examples: Sequence[Example], spec: str, progress: bool) -> MethodDrift:
    found: list[list[Drift]] = []
    recomputed = 0
    try:
        engine = setting.engine(spec)
        if engine.method.uses_encoder:
            raise ValueError(f"{spec} puts no document into the decoder's states")
        for example in tqdm(examples, spec, unit="prompt", disable=not progress, leave=False):
            with linked(engine, *setting.request(spec, example)) as state:
                found.append(drift_of(engine.method.backbone, state))
                recomputed += state.recomputed_tokens
            engine.store.clear()
    except REFUSALS as error:
        return MethodDrift(spec, refused=one_line(error))
    layers = [_summary(of_layer) for of_layer in zip(*found, strict=True)]
    return MethodDrift(spec, len(found), tuple(layers), recomputed / len(found))


def _summary(prompts: Sequence[Drift]) -> LayerDrift:
    error, degrees = (Timing.over([getattr(drift, name) for drift in prompts]) for name in ("error", "degrees"))
    return LayerDrift(prompts[0].layer, error, degrees)

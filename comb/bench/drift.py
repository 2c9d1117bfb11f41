"""`comb bench drift`: how far a hybrid's states are from those of full recompute, layer by layer (HYPIC table 4)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from torch import Tensor
from tqdm import tqdm

from comb.bench.comparison import REFUSALS, one_line
from comb.bench.request import linked
from comb.documents.document import Example
from comb.evaluation.drift import Drift, drift_of, exact_states
from comb.evaluation.run import Setting, Timing


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
    runs = [_Run(setting, spec) for spec in specs]
    for example in tqdm(examples, "drift", unit="prompt", disable=not progress, leave=False):
        exact = cache(exact_states)  # once for all methods
        for run in runs:
            run.add(example, exact)
    return [run.result() for run in runs]


class _Run:
    """One method, until it is refused."""

    def __init__(self, setting: Setting, spec: str) -> None:
        self.setting, self.spec = setting, spec
        self.found: list[list[Drift]] = []
        self.recomputed = 0
        self.refused = ""
        try:
            self.engine = setting.engine(spec)
            if self.engine.method.uses_encoder:
                self.refused = f"{spec} puts no document into the decoder's states"
        except REFUSALS as error:
            self.refused = one_line(error)

    def add(self, example: Example, exact: Callable[..., dict[int, Tensor]]) -> None:
        if self.refused:
            return
        try:
            with linked(self.engine, *self.setting.request(self.spec, example)) as state:
                self.found.append(drift_of(self.engine.method.backbone, state, exact))
                self.recomputed += state.recomputed_tokens
        except REFUSALS as error:
            self.refused = one_line(error)
        self.engine.store.clear()

    def result(self) -> MethodDrift:
        if self.refused:
            return MethodDrift(self.spec, refused=self.refused)
        layers = [_summary(of_layer) for of_layer in zip(*self.found, strict=True)]
        return MethodDrift(self.spec, len(self.found), tuple(layers), self.recomputed / len(self.found))


def _summary(prompts: Sequence[Drift]) -> LayerDrift:
    error, degrees = (Timing.over([getattr(drift, name) for drift in prompts]) for name in ("error", "degrees"))
    return LayerDrift(prompts[0].layer, error, degrees)

"""Listens to the scans of a backbone's linear layers, and reads transitions off their arguments.

transformers' linear layers call a scan function of their own file (which takes the kernels of flash-linear-attention
or mamba-ssm where they are installed). For the length of one forward pass a listener stands there, which passes every
call on unchanged. A layer that calls no scan known here is probed instead (`comb.hybrid.probe`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from comb.backbones.transformers_private import wrapped_functions
from comb.hybrid.transition import DenseTransition, ElementwiseTransition, ScalarTransition, Transition
from comb.registry import Registry


@dataclass(frozen=True)
class ScanCall:
    """One call of a scan: its name, the function itself, and its arguments by name."""

    name: str
    function: Callable[..., Any]
    arguments: dict[str, Any]


ScanReader = Callable[[ScanCall, int], "tuple[Transition, Tensor | None]"]
"""From a call over tokens [0, n) to T over [start, n) and the state S that those leave behind an empty one.

S is None where subtracting T S_before from the layer's own final state is as good.
"""

Heard = TypeVar("Heard")

SCAN_READERS: Registry[ScanReader] = Registry("scan")
"""By the name of the scan's function in the model's module."""


def reads_scan(*names: str) -> Callable[[ScanReader], ScanReader]:
    """Decorator: the function reads calls of the scans with these names."""

    def add(reader: ScanReader) -> ScanReader:
        for name in names:
            SCAN_READERS.register(name)(reader)
        return reader

    return add


@contextmanager
def listen(model: nn.Module, hear: Callable[[ScanCall], Heard]) -> Iterator[list[Heard]]:
    """What `hear` makes of every call of a known scan by this thread's forward pass over `model`, in order.

    It is called at once, so that nothing keeps the keys and values of all layers alive.
    """
    heard: list[Heard] = []

    def listener(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(function)

        def call(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            # what a function takes as **kwargs counts as arguments of their own
            arguments = {name: bound.arguments[name] for name in bound.arguments if name not in bound.kwargs}
            heard.append(hear(ScanCall(name, function, arguments | bound.kwargs)))
            return function(*args, **kwargs)

        return call

    with wrapped_functions(model, SCAN_READERS, listener):
        yield heard


def _steps(steps: Tensor, bias: Tensor | None, softplus: bool | None) -> Tensor:
    """Step sizes dt [tokens, channels] as a Mamba scan makes them."""
    steps = steps if bias is None else steps + bias.to(steps.dtype)
    return F.softplus(steps) if softplus else steps


@reads_scan("mamba_selective_scan")
def mamba(call: ScanCall, start: int) -> tuple[ElementwiseTransition, None]:
    """log T = A sum of dt. Arguments: dt [1, channels, tokens], A [channels, state]."""
    given = call.arguments
    steps = _steps(given["dt"][0, :, start:].T, given.get("delta_bias"), given.get("delta_softplus"))
    return ElementwiseTransition(steps.float().sum(dim=0)[:, None] * given["A"].float()), None


@reads_scan("mamba2_chunk_scan")
def mamba2(call: ScanCall, start: int) -> tuple[ScalarTransition, None]:
    """log a_i = A dt_i. Arguments: dt [1, tokens, H], A [H]."""
    given = call.arguments
    steps = _steps(given["dt"][0, start:], given.get("dt_bias"), given.get("dt_softplus"))
    least, most = given.get("dt_limit") or (0.0, float("inf"))
    steps = steps.clamp(min=least, max=most)
    return ScalarTransition((steps.float() * given["A"].float()).sum(dim=0)), None


@reads_scan("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention")
def delta_rule(call: ScanCall, start: int) -> tuple[DenseTransition, Tensor]:
    """T and S by the layer's own scan, run once more with values [v | 0] from the state [0 | I].

    A scan treats the columns of its state alike, so the columns behind the zero values come out as T. Arguments:
    g, beta [1, tokens, H, ...], value [1, tokens, H, V], query and key of as many heads or (transformers 5.23) fewer.
    """
    arguments: dict[str, Any] = dict(call.arguments)
    for name in ("query", "key", "value", "g", "beta"):
        arguments[name] = arguments[name][:, start:]
    key, value = arguments["key"], arguments["value"]
    heads, width, channels = value.shape[2], value.shape[3], key.shape[3]
    nothing = value.new_zeros(*value.shape[:3], channels)
    initial = torch.zeros(1, heads, channels, width + channels, device=value.device)
    initial[..., width:] = torch.eye(channels, device=value.device)
    arguments |= {
        "value": torch.cat([value, nothing], dim=-1), "initial_state": initial, "output_final_state": True,
    }  # fmt: skip
    _, last = call.function(**arguments)
    last = last[0].float()
    return DenseTransition(last[..., width:].contiguous()), last[..., :width].contiguous()

"""Listens to the scans of a backbone's linear layers, to read gates and keys off their arguments.

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

from torch import Tensor, nn

from comb.backbones.transformers_private import wrapped_functions
from comb.hybrid.transition import Transition
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

SCAN_READERS: Registry[ScanReader] = Registry("scan", "comb.hybrid.families")
"""By the name of the scan's function in the model's module."""


def reads_scan(*names: str) -> Callable[[ScanReader], ScanReader]:
    """Decorator: the function reads calls of the scans with these names."""

    def add(reader: ScanReader) -> ScanReader:
        for name in names:
            SCAN_READERS.register(name)(reader)
        return reader

    return add


def read_scan(call: ScanCall, start: int) -> tuple[Transition, Tensor | None]:
    """T, and perhaps S, of a call's tokens from `start` on."""
    return SCAN_READERS.get(call.name)(call, start)


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

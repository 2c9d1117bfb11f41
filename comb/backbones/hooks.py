"""Runs code in front of decoder layers through torch's own hooks, for exactly as long as someone needs it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from comb.backbones.discovery import layer_input


class LayerHooks:
    """Runs a function on the hidden state in front of chosen decoder layers, only while someone needs it.

    Hooks are counted: the first `attached()` registers them, the last one to leave removes them, also when
    several threads are inside at once.

    Args:
        layers: the decoder layers.
        functions: layer index -> function from hidden state ``[batch, tokens, hidden]`` to the same shape.
    """

    def __init__(self, layers: nn.ModuleList, functions: dict[int, Callable[[Tensor], Tensor]]) -> None:
        self._layers = layers
        self._functions = functions
        self._lock = threading.Lock()
        self._users = 0
        self._handles: list[Any] = []

    def __reduce__(self) -> tuple[Any, ...]:
        # a lock can't be copied or pickled, and a copied model starts with nobody inside
        return LayerHooks, (self._layers, self._functions)

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Keeps the hooks registered inside the ``with`` block."""
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._handles = [self._register(index, fn) for index, fn in self._functions.items()]
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._users == 0:
                    for handle in self._handles:
                        handle.remove()
                    self._handles = []

    def _register(self, index: int, function: Callable[[Tensor], Tensor]) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
            changed = function(layer_input(args, kwargs))
            if args:
                return (changed, *args[1:]), kwargs
            return args, {**kwargs, "hidden_states": changed}

        return self._layers[index].register_forward_pre_hook(hook, with_kwargs=True)

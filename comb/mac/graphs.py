"""A decode step at fixed addresses, which a GPU replays as one CUDA graph and a CPU runs as it is.

Keys and values lie in tensors that don't move (`FixedLayer`), the rings never have; token, position and where the step
writes are tensors as well, so the step is the same sequence of operators for every token: nothing in it waits for the
device, and no size depends on data. A session goes over to it once an ordinary step was reused in all layers.

Source: MAC-Attention sec. 4 and app. B.2 (steady state as a CUDA graph).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from comb.linking.cache import FixedLayer, RoomyLayer

ROOM = 1024
"""Tokens that may be decoded before keys and values move, and the step is captured anew."""
WARM_UP = 2
"""Steps before the capture, on a stream of their own: libraries set themselves up, kernels are compiled."""
_TAKEN = {"input_ids", "attention_mask", "position_ids", "past_key_values", "use_cache", "return_dict"}


def why_not_fixed(cache: Any, given: dict[str, Any], config: Any) -> str:
    """Why a decoder's step with these arguments can't be one at fixed addresses; empty if it can."""
    further = sorted(name for name, value in given.items() if name not in _TAKEN and value is not None)
    if further or getattr(config, "output_hidden_states", False):
        return f"argument {further[0]}" if further else "hidden states asked for"
    kinds = {type(layer) for layer in cache.layers} - {DynamicLayer, RoomyLayer, FixedLayer}
    if kinds:
        return f"cache of {min(kind.__name__ for kind in kinds)}"
    devices = {layer.keys.device for layer in cache.layers}
    return "" if devices == {given["input_ids"].device} else "several devices"


class FixedStep:
    """The decoder's step over one cache; `cache`'s layers become fixed ones.

    Args:
        forward: of the decoder, with its hooks left out.
        start: [B], keys of padding in front of each row.
        ids: [B, 1], like those of every step.
        states: whatever else must be the very same for the step to be the same, compared by identity.
    """

    def __init__(
        self, forward: Callable[..., Any], cache: Any, start: Tensor, ids: Tensor, states: Sequence[Any]
    ) -> None:
        self.forward, self.cache, self.start, self.states = forward, cache, start, list(states)
        self.length = cache.get_seq_length()
        cache.layers[:] = [FixedLayer.within(layer, self.length + 1, self.length + ROOM) for layer in cache.layers]
        self.rooms = [layer.room for layer in cache.layers if layer.room is not None]
        self.capacity = min(keys.shape[2] for keys, _ in self.rooms)
        self.ids = ids.clone()
        self.positions = torch.zeros_like(ids, dtype=torch.long)
        self.at = torch.zeros(1, dtype=torch.long, device=ids.device)
        self.runs = 0
        self.graph: Any = None
        self.failed = ""
        self._output: Any = None

    @property
    def lengths(self) -> Tensor:
        """[B], keys of each row, the step's own and padding included."""
        return (self.at + 1).expand(len(self.start))

    def fits(self, cache: Any, start: Tensor, ids: Tensor, states: Sequence[Any]) -> bool:
        """Whether the next step is this one."""
        if cache is not self.cache or start is not self.start or ids.shape != self.ids.shape:
            return False
        if len(states) != len(self.states) or any(a is not b for a, b in zip(states, self.states, strict=True)):
            return False
        held = all(
            isinstance(layer, FixedLayer) and layer.keys.data_ptr() == room[0].data_ptr() and layer.room is room
            for layer, room in zip(cache.layers, self.rooms, strict=True)
        )
        return held and cache.get_seq_length() < self.capacity

    def __call__(self, ids: Tensor, positions: Tensor | None) -> Any:
        """The decoder's output for one more token per row: ids [B, 1] at positions [B or 1, 1]; None: key indices."""
        length = self.cache.get_seq_length() + 1
        self.ids.copy_(ids)
        self.at.fill_(length - 1)
        self.positions.copy_(self.at[None] if positions is None else positions)
        output = self._run()
        for layer in self.cache.layers:
            layer.grow(length)
        return output

    def _run(self) -> Any:
        if not self.ids.is_cuda:
            return self.step()
        if self.graph is None and self.runs >= WARM_UP and not self.failed:
            self._capture()
        if self.graph is not None:
            self.graph.replay()
            # the next replay writes into the same memory
            return replace(self._output, last_hidden_state=self._output.last_hidden_state.clone())
        self.runs += 1
        stream, now = torch.cuda.Stream(self.ids.device), torch.cuda.current_stream(self.ids.device)
        stream.wait_stream(now)
        with torch.cuda.stream(stream):
            output = self.step()
        now.wait_stream(stream)
        return output

    def _capture(self) -> None:
        """Records the step, which isn't computed by that; a model whose own code waits for the device can't be."""
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.device(self.ids.device), torch.cuda.graph(graph):
                self._output = self.step()
        except RuntimeError as error:
            self.failed = str(error).partition("\n")[0]
            return
        if set(self._output) <= {"last_hidden_state", "past_key_values"}:
            self.graph = graph
        else:
            self.failed = "outputs besides the last hidden state"

    def step(self) -> Any:
        """The decoder's step on what stands in the fixed tensors."""
        place = torch.arange(self.capacity, device=self.ids.device)
        seen = (place >= self.start[:, None]) & (place <= self.at)
        kind = self.rooms[0][0].dtype
        mask = torch.zeros(seen.shape, dtype=kind, device=seen.device).masked_fill(~seen, torch.finfo(kind).min)
        for layer in self.cache.layers:
            layer.at = self.at
        try:
            return self.forward(
                input_ids=self.ids, position_ids=self.positions, attention_mask=mask[:, None, None],
                past_key_values=self.cache, use_cache=True,
            )  # fmt: skip
        finally:
            for layer in self.cache.layers:
                layer.at = None

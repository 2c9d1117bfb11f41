"""What compiled documents do to the states of linear layers: captured while they are compiled, composed when linked.

Of a document's interior [head, end), which its seams leave, each linear layer keeps T, S and the last raw columns in
front of its convolution (HYPIC sec. 4.2; the library's `comb.hybrid`). The scheduler has steps end where the interior
begins and ends, so vLLM's own cache holds the state at both; T is heard from the scans in between, chunk by chunk:

    T = T_n ... T_1        S = S_end - T S_head        linked:  S_after = T S_before + S

Kept in float32 as bytes behind the document's rows in the pool: a document that is given up on leaves nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from comb.hybrid.transition import TransitionError
from comb_serving.vllm.linking.commands import CaptureCommand, ComposeCommand
from comb_serving.vllm.linking.scans import ScanListener, StateLayer


@dataclass(frozen=True)
class DocumentState:
    """What a document's interior does to one layer: views of a pool's bytes.

    Args:
        transition: T's tensor, as its family has it.
        state: S, and as long as the interior isn't read to its end, the state in front of it.
        columns: [kernel - 1, C] in front of the convolution, of the interior's last tokens.
    """

    transition: Tensor
    state: Tensor
    columns: Tensor


class DocumentStates:
    """The linear layers of one rank, and how the bytes of a document are laid out.

    Args:
        layers: by name.

    Attributes:
        nbytes: that a document takes, whatever its length.
        columns: of the widest convolution: a head seam is at least as wide.
    """

    def __init__(self, layers: Mapping[str, StateLayer]) -> None:
        self.layers = dict(layers)
        self.columns = max(layer.columns_shape[0] for layer in self.layers.values())
        self._places: dict[str, tuple[tuple[int, tuple[int, ...], torch.dtype], ...]] = {}
        at = 0
        for name, layer in self.layers.items():
            kinds = (
                (layer.transition_shape, torch.float32),
                (layer.state_shape, torch.float32),
                (layer.columns_shape, layer.columns_dtype),
            )
            places = []
            for shape, dtype in kinds:
                places.append((at, shape, dtype))
                at += -(-math.prod(shape) * dtype.itemsize // 8) * 8
            self._places[name] = tuple(places)
        self.nbytes = at
        self._groups: dict[str, int] = {}
        self._listener: ScanListener | None = None

    def attach(self, groups: Mapping[str, int]) -> None:
        """vLLM's cache is there: `groups` are the numbers of the layers' cache groups."""
        self._groups = {name: groups[name] for name in self.layers}
        self._listener = ScanListener(self.layers, self._groups)

    def close(self) -> None:
        """Nothing is listened to any more."""
        if self._listener is not None:
            self._listener.close()

    def parts(self, memory: Tensor) -> dict[str, DocumentState]:
        """Views of a document's bytes [nbytes] by layer."""

        def view(at: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            return memory[at : at + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)

        return {name: DocumentState(*(view(*place) for place in places)) for name, places in self._places.items()}

    def listen(self, captures: list[CaptureCommand]) -> None:
        """Before a step: what it computes of interiors is waited for, and of nothing else."""
        assert self._listener is not None
        self._listener.heard.clear()
        inside = [capture for capture in captures if not capture.begins and not capture.whole]
        self._listener.wanted = {
            capture.blocks[group][0]: group for capture in inside for group in set(self._groups.values())
        }

    def capture(self, command: CaptureCommand, memory: Tensor) -> None:
        """After a step that ended where the interior begins, or somewhere inside of it.

        Raises:
            RuntimeError: if a layer's scan was not heard: then this isn't the vLLM that the hooks were written for.
        """
        assert self._listener is not None
        for name, kept in self.parts(memory).items():
            layer, slot = self.layers[name], command.blocks[self._groups[name]][0]
            if command.begins or command.whole:
                kept.transition.copy_(layer.identity(memory.device).tensor)
                kept.state.copy_(layer.state(slot))
                if command.whole:
                    kept.columns.copy_(layer.columns(slot))
                continue
            heard: Any = self._listener.heard.pop((name, slot), None)
            if heard is None:
                raise RuntimeError(f"{name} has computed tokens of a document, and its scan was not heard")
            transition = heard.after(layer.family(kept.transition))
            kept.transition.copy_(transition.tensor)
            if command.ends:
                kept.state.copy_(layer.state(slot).float() - transition.apply(kept.state))
                kept.columns.copy_(layer.columns(slot))

    def compose(self, command: ComposeCommand, memory: Tensor) -> None:
        """Takes a request's states from in front of an interior to behind it."""
        for name, kept in self.parts(memory).items():
            layer, slot = self.layers[name], command.blocks[self._groups[name]][0]
            state, columns = layer.state(slot), layer.columns(slot)
            if command.fresh:
                state.copy_(kept.state)
                columns.copy_(kept.columns)
                continue
            state.copy_(layer.family(kept.transition).apply(state.float()) + kept.state)
            new = min(len(columns), command.tokens)  # earlier columns move up
            columns.copy_(torch.cat([columns[new:], kept.columns[len(columns) - new :]]))

    def damaged(self, memory: Tensor) -> str:
        """Why what is kept of a document can't be used; empty if it can."""
        for name, kept in self.parts(memory).items():
            try:
                self.layers[name].family(kept.transition).check()
            except TransitionError as error:
                return f"{name}: {error}"
            if not bool(torch.isfinite(kept.state).all() and torch.isfinite(kept.columns).all()):
                return f"{name}: its state holds NaN or infinity"
        return ""

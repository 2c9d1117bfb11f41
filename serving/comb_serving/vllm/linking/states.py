"""What compiled documents do to the states of linear layers: captured while they are compiled, composed when linked.

Of a document's interior [start, end), which its seams leave, each linear layer keeps T, S and the last raw columns in
front of its convolution (HYPIC sec. 4.2; the library's `comb.hybrid`). The scheduler has steps end where the interior
begins and ends, so vLLM's own cache holds the state at both; T is heard from the scans in between, chunk by chunk:

    T = T_n ... T_1        S = S_end - T S_start       linked:  S_after = T S_before + S

Kept in float32 as bytes behind the document's rows in the pool: a document that is given up on leaves nothing.

All that is reached into here has no official way. Seen in vLLM 0.32 and 0.33:

- ``MambaMixer2.conv_ssm_forward(projected_states, output)``, called on the layer by the op ``mamba_mixer2``; its
  attributes ``A``, ``dt_bias`` and ``tped_dt_size``; ``Mamba2AttentionMetadata``'s three fields for rows of prefill
- ``chunk_gated_delta_rule_cpu`` among the operators (`versions`), which gated DeltaNet calls with keywords and with
  the cache of all states, changed in place; that holds [K, V] for each head on a CPU, whatever its shape says
- ``QwenGatedDeltaNetAttention.chunk_gated_delta_rule``, its counterpart on a GPU: with the states of its rows [V, K],
  as ``GDNAttentionMetadata``'s fields for rows of prefill name them. By reading: nobody has run it here
- a row of one token behind others is computed as if decoded (gated DeltaNet), and isn't heard
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

from comb.hybrid.scans import ScanCall, mamba2
from comb.hybrid.transition import DenseTransition, ScalarTransition, Transition
from comb.linktokens.front import LearnedFront
from comb.waits import all_finite
from comb_serving.vllm.linking.links import CaptureCommand, ComposeCommand
from comb_serving.vllm.versions import operators


class StateLayer:
    """A linear layer of vLLM's whose states can be composed.

    Shapes: H heads, K key channels, V value channels, C channels of the convolution; K and V in any order where T is
    a scalar per head.
    """

    family: ClassVar[type[Transition]]
    transition_shape: tuple[int, ...]

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        (columns, state), dtypes = tuple(layer.get_state_shape())[:2], layer.get_state_dtype()
        self.state_shape: tuple[int, ...] = tuple(state)
        self.columns_shape: tuple[int, ...] = tuple(columns) if not is_conv_state_dim_first() else tuple(columns)[::-1]
        self.columns_dtype: torch.dtype = dtypes[0]

    def identity(self, device: torch.device) -> Tensor:
        """T of no tokens."""
        raise NotImplementedError

    def state(self, slot: int) -> Tensor:
        """A view of the state in a slot of vLLM's cache, `state_shape`."""
        found: Tensor = self.layer.kv_cache[1][slot]
        return found

    def columns(self, slot: int) -> Tensor:
        """A view of the last raw columns in front of the convolution [kernel - 1, C], the oldest first."""
        found: Tensor = self.layer.kv_cache[0][slot]
        return found.transpose(0, 1) if is_conv_state_dim_first() else found


class ScalarLayer(StateLayer):
    """Mamba-2: T is exp(sum of A dt), one number for each head; kept is its logarithm."""

    family = ScalarTransition

    def __init__(self, layer: Any) -> None:
        super().__init__(layer)
        self.transition_shape = (self.state_shape[0],)

    def identity(self, device: torch.device) -> Tensor:
        return torch.zeros(self.transition_shape, device=device)


class DenseLayer(StateLayer):
    """Gated DeltaNet: T is a matrix for each head, the state that its scan makes of the identity without values."""

    family = DenseTransition

    def __init__(self, layer: Any) -> None:
        super().__init__(layer)
        heads, values, keys = self.state_shape
        self.state_shape, self.transition_shape = (heads, keys, values), (heads, keys, keys)

    def identity(self, device: torch.device) -> Tensor:
        return torch.eye(self.state_shape[1], device=device).expand(self.transition_shape)

    def state(self, slot: int) -> Tensor:
        found = super().state(slot)
        return found.view(self.state_shape) if found.device.type == "cpu" else found.transpose(-1, -2)

    def run_cpu(self, scan: Callable[..., Any], given: dict[str, Any], start: int, end: int) -> Transition:
        """T of tokens [start, end) of a call of the CPU's scan; as many columns at a time as a state has."""
        heads, keys, values = self.state_shape
        cut = {name: given[name][:, start:end].contiguous() for name in ("query", "key", "value", "g", "beta")}
        index = torch.zeros(1, dtype=given["initial_state_indices"].dtype)
        bounds = torch.tensor([0, end - start], dtype=given["cu_seqlens"].dtype)
        cut |= {"value": torch.zeros_like(cut["value"]), "initial_state_indices": index, "cu_seqlens": bounds}
        identity, parts = torch.eye(keys), []
        for first in range(0, keys, values):
            columns = identity[:, first : first + values]
            state = torch.zeros(1, heads, keys, values, dtype=given["initial_state"].dtype)
            state[..., : columns.shape[1]] = columns
            scan(**given | cut | {"initial_state": state})
            parts.append(state[0, ..., : columns.shape[1]].float())
        return DenseTransition(torch.cat(parts, dim=-1))

    def run_gpu(self, scan: Callable[..., Any], given: dict[str, Any], start: int, end: int) -> Transition:
        """T of tokens [start, end) of a call of a GPU's scan, whose states are [V, K]. By reading, see above."""
        heads, keys, values = self.state_shape
        cut = {name: given[name][:, start:end].contiguous() for name in ("q", "k", "v", "g", "beta")}
        state, bounds = given["initial_state"], given["cu_seqlens"]
        cut |= {"v": torch.zeros_like(cut["v"]), "cu_seqlens": bounds.new_tensor([0, end - start])}
        identity, parts = torch.eye(keys, device=state.device), []
        for first in range(0, keys, values):
            columns = identity[:, first : first + values]
            initial = state.new_zeros(1, heads, values, keys)
            initial[:, :, : columns.shape[1]] = columns.T
            # chunks were laid out for the whole batch: left out, they are for these tokens
            plain = {"chunk_indices": None, "chunk_offsets": None, "core_attn_out": None}
            _, last = scan(**given | plain | cut | {"initial_state": initial, "output_final_state": True})
            parts.append(last[0].float().transpose(-1, -2)[..., : columns.shape[1]])
        return DenseTransition(torch.cat(parts, dim=-1))


def is_linear(layer: Any) -> bool:
    """Whether a layer of vLLM's keeps a state in place of keys and values."""
    return isinstance(layer, MambaBase)


def state_layer(name: str, layer: Any) -> StateLayer:
    """A linear layer of vLLM's. Raises ValueError for one whose scan can't be heard here."""
    kind = layer.mamba_type.name
    if kind == "MAMBA2" and hasattr(layer, "conv_ssm_forward"):
        return ScalarLayer(layer)
    if kind == "GDN_ATTN" and hasattr(layer, "chunk_gated_delta_rule"):
        if (backend := getattr(layer, "gdn_prefill_backend", "triton")) not in ("triton", "flashinfer"):
            reason = f"{name}'s scan is {backend}'s, which can't be asked for a part of a batch"
            raise ValueError(f"{reason}: start with --gdn-prefill-backend triton")
        return DenseLayer(layer)
    raise ValueError(
        f"hypic links gated DeltaNet (Qwen3-Next) and Mamba-2 inside vLLM; {name} is a "
        f"{type(layer).__name__} ({kind}): use --method full, or the library's own hypic, which has more families"
    )


@dataclass(frozen=True)
class DocumentState:
    """What a document's interior does to one layer: views of a pool's bytes."""

    transition: Tensor  # T's tensor, as its family has it
    state: Tensor  # S, and as long as the interior isn't read to its end, the state in front of it
    columns: Tensor  # [kernel - 1, C] in front of the convolution, of the interior's last tokens


class DocumentStates:
    """The linear layers of one rank, and how the bytes of a document are laid out.

    Attributes:
        nbytes: that a document takes, whatever its length.
        columns: of the widest convolution: a seam at a document's start is at least as wide.
        wanted: cache group by slot, of the rows that are waited for in a step; nothing is heard of others. Layers of
            several groups share memory, and slots tell them apart.
        heard: T of what a step has computed, by layer and slot.
    """

    def __init__(self, layers: Mapping[str, StateLayer]) -> None:
        self.layers = dict(layers)
        self.columns = max(layer.columns_shape[0] for layer in self.layers.values())
        self._places: dict[str, list[tuple[int, tuple[int, ...], torch.dtype]]] = {}
        self.nbytes = 0
        for name, layer in self.layers.items():
            self._places[name] = []
            for shape, dtype in (
                (layer.transition_shape, torch.float32),
                (layer.state_shape, torch.float32),
                (layer.columns_shape, layer.columns_dtype),
            ):
                self._places[name].append((self.nbytes, shape, dtype))
                self.nbytes += -(-math.prod(shape) * dtype.itemsize // 8) * 8
        self.wanted: dict[int, int] = {}
        self.heard: dict[tuple[str, int], Transition] = {}
        self._groups: dict[str, int] = {}
        self._hooks = ExitStack()

    def attach(self, groups: Mapping[str, int]) -> None:
        """vLLM's cache is there: `groups` are the numbers of the layers' cache groups. Scans are heard from now on."""
        self._groups = {name: groups[name] for name in self.layers}
        dense = {}
        for name, layer in self.layers.items():
            if isinstance(layer, ScalarLayer):
                self._replace(layer.layer, "conv_ssm_forward", partial(self._scalar, name, layer.layer))
            elif isinstance(layer, DenseLayer):
                dense[layer.layer.kv_cache[1].data_ptr(), self._groups[name]] = name, layer
                self._replace(layer.layer.chunk_gated_delta_rule, "forward", partial(self._dense_gpu, name, layer))
        if dense:
            self._replace(operators(), "chunk_gated_delta_rule_cpu", partial(self._dense_cpu, dense))

    def _replace(self, owner: Any, name: str, listening: Callable[..., Any]) -> None:
        inner, own = getattr(owner, name), name in vars(owner)
        setattr(owner, name, partial(listening, inner))
        self._hooks.callback(partial(setattr, owner, name, inner) if own else partial(delattr, owner, name))

    def close(self) -> None:
        """Nothing is listened to any more; layers are as they were."""
        self._hooks.close()

    # ---- what a scan does, in place of itself ----

    def _scalar(self, name: str, layer: Any, inner: Any, projected_states: Tensor, output: Tensor) -> Any:
        if self.wanted and (metadata := _metadata(layer)) is not None and metadata.num_prefills:
            decodes, dt = metadata.num_decode_tokens, projected_states[..., -layer.tped_dt_size :].float()
            for slot, start, end in self._rows(metadata.state_indices_tensor_p, metadata.query_start_loc_p):
                steps = dt[None, decodes + start : decodes + end]
                gates = {"dt": steps, "A": layer.A, "dt_bias": layer.dt_bias, "dt_softplus": True}
                self.heard[name, slot], _ = mamba2(ScanCall("mamba_mixer2", mamba2, gates), 0)
        return inner(projected_states=projected_states, output=output)

    def _dense_cpu(self, layers: Mapping[Any, tuple[str, DenseLayer]], inner: Any, **given: Any) -> Any:
        if self.wanted:
            memory = given["initial_state"].data_ptr()
            for slot, start, end in self._rows(given["initial_state_indices"], given["cu_seqlens"]):
                if (found := layers.get((memory, self.wanted[slot]))) is not None:
                    self.heard[found[0], slot] = found[1].run_cpu(inner, given, start, end)
        return inner(**given)

    def _dense_gpu(self, name: str, layer: DenseLayer, inner: Any, **given: Any) -> Any:
        if self.wanted and (metadata := _metadata(layer.layer)) is not None:
            for slot, start, end in self._rows(metadata.prefill_state_indices, given["cu_seqlens"]):
                self.heard[name, slot] = layer.run_gpu(inner, given, start, end)
        return inner(**given)

    def _rows(self, slots: Tensor, bounds: Tensor) -> list[tuple[int, int, int]]:
        """(slot, start, end) of the wanted rows among a batch's."""
        places, rows = bounds.tolist(), enumerate(slots.flatten().tolist())
        return [(slot, places[row], places[row + 1]) for row, slot in rows if slot in self.wanted]

    # ---- documents ----

    def parts(self, memory: Tensor) -> dict[str, DocumentState]:
        """Views of a document's bytes [nbytes] by layer."""

        def view(at: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            return memory[at : at + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)

        return {name: DocumentState(*(view(*place) for place in places)) for name, places in self._places.items()}

    def listen(self, captures: list[CaptureCommand]) -> None:
        """Before a step: what it computes of interiors is waited for, and of nothing else."""
        self.heard.clear()
        inside = [capture for capture in captures if not capture.begins and not capture.whole]
        self.wanted = {capture.blocks[group][0]: group for capture in inside for group in set(self._groups.values())}

    def capture(self, command: CaptureCommand, memory: Tensor) -> None:
        """After a step that ended where the interior begins, or somewhere inside of it.

        Raises RuntimeError if a layer's scan was not heard: then this isn't the vLLM that the hooks were written for.
        """
        for name, kept in self.parts(memory).items():
            layer, slot = self.layers[name], command.blocks[self._groups[name]][0]
            if command.begins or command.whole:
                kept.transition.copy_(layer.identity(memory.device))
                kept.state.copy_(layer.state(slot))
                if command.whole:
                    kept.columns.copy_(layer.columns(slot))
                continue
            heard: Any = self.heard.pop((name, slot), None)
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

    def given(self, front: LearnedFront) -> Tensor:
        """The bytes of an adapter's link tokens, a prompt's beginning like any other (`CaptureCommand.whole`).

        Raises ValueError for other layers or shapes than this model's.
        """
        memory = torch.zeros(self.nbytes, dtype=torch.uint8)
        if len(front.linear_layers) != len(self.layers):
            states = f"{len(front.linear_layers)} linear layers, this model has {len(self.layers)}"
            raise ValueError(f"the adapter's link tokens are for {states}")
        for number, (name, kept) in zip(front.linear_layers, self.parts(memory).items(), strict=True):
            columns, state = front.linear(number)
            last = None if columns is None else columns[:, -len(kept.columns) :].T
            for mine, learned in ((kept.columns, last), (kept.state, state)):
                if learned is None or learned.shape != mine.shape:
                    has = None if learned is None else list(learned.shape)
                    raise ValueError(f"{name} keeps {list(mine.shape)} numbers, the adapter's link tokens have {has}")
                mine.copy_(learned)
        return memory

    def damaged(self, memory: Tensor) -> str:
        """Why what is kept of a document can't be used; empty if it can."""
        for name, kept in self.parts(memory).items():
            if not all_finite((kept.transition, kept.state, kept.columns)):
                return f"{name}: its state holds NaN or infinity"
        return ""


def _metadata(layer: Any) -> Any:
    """Of the step that runs, for a layer of vLLM's; None while vLLM only tries its model."""
    found = get_forward_context().attn_metadata
    return found.get(layer.prefix) if isinstance(found, dict) else None

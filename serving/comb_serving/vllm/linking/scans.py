"""vLLM's linear layers: where their states are, and what a step's tokens do to them, heard from their own scans.

All that is reached into here has no official way. Seen in vLLM 0.32:

- ``MambaMixer2.conv_ssm_forward(projected_states, output)``, called on the layer by the op ``mamba_mixer2``; its
  attributes ``A``, ``dt_bias`` and ``tped_dt_size``; ``Mamba2AttentionMetadata``'s three fields for rows of prefill
- ``chunk_gated_delta_rule_cpu`` among the operators (`vllm_private`), which gated DeltaNet calls with keywords and with
  the cache of all states, changed in place; that holds [K, V] for each head on a CPU, whatever its shape says
- ``QwenGatedDeltaNetAttention.chunk_gated_delta_rule``, its counterpart on a GPU: with the states of its rows [V, K],
  as ``GDNAttentionMetadata``'s fields for rows of prefill name them. By reading: nobody has run it here
- a row of one token behind others is computed as if decoded (gated DeltaNet), and isn't heard
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.abstract import MambaBase

from comb.hybrid.families.dense import DenseTransition
from comb.hybrid.families.scalar import ScalarTransition, mamba2
from comb.hybrid.scans import ScanCall
from comb.hybrid.transition import Transition
from comb_serving.vllm.vllm_private import operators

Heard = dict[tuple[str, int], Transition]
"""By layer and slot."""


class StateLayer:
    """A linear layer whose states can be composed.

    Shapes: H heads, K key channels, V value channels, C channels of the convolution; K and V in any order where T is
    a scalar per head.

    Args:
        layer: vLLM's.
    """

    family: ClassVar[type[Transition]]
    convolved: int  # columns of the convolution that a state holds

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        (columns, state), dtypes = tuple(layer.get_state_shape())[:2], layer.get_state_dtype()
        self.state_shape: tuple[int, ...] = tuple(state)
        self.columns_shape: tuple[int, ...] = tuple(columns) if not _channels_first() else tuple(columns)[::-1]
        self.columns_dtype: torch.dtype = dtypes[0]

    @property
    def transition_shape(self) -> tuple[int, ...]:
        """Of T's tensor."""
        raise NotImplementedError

    def identity(self, device: torch.device) -> Transition:
        """T of no tokens."""
        raise NotImplementedError

    def state(self, slot: int) -> Tensor:
        """A view of the state in a slot of vLLM's cache, `state_shape`."""
        found: Tensor = self.layer.kv_cache[1][slot]
        return found

    def columns(self, slot: int) -> Tensor:
        """A view of the last raw columns in front of the convolution [kernel - 1, C], the oldest first."""
        found: Tensor = self.layer.kv_cache[0][slot]
        return found.transpose(0, 1) if _channels_first() else found


class ScalarLayer(StateLayer):
    """Mamba-2: T is exp(sum of A dt), one number for each head; kept is its logarithm."""

    family = ScalarTransition

    @property
    def transition_shape(self) -> tuple[int, ...]:
        return (self.state_shape[0],)

    def identity(self, device: torch.device) -> Transition:
        return ScalarTransition(torch.zeros(self.transition_shape, device=device))

    def hear(self, projected: Tensor, metadata: Any, wanted: Mapping[int, int]) -> dict[int, Transition]:
        """T of the wanted rows of a step, by slot; `projected` [tokens, channels] ends with dt."""
        layer, decodes = self.layer, metadata.num_decode_tokens
        dt = projected[..., -layer.tped_dt_size :].float()
        found: dict[int, Transition] = {}
        for slot, start, end in _rows(metadata.state_indices_tensor_p, metadata.query_start_loc_p, wanted):
            steps = dt[None, decodes + start : decodes + end]
            gates = {"dt": steps, "A": layer.A, "dt_bias": layer.dt_bias, "dt_softplus": True}
            found[slot], _ = mamba2(ScanCall("mamba_mixer2", mamba2, gates), 0)
        return found


class DenseLayer(StateLayer):
    """Gated DeltaNet: T is a matrix for each head, the state that its scan makes of the identity without values."""

    family = DenseTransition

    def __init__(self, layer: Any) -> None:
        super().__init__(layer)
        heads, values, keys = self.state_shape
        self.state_shape = heads, keys, values

    @property
    def transition_shape(self) -> tuple[int, ...]:
        heads, keys, _ = self.state_shape
        return heads, keys, keys

    def identity(self, device: torch.device) -> Transition:
        return DenseTransition(torch.eye(self.state_shape[1], device=device).expand(self.transition_shape))

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


def state_layer(name: str, layer: Any) -> StateLayer:
    """A linear layer of vLLM's.

    Raises:
        ValueError: for one whose scan can't be heard here.
    """
    kind = layer.mamba_type.name
    if kind == "MAMBA2" and hasattr(layer, "conv_ssm_forward"):
        return ScalarLayer(layer)
    if kind == "GDN_ATTN" and hasattr(layer, "chunk_gated_delta_rule"):
        return DenseLayer(layer)
    raise ValueError(
        f"hypic links gated DeltaNet (Qwen3-Next, Qwen3.5) and Mamba-2 inside vLLM; {name} is a "
        f"{type(layer).__name__} ({kind}): the library's own hypic has more families, one request at a time"
    )


class ScanListener:
    """Has every scan of the layers say what it does to the states of the rows that are waited for.

    Args:
        layers: by name.
        groups: number of each layer's cache group: layers of several groups share memory, and slots tell them apart.

    Attributes:
        wanted: cache group by slot, of the rows that are waited for; nothing is heard of others.
        heard: what was heard since it was last cleared.
    """

    def __init__(self, layers: Mapping[str, StateLayer], groups: Mapping[str, int]) -> None:
        self.wanted: dict[int, int] = {}
        self.heard: Heard = {}
        self._stack = ExitStack()
        dense = {}
        for name, layer in layers.items():
            if isinstance(layer, ScalarLayer):
                self._replace(layer.layer, "conv_ssm_forward", partial(self._scalar, name, layer))
            elif isinstance(layer, DenseLayer):
                dense[layer.layer.kv_cache[1].data_ptr(), groups[name]] = name, layer
                self._replace(layer.layer.chunk_gated_delta_rule, "forward", partial(self._dense_gpu, name, layer))
        if dense:
            self._replace(operators(), "chunk_gated_delta_rule_cpu", partial(self._dense_cpu, dense))

    def close(self) -> None:
        """Layers are as they were."""
        self._stack.close()

    def _replace(self, owner: Any, name: str, listening: Callable[..., Any]) -> None:
        inner, own = getattr(owner, name), name in vars(owner)
        setattr(owner, name, partial(listening, inner))
        self._stack.callback(partial(setattr, owner, name, inner) if own else partial(delattr, owner, name))

    def _scalar(self, name: str, layer: ScalarLayer, inner: Any, projected_states: Tensor, output: Tensor) -> Any:
        if self.wanted and (metadata := _metadata(layer)) is not None and metadata.num_prefills:
            for slot, found in layer.hear(projected_states, metadata, self.wanted).items():
                self.heard[name, slot] = found
        return inner(projected_states=projected_states, output=output)

    def _dense_cpu(self, layers: Mapping[Any, tuple[str, DenseLayer]], inner: Any, **given: Any) -> Any:
        if self.wanted:
            memory = given["initial_state"].data_ptr()
            for slot, start, end in _rows(given["initial_state_indices"], given["cu_seqlens"], self.wanted):
                if (found := layers.get((memory, self.wanted[slot]))) is not None:
                    self.heard[found[0], slot] = found[1].run_cpu(inner, given, start, end)
        return inner(**given)

    def _dense_gpu(self, name: str, layer: DenseLayer, inner: Any, **given: Any) -> Any:
        if self.wanted and (metadata := _metadata(layer)) is not None:
            for slot, start, end in _rows(metadata.prefill_state_indices, given["cu_seqlens"], self.wanted):
                self.heard[name, slot] = layer.run_gpu(inner, given, start, end)
        return inner(**given)


def is_linear(layer: Any) -> bool:
    """Whether a layer of vLLM's keeps a state in place of keys and values."""
    return isinstance(layer, MambaBase)


def _metadata(layer: StateLayer) -> Any:
    """Of the step that runs, for a layer; None while vLLM only tries its model."""
    found = get_forward_context().attn_metadata
    return found.get(layer.layer.prefix) if isinstance(found, dict) else None


def _rows(slots: Tensor, bounds: Tensor, wanted: Mapping[int, int]) -> list[tuple[int, int, int]]:
    """(slot, start, end) of the wanted rows among a batch's."""
    places = bounds.tolist()
    return [(slot, places[row], places[row + 1]) for row, slot in enumerate(slots.flatten().tolist()) if slot in wanted]


def _channels_first() -> bool:
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    return bool(is_conv_state_dim_first())

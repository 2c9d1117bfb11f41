"""The cross block inside vLLM: `CrossBlock` over paged documents, one custom op per layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from vllm import ir
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.config import CUDAGraphMode
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.activation import get_act_and_mul_fn
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.utils.torch_utils import direct_register_custom_op

from comb.kernels.dispatch import attend
from comb.model.config import CombEncoderConfig
from comb_serving.vllm import OP
from comb_serving.vllm.rows import RequestDocuments

GATE_UP = ("gate_proj", "up_proj")  # in checkpoints; here one product, of each rank's part of both


class OwnColumnLinear(ColumnParallelLinear):
    """vLLM's LoRA wraps layers of exactly its own types, for all tokens of a batch; cross blocks see those of some."""


class OwnRowLinear(RowParallelLinear):
    """As `OwnColumnLinear`."""


class FusedNorm(RMSNorm):
    """vLLM's norm, in one kernel where there is one: while vLLM compiles it prefers operators that compile into others,
    and here is nothing to compile into."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] -> the same shape."""
        with ir.ops.rms_norm.set_priority(["vllm_c", "native"]):
            out: Tensor = super().forward(x)
            return out


class GatedActivation(nn.Module):
    """``act(gate) * up`` for activations that vLLM has no kernel for."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.act = ACT2FN[name]

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, 2 * width] -> [tokens, width]."""
        gate, up = x.chunk(2, -1)
        out: Tensor = self.act(gate) * up
        return out


class ParallelCrossAttention(nn.Module):
    """`comb.model.cross_attention.CrossAttention`, its heads divided over the tensor-parallel ranks."""

    def __init__(self, config: CombEncoderConfig, prefix: str) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        width = config.num_attention_heads * config.head_dim
        self.q_proj = OwnColumnLinear(
            config.hidden_size, width, bias=config.cross_bias, return_bias=False, prefix=f"{prefix}.q_proj"
        )
        self.o_proj = OwnRowLinear(width, config.hidden_size, bias=False, return_bias=False, prefix=f"{prefix}.o_proj")
        normed = config.cross_qk_norm == "head"
        self.q_norm = FusedNorm(config.head_dim, config.rms_norm_eps) if normed else nn.Identity()

    def query(self, hidden: Tensor) -> Tensor:
        """[tokens, hidden] -> [tokens, heads, head_dim]."""
        out: Tensor = self.q_norm(self.q_proj(hidden).unflatten(-1, (-1, self.head_dim)))
        return out


class ParallelMLP(nn.Module):
    """transformers' `LlamaMLP`, divided over the tensor-parallel ranks."""

    def __init__(self, config: CombEncoderConfig, prefix: str) -> None:
        super().__init__()
        hidden, width, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        # vLLM's LoRA wraps all kinds of its own layer for two merged products
        self.gate_up_proj = OwnColumnLinear(
            hidden, 2 * width, bias=bias, return_bias=False, prefix=f"{prefix}.gate_up_proj"
        )
        self.down_proj = OwnRowLinear(width, hidden, bias=bias, return_bias=False, prefix=f"{prefix}.down_proj")
        self.act_fn: nn.Module
        try:
            self.act_fn = get_act_and_mul_fn(config.hidden_act)
        except ValueError:  # vLLM has no kernel for it
            self.act_fn = GatedActivation(config.hidden_act)

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, hidden] -> the same shape."""
        out: Tensor = self.down_proj(self.act_fn(self.gate_up_proj(x)))
        return out


class PagedCrossBlock(nn.Module):
    """`comb.model.cross_attention.CrossBlock`; parameters have its names, keys and values come from the shared pool.

    Args:
        config: shape of the encoder, shared by the block.
        layer: which of the pool's cross layers it reads.
        documents: of the running step.
        name: under which the op finds the block again.
    """

    def __init__(self, config: CombEncoderConfig, layer: int, documents: RequestDocuments, name: str) -> None:
        super().__init__()
        check_divisible(config, get_tensor_model_parallel_world_size())
        self.layer, self.documents, self.name = layer, documents, name
        self.input_layernorm = FusedNorm(config.hidden_size, config.rms_norm_eps)
        self.cross_attn = ParallelCrossAttention(config, f"{name}.cross_attn")
        self.attention_gate = nn.Parameter(torch.zeros(1))
        self.post_attention_layernorm = FusedNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = ParallelMLP(config, f"{name}.mlp")
        self.mlp_gate = nn.Parameter(torch.zeros(1))
        self.graphs: tuple[Callable[..., Any], Callable[..., None]] | None = None

    def forward(self, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Mixes documents into the stream in front of a decoder layer, [tokens, hidden], in place.

        vLLM's layers pass their stream on in two parts whose sum it is; rows with documents come back as
        (new stream, 0), the others untouched, so that they are the plain backbone's bit for bit.
        """
        if residual is None:
            hidden = hidden.clone()  # it may be the embeddings that the caller keeps
        torch.ops.vllm.comb_cross_block(hidden, hidden.new_empty(0) if residual is None else residual, self.name)
        return hidden, residual

    def capture(self, graph: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Has the two parts beside attention replayed in the steps that vLLM replays in pieces.

        Args:
            graph: what makes a CUDA graph of a function, one for each size of a batch.
        """
        self.graphs = graph(self.read), graph(self.write)

    def mix_(self, hidden: Tensor, residual: Tensor) -> None:
        """What the op does: nothing, unless a row of this step has documents. An empty `residual` is none."""
        step, pool = self.documents.step, self.documents.pool
        # [1, tokens, hidden] where vLLM runs transformers' own layers; view, as what is written must arrive
        hidden = hidden.view(-1, hidden.shape[-1])
        residual = residual.view(-1, residual.shape[-1]) if residual.numel() else residual
        pieces = self.graphs is not None and get_forward_context().cudagraph_runtime_mode == CUDAGraphMode.PIECEWISE
        if not step.rows or pool is None:
            if pieces and step.dummy:
                self.replay(hidden, residual, warm=True)
            return
        self.documents.mixed += 1
        if pieces:
            self.replay(hidden, residual)
            return
        tokens = step.tokens(hidden.device)
        rest = residual.index_select(0, tokens) if residual.numel() else residual
        stream, query, _ = self.read(hidden.index_select(0, tokens), rest)
        mixed = self.mixed(stream, attend(query, pool.layer(self.layer), step.batch))
        hidden.index_copy_(0, tokens, mixed.to(hidden))
        if residual.numel():
            residual.index_fill_(0, tokens, 0)

    def replay(self, hidden: Tensor, residual: Tensor, *, warm: bool = False) -> None:
        """`mix_` by graphs that take all rows and write those with documents; attention alone takes the latter.

        warm: no row has documents, the graphs are there to be captured.
        """
        assert self.graphs is not None
        read, write = self.graphs
        step, readers = self.documents.step, self.documents.readers(len(hidden))
        if warm:  # what is made at the first call, such as handles and compiled kernels, can't be captured
            stream, _, attended = self.read(hidden, residual)
            self.write(stream, attended, hidden, residual, readers)
        stream, query, attended = read(hidden, residual)
        if step.rows:
            assert self.documents.pool is not None
            tokens = step.tokens(hidden.device)
            layer = self.documents.pool.layer(self.layer)
            attended.index_copy_(0, tokens, attend(query.index_select(0, tokens), layer, step.batch))
        write(stream, attended, hidden, residual, readers)

    def read(self, hidden: Tensor, residual: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What stands in front of attention.

        Returns:
            The stream [tokens, hidden], queries [tokens, heads, head_dim], and room for what attention makes of them.
        """
        stream = (hidden + residual if residual.numel() else hidden).to(self.attention_gate)
        query = self.cross_attn.query(self.input_layernorm(stream))
        return stream, query, torch.empty_like(query)

    def write(self, stream: Tensor, attended: Tensor, hidden: Tensor, residual: Tensor, readers: Tensor) -> None:
        """What stands behind attention, written into the rows of `hidden` that `readers` [tokens, 1] names."""
        torch.where(readers, self.mixed(stream, attended).to(hidden), hidden, out=hidden)
        if residual.numel():
            residual.masked_fill_(readers, 0)

    def mixed(self, stream: Tensor, attended: Tensor) -> Tensor:
        """The new stream [tokens, hidden]."""
        x = torch.addcmul(stream, self.attention_gate.tanh(), self.cross_attn.o_proj(attended.flatten(1)))
        return torch.addcmul(x, self.mlp_gate.tanh(), self.mlp(self.post_attention_layernorm(x)))


def checkpoint_weights(block: nn.Module) -> Iterator[tuple[str, nn.Parameter, int | None]]:
    """(name in a checkpoint, parameter, which part of it) of all weights of a block; None is the whole."""
    for name, weight in block.named_parameters():
        if "gate_up_proj" in name:
            yield from ((name.replace("gate_up_proj", part), weight, index) for index, part in enumerate(GATE_UP))
        else:
            yield name, weight, None


def load_weight(weight: nn.Parameter, tensor: Tensor, part: int | None) -> None:
    """Copies a checkpoint's weight, or this rank's rows of it, into a parameter or its half number `part`."""
    if part is None:
        getattr(weight, "weight_loader", default_weight_loader)(weight, tensor)
        return
    rows, rank = len(weight) // len(GATE_UP), get_tensor_model_parallel_rank()
    weight.data[part * rows : (part + 1) * rows].copy_(tensor[rank * rows : (rank + 1) * rows])


def check_divisible(config: CombEncoderConfig, ranks: int) -> None:
    """Raises ValueError if the blocks can't be divided over so many tensor-parallel ranks."""
    heads = config.num_key_value_heads
    whole = config.num_attention_heads % ranks == 0 and config.intermediate_size % ranks == 0
    if not whole or (heads % ranks and ranks % heads):
        raise ValueError(
            f"the adapter's {config.num_attention_heads} heads, {heads} key/value heads and MLP of "
            f"{config.intermediate_size} can't be divided over {ranks} ranks: choose another tensor_parallel_size"
        )


# torch.Tensor in full: torch reads the op's annotations in the module of vLLM's decorator, which knows no other name
def _mix(hidden: torch.Tensor, residual: torch.Tensor, name: str) -> None:
    get_forward_context().no_compile_layers[name].mix_(hidden, residual)


if not hasattr(torch.ops.vllm, OP):
    # vLLM's breakable CUDA graphs would replay a step without its documents otherwise
    mix = eager_break_during_capture(_mix)
    direct_register_custom_op(OP, mix, mutates_args=["hidden", "residual"], fake_impl=lambda *_: None)

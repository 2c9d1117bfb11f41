"""The cross block inside vLLM: `CrossBlock` over paged documents, one custom op per layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear
from vllm.utils.torch_utils import direct_register_custom_op

from comb.kernels.paged.attention import attend
from comb.kernels.paged.layout import PagedBatch, PagedLayer
from comb.model.config import CombEncoderConfig
from comb.model.encoder import cross_norm
from comb_serving.vllm import OP
from comb_serving.vllm.rows import RequestDocuments


class OwnColumnLinear(ColumnParallelLinear):
    """vLLM's LoRA wraps layers of exactly its own types, for all tokens of a batch; cross blocks see those of some."""


class OwnRowLinear(RowParallelLinear):
    """As `OwnColumnLinear`."""


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
        self.q_norm = cross_norm(config)

    def forward(self, hidden: Tensor, layer: PagedLayer, batch: PagedBatch) -> Tensor:
        """Tokens of all rows with documents, behind one another, against each row's own documents.

        hidden [tokens, hidden] -> the same shape
        """
        query = self.q_norm(self.q_proj(hidden).unflatten(-1, (-1, self.head_dim)))
        out: Tensor = self.o_proj(attend(query, layer, batch).flatten(1))
        return out


class ParallelMLP(nn.Module):
    """transformers' `LlamaMLP`, divided over the tensor-parallel ranks."""

    def __init__(self, config: CombEncoderConfig, prefix: str) -> None:
        super().__init__()
        sizes, bias = (config.hidden_size, config.intermediate_size), config.mlp_bias
        self.gate_proj, self.up_proj = (
            OwnColumnLinear(*sizes, bias=bias, return_bias=False, prefix=f"{prefix}.{name}")
            for name in ("gate_proj", "up_proj")
        )
        self.down_proj = OwnRowLinear(*reversed(sizes), bias=bias, return_bias=False, prefix=f"{prefix}.down_proj")
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, hidden] -> the same shape."""
        out: Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
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
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.cross_attn = ParallelCrossAttention(config, f"{name}.cross_attn")
        self.attention_gate = nn.Parameter(torch.zeros(1))
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = ParallelMLP(config, f"{name}.mlp")
        self.mlp_gate = nn.Parameter(torch.zeros(1))

    def forward(self, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Mixes documents into the stream in front of a decoder layer, [tokens, hidden], in place.

        vLLM's layers pass their stream on in two parts whose sum it is; rows with documents come back as
        (new stream, 0), the others untouched, so that they are the plain backbone's bit for bit.
        """
        if residual is None:
            hidden = hidden.clone()  # it may be the embeddings that the caller keeps
        torch.ops.vllm.comb_cross_block(hidden, hidden.new_empty(0) if residual is None else residual, self.name)
        return hidden, residual

    def mix_(self, hidden: Tensor, residual: Tensor) -> None:
        """What the op does: nothing, unless a row of this step has documents. An empty `residual` is none."""
        step, pool = self.documents.step, self.documents.pool
        if not step.rows or pool is None:
            return
        self.documents.mixed += 1
        # [1, tokens, hidden] where vLLM runs transformers' own layers; view, as what is written must arrive
        hidden, tokens = hidden.view(-1, hidden.shape[-1]), step.tokens(hidden.device)
        stream = hidden.index_select(0, tokens)
        if residual.numel():
            stream = stream + residual.index_select(0, tokens)
            residual.index_fill_(0, tokens, 0)
        x = stream.to(self.attention_gate)
        attended = self.cross_attn(self.input_layernorm(x), pool.layer(self.layer), step.batch)
        x = x + self.attention_gate.tanh() * attended
        x = x + self.mlp_gate.tanh() * self.mlp(self.post_attention_layernorm(x))
        hidden.index_copy_(0, tokens, x.to(hidden))


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


def _mix_fake(hidden: torch.Tensor, residual: torch.Tensor, name: str) -> None:
    return None


if not hasattr(torch.ops.vllm, OP):
    # vLLM's breakable CUDA graphs would replay a step without its documents otherwise
    mix = eager_break_during_capture(_mix)
    direct_register_custom_op(OP, mix, mutates_args=["hidden", "residual"], fake_impl=_mix_fake)

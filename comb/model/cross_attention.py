"""Gated cross-attention from decoder tokens to linked documents (COMB sec. 4.2, eq. 4-8), hooked in front of layers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from comb.backbones.discovery import layer_input
from comb.backbones.transformers_private import recomputed_with
from comb.model.attention import Lengths, attend, uses_packing
from comb.model.config import CombEncoderConfig
from comb.waits import on_device

KeyValues = tuple[Tensor, Tensor]  # each [cross_layers, tokens, kv_heads, head_dim]


class LinkedDocuments:
    """The documents of every row of a batch, laid out for the cross blocks: the result of COMB's link.

    Documents of a row are concatenated; as keys carry no position, their order doesn't matter (COMB sec. 4.2).

    Args:
        rows: for each row of the batch its documents' keys and values; a row may have none.
        implementation: the attention implementation the blocks will use.
        reading: which tokens of the prompt read them; None for all of them. [rows, tokens]
    """

    def __init__(
        self, rows: Sequence[Sequence[KeyValues]], implementation: str | None, reading: Tensor | None = None
    ) -> None:
        self.num_rows, self.reading = len(rows), reading
        self.answered = 0  # tokens behind the prompt, which all read
        self.with_documents = [index for index, documents in enumerate(rows) if documents]
        self.implementation = implementation
        self.was_read = False
        self._expanded: dict[int, Tensor] = {}
        if not self.with_documents:
            return
        given = [rows[index] for index in self.with_documents]
        self.lengths = Lengths(torch.tensor([sum(keys.shape[1] for keys, _ in row) for row in given]))
        self.device = given[0][0][0].device
        self.packed = uses_packing(implementation)
        self.key_mask = None if self.packed else self.lengths.mask(self.device)
        self._offsets: dict[torch.device, Tensor] = {}
        self.keys, self.values = (self._layout([[pair[part] for pair in row] for row in given]) for part in (0, 1))

    def _layout(self, rows: Sequence[Sequence[Tensor]]) -> tuple[Tensor, ...]:
        """Rows of documents [cross_layers, tokens, kv_heads, head_dim] -> per cross layer
        [rows, kv_heads, longest, head_dim], or, packed, [1, kv_heads, all tokens, head_dim]."""
        if self.packed:
            rows = [[document for documents in rows for document in documents]]
        counts = [sum(document.shape[1] for document in documents) for documents in rows]
        padded = []
        for documents, count in zip(rows, counts, strict=True):  # padded as they are joined: one copy less of them all
            layers, _, *size = documents[0].shape
            padding = documents[0].new_zeros(layers, max(counts) - count, *size)
            padded.append(torch.cat([*documents, padding], dim=1).transpose(1, 2))
        # taken apart at once: an index per layer would have a gradient as large as all of them
        return torch.stack(padded, dim=1).unbind()

    def rows_of(self, batch: int) -> Tensor | None:
        """Which rows of a batch of hidden states have documents; None for all of them. [rows_with_documents]

        Generation may repeat every row (beams, several returned sequences): row r of the prompt is then rows
        ``r * repeats ... (r + 1) * repeats - 1``. Raises ValueError if `batch` is no multiple of the prompt rows.
        """
        if batch % self.num_rows:
            raise ValueError(
                f"documents were given for {self.num_rows} rows, but the batch has {batch}: "
                "give one list of documents (possibly empty) per row of input_ids"
            )
        if len(self.with_documents) == self.num_rows:
            return None
        if batch not in self._expanded:
            repeats = batch // self.num_rows
            rows = [row * repeats + copy for row in self.with_documents for copy in range(repeats)]
            self._expanded[batch] = on_device(torch.tensor(rows), self.device)
        return self._expanded[batch]

    def readers(self, hidden: Tensor) -> Tensor | None:
        """Which tokens of a batch of hidden states read documents; None for all. [batch, tokens, 1] bool

        Raises ValueError for a part of the prompt, which doesn't say which.
        """
        if self.reading is None or hidden.shape[1] <= self.answered:
            return None
        # without a cache each step computes the prompt again
        reading = nn.functional.pad(self.reading, (0, self.answered), value=True)
        if hidden.shape[1] != reading.shape[1]:
            raise ValueError(
                f"a prompt of {self.reading.shape[1]} tokens with prefix_tokens is taken whole, not {hidden.shape[1]} "
                "tokens of it: leave prefill_chunk_size and the like out"
            )
        readers = reading.repeat_interleave(hidden.shape[0] // self.num_rows, 0)
        return readers[..., None].to(hidden.device)

    def attention_inputs(self, layer: int, query: Tensor) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
        """Query, keys, values and mask arguments of cross layer `layer` for `attend`.

        query [rows_with_documents * repeats, heads, queries, head_dim]
        """
        keys, values = self.keys[layer], self.values[layer]
        repeats = query.shape[0] // len(self.with_documents)
        if not self.packed:
            mask = self.key_mask
            if repeats > 1:
                keys, values = keys.repeat_interleave(repeats, 0), values.repeat_interleave(repeats, 0)
                mask = None if mask is None else mask.repeat_interleave(repeats, 0)
            return query, keys, values, {"key_mask": None if mask is None else mask.to(query.device)}
        rows, heads, queries, head_dim = query.shape
        if repeats > 1:  # a prompt row's beams ask the same documents: one longer row of queries
            rows, queries = rows // repeats, queries * repeats
        packed = query.transpose(1, 2).reshape(1, rows * queries, heads, head_dim).transpose(1, 2)
        offsets = torch.arange(rows + 1, dtype=torch.int32, device=query.device) * queries
        if query.device not in self._offsets:  # once, not for every layer and token
            self._offsets[query.device] = self.lengths.offsets(query.device)
        return packed, keys, values, {
            "cu_seq_lens_q": offsets, "cu_seq_lens_k": self._offsets[query.device],
            "max_length_q": queries, "max_length_k": self.lengths.longest,
        }  # fmt: skip


class CrossAttention(nn.Module):
    """Query side of the cross-attention; keys and values come ready from the encoder. No positions, no mask."""

    def __init__(self, config: CombEncoderConfig) -> None:
        super().__init__()
        self.config = config  # transformers' attention functions ask for it
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        width = config.num_attention_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=config.cross_bias)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)
        normed = config.cross_qk_norm == "head"
        self.q_norm = LlamaRMSNorm(config.head_dim, config.rms_norm_eps) if normed else nn.Identity()

    def forward(self, hidden: Tensor, documents: LinkedDocuments, layer: int) -> Tensor:
        """[rows_with_documents, tokens, hidden] -> the same shape."""
        return self.o_proj(self.read(hidden, documents, layer))  # type: ignore[no-any-return]

    def read(self, hidden: Tensor, documents: LinkedDocuments, layer: int) -> Tensor:
        """What the heads read. [rows_with_documents, tokens, hidden] -> [.., tokens, heads * head_dim]"""
        query = self.q_norm(self.q_proj(hidden).unflatten(-1, (-1, self.head_dim))).transpose(1, 2)
        query, keys, values, mask = documents.attention_inputs(layer, query)
        mixed = attend(self, query, keys.to(query), values.to(query), documents.implementation, **mask)
        return mixed.reshape(*hidden.shape[:2], -1)


class CrossBlock(nn.Module):
    """Cross-attention and a gated MLP in front of one decoder layer, each behind a tanh gate that starts at zero.

    Args:
        config: shape of the encoder, shared by the block.
        layer: which of the PICache's cross layers it reads.
    """

    def __init__(self, config: CombEncoderConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.cross_attn = CrossAttention(config)
        self.attention_gate = nn.Parameter(torch.zeros(1))
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = LlamaMLP(config)
        self.mlp_gate = nn.Parameter(torch.zeros(1))

    @property
    def gates(self) -> list[nn.Parameter]:
        """The attention's and the MLP's."""
        return [self.attention_gate, self.mlp_gate]

    def forward(self, hidden: Tensor, documents: LinkedDocuments) -> Tensor:
        """[batch, tokens, hidden] -> the same; rows without documents and tokens that read none come back untouched,
        bit for bit."""
        if not documents.with_documents:
            return hidden
        rows = documents.rows_of(hidden.shape[0])
        if rows is None:
            mixed = self._mix(hidden, documents)
        else:
            rows = rows.to(hidden.device)
            mixed = hidden.index_copy(0, rows, self._mix(hidden.index_select(0, rows), documents))
        readers = documents.readers(hidden)
        return mixed if readers is None else torch.where(readers, mixed, hidden)

    def _mix(self, hidden: Tensor, documents: LinkedDocuments) -> Tensor:
        # the block may be kept in higher precision than a bf16 backbone
        x = hidden.to(self.attention_gate)
        attended = self.cross_attn(self.input_layernorm(x), documents, self.layer)
        x = x + self.attention_gate.tanh() * attended
        x = x + self.mlp_gate.tanh() * self.mlp(self.post_attention_layernorm(x))
        result: Tensor = x.to(hidden)
        return result


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
        def hook(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
            changed = recomputed_with(layer, function, layer_input(args, kwargs))
            if args:
                return (changed, *args[1:]), kwargs
            return args, {**kwargs, "hidden_states": changed}

        return self._layers[index].register_forward_pre_hook(hook, with_kwargs=True)

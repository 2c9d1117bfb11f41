"""The chunk encoder: one segment in, cross-attention keys and values out (COMB sec. 4.1-4.2)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, rotate_half

from comb.model.attention import Lengths, attend, uses_packing
from comb.model.config import CombEncoderConfig

T = TypeVar("T")


def rotary_frequencies(config: CombEncoderConfig) -> tuple[Tensor, float]:
    """Inverse frequencies of the rotary embedding, and the factor on its cosine and sine.

    Fixed once: types that change with the length of the text (dynamic NTK, longrope) take their values for
    short text, so that a document's encoding depends on nothing but the document.

    Returns:
        ([rotary_dim / 2] float32, attention factor)
    """
    rope = dict(config.rope_parameters or {"rope_type": "default", "rope_theta": 10_000.0})
    if rope["rope_type"] in ("default", "dynamic"):
        dim = int(config.head_dim * rope.get("partial_rotary_factor", 1.0))
        exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
        return 1.0 / (rope["rope_theta"] ** exponents), 1.0
    shim = SimpleNamespace(
        rope_parameters=rope,
        standardize_rope_params=lambda: None,
        head_dim=config.head_dim,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        max_position_embeddings=config.max_position_embeddings,
        partial_rotary_factor=rope.get("partial_rotary_factor", 1.0),
    )
    with torch.device("cpu"):  # not on the meta device, if a model is being made there: some types look at the numbers
        frequencies, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](shim, torch.device("cpu"))
    return frequencies.float(), float(factor)


class Rotary(nn.Module):
    """Rotary position embedding with fixed frequencies; the first `rotary_dim` of each head are rotated."""

    def __init__(self, config: CombEncoderConfig) -> None:
        super().__init__()
        self.config = config
        self._comb_found: tuple[Tensor, float] | None = None  # of the configuration: named as what is no setting

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine, float32. positions [rows, tokens] -> 2 x [rows, tokens, rotary_dim]"""
        # made at first use, not in __init__: there the module may still be on the meta device
        if self._comb_found is None or self._comb_found[0].device != positions.device:
            frequencies, factor = rotary_frequencies(self.config)
            self._comb_found = frequencies.to(positions.device), factor
        frequencies, factor = self._comb_found
        angles = positions[..., None].float() * frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos() * factor, angles.sin() * factor


def apply_rotary(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotates the first `rotary_dim` of each head. x [rows, heads, tokens, head_dim]"""
    dim = cosine.shape[-1]
    cosine, sine = cosine[:, None].to(x.dtype), sine[:, None].to(x.dtype)
    turned = x[..., :dim] * cosine + rotate_half(x[..., :dim]) * sine
    return torch.cat((turned, x[..., dim:]), dim=-1) if dim < x.shape[-1] else turned


def in_front(front: Tensor, x: Tensor, counts: list[int] | None) -> Tensor:
    """`front` in front of each row, or of each segment of the one packed row, of so many tokens.

    Args:
        front: [a, n, ...]
        x: [rows, a, tokens, ...]
    """
    if counts is None:
        return torch.cat((front.expand(len(x), *front.shape), x), dim=2)
    return torch.cat([part for segment in x[0].split(counts, dim=1) for part in (front, segment)], dim=1)[None]


class EncoderAttention(nn.Module):
    """Self-attention over one segment, with the backbone's head geometry."""

    def __init__(self, config: CombEncoderConfig) -> None:
        super().__init__()
        self.config = config
        heads, kv_heads, self.head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.num_key_value_groups = heads // kv_heads
        self.scaling = self.head_dim**-0.5
        bias = config.attention_bias
        self.q_proj = nn.Linear(config.hidden_size, heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(heads * self.head_dim, config.hidden_size, bias=config.attention_output_bias)
        if config.qk_norm != "none":
            flat = config.qk_norm == "flat"
            self.q_norm = LlamaRMSNorm(heads * self.head_dim if flat else self.head_dim, config.rms_norm_eps)
            self.k_norm = LlamaRMSNorm(kv_heads * self.head_dim if flat else self.head_dim, config.rms_norm_eps)

    def keys_and_values(self, hidden: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """[rows, tokens, hidden] -> 2 x [rows, kv_heads, tokens, head_dim]"""
        key = self._heads(self.k_proj(hidden), getattr(self, "k_norm", None))
        return apply_rotary(key, *rotary), self._heads(self.v_proj(hidden), None)

    def forward(
        self, hidden: Tensor, rotary: tuple[Tensor, Tensor], front: Tensor | None = None,
        counts: list[int] | None = None, **mask: Any,
    ) -> Tensor:  # fmt: skip
        """[rows, tokens, hidden] -> the same shape. front [2, kv_heads, tokens, head_dim]; counts: see `in_front`"""
        query = self._heads(self.q_proj(hidden), getattr(self, "q_norm", None))
        key, value = self.keys_and_values(hidden, rotary)
        if front is not None:
            key, value = in_front(front[0], key, counts), in_front(front[1], value, counts)
        query, implementation = apply_rotary(query, *rotary), self.config._attn_implementation
        mixed = attend(self, query, key, value, implementation, causal=self.config.causal, **mask)
        return self.o_proj(mixed.flatten(2))  # type: ignore[no-any-return]

    def _heads(self, x: Tensor, norm: nn.Module | None) -> Tensor:
        if norm is not None and self.config.qk_norm == "flat":
            x = norm(x)
        x = x.unflatten(-1, (-1, self.head_dim))
        if norm is not None and self.config.qk_norm == "head":
            x = norm(x)
        return x.transpose(1, 2)


class EncoderLayer(GradientCheckpointingLayer):
    """One transformer layer: attention and gated MLP, with norms before, after or around each of them."""

    def __init__(self, config: CombEncoderConfig) -> None:
        super().__init__()
        before, after = config.norm_placement != "post", config.norm_placement != "pre"

        def norm(wanted: bool) -> nn.Module:
            return LlamaRMSNorm(config.hidden_size, config.rms_norm_eps) if wanted else nn.Identity()

        self.self_attn = EncoderAttention(config)
        self.mlp = LlamaMLP(config)
        self.input_layernorm, self.attention_output_norm = norm(before), norm(after)
        self.post_attention_layernorm, self.mlp_output_norm = norm(before), norm(after)

    def forward(self, hidden: Tensor, rotary: tuple[Tensor, Tensor], **mask: Any) -> Tensor:
        """[rows, tokens, hidden] -> the same shape."""
        mixed = self.self_attn(self.input_layernorm(hidden), rotary, **mask)
        hidden = hidden + self.attention_output_norm(mixed)
        return hidden + self.mlp_output_norm(self.mlp(self.post_attention_layernorm(hidden)))  # type: ignore[no-any-return]


class KeyValueHead(nn.Module):
    """Projects one encoder layer's output to the keys and values of one cross block (COMB eq. 5, 6).

    Where keys are normalised they leave it so, so that reading a PICache costs nothing per step.
    """

    def __init__(self, config: CombEncoderConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        width = config.num_key_value_heads * config.head_dim
        self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps) if config.kv_input_norm else nn.Identity()
        self.k_proj = nn.Linear(config.hidden_size, width, bias=config.cross_bias)
        self.v_proj = nn.Linear(config.hidden_size, width, bias=config.cross_bias)
        normed = config.cross_qk_norm == "head"
        self.k_norm = LlamaRMSNorm(config.head_dim, config.rms_norm_eps) if normed else nn.Identity()

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """[rows, tokens, hidden] -> keys, values, each [rows, tokens, kv_heads, head_dim]"""
        hidden = self.norm(hidden)
        keys = self.k_norm(self.k_proj(hidden).unflatten(-1, (-1, self.head_dim)))
        return keys, self.v_proj(hidden).unflatten(-1, (-1, self.head_dim))


class CombEncoder(nn.Module):
    """`num_hidden_layers` transformer layers and one K/V head per cross block.

    With `front_tokens` it has learned a *front*, keys and values in each layer that stand in front of every segment,
    and a *sink*: one more key and value for each cross block, in front of every segment's own. A language model looks
    at a text's first token where it wants nothing: a segment encoded alone has its own first token be that, and the
    others are not what they are in the middle of a prompt (docs/comb.md).

    Args:
        config: its shape.
        sources: for each cross block, the encoder layer it reads.
    """

    front: nn.Parameter | None  # [layers, keys and values, kv_heads, front_tokens, head_dim]
    sink: nn.Parameter | None  # [keys and values, cross_layers, 1, kv_heads, head_dim]

    def __init__(self, config: CombEncoderConfig, sources: list[int]) -> None:
        super().__init__()
        self.config = config
        self.sources = list(sources)
        self.rotary = Rotary(config)
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.num_hidden_layers))
        self.key_value_heads = nn.ModuleList(KeyValueHead(config) for _ in sources)
        heads, dim = config.num_key_value_heads, config.head_dim
        shapes = {"front": (config.num_hidden_layers, 2, heads, config.front_tokens, dim),
                  "sink": (2, len(sources), 1, heads, dim)}  # fmt: skip
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape)) if config.front_tokens else None)

    @torch.no_grad()
    def start_front(self, embeddings: Tensor) -> None:
        """Has the front be what the encoder makes of a text, and the sink what blocks read of its first token.

        Args:
            embeddings: of the text's tokens. [front_tokens, hidden]
        """
        assert self.front is not None
        assert self.sink is not None
        hidden, outputs = embeddings[None].to(self.dtype), []
        rotary = self.rotary(torch.arange(len(embeddings), device=embeddings.device)[None])
        for layer, front in zip(self.layers, self.front, strict=True):
            assert isinstance(layer, EncoderLayer)
            front.copy_(torch.cat(layer.self_attn.keys_and_values(layer.input_layernorm(hidden), rotary)))
            hidden = layer(hidden, rotary)
            outputs.append(hidden[:, :1])
        for place, (head, source) in enumerate(zip(self.key_value_heads, self.sources, strict=True)):
            self.sink[:, place] = torch.cat(head(outputs[source]))

    def encode(self, embeddings: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Encodes segments, each alone and from position zero, in one batch.

        Args:
            embeddings: one [tokens, hidden] per segment.

        Returns:
            per segment, keys and values, each [cross_layers, tokens, kv_heads, head_dim]; behind a front, of one
            more token than the segment has, the sink
        """
        keys, values = self(embeddings)
        counts = [len(segment) + self.config.sink_tokens for segment in embeddings]
        if uses_packing(self.config._attn_implementation):
            return list(zip(keys[0].split(counts, dim=1), values[0].split(counts, dim=1), strict=True))
        # taken apart at once: an index per segment would have a gradient as large as the batch
        rows = zip(keys.unbind(), values.unbind(), counts, strict=True)
        return [(key[:, :count], value[:, :count]) for key, value, count in rows]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of what the encoder computes: of its K/V heads, as LoRA may stand beside layers in another."""
        return next(chain(self.key_value_heads.parameters(), self.parameters())).dtype

    def forward(self, embeddings: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values of a batch of segments, padded or (flash attention) packed in one row.

        `encode` takes them apart, outside the module: ZeRO-3 counts a module's output tensors, which must be the same
        number on every rank.

        Returns:
            keys, values: [rows, cross_layers, tokens, kv_heads, head_dim]
        """
        first = self.config.front_tokens  # where segments begin
        counts = [len(segment) for segment in embeddings]
        lengths, seen = Lengths(torch.tensor(counts)), Lengths(torch.tensor(counts) + first)
        packed = uses_packing(self.config._attn_implementation)
        device = embeddings[0].device
        if packed:
            hidden = torch.cat(embeddings)[None]
            positions = torch.cat([torch.arange(first, first + count, device=device) for count in counts])[None]
            mask: dict[str, Any] = {"cu_seq_lens_q": lengths.offsets(device), "cu_seq_lens_k": seen.offsets(device),
                                    "max_length_q": lengths.longest, "max_length_k": seen.longest}  # fmt: skip
        else:
            hidden = nn.utils.rnn.pad_sequence(embeddings, batch_first=True)
            positions = torch.arange(first, seen.longest, device=device)[None]
            # behind a causal mask no token sees the padding on its right
            mask = {"key_mask": None if self.config.causal else seen.mask(device)}
        hidden, rotary, outputs = hidden.to(self.dtype), self.rotary(positions), []
        segments = counts if packed else None
        fronts = [None] * len(self.layers) if self.front is None else self.front.unbind()
        for layer, front in zip(self.layers, fronts, strict=True):
            hidden = layer(hidden, rotary, front=front, counts=segments, **mask)
            outputs.append(hidden)
        pairs = [head(outputs[source]) for head, source in zip(self.key_value_heads, self.sources, strict=True)]
        keys, values = (torch.stack(tensors, dim=1) for tensors in zip(*pairs, strict=True))
        if self.sink is not None:
            keys, values = in_front(self.sink[0], keys, segments), in_front(self.sink[1], values, segments)
        return keys, values


def padded_batches(rows: Sequence[T], budget: int, length: Callable[[T], int] = len) -> Iterator[list[T]]:  # type: ignore[assignment]  # of segments
    """Runs of segments, or other rows with a length (sorted by it), whose padded size stays under `budget` tokens."""
    batch: list[T] = []
    for row in rows:
        if batch and (len(batch) + 1) * length(row) > budget:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def equal_parts(segments: list[tuple[int, ...]], parts: int) -> list[list[tuple[int, ...]]]:
    """Segments (sorted by length) in so many runs of about as many tokens each, none empty."""
    cuts: list[int] = []
    total, done = sum(map(len, segments)), 0
    for place, segment in enumerate(segments):
        left = parts - 1 - len(cuts)
        # cut where a share of the tokens is full, and in time for the rest to be one each
        if place and left and (done >= total * (len(cuts) + 1) / parts or len(segments) - place == left):
            cuts.append(place)
        done += len(segment)
    return [segments[start:end] for start, end in zip([0, *cuts], [*cuts, len(segments)], strict=True)]

"""Synthetic decoding streams for MAC: queries that resemble earlier ones, and what reusing attention does to them.

White noise says nothing about real models: under a rotary embedding even equal queries at two positions look at far
keys in unrelated ways, and any reuse is wrong (`white=True` is that control). What is made here has the two properties
that MAC rests on, each with a strength of its own: *content* lies in slow rotary pairs, which hardly turn within a
window, and moves a little with every token; *recency* lies in fast pairs and draws attention to the latest keys.

Shapes: N = context + steps tokens, H query heads, G key/value heads, D channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from comb.kernels.mac.mac_config import MacConfig
from comb.kernels.mac.state import MacState, prompt_rows
from comb.kernels.mac.step import attend, step

_BASE = 500_000.0


@dataclass(frozen=True)
class StreamSpec:
    """What a stream is like."""

    context: int  # tokens of the prompt
    steps: int  # decode steps behind it
    heads: int = 8
    kv_heads: int = 2
    width: int = 64
    drift: float = 0.05  # how far content moves per token: 0 stands still, 1 is another query every time
    recency: float = 10.0  # by how much the latest key's score stands above others', in nats
    content: float = 1.0  # standard deviation of scores by content, in nats
    white: bool = False  # white noise in all channels instead, where nothing of the above holds
    seed: int = 0


@dataclass(frozen=True)
class Stream:
    """Queries [H, N, D] before and after the rotary embedding, keys and values [G, N, D]."""

    spec: StreamSpec
    unrotated: Tensor
    queries: Tensor
    keys: Tensor
    values: Tensor


def make_stream(spec: StreamSpec) -> Stream:
    """The same stream for the same specification. `width` must be a multiple of 8."""
    if spec.width % 8 or spec.heads % spec.kv_heads:
        raise ValueError(f"width must be a multiple of 8 and heads one of kv_heads, got {spec}")
    generator = torch.Generator().manual_seed(spec.seed)
    tokens, width, half = spec.context + spec.steps, spec.width, spec.width // 2

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    values = noise(spec.kv_heads, tokens, width)
    if spec.white:
        queries = noise(spec.heads, 1, width).expand(-1, tokens, -1)
        keys = spec.content * noise(spec.kv_heads, tokens, width)
    else:
        queries = torch.zeros(spec.heads, tokens, width, dtype=torch.float64)
        keys = torch.zeros(spec.kv_heads, tokens, width, dtype=torch.float64)
        slow = torch.cat([torch.arange(half - half // 4, half), torch.arange(width - half // 4, width)])
        fast = torch.arange(half // 8, half // 2)
        # as far apart as white queries of the whole width, so that thresholds mean the same
        size = (width / len(slow)) ** 0.5
        walk = noise(spec.heads, tokens, len(slow))  # of unit variance, each a little off the one before it
        for token in range(1, tokens):
            walk[:, token] = (1 - spec.drift**2) ** 0.5 * walk[:, token - 1] + spec.drift * walk[:, token]
        queries[:, :, slow] = size * walk
        content = spec.content / (len(slow) ** 0.5 * size) * width**0.5
        keys[:, :, slow] = content * noise(spec.kv_heads, tokens, len(slow))
        queries[:, :, fast] = keys[:, :, fast] = (spec.recency * width**0.5 / len(fast)) ** 0.5
    return Stream(spec, *(tensor.float() for tensor in (queries, _rotate(queries), _rotate(keys), values)))


def _rotate(tensor: Tensor) -> Tensor:
    """The rotary embedding at positions from 0 on: [heads, N, D] -> [heads, N, D]."""
    half = tensor.shape[-1] // 2
    angles = torch.arange(tensor.shape[1]).double()[:, None] * _BASE ** (-torch.arange(half).double() / half)
    first, second = tensor[..., :half], tensor[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


@torch.no_grad()
def run_stream(stream: Stream, config: MacConfig) -> dict[str, Any]:
    """Decodes a stream with MAC beside exact attention, counting every key that a head reads.

    Returns:
        Of all steps and heads ``hit_rate``, ``keys_read`` and ``keys_exact``; in ``errors`` per step the relative error
        of the output over all heads.
    """
    spec, scale, start = stream.spec, stream.spec.width**-0.5, torch.zeros(1, dtype=torch.long)
    unrotated, queries, keys, values = (t[None] for t in (stream.unrotated, stream.queries, stream.keys, stream.values))
    state = MacState.empty(1, spec.heads, spec.width, spec.width, config, queries)
    last = torch.arange(max(0, spec.context - config.window), spec.context)
    prompt = (keys[:, :, : spec.context], values[:, :, : spec.context])
    state.write(prompt_rows(unrotated[:, :, last], queries[:, :, last], *prompt, last, start, config, scale))
    group = torch.arange(spec.heads) // (spec.heads // spec.kv_heads)
    read, hits, errors = [], [], []
    for m in range(spec.context, spec.context + spec.steps):
        seen, query = slice(0, m + 1), queries[:, :, m]
        done, entries = step(
            state, unrotated[:, :, m], query, keys[:, :, seen], values[:, :, seen], start, config, scale
        )
        state.write(entries)
        exact, _ = attend(query[0], stream.keys[group, seen], stream.values[group, seen], scale)
        errors.append(float((done.output[0] - exact).norm() / exact.norm()))
        read.append(done.keys_read[0])
        hits.append(done.match.hit[0])
    counted, hit, searches = torch.stack(read), torch.stack(hits), spec.heads * spec.steps  # [steps, heads]
    keys_exact = spec.heads * sum(range(spec.context + 1, spec.context + spec.steps + 1))
    return {
        "hit_rate": int(hit.sum()) / searches, "keys_read": int(counted.sum()), "keys_exact": keys_exact,
        "read_share": int(counted.sum()) / keys_exact, "most_read_on_hit": int((hit * counted).max()),
        "read_per_step": int(counted.sum()) / searches, "exact_per_step": keys_exact / searches,
        "errors": errors, "error_mean": fmean(errors),
    }  # fmt: skip

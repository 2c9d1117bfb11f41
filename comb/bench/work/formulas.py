"""What a paper's table computes rather than measures, by this library's own classes: `comb bench paper` asks for it."""

from __future__ import annotations

from collections.abc import Callable
from math import log

import torch

from comb.bench.work.mac_stream import StreamSpec, make_stream, run_stream
from comb.evaluation.table import Row
from comb.hybrid.transition import DenseTransition, DiagonalTransition, ScalarTransition
from comb.kernels.mac.mac_config import MacConfig
from comb.kernels.mac.state import MacState

_CHANNELS = 128


def addition_error() -> list[Row]:
    """HYPIC table 2: what adding a segment's state instead of composing leaves wrong, over the state's norm."""
    rows, state = [], torch.randn(1, _CHANNELS, _CHANNELS, generator=torch.Generator().manual_seed(0))
    for bits in (5, 7, 10):
        for tokens in (256, 512, 1024):
            transition = ScalarTransition(torch.full((1,), tokens * log(1 - 2**-bits)))
            wrong = state - transition.apply(state)
            rows.append({"bits": bits, "tokens": tokens, "error": float(wrong.norm() / state.norm())})
    return rows


def transition_bytes() -> list[Row]:
    """HYPIC table 3: bytes of a segment's transition per head and layer, 128 channels in 16 bits where that holds."""
    made = {
        "scalar": ScalarTransition(torch.zeros(1)),
        "diagonal": DiagonalTransition(torch.zeros(1, _CHANNELS)),
        "dense": DenseTransition(torch.eye(_CHANNELS)[None]),
    }
    return [{"family": name, "bytes": each.stored(torch.float16).tensor.nbytes} for name, each in made.items()]


def ring_overhead() -> list[Row]:
    """MAC-Attention table 7: bytes of the rings over those of keys and values of 128K tokens, Llama-3.1-8B, 16 bits."""
    heads, kv_heads, width, tokens = 32, 8, 128, 128 * 1024
    cache = 2 * kv_heads * width * tokens * 2
    rows = []
    for window in (256, 512, 1024, 2048):
        config = MacConfig(window=window, ring_dtype="bfloat16")
        like = torch.zeros(1, dtype=torch.bfloat16)
        rows.append({"window": window, "share": MacState.empty(1, heads, width, width, config, like).nbytes / cache})
    return rows


def prefill() -> list[Row]:
    """MAC-Attention table 8: a made-up prompt of 1,024 tokens in chunks of 128, any earlier chunk's token may match."""
    rows = []
    for tau, band in ((0.30, 64), (0.45, 16), (0.45, 32), (0.45, 64), (0.60, 64)):
        stream = make_stream(StreamSpec(1, 1023, heads=4, kv_heads=1, drift=0.15))
        config = MacConfig(window=1024, band=band, tau=tau, min_length=0).uncapped()
        rows += [{"tau": tau, "band": band, "chunk": chunk, **run_stream(stream, config, chunk)} for chunk in (1, 128)]
    return rows


FORMULAS: dict[str, Callable[[], list[Row]]] = {
    "addition_error": addition_error,
    "transition_bytes": transition_bytes,
    "ring_overhead": ring_overhead,
    "prefill": prefill,
}

"""Calls of the kernels as data, and how wrong an answer of theirs is: what `comb bench kernels` checks and times.

Attention to noise is small, the mean of thousands of values, so an absolute bound would pass a kernel that leaves keys
out. Errors are relative: of every vector by its own length, the largest of all. Each case also has answers that are
wrong on purpose, as a kernel with a fault would give them; a check that doesn't notice them counts for nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from comb.cache.quantization import quantize
from comb.kernels.mac.kernel import fused_step
from comb.kernels.mac.mac_config import MacConfig
from comb.kernels.mac.state import MacState
from comb.kernels.mac.step import MacStep, attend, step
from comb.kernels.paged.attention import BlockTable, PagedBatch, PagedLayer, attend_plain
from comb.kernels.paged.kernel import attend_paged
from comb.kernels.paged.plan import launch_for

BOUNDS = {torch.float32: 5e-5, torch.float16: 3e-3, torch.bfloat16: 1e-2}
"""Of relative errors; right answers have about a fourth of them, as weights are rounded to the queries' dtype."""
TILE = 64
"""Keys that a wrong answer leaves out: one turn of a kernel's loop."""


@dataclass(frozen=True)
class KernelCall:
    """One call of the kernels on a device: calling `kernel` or its `rival` again does the same work."""

    kernel: Callable[[], object]
    answer: Callable[[], Any]  # what the kernels give, as `error` takes it
    plain: Callable[[], Any]  # what the plain way gives
    error: Callable[[Any], float]  # relative, from the plain way; infinite where another choice was made
    rival: Callable[[], Tensor]
    rival_error: Callable[[Tensor], float]
    wrong: Mapping[str, Callable[[], Any]]  # the plain way's answers with a fault, by name
    wrong_rivals: Mapping[str, Callable[[], Tensor]]
    bound: float  # of all errors
    nbytes: int  # keys and values that it must read, each once
    rival_nbytes: int

    def fault(self) -> tuple[dict[str, float], str]:
        """Errors by what they are of, and what speaks against timing the call; empty if nothing does."""
        errors = {"error": self.error(self.answer()), "rival_error": self.rival_error(self.rival())}
        wrong = {name: self.error(make()) for name, make in self.wrong.items()}
        wrong |= {name: self.rival_error(make()) for name, make in self.wrong_rivals.items()}
        found = errors | {"least_wrong": min(wrong.values())}
        if not errors["error"] < self.bound:
            return found, f"the kernel is off by {errors['error']:.2g}, more than {self.bound:.2g}"
        if not errors["rival_error"] < self.bound:
            return found, f"what it is compared with is off by {errors['rival_error']:.2g}, more than {self.bound:.2g}"
        unseen = [f"{name} ({error:.2g})" for name, error in wrong.items() if not error > 2 * self.bound]
        return found, f"the check would hardly notice {', '.join(unseen)}" if unseen else ""


@dataclass(frozen=True)
class MacCase:
    """A decode step of MAC attention for `rows` requests of `context` tokens."""

    config: MacConfig
    rows: int
    context: int
    hits: float = 0.5  # share of the key/value heads whose query heads all find their query, unchanged, in the ring
    dtype: torch.dtype = torch.bfloat16
    heads: int = 32
    groups: int = 8
    width: int = 128
    chains: int = 1  # those of the ring's entries are drawn below it

    def make(self, device: torch.device) -> KernelCall:
        """Kernels against the plain step: outputs, log-sum-exps and rings; the rival is torch's exact attention."""
        draw, config, scale = torch.Generator(device).manual_seed(0), self.config, self.width**-0.5

        def noise(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=draw, device=device, dtype=self.dtype)

        keys, values = (noise(self.rows, self.groups, self.context, self.width) for _ in range(2))
        query, unrotated = (noise(self.rows, self.heads, self.width) for _ in range(2))
        start = torch.arange(self.rows, device=device)  # padding in front
        state = self._rings(noise, unrotated, draw)

        def kernel(into: MacState = state) -> MacStep:
            # the ring's oldest slot is written, which no later call matches
            return fused_step(into, unrotated, query, keys, values, start, config, scale)

        def plain(by: float = scale) -> tuple[MacStep, MacState]:
            written = deepcopy(state)
            return step(written, unrotated, query, keys, values, start, config, by), written

        def rival(length: int = self.context) -> Tensor:
            # query heads that share keys are queries of one head: keys are read once
            found = F.scaled_dot_product_attention(
                query.unflatten(1, (self.groups, -1)), keys[:, :, :length], values[:, :, :length]
            )
            return found.flatten(1, 2)

        def answer() -> tuple[MacStep, MacState]:
            written = deepcopy(state)
            return kernel(written), written

        wanted, rings = plain()

        def error(answer: tuple[MacStep, MacState]) -> float:
            found, written = answer
            same = all(torch.equal(getattr(written, name), getattr(rings, name)) for name in ("pos", "chain"))
            same &= torch.equal(found.match.pos, wanted.match.pos) and torch.equal(found.keys_read, wanted.keys_read)
            if not same:
                return math.inf
            sums = [(found.lse, wanted.lse), (written.lse, rings.lse)]
            vectors = [(found.output, wanted.output), (written.o, rings.o), (written.query, rings.query)]
            # distances of queries are differences of their squares: of an equal one nothing but rounding is left
            drift = float((written.drift - rings.drift).abs().max()) / math.sqrt(2 * self.width)
            found_errors = [*(_error_of_sums(*pair) for pair in sums), *(relative_error(*pair) for pair in vectors)]
            return max([drift, *found_errors])

        def dropped_tile() -> tuple[MacStep, MacState]:
            # the latest keys, which every head reads, taken out of the softmax
            size = min(TILE, config.band // 2)
            o, lse = self._exact(query, keys, values, self.context - size)
            share = torch.exp(lse - wanted.lse)
            output = (wanted.output - share[..., None] * o) / (1 - share)[..., None]
            return replace(wanted, output=output, lse=wanted.lse + torch.log1p(-share)), deepcopy(rings)

        return KernelCall(
            kernel,
            answer,
            plain,
            error,
            rival,
            # the rival sees padding, too
            lambda found: relative_error(found, self._exact(query, keys, values, 0)[0]),
            {"a tile left out": dropped_tile, "scores a tenth too large": partial(plain, 1.1 * scale)},
            {"a fourth of the rival's keys left out": partial(rival, self.context * 3 // 4)},
            max(BOUNDS[self.dtype], BOUNDS[torch.bfloat16] if config.ring_dtype != "auto" else 0.0),
            int(wanted.group_keys_read.sum()) * 2 * self.width * keys.itemsize,
            keys.nbytes + values.nbytes,
        )

    def _exact(self, query: Tensor, keys: Tensor, values: Tensor, low: int) -> tuple[Tensor, Tensor]:
        """Attention to all keys from `low` on, row by row: o [B, H, V], lse [B, H]."""
        found = []
        for own, key, value in zip(query.unflatten(1, (self.groups, -1)), keys, values, strict=True):
            one = attend(own, key[:, None, low:], value[:, None, low:], self.width**-0.5)
            found.append([part.flatten(0, 1) for part in one])
        o, lse = (torch.stack(parts) for parts in zip(*found, strict=True))
        return o, lse

    def _rings(self, noise: Callable[..., Tensor], unrotated: Tensor, draw: torch.Generator) -> MacState:
        """Rings full of noise as small as attention's, in which chosen groups of heads find their query."""
        window, shared = self.config.window, self.heads // self.groups
        state = MacState.empty(self.rows, self.heads, self.width, self.width, self.config, unrotated)
        state.query.copy_(noise(*state.query.shape))
        # of scores with variance 1: the sum of weights is e^0.5 a key, the mean of values has variance e / keys
        state.o.copy_(noise(*state.o.shape) * math.sqrt(math.e / self.context))
        state.lse.fill_(math.log(self.context) + 0.5)
        state.chain.copy_(torch.randint(self.chains, state.chain.shape, generator=draw, device=state.chain.device))
        order = torch.randperm(self.rows * self.groups, generator=torch.Generator().manual_seed(1)).tolist()
        for row in range(self.rows):
            position = self.context - 1 - row
            latest = torch.arange(position - window + 1, position, device=state.pos.device)
            state.pos[row, latest % window] = latest
            for group, place in enumerate(order[row * self.groups : (row + 1) * self.groups]):
                if place < round(self.hits * len(order)):
                    own = slice(group * shared, (group + 1) * shared)
                    slot = (position - 1 - place % (window - 1)) % window
                    state.query[row, slot, own] = unrotated[row, own].to(state.query.dtype)
        return state


@dataclass(frozen=True)
class PagedCase:
    """One layer's attention of a step: `rows` requests of `queries` tokens each over `documents` of `tokens` each."""

    rows: int
    documents: int
    tokens: int
    queries: int = 1
    dtype: torch.dtype = torch.bfloat16
    fp8: bool = False
    heads: int = 32
    groups: int = 8
    width: int = 128
    block: int = 16
    least_keys: int = 256

    def make(self, device: torch.device) -> KernelCall:
        """The kernels against the plain way, in shuffled blocks of a pool; slots that no row may read are NaN."""
        draw = torch.Generator(device).manual_seed(0)
        layer, tables = self.stored(device, draw)
        batch = PagedBatch((self.queries,) * self.rows, tables)
        query = torch.randn(
            self.rows * self.queries, self.heads, self.width, generator=draw, device=device, dtype=self.dtype
        )
        launch = replace(launch_for(self.dtype, self.width, fp8=self.fp8), least_keys=self.least_keys)
        kernel, rival = partial(attend_paged, query, layer, batch, launch), partial(attend_plain, query, layer, batch)
        wanted = attend_plain(query.double(), layer, batch)
        error = partial(relative_error, wanted=wanted)

        def dropped_tile() -> Tensor:
            # in one row alone, the last one: without the blocks of its first keys, though never without all
            short = BlockTable([(self.block, (0,))], self.block)
            whole = tables[-1].last
            short.last = whole[min(TILE // self.block, len(whole) // 2) :]
            own = attend_plain(query[-self.queries :], layer, PagedBatch((self.queries,), (short,)))
            return torch.cat([wanted[: -self.queries], own.to(wanted)])

        wrong: dict[str, Callable[[], Tensor]] = {
            "a tile left out": dropped_tile,
            "scores a tenth too large": lambda: attend_plain(1.1 * query, layer, batch),
        }
        if len(query) > 1:
            wrong["another row's answer"] = lambda: rival().roll(1, 0)
        each = self.width + 4 if self.fp8 else self.dtype.itemsize * self.width
        nbytes = 2 * each * self.groups * self.rows * self.documents * self.tokens
        return KernelCall(kernel, kernel, rival, error, rival, error, wrong, {}, BOUNDS[self.dtype], nbytes, nbytes)

    def stored(self, device: torch.device, draw: torch.Generator) -> tuple[PagedLayer, tuple[BlockTable, ...]]:
        """Documents of noise in shuffled blocks, and each row's; all other slots are NaN."""
        count = -(-self.tokens // self.block)
        order = iter(torch.randperm(self.rows * self.documents * count).tolist())
        tables = tuple(
            BlockTable([(self.tokens, [next(order) for _ in range(count)]) for _ in range(self.documents)], self.block)
            for _ in range(self.rows)
        )
        slots = self.rows * self.documents * count * self.block
        hole = torch.ones(slots, dtype=torch.bool, device=device)
        for table in tables:
            hole[table.slots(device)] = False
        parts, scales = [], []
        for _ in range(2):
            part = torch.randn(slots, self.groups, self.width, generator=draw, device=device, dtype=self.dtype)
            if self.fp8:
                part, scale = quantize(part, "fp8")
                part.view(torch.uint8).masked_fill_(hole[:, None, None], 0x7F)  # NaN
                scales.append(scale[..., 0].float().masked_fill_(hole[:, None], math.nan))
            parts.append(part if self.fp8 else part.masked_fill_(hole[:, None, None], math.nan))
        return PagedLayer(parts[0], parts[1], self.block, *scales), tables


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """The largest ``|found - wanted| / |wanted|`` of all vectors [..., D]; NaN is infinitely far."""
    apart = (found.double() - wanted.double()).norm(dim=-1)
    share = torch.where(apart == 0, 0.0, apart / wanted.double().norm(dim=-1))
    return float(torch.nan_to_num(share, nan=math.inf).max())


def _error_of_sums(found: Tensor, wanted: Tensor) -> float:
    """Relative error of the sums that these log-sum-exps are of; empty ones are equal, NaN is infinitely far."""
    apart = torch.where(found == wanted, 0.0, (found.double() - wanted.double()).abs())
    return float(torch.expm1(torch.nan_to_num(apart, nan=math.inf)).max())


def seconds_of(call: Callable[[], object], device: torch.device) -> list[float]:
    """Of a call that gives the same, each time it is replayed; on a CPU it shows that it runs, nothing else."""
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return [time.perf_counter() - start]
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):  # compiles, and fills the allocator
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    found: Any = triton.testing.do_bench(graph.replay, warmup=5, rep=50, return_mode="all")
    return [milliseconds / 1000 for milliseconds in found]


def label(case: MacCase | PagedCase) -> str:
    """What of it isn't the default."""
    parts = []
    for each in fields(case):
        value = getattr(case, each.name)
        if isinstance(value, MacConfig):
            parts.append(f"window {value.window}, band {value.band}, sink {value.sink}")
        elif value != each.default:
            parts.append(f"{each.name} {value}".replace("torch.", ""))
    return ", ".join(parts)


_MAC = MacConfig(window=48, band=20, tau=0.6, min_length=0, max_chain=None, max_drift=False)
_SMALL = MacCase(_MAC, 2, 150, dtype=torch.float32, heads=6, groups=2, width=10)
_MAC_CHECKS = (
    _SMALL,
    replace(_SMALL, dtype=torch.bfloat16),
    replace(_SMALL, config=replace(_MAC, sink=7, max_chain=1, max_drift=True), chains=2),
    replace(_SMALL, config=replace(_MAC, ring_dtype="bfloat16"), dtype=torch.float16, hits=1.0),
    replace(_SMALL, rows=1, width=256, hits=0.0),
    MacCase(replace(_MAC, window=1024, band=256), 4, 6000),
    MacCase(replace(_MAC, window=1024, band=256), 4, 6000, hits=0.0),
)
# the paper's Fig. 6 searches 512 queries; rings in 16 bits as its release
_FIG6 = MacConfig(window=512, band=256, tau=0.8, min_length=0, ring_dtype="bfloat16")
_MAC_TIMES = tuple(
    MacCase(_FIG6, rows, context, hits)
    for rows, context in ((1, 32768), (8, 32768), (32, 32768), (1, 131072), (8, 131072)) for hits in (0.0, 0.9, 1.0)
)  # fmt: skip
_PAGED_CHECKS = tuple(
    PagedCase(rows, 3, 37, queries, dtype, fp8, least_keys=least)
    for dtype in BOUNDS for fp8 in (False, True) for rows, queries, least in ((4, 1, 256), (2, 37, 16))
)  # fmt: skip
_PAGED_TIMES = tuple(
    PagedCase(rows, 8, tokens, queries, fp8=fp8)
    for fp8 in (False, True) for queries in (1, 256) for rows, tokens in ((1, 500), (8, 500), (8, 4000), (128, 500))
)  # fmt: skip
_TINY: dict[str, Any] = {"dtype": torch.float32, "heads": 4, "groups": 2, "width": 16}
_TINY_PAGED = tuple(
    PagedCase(3, 2, 9, queries, fp8=fp8, block=4, **_TINY) for queries in (1, 5) for fp8 in (False, True)
)
Cases = tuple[MacCase | PagedCase, ...]
CASES: dict[str, tuple[Cases, Cases]] = {"mac": (_MAC_CHECKS, _MAC_TIMES), "paged": (_PAGED_CHECKS, _PAGED_TIMES)}
"""By part of `comb bench kernels`: what is compared, and what is compared and timed."""
TINY_CASES: dict[str, tuple[Cases, Cases]] = {
    "mac": (
        _MAC_CHECKS[:4],
        tuple(MacCase(replace(_MAC, window=16, band=8), 2, 96, hits, **_TINY) for hits in (0.0, 1.0)),
    ),
    "paged": (_TINY_PAGED, _TINY_PAGED),
}

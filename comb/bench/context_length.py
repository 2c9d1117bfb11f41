"""`comb bench context-length`: time to first token against the length of the context (EPIC sec. 5.6, Fig. 9).

Random token segments and a random query, so that any model can be measured, also one with random weights. In every
repeat all methods take their turn before the next repeat begins, so that a machine that slows down slows all of them;
ratios are taken within a repeat. Tokenisation and the store's look-up are not part of it.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from tqdm import tqdm

from comb import methods
from comb.backbones.exclusive import backbone_of
from comb.bench.comparison import one_line
from comb.bench.memory import peak_memory
from comb.cache.picache import PICache
from comb.evaluation.run import Timing
from comb.methods.base import DecodeState, Method

OUT_OF_MEMORY = (torch.OutOfMemoryError, MemoryError)


@dataclass(frozen=True)
class LengthResult:
    """One method at one context length.

    Args:
        tokens: of all segments together; the query comes on top.
        ttft_cached_s: link and first token, from PICaches in memory.
        ttft_cold_s: the same with compiling all segments before it.
        speedup: TTFT of `full` over `ttft_cached_s`, both of the same repeat; None without `full`.
        recomputed_tokens: document tokens that were prefilled.
        stages_s: where the cached TTFT goes, median seconds: the method's own stages, the rest of `link`, and the
            first token, which is what ``generate`` takes behind it.
        cache_bytes: of all PICaches.
        peak_memory_bytes: most bytes of tensors that link and first token add; None: not measured.
        refused: why nothing was measured.
    """

    method: str
    tokens: int
    ttft_cached_s: Timing | None = None
    ttft_cold_s: Timing | None = None
    speedup: Timing | None = None
    recomputed_tokens: int = 0
    stages_s: dict[str, float] = field(default_factory=dict)
    cache_bytes: int = 0
    peak_memory_bytes: int | None = None
    refused: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def random_model(
    *,
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    vocab: int,
    positions: int,
    hybrid: bool = False,
    seed: int = 0,
) -> Any:
    """A Llama with random weights, the same for the same seed.

    Args:
        hybrid: a Qwen3.5 instead, three gated DeltaNet layers to each full one.

    Raises:
        ValueError: if the sizes don't go together.
    """
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3_5TextConfig

    if min(layers, hidden, heads, kv_heads, vocab) < 1 or hidden % heads or heads % kv_heads or (hidden // heads) % 2:
        raise ValueError(
            f"no Llama has hidden={hidden}, heads={heads}, kv_heads={kv_heads}: heads must divide hidden into an even "
            "size, and kv_heads must divide heads"
        )
    sizes: dict[str, Any] = {
        "vocab_size": vocab, "hidden_size": hidden, "intermediate_size": 4 * hidden, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "max_position_embeddings": positions,
        "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0,
    }  # fmt: skip
    if hybrid:
        width = hidden // heads
        kinds = ["full_attention" if index % 4 == 3 or index == layers - 1 else "linear_attention"
                 for index in range(layers)]  # fmt: skip
        config: Any = Qwen3_5TextConfig(
            **sizes, head_dim=width, layer_types=kinds, linear_num_key_heads=heads, linear_num_value_heads=heads,
            linear_key_head_dim=width, linear_value_head_dim=width,
        )  # fmt: skip
    else:
        config = LlamaConfig(**sizes)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config).eval()


@dataclass(frozen=True)
class Work:
    """The segments and the query of one measurement, as token ids."""

    segments: tuple[tuple[int, ...], ...]
    query: tuple[int, ...]

    @classmethod
    def random(cls, vocab: int, tokens: int, segment_tokens: int, query_tokens: int, seed: int = 0) -> Work:
        """`tokens` random ids cut into segments of `segment_tokens` (the last may be shorter), and a query."""
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(vocab, (tokens + query_tokens,), generator=generator).tolist()
        cuts = range(0, tokens, segment_tokens)
        return cls(tuple(tuple(ids[cut : min(cut + segment_tokens, tokens)]) for cut in cuts), tuple(ids[tokens:]))

    @property
    def flat(self) -> list[int]:
        """The whole prompt."""
        return [*(token for segment in self.segments for token in segment), *self.query]


def measure_context_length(
    model: Any,
    specs: Sequence[str],
    lengths: Sequence[int],
    *,
    segment_tokens: int = 512,
    query_tokens: int = 32,
    repeats: int = 5,
    memory: bool = True,
    seed: int = 0,
    progress: bool = True,
) -> list[LengthResult]:
    """Results by length, then by method.

    Before anything is timed, every method links a short prompt: its logits must be finite, and those of `full` must be
    the plain model's. A method that fails is refused.

    Raises:
        ValueError: for sizes below 1, or when `full` differs from the plain model.
    """
    for name, value in (("segment tokens", segment_tokens), ("query tokens", query_tokens), ("repeats", repeats)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    vocab = vocabulary(model)
    made, refused = _make(model, specs, Work.random(vocab, 40, 20, 8, seed))
    results = []
    for length in tqdm(lengths, "context lengths", disable=not progress, leave=False):
        work = Work.random(vocab, length, segment_tokens, query_tokens, seed)
        found = _Length(work, length, made, repeats, memory)(progress)
        for spec in specs:
            reason = refused.get(spec)
            results.append(LengthResult(spec, length, refused=reason) if reason else found[spec])
    return results


def vocabulary(model: Any) -> int:
    """Rows of the model's embedding table."""
    return int(backbone_of(model).get_input_embeddings().weight.shape[0])


def growth_exponent(results: Sequence[LengthResult], method: str) -> float | None:
    """Slope of log(cached TTFT) over log(context length), by least squares; None for fewer than two lengths."""
    points = [
        (math.log(result.tokens), math.log(result.ttft_cached_s.median))
        for result in results
        if result.method == method and result.ttft_cached_s is not None
    ]
    if len(points) < 2:
        return None
    return statistics.linear_regression(*zip(*points, strict=True)).slope


def _make(model: Any, specs: Sequence[str], work: Work) -> tuple[dict[str, Method], dict[str, str]]:
    """The methods that run on this model and pass the check, and per other method the reason."""
    made, refused = {}, {}
    for spec in specs:
        try:
            method = methods.create(spec, model)
            _check(method, work)
        except (ValueError, NotImplementedError) as error:
            if methods.parse(spec)[0] == "full":
                raise
            refused[spec] = one_line(error)
        else:
            made[spec] = method
    return made, refused


def _check(method: Method, work: Work) -> None:
    """Raises ValueError unless the logits on a short prompt are finite, and for `full` those of the plain model."""
    state = method.link(method.compile(work.segments), work.query)
    logits = state.logits[0]
    state.release()
    if not bool(torch.isfinite(logits).all()):
        raise ValueError("check failed: the logits of a short prompt are not finite")
    if method.name != "full":
        return
    with torch.no_grad():
        ids = torch.tensor([work.flat], device=logits.device)
        plain = method.backbone(input_ids=ids).logits[0, -1].float()
    # one rounding of the dtype the model computes in, at the size of the largest logit
    allowed = 16 * torch.finfo(method.backbone.dtype).eps * float(plain.abs().max())
    difference = float((logits - plain).abs().max())
    if not difference <= allowed:
        raise ValueError(
            f"check failed: `full` differs from the plain model by {difference:.2g} in a logit (allowed: {allowed:.2g})"
            "; no ratio to it would mean anything"
        )


class _Length:
    """All methods at one length."""

    def __init__(self, work: Work, tokens: int, made: dict[str, Method], repeats: int, memory: bool) -> None:
        self.work = work
        self.tokens = tokens
        self.methods = made
        self.repeats = repeats
        self.memory = memory
        self.refused: dict[str, str] = {}
        self.cold: dict[str, list[float]] = {spec: [] for spec in made}
        self.cached: dict[str, list[float]] = {spec: [] for spec in made}
        self.stages: dict[str, list[dict[str, float]]] = {spec: [] for spec in made}
        self.peaks: dict[str, int] = {}
        self.recomputed: dict[str, int] = {}
        self.bytes: dict[str, int] = {}

    def __call__(self, progress: bool) -> dict[str, LengthResult]:
        for repeat in tqdm(range(-1, self.repeats), f"{self.tokens} tokens", disable=not progress, leave=False):
            compiled: dict[tuple[str, ...], tuple[list[PICache], float]] = {}
            for spec, method in self.methods.items():
                if spec in self.refused:
                    continue
                try:
                    self._once(spec, method, compiled, warm_up=repeat < 0)
                except ValueError as error:
                    self.refused[spec] = one_line(error)
                except OUT_OF_MEMORY:
                    self.refused[spec] = f"out of memory at {self.tokens} tokens"
                except RuntimeError as error:
                    if "allocate memory" not in str(error):  # how torch's CPU allocator says it
                        raise
                    self.refused[spec] = f"out of memory at {self.tokens} tokens"
        return {spec: self._result(spec) for spec in self.methods}

    def _once(
        self,
        spec: str,
        method: Method,
        compiled: dict[tuple[str, ...], tuple[list[PICache], float]],
        *,
        warm_up: bool,
    ) -> None:
        """One method's turn in one repeat."""
        # what several methods compile alike is compiled once per repeat
        kind = (method.compile_name or method.name, method.fingerprint)
        if kind not in compiled:
            start = time.perf_counter()
            picaches = method.compile(self.work.segments)
            _wait(method)
            compiled[kind] = picaches, time.perf_counter() - start
        picaches, compile_s = compiled[kind]
        if warm_up:
            self._warm_up(spec, method, picaches)
        else:
            cold = cached = self._first_token(method, picaches)
            if method.needs_store:  # it keeps what it computed by itself
                cached = self._first_token(method, picaches)
            self.cold[spec].append(compile_s + sum(cold[0].values()))
            self.cached[spec].append(sum(cached[0].values()))
            self.stages[spec].append(cached[0])
        if method.needs_store:
            method.store.clear()  # type: ignore[attr-defined]  # what needs_store says

    def _warm_up(self, spec: str, method: Method, picaches: Sequence[PICache]) -> None:
        """Lets everything lazy happen, and takes what isn't a time."""
        if method.needs_store:
            self._first_token(method, picaches)
        recomputed: list[int] = []

        def cached() -> None:
            recomputed.append(self._first_token(method, picaches)[1].recomputed_tokens)

        if self.memory:
            self.peaks[spec] = peak_memory(method.backbone.device, cached)
        else:
            cached()
        self.recomputed[spec] = recomputed[0]
        self.bytes[spec] = _cache_bytes(method, picaches)

    def _first_token(self, method: Method, picaches: Sequence[PICache]) -> tuple[dict[str, float], DecodeState]:
        """Seconds by stage from PICaches to the first token, and the state it came from."""
        start = time.perf_counter()
        state = method.link(picaches, self.work.query)
        try:
            _wait(method)
            linked = time.perf_counter()
            state.logits.argmax(-1).cpu()
            end = time.perf_counter()
        finally:
            state.release()
        own = dict(getattr(state, "seconds", {}))
        rest = max(0.0, linked - start - sum(own.values()))
        return {**own, "other linking": rest, "first token": end - linked}, state

    def _result(self, spec: str) -> LengthResult:
        if spec in self.refused:
            return LengthResult(spec, self.tokens, refused=self.refused[spec])
        full = self.cached.get("full", [])
        speedups = [whole / part for whole, part in zip(full, self.cached[spec], strict=False)]
        names = dict.fromkeys(name for stages in self.stages[spec] for name in stages)
        return LengthResult(
            method=spec,
            tokens=self.tokens,
            ttft_cached_s=Timing.of(self.cached[spec]),
            ttft_cold_s=Timing.of(self.cold[spec]),
            speedup=Timing.of(speedups),
            recomputed_tokens=self.recomputed[spec],
            stages_s={name: statistics.median(s.get(name, 0.0) for s in self.stages[spec]) for name in names},
            cache_bytes=self.bytes[spec],
            peak_memory_bytes=self.peaks.get(spec),
        )


def _cache_bytes(method: Method, picaches: Sequence[PICache]) -> int:
    """Bytes kept for the segments: PICaches, or what the method put into its own store; token ids don't count."""
    if method.name == "full":
        return 0
    if method.needs_store:
        return sum(tier.bytes for tier in method.store.stats().tiers.values())  # type: ignore[attr-defined]
    return sum(picache.nbytes for picache in picaches)


def _wait(method: Method) -> None:
    device = method.backbone.device
    if device.type == "cuda":
        torch.cuda.synchronize(device)

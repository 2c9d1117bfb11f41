"""`comb bench parallel`: TTFT of a cold prompt over several workers, stage by stage (HYPIC sec. 6.5, Fig. 14).

In every repeat each method takes its turn with each number of workers, so that a machine that slows down slows all of
them; ratios are taken within a repeat. Tokenisation and the store's look-up are not part of it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from tqdm import tqdm

from comb import methods
from comb.bench.context_length import Work
from comb.bench.simulate import CostModel, PolicyResult, Trace, random_trace, simulate
from comb.cache.picache import PICache
from comb.engine.workers import Compiled, CompileExecutor
from comb.evaluation.run import Timing
from comb.methods.base import Method


@dataclass(frozen=True)
class ParallelResult:
    """One method over one number of workers.

    Args:
        workers: that took part; 0 for `full`, which prefills the whole prompt here.
        tokens: of all segments together; the query comes on top.
        ttft_s: all three stages.
        dispatch_s: computing, of the busiest worker.
        transfer_s: what serialising, sending and checking could not hide behind computing.
        combine_s: link and first token.
        speedup: TTFT with one worker over this TTFT, both of the same repeat.
        combine_share: `combine_s` over TTFT with one worker, both of the same repeat.
        cache_bytes: of all PICaches.
        costs: fitted to the segments that one worker has compiled; for the simulation.
    """

    method: str
    workers: int
    tokens: int
    ttft_s: Timing
    dispatch_s: Timing
    transfer_s: Timing
    combine_s: Timing
    speedup: Timing
    combine_share: Timing
    cache_bytes: int = 0
    costs: CostModel | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {"kind": "measured", **asdict(self)}


@dataclass(frozen=True)
class Simulated:
    """Policies on a prompt or a trace, with the costs of a measured method."""

    name: str
    method: str
    results: tuple[PolicyResult, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {"kind": "simulated", **asdict(self)}


@dataclass
class _Samples:
    """Seconds of the stages, one of each per repeat."""

    dispatch: list[float] = field(default_factory=list)
    transfer: list[float] = field(default_factory=list)
    combine: list[float] = field(default_factory=list)

    @property
    def ttft(self) -> list[float]:
        return [sum(stages) for stages in zip(self.dispatch, self.transfer, self.combine, strict=True)]


def prompt(vocab: int, segments: int, segment_tokens: int, query_tokens: int, *, spread: float, seed: int = 0) -> Work:
    """Random token ids. `spread` is the sigma of the lengths' log-normal distribution, 0 for equal lengths.

    Raises:
        ValueError: for sizes below 1, or fewer than two segments.
    """
    if segments < 2 or min(segment_tokens, query_tokens) < 1 or spread < 0:
        raise ValueError(
            "segment parallelism takes at least two segments and one token in each and in the query, got "
            f"{segments} segments of {segment_tokens} tokens, {query_tokens} of query, spread {spread:g}"
        )
    (lengths,) = random_trace(1, segments, segment_tokens, sigma=spread, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    parts = [torch.randint(vocab, (length,), generator=generator).tolist() for length in [*lengths, query_tokens]]
    return Work(tuple(tuple(part) for part in parts[:-1]), tuple(parts[-1]))


def measure_parallel(
    model: Any,
    executor: CompileExecutor,
    specs: Sequence[str],
    workers: Sequence[int],
    work: Work,
    *,
    repeats: int = 5,
    full: bool = False,
    threads: int = 1,
    progress: bool = True,
) -> list[ParallelResult]:
    """Results by method, then by number of workers; `full` first if wanted.

    Before anything is timed, each method's logits from workers must be those from compiling here.

    Args:
        workers: numbers of them, 1 among them: it is what the others are compared with.
        threads: that torch may use here, as the workers were told; reset at the end.

    Raises:
        ValueError: for numbers of workers that the executor doesn't have, or when a check fails.
    """
    if 1 not in workers or not all(1 <= count <= executor.workers for count in workers):
        raise ValueError(f"workers are counts from 1 to {executor.workers}, 1 among them; got {list(workers)}")
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, got {repeats}")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        made = {spec: methods.create(spec, model) for spec in specs}
        sizes = {spec: _check(method, executor, work) for spec, method in made.items()}
        plain = methods.create("full", model) if full else None
        samples = {(spec, count): _Samples() for spec in specs for count in workers}
        whole = _Samples()
        segments: dict[str, list[tuple[int, float, float]]] = {spec: [] for spec in specs}
        for _ in tqdm(range(repeats), "repeats", disable=not progress, leave=False):
            if plain is not None:
                compiled = plain.compile(work.segments)
                _add(whole, Compiled(compiled, 0.0, 0.0), _first_token(plain, compiled, work))
            for spec, method in made.items():
                for count in workers:
                    run = executor.run(method, work.segments, workers=count)
                    _add(samples[spec, count], run, _first_token(method, run.picaches, work))
                    if count == 1:
                        total = sum(map(len, work.segments))
                        segments[spec] += [
                            (len(segment), seconds, run.decode_s / total)
                            for segment, seconds in zip(work.segments, run.segment_s, strict=True)
                        ]
    finally:
        torch.set_num_threads(before)
    if executor.stats.locally:
        raise ValueError(f"workers were lost on the way, so these are no times of workers: {executor.stats}")
    results = [_result("full", 0, work, whole, samples[specs[0], 1])] if full else []
    for spec in specs:
        combine_s = statistics.median(samples[spec, 1].combine)
        costs = CostModel.fitted(
            [(tokens, seconds) for tokens, seconds, _ in segments[spec]],
            statistics.median(decode for _, _, decode in segments[spec]), combine_s,
        )  # fmt: skip
        results += [
            _result(spec, count, work, samples[spec, count], samples[spec, 1], sizes[spec], costs) for count in workers
        ]
    return results


def simulate_beyond(
    measured: Sequence[ParallelResult], work: Work, workers: Sequence[int], trace: Trace, trace_name: str
) -> list[Simulated]:
    """The measured prompt over more workers, with each method's costs; then a trace with those of the first."""
    lengths: Trace = [[len(segment) for segment in work.segments]]
    costs = [(result.method, result.costs) for result in measured if result.workers == 1 and result.costs is not None]
    plans = [("this prompt", method, lengths, cost) for method, cost in costs]
    plans += [(trace_name, method, trace, cost) for method, cost in costs[:1]]
    return [Simulated(name, method, tuple(simulate(asked, workers, cost))) for name, method, asked, cost in plans]


def _check(method: Method, executor: CompileExecutor, work: Work) -> int:
    """Bytes of all PICaches. Raises ValueError unless workers give the logits that compiling here gives."""
    executor.check(method)
    few = Work(work.segments[:2], work.query)
    logits = []
    for picaches in (executor.compile(method, few.segments), [method.compile([s])[0] for s in few.segments]):
        state = method.link(picaches, few.query)
        logits.append(state.logits[0])
        state.release()
    difference = float((logits[0] - logits[1]).abs().max())
    # threads may differ in how they add up: one rounding at the size of the largest logit
    allowed = 16 * torch.finfo(method.backbone.dtype).eps * float(logits[1].abs().max())
    if not difference <= allowed:
        raise ValueError(
            f"check failed: {method.name!r} over workers differs by {difference:.2g} (allowed {allowed:.2g})"
        )
    picaches = executor.compile(method, work.segments)
    return sum(picache.nbytes for picache in picaches)


def _first_token(method: Method, picaches: Sequence[PICache], work: Work) -> float:
    start = time.perf_counter()
    state = method.link(picaches, work.query)
    try:
        state.logits.argmax(-1).cpu()
    finally:
        state.release()
    return time.perf_counter() - start


def _add(samples: _Samples, run: Compiled, combine_s: float) -> None:
    samples.dispatch.append(run.dispatch_s)
    samples.transfer.append(run.transfer_s)
    samples.combine.append(combine_s)


def _result(
    spec: str,
    workers: int,
    work: Work,
    own: _Samples,
    serial: _Samples,
    nbytes: int = 0,
    costs: CostModel | None = None,
) -> ParallelResult:
    pairs = list(zip(serial.ttft, own.ttft, own.combine, strict=True))
    return ParallelResult(
        spec, workers, sum(map(len, work.segments)),
        ttft_s=Timing.over(own.ttft), dispatch_s=Timing.over(own.dispatch), transfer_s=Timing.over(own.transfer),
        combine_s=Timing.over(own.combine), speedup=Timing.over([one / more for one, more, _ in pairs]),
        combine_share=Timing.over([combine / one for one, _, combine in pairs]), cache_bytes=nbytes, costs=costs,
    )  # fmt: skip

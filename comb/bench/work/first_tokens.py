"""Times to the first token and peak memory, of all methods in turn: `comb bench context-length`."""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from comb import methods
from comb.bench.harness import or_refused, ratios
from comb.bench.work.random_prompts import RandomPrompt, check_logits, first_token, synchronize, vocabulary
from comb.cache.picache import PICache
from comb.evaluation.table import Row, Timing
from comb.methods.base import Method
from comb.methods.prefixes import prefixes_of


def measure_context_length(
    model: Any, specs: Sequence[str], lengths: Sequence[int], shape: tuple[int, int], *, repeats: int, seed: int
) -> Iterator[Row]:
    """Rows by length, then by method.

    Before anything is timed, every method links a short prompt: its logits must be finite, and those of `full` must be
    the plain model's. A method that fails is refused.

    Args:
        shape: tokens of a segment, and of the query.

    Raises:
        ValueError: when `full` differs from the plain model.
    """
    made: dict[str, Method] = {}
    unfit: dict[str, Row] = {}
    vocab = vocabulary(model)
    short = RandomPrompt.random(vocab, 40, 20, 8, seed)
    for spec in specs:
        with or_refused(unfit.setdefault(spec, {"refused": ""})):
            made[spec] = _checked(methods.create(spec, model), short)
        if methods.parse(spec)[0] == "full" and unfit[spec]["refused"]:
            raise ValueError(unfit[spec]["refused"])
    for length in tqdm(lengths, "context lengths", leave=False):
        prompt = RandomPrompt.random(vocab, length, *shape, seed)
        rows: dict[str, Row] = {spec: {"method": spec, "tokens": length, **unfit[spec]} for spec in specs}
        turns: dict[str, list[dict[str, Any]]] = {spec: [] for spec in made}
        for repeat in tqdm(range(-1, repeats), f"{length} tokens", leave=False):
            compiled: dict[Any, tuple[list[PICache], float]] = {}
            for spec, method in made.items():
                if not rows[spec]["refused"]:
                    with or_refused(rows[spec]):
                        picaches, compile_s = _compiled(method, prompt, compiled)
                        if repeat < 0:
                            rows[spec] |= _warm_up(method, picaches, prompt)
                        else:
                            turns[spec].append(_turn(method, picaches, compile_s, prompt))
                        prefixes_of(method.backbone).clear()
        for spec, row in rows.items():
            yield row | ({} if row["refused"] else _summary(turns[spec], turns.get("full", [])))


@torch.no_grad()
def _checked(method: Method, prompt: RandomPrompt) -> Method:
    """Raises ValueError unless the logits on a short prompt are finite, and for `full` those of the plain model."""
    state = method.link(method.compile(prompt.segments), prompt.query)
    logits = state.logits[0]
    state.release()
    if not bool(torch.isfinite(logits).all()):
        raise ValueError("check failed: the logits of a short prompt are not finite")
    if method.name == "full":
        ids = torch.tensor([prompt.flat], device=logits.device)
        plain = method.backbone(input_ids=ids).logits[0, -1].float()
        check_logits("`full` differs from the plain model", logits, plain, method.backbone.dtype)
    return method


def _compiled(
    method: Method, prompt: RandomPrompt, compiled: dict[Any, tuple[list[PICache], float]]
) -> tuple[list[PICache], float]:
    """PICaches and the seconds that they took; what several methods compile alike is compiled once per repeat."""
    kind = (method.compile_name or method.name, method.fingerprint)
    if kind not in compiled:
        start = time.perf_counter()
        picaches = method.compile(prompt.segments)
        synchronize(method.backbone.device)
        compiled[kind] = picaches, time.perf_counter() - start
    return compiled[kind]


def _warm_up(method: Method, picaches: Sequence[PICache], prompt: RandomPrompt) -> Row:
    """Lets everything lazy happen, and takes what isn't a time."""
    counts: list[tuple[int, int]] = []

    def cached() -> None:
        state = method.link(picaches, prompt.query)
        counts.append((sum(state.computed), state.recomputed_tokens))
        state.logits.argmax(-1).cpu()
        state.release()

    if method.name == "prefix":  # it keeps what it computed by itself
        cached()
    peak = peak_memory(method.backbone.device, cached)
    kept = sum(picache.nbytes for picache in picaches)
    if method.name == "prefix":
        kept = prefixes_of(method.backbone).nbytes
    # of `full` PICaches are token ids alone, which don't count
    kept = 0 if method.name == "full" else kept
    computed, recomputed = counts[-1]
    return {
        "computed_tokens": computed,
        "recomputed_tokens": recomputed,
        "peak_memory_bytes": peak,
        "cache_bytes": kept,
    }


def _turn(method: Method, picaches: Sequence[PICache], compile_s: float, prompt: RandomPrompt) -> dict[str, Any]:
    """Seconds of one cold and one cached first token, and the cached one's stages."""
    cold = cached = first_token(method, picaches, prompt.query)
    if method.name == "prefix":
        cached = first_token(method, picaches, prompt.query)
    return {"cold": compile_s + sum(cold.values()), "cached": sum(cached.values()), "stages": cached}


def _summary(turns: Sequence[dict[str, Any]], full: Sequence[dict[str, Any]]) -> Row:
    """Over all repeats; ratios are to `full`, of the same repeat."""
    cached, stages = [turn["cached"] for turn in turns], [turn["stages"] for turn in turns]
    return {
        "ttft_cached_s": Timing.of(cached),
        "ttft_cold_s": Timing.of([turn["cold"] for turn in turns]),
        "speedup": ratios([turn["cached"] for turn in full], cached),
        "stages_s": {name: statistics.median(times[name] for times in stages) for name in stages[0]},
    }


def peak_memory(device: torch.device | str, work: Callable[[], Any]) -> int:
    """Runs `work` and returns the peak of bytes that torch allocated on `device` on top of what it held before.

    On CUDA the caching allocator counts. On the CPU, torch's profiler records every allocation and release of torch's
    CPU allocator, so the result is exact and repeatable, and work is slower meanwhile; scratch memory that libraries
    such as MKL take on their own is not in it.
    """
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        work()
        torch.cuda.synchronize(device)
        return int(torch.cuda.max_memory_allocated(device) - before)
    # 6 is above every level: the profiler's own lines would stand between ours
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        work()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    changes = [event for event in events if event.get("name") == "[memory]" and event["args"]["Device Type"] == 0]
    changes.sort(key=lambda event: event["args"]["Ev Idx"])
    return running_maximum(event["args"]["Bytes"] for event in changes)


def running_maximum(changes: Iterable[int]) -> int:
    """The highest sum of a beginning of `changes`, at least 0."""
    now = peak = 0
    for change in changes:
        now += int(change)
        peak = max(peak, now)
    return peak

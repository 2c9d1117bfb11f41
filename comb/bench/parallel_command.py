"""The command `comb bench parallel`."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from comb.bench.harness import bench
from comb.bench.inputs import make_random
from comb.bench.old_options import Backbone, Device, Dtype, Methods, OfRandomModel, Out, QueryTokens, Seed
from comb.bench.output import show


@bench.command("parallel")
def parallel_command(
    model: Annotated[str, typer.Option(help="as elsewhere, or `random`: a Llama with random weights")] = "random",
    methods: Methods = "naive,legolink:16",
    workers: Annotated[str, typer.Option(help="numbers of workers to measure, 1 among them")] = "1,2",
    beyond: Annotated[str, typer.Option(help="numbers of workers to simulate, at most 64")] = "1,2,4,8,16,32,64",
    segments: Annotated[int, typer.Option(min=2, help="cold segments in the prompt")] = 11,
    segment_tokens: Annotated[int, typer.Option(min=1, help="tokens per segment; their median with --spread")] = 480,
    spread: Annotated[float, typer.Option(min=0, help="sigma of log-normal segment lengths; 0: all equal")] = 0.0,
    query_tokens: QueryTokens = 32,
    repeats: Annotated[int, typer.Option(min=1, help="measurements; in each, all take their turn")] = 5,
    full: Annotated[bool, typer.Option("--full/--no-full", help="prefill the whole prompt too")] = False,
    threads: Annotated[int, typer.Option(min=1, help="of torch, in every worker and here")] = 1,
    trace: Annotated[
        Path | None, typer.Option(help="segment lengths to simulate: one JSON list per request and line")
    ] = None,
    layers: OfRandomModel = 12,
    hidden: OfRandomModel = 768,
    heads: OfRandomModel = 12,
    kv_heads: OfRandomModel = 4,
    vocab: OfRandomModel = 8192,
    seed: Seed = 0,
    out: Out = None,
    backbone: Backbone = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> None:
    """TTFT of a cold prompt over several workers, by dispatch, transfer and combine, and simulated beyond (HYPIC)."""
    from comb.bench.context_length import vocabulary
    from comb.bench.parallel import measure_parallel, prompt, simulate_beyond
    from comb.bench.parallel_report import parallel_tables, plot_parallel
    from comb.bench.report import check_out
    from comb.bench.simulate import random_trace, read_trace
    from comb.bench.specs import integers, split_methods, without_control
    from comb.engine.workers.processes import process_executor
    from comb.model.source import ModelSource, load_named

    check_out(out)
    specs = without_control(split_methods(methods), "parallel")
    counts, simulated = integers(workers, "--workers"), integers(beyond, "--beyond")
    requests = random_trace(200, segments, segment_tokens, seed=seed) if trace is None else read_trace(trace)
    trace_name = str(trace or f"200 requests of {segments} log-normal lengths")
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv_heads, "vocab": vocab}
    load_before = os.getloadavg()
    with tempfile.TemporaryDirectory() as folder:
        if model == "random":
            work = prompt(vocab, segments, segment_tokens, query_tokens, spread=spread, seed=seed)
            loaded = make_random(sizes, len(work.flat) + 1, dtype, device, seed=seed)
            loaded.save_pretrained(folder)
            source = ModelSource(folder, device=str(loaded.device))
        else:
            loaded = load_named(model, backbone=backbone, dtype=dtype, device=device)
            work = prompt(vocabulary(loaded), segments, segment_tokens, query_tokens, spread=spread, seed=seed)
            source = ModelSource(model, {"backbone": backbone, "dtype": dtype}, str(loaded.device))
        with process_executor(source, max(counts), threads=threads) as executor:
            results = measure_parallel(
                loaded, executor, specs, counts, work, repeats=repeats, full=full, threads=threads
            )
    found = simulate_beyond(results, work, simulated, requests, trace_name)
    name = f"random Llama, {layers} layers, hidden {hidden}" if model == "random" else model
    lengths = f"{segment_tokens}" if not spread else f"{segment_tokens} (median)"
    title = f"{name}: {segments} segments of {lengths}, query of {query_tokens} tokens, {threads} thread(s) each"
    show(
        out, [*results, *found], parallel_tables(results, found),
        lambda file: plot_parallel(results, found, file, title=title),
        heading=title, benchmark="parallel", model=model, seed=seed, segment_tokens=segment_tokens, spread=spread,
        lengths=[len(segment) for segment in work.segments], query_tokens=query_tokens, repeats=repeats,
        threads=threads, trace=trace_name, **({"sizes": sizes} if model == "random" else {}),
        dtype=str(loaded.dtype), device=str(loaded.device), load_before=load_before, load_after=os.getloadavg(),
    )  # fmt: skip

"""The commands `comb bench methods`, async, context-length and needle: options in, tables and files out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from comb.bench.harness import bench
from comb.bench.inputs import make_random, make_setting, read
from comb.bench.old_options import (
    Backbone,
    DataPath,
    DatasetName,
    Device,
    DocumentTemplate,
    Dtype,
    Limit,
    MaxNewTokens,
    Memory,
    Methods,
    Model,
    NumDocuments,
    OfRandomModel,
    Out,
    QueryTemplate,
    QueryTokens,
    Seed,
    Split,
    Splitter,
)
from comb.bench.output import show, wide_console, write

if TYPE_CHECKING:
    from comb.documents.document import Example

COMPARED = "full,prefix,naive,legolink:2,legolink:16,legolink-0,attnlink:16,cacheblend:0.15"


@bench.command("methods")
def methods_command(
    model: Model = "nano",
    methods: Methods = COMPARED,
    dataset: DatasetName = "nano",
    path: DataPath = None,
    split: Split = "heldout",
    num_documents: NumDocuments = None,
    limit: Limit = 50,
    max_new_tokens: MaxNewTokens = 48,
    batch_size: Annotated[int, typer.Option(min=1, help="questions answered at once, for quality only")] = 8,
    timing_examples: Annotated[int, typer.Option(min=0, help="questions of which times are taken")] = 8,
    kl_examples: Annotated[int, typer.Option(min=0, help="questions of which KL to full recompute is taken")] = 32,
    memory: Memory = True,
    metric: Annotated[str, typer.Option(help="of the plot: em, f1 or rouge_l")] = "f1",
    query_template: QueryTemplate = None,
    document_template: DocumentTemplate = None,
    splitter: Splitter = None,
    seed: Seed = 0,
    out: Out = None,
    backbone: Backbone = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> None:
    """Quality, KL to full recompute, TTFT, bytes and memory of every method, one request at a time (EPIC Fig. 6)."""
    from comb.bench.comparison import compare, drop_too_long
    from comb.bench.report import check_out
    from comb.bench.specs import split_methods
    from comb.evaluation.plot import METRICS, Quality, draw
    from comb.evaluation.table import result_table

    check_out(out)
    specs = split_methods(methods)
    if metric not in METRICS:
        raise ValueError(f"--metric is one of {', '.join(METRICS)}, not {metric!r}")
    examples, counts = read(dataset, path, split, num_documents, limit, seed)
    setting = make_setting(model, backbone, dtype, device, query_template, document_template, splitter)
    examples = drop_too_long(setting, examples, max_new_tokens, counts)
    results = compare(
        setting,
        examples,
        specs,
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
        timing_examples=timing_examples,
        kl_examples=kl_examples,
        memory=memory,
    )
    title = f"{model}, {dataset}, {split}"
    console = wide_console()
    console.print(f"{split} data: {counts}")
    console.print(result_table(results, title))
    timed = any(result.ttft_cold_s is not None for result in results)
    write(
        out,
        results,
        f"### {title}\n\n{counts}\n\n{result_table(results).markdown()}\n",
        (lambda file: draw([Quality(results, metric, zoom=True)], file, title=title)) if timed else None,
        benchmark="methods", model=model, dataset=dataset, path=path, split=split, seed=seed, data=counts.to_dict(),
        splitter=splitter, max_new_tokens=max_new_tokens, kl_examples=kl_examples,
    )  # fmt: skip


@bench.command("async")
def async_command(
    model: Model = "nano",
    methods: Methods = "full,legolink:16,cacheblend:0.15",
    rates: Annotated[str, typer.Option(help="requests per second, separated by commas")] = "1,2,4,8",
    ccr: Annotated[str, typer.Option(help="context-cache ratios: the store's budget over what all users need")] = "1",
    users: Annotated[int, typer.Option(min=1, help="users, each with the documents of one example")] = 8,
    seconds: Annotated[float, typer.Option(min=0.001, help="of simulated arrivals per rate")] = 40.0,
    dataset: DatasetName = "nano",
    path: DataPath = None,
    split: Split = "heldout",
    num_documents: NumDocuments = None,
    limit: Limit = 200,
    max_new_tokens: MaxNewTokens = 16,
    query_template: QueryTemplate = None,
    document_template: DocumentTemplate = None,
    splitter: Splitter = None,
    seed: Seed = 0,
    out: Out = None,
    backbone: Backbone = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> None:
    """TTFT and throughput under Poisson arrivals, with a store of limited size (EPIC Fig. 8)."""
    from comb.bench.asynchronous import measure_async
    from comb.bench.comparison import drop_too_long
    from comb.bench.plots import plot_async
    from comb.bench.report import async_tables, check_out
    from comb.bench.specs import numbers, split_methods, without_control

    check_out(out)
    specs = without_control(split_methods(methods), "async")
    offered, ratios = numbers(rates, "--rates", least=1e-3), numbers(ccr, "--ccr", least=1e-3)
    examples, counts = read(dataset, path, split, num_documents, limit, seed)
    setting = make_setting(model, backbone, dtype, device, query_template, document_template, splitter)
    examples = drop_too_long(setting, examples, max_new_tokens, counts)
    results = measure_async(
        setting, examples, specs, offered, ratios[::-1],
        users=users, seconds=seconds, max_new_tokens=max_new_tokens, seed=seed,
    )  # fmt: skip
    title = f"{model}, {dataset}: {users} users"
    drawn = any(not result.refused for result in results)
    show(
        out, results, async_tables(results), (lambda file: plot_async(results, file, title=title)) if drawn else None,
        benchmark="async", model=model, dataset=dataset, path=path, split=split, seed=seed, users=users,
        seconds=seconds, max_new_tokens=max_new_tokens, data=counts.to_dict(),
    )  # fmt: skip


@bench.command("context-length")
def context_length_command(
    model: Annotated[
        str, typer.Option(help="as elsewhere, or `random`: a Llama with random weights, or `random-hybrid`: a Qwen3.5")
    ] = "random",
    methods: Methods = "full,naive,legolink:16,cacheblend:0.15",
    lengths: Annotated[str, typer.Option(help="tokens of context, separated by commas")] = "512,1024,2048,4096",
    segment_tokens: Annotated[int, typer.Option(min=1, help="tokens per segment")] = 512,
    query_tokens: QueryTokens = 32,
    repeats: Annotated[int, typer.Option(min=1, help="measurements; in each, all methods take their turn")] = 5,
    memory: Memory = True,
    layers: OfRandomModel = 12,
    hidden: OfRandomModel = 768,
    heads: OfRandomModel = 12,
    kv_heads: OfRandomModel = 12,
    vocab: OfRandomModel = 8192,
    seed: Seed = 0,
    out: Out = None,
    backbone: Backbone = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> None:
    """TTFT against context length, as ratios to full recompute in one run, and where it goes (EPIC Fig. 9)."""
    import torch

    from comb.bench.context_length import measure_context_length
    from comb.bench.plots import plot_context_length
    from comb.bench.report import check_out, length_tables
    from comb.bench.specs import integers, split_methods, without_control

    check_out(out)
    specs = without_control(split_methods(methods), "context-length")
    wanted = integers(lengths, "--lengths")
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv_heads, "vocab": vocab}
    kind = {"random": "Llama", "random-hybrid": "hybrid"}.get(model)
    if kind:
        positions = wanted[-1] + query_tokens + 1
        loaded = make_random(sizes, positions, dtype, device, hybrid=kind == "hybrid", seed=seed)
    else:
        from comb.model.source import load_named

        loaded = load_named(model, backbone=backbone, dtype=dtype, device=device)
    results = measure_context_length(
        loaded, specs, wanted,
        segment_tokens=segment_tokens, query_tokens=query_tokens, repeats=repeats, memory=memory, seed=seed,
    )  # fmt: skip
    name = f"random {kind}, {layers} layers, hidden {hidden}" if kind else model
    title = f"{name}: segments of {segment_tokens}, query of {query_tokens} tokens"
    drawn = any(not result.refused for result in results)
    show(
        out, results, length_tables(results),
        (lambda file: plot_context_length(results, file, title=title)) if drawn else None,
        heading=title, benchmark="context-length", model=model, seed=seed, segment_tokens=segment_tokens,
        query_tokens=query_tokens, repeats=repeats, **({"sizes": sizes} if kind else {}),
        threads=torch.get_num_threads(), dtype=str(loaded.dtype), device=str(loaded.device),
    )  # fmt: skip


@bench.command("needle")
def needle_command(
    model: Model = "nano",
    methods: Methods = "full,naive,legolink:16,cacheblend:0.15",
    lengths: Annotated[str, typer.Option(help="tokens of context, separated by commas")] = "1024,2048,4096",
    depths: Annotated[str, typer.Option(help="where the needle stands, in percent of the context")] = "0,25,50,75,100",
    chunk_tokens: Annotated[int, typer.Option(min=1, help="tokens per chunk of text")] = 512,
    repeats: Annotated[int, typer.Option(min=1, help="haystacks per cell, each with another needle")] = 3,
    haystack: Annotated[
        Path | None, typer.Option(help="filler: .txt, or .jsonl(.gz) with `text`; default: generated sentences")
    ] = None,
    dataset: Annotated[
        str | None, typer.Option(help="take needles, questions and filler from a dataset's documents instead")
    ] = None,
    path: DataPath = None,
    split: Split = "heldout",
    limit: Limit = 200,
    max_new_tokens: MaxNewTokens = 24,
    query_template: QueryTemplate = None,
    document_template: DocumentTemplate = None,
    seed: Seed = 0,
    out: Out = None,
    backbone: Backbone = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> None:
    """Needle in a haystack: a grid of context length and depth for every method."""
    from comb.bench.haystack import ExampleHaystack, Haystack, TextHaystack, read_text
    from comb.bench.needle import measure_needles
    from comb.bench.plots import plot_needles
    from comb.bench.report import check_out, needle_tables
    from comb.bench.specs import integers, numbers, split_methods

    check_out(out)
    specs = split_methods(methods)
    wanted, places = integers(lengths, "--lengths"), numbers(depths, "--depths", most=100)
    if dataset is not None and haystack is not None:
        raise ValueError("--haystack and --dataset are two sources of filler: give one of them")
    text = None if haystack is None else read_text(haystack)
    examples: Sequence[Example] = ()
    if dataset is not None:
        examples, _ = read(dataset, path, split, None, limit, seed)
    setting = make_setting(model, backbone, dtype, device, query_template, document_template, None)
    source: Haystack
    if examples:
        source = ExampleHaystack(examples, setting.builder, setting.query_template)
    else:
        source = TextHaystack(setting.tokenizer, chunk_tokens, text, seed)
    cells = measure_needles(setting, source, specs, wanted, places, repeats=repeats, max_new_tokens=max_new_tokens)
    title = f"{model}: needles in {dataset or haystack or 'generated text'}"
    drawn = any(not cell.refused for cell in cells)
    show(
        out, cells, needle_tables(cells), (lambda file: plot_needles(cells, file, title=title)) if drawn else None,
        heading=title, benchmark="needle", model=model, dataset=dataset, haystack=haystack, seed=seed,
        chunk_tokens=None if examples else chunk_tokens, repeats=repeats, max_new_tokens=max_new_tokens,
    )  # fmt: skip

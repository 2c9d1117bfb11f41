"""The commands below `comb bench`: options in, tables and files out, no measuring of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from comb.bench.report import TextTable
    from comb.documents import Example
    from comb.evaluation.datasets import Counts
    from comb.evaluation.run import Setting

_WIDTH = 110

bench = typer.Typer(help="Compare methods: quality, time, memory.", no_args_is_help=True)

LEAST_POSITIONS = 128  # of the random model: what is checked before anything is timed must fit
COMPARED = "full,prefix,naive,legolink:2,legolink:16,legolink-0,attnlink:16,cacheblend:0.15"

Model = Annotated[str, typer.Option(help="adapter folder, backbone folder, Hub id, or nano")]
Methods = Annotated[str, typer.Option(help="separated by commas, parameters and all: full,legolink:16,comb")]
Backbone = Annotated[str | None, typer.Option(help="load the adapter's backbone from here instead")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16, float16")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1")]
Out = Annotated[Path | None, typer.Option(help="JSON for the results; a .md table and a .png plot go beside it")]
Seed = Annotated[int, typer.Option(help="of everything drawn at random")]
DatasetName = Annotated[str, typer.Option("--dataset", help="a dataset's name, or a .jsonl file")]
DataPath = Annotated[str | None, typer.Option("--path", help="the dataset's file or folder")]
Split = Annotated[str, typer.Option(help="heldout, train or all")]
NumDocuments = Annotated[int | None, typer.Option(help="documents per question, for datasets that choose them")]
Limit = Annotated[int, typer.Option(min=1, help="questions at most")]
MaxNewTokens = Annotated[int, typer.Option(min=1, help="longest answer, in tokens")]
QueryTemplate = Annotated[str | None, typer.Option(help="how a question is written; {query} is replaced")]
DocumentTemplate = Annotated[str | None, typer.Option(help="how a document is written, with {text} and {title}")]
Splitter = Annotated[str | None, typer.Option(help="how long documents are split (KVSplit), for example fixed:512")]
Memory = Annotated[bool, typer.Option("--memory/--no-memory", help="measure peak memory")]


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
    from comb.bench.comparison import compare
    from comb.bench.report import check_out
    from comb.bench.specs import split_methods
    from comb.evaluation.plot import METRICS, plot_results
    from comb.evaluation.table import markdown_table, notes, result_table

    check_out(out)
    specs = split_methods(methods)
    if metric not in METRICS:
        raise ValueError(f"--metric is one of {', '.join(METRICS)}, not {metric!r}")
    examples, counts = _read(dataset, path, split, num_documents, limit, seed)
    setting = _setting(model, backbone, dtype, device, query_template, document_template, splitter)
    examples = _fitting(setting, examples, max_new_tokens, counts)
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
    console = _console()
    console.print(f"{split} data: {counts}")
    console.print(result_table(results, title))
    timed = any(result.ttft_cold_s is not None for result in results)
    _write(
        out,
        results,
        f"### {title}\n\n{counts}\n\n{markdown_table(results)}\n{notes(results)}\n",
        (lambda file: plot_results(results, file, title=title, metric=metric, zoom=True)) if timed else None,
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
    from comb.bench.plots import plot_async
    from comb.bench.report import async_tables, check_out
    from comb.bench.specs import numbers, split_methods, without_control

    check_out(out)
    specs = without_control(split_methods(methods), "async")
    offered, ratios = numbers(rates, "--rates", least=1e-3), numbers(ccr, "--ccr", least=1e-3)
    examples, counts = _read(dataset, path, split, num_documents, limit, seed)
    setting = _setting(model, backbone, dtype, device, query_template, document_template, splitter)
    examples = _fitting(setting, examples, max_new_tokens, counts)
    results = measure_async(
        setting, examples, specs, offered, ratios[::-1],
        users=users, seconds=seconds, max_new_tokens=max_new_tokens, seed=seed,
    )  # fmt: skip
    title = f"{model}, {dataset}: {users} users"
    drawn = any(not result.refused for result in results)
    _show(
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
    query_tokens: Annotated[int, typer.Option(min=1, help="tokens behind the segments")] = 32,
    repeats: Annotated[int, typer.Option(min=1, help="measurements; in each, all methods take their turn")] = 5,
    memory: Memory = True,
    layers: Annotated[int, typer.Option(help="of the random model")] = 12,
    hidden: Annotated[int, typer.Option(help="of the random model")] = 768,
    heads: Annotated[int, typer.Option(help="of the random model")] = 12,
    kv_heads: Annotated[int, typer.Option(help="of the random model")] = 12,
    vocab: Annotated[int, typer.Option(help="of the random model")] = 8192,
    seed: Seed = 0,
    out: Out = None,
    backbone: Backbone = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> None:
    """TTFT against context length, as ratios to full recompute in one run, and where it goes (EPIC Fig. 9)."""
    from comb.bench.context_length import measure_context_length, random_model
    from comb.bench.plots import plot_context_length
    from comb.bench.report import check_out, length_tables
    from comb.bench.specs import integers, split_methods, without_control

    check_out(out)
    specs = without_control(split_methods(methods), "context-length")
    wanted = integers(lengths, "--lengths")
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv_heads, "vocab": vocab}
    kind = {"random": "Llama", "random-hybrid": "hybrid"}.get(model)
    if kind:
        positions = max(wanted[-1] + query_tokens + 1, LEAST_POSITIONS)
        made = random_model(**sizes, positions=positions, hybrid=kind == "hybrid", seed=seed)
        loaded = _placed(made, dtype, device)
    else:
        loaded = _load(model, backbone, dtype, device)
    results = measure_context_length(
        loaded, specs, wanted,
        segment_tokens=segment_tokens, query_tokens=query_tokens, repeats=repeats, memory=memory, seed=seed,
    )  # fmt: skip
    name = f"random {kind}, {layers} layers, hidden {hidden}" if kind else model
    title = f"{name}: segments of {segment_tokens}, query of {query_tokens} tokens"
    drawn = any(not result.refused for result in results)
    _show(
        out, results, length_tables(results),
        (lambda file: plot_context_length(results, file, title=title)) if drawn else None,
        heading=title, benchmark="context-length", model=model, seed=seed, segment_tokens=segment_tokens,
        query_tokens=query_tokens, repeats=repeats, **({"sizes": sizes} if kind else {}),
        threads=_threads(), dtype=str(loaded.dtype), device=str(loaded.device),
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
        examples, _ = _read(dataset, path, split, None, limit, seed)
    setting = _setting(model, backbone, dtype, device, query_template, document_template, None)
    source: Haystack
    if examples:
        source = ExampleHaystack(examples, setting.builder, setting.query_template)
    else:
        source = TextHaystack(setting.tokenizer, chunk_tokens, text, seed)
    cells = measure_needles(setting, source, specs, wanted, places, repeats=repeats, max_new_tokens=max_new_tokens)
    title = f"{model}: needles in {dataset or haystack or 'generated text'}"
    drawn = any(not cell.refused for cell in cells)
    _show(
        out, cells, needle_tables(cells), (lambda file: plot_needles(cells, file, title=title)) if drawn else None,
        heading=title, benchmark="needle", model=model, dataset=dataset, haystack=haystack, seed=seed,
        chunk_tokens=None if examples else chunk_tokens, repeats=repeats, max_new_tokens=max_new_tokens,
    )  # fmt: skip


def _console() -> Any:
    from rich.console import Console

    from comb import cli

    # the tables need some 105 columns; on a narrower terminal lines wrap, which is better than columns that vanish
    return cli.console if cli.console.width >= _WIDTH else Console(width=_WIDTH)


def _load(model: str, backbone: str | None, dtype: str, device: str) -> Any:
    from comb import cli

    return cli.load(model, backbone=backbone, dtype=dtype, device=device).eval()


def _placed(model: Any, dtype: str, device: str) -> Any:
    """A model made here, in the dtype and on the device asked for."""
    import torch

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    kind = torch.float32 if dtype == "auto" else getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype) or not kind.is_floating_point:
        raise ValueError(f"--dtype is auto, float32, bfloat16 or float16, not {dtype!r}")
    return model.to(device=device, dtype=kind)


def _threads() -> int:
    import torch

    return torch.get_num_threads()


def _setting(
    model: str,
    backbone: str | None,
    dtype: str,
    device: str,
    query_template: str | None,
    document_template: str | None,
    splitter: str | None,
) -> Setting:
    """Model, tokenizer and templates; an adapter's own templates where none are given."""
    from comb.compatibility import load_tokenizer
    from comb.documents import PromptBuilder
    from comb.evaluation.run import Setting

    trained = _trained_templates(model)
    query = query_template or trained.get("query_template") or "{query}"
    if "{query}" not in query:
        raise ValueError(f"--query-template {query!r} has no {{query}}: every question would be the same")
    loaded = _load(model, backbone, dtype, device)
    tokenizer = load_tokenizer(model, loaded)
    builder = PromptBuilder(tokenizer, document_template=document_template or trained.get("document_template"))
    return Setting(loaded, tokenizer, builder, query, splitter)


def _trained_templates(model: str) -> dict[str, Any]:
    """How text was written when an adapter was trained, if its folder says so."""
    import json

    path = Path(model) / "training.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))["config"]["data"]
        return {name: data.get(name) for name in ("query_template", "document_template")}
    except (OSError, KeyError, TypeError, AttributeError, ValueError):
        return {}


def _read(
    dataset: str, path: str | None, split: str, num_documents: int | None, limit: int, seed: int
) -> tuple[list[Example], Counts]:
    from comb.evaluation.datasets import read_dataset

    extra = {} if num_documents is None else {"num_documents": num_documents}
    found = read_dataset(dataset, path, split=split, seed=seed, limit=limit, **extra)
    return list(found), found.counts


def _fitting(setting: Setting, examples: Sequence[Example], max_new_tokens: int, counts: Counts) -> list[Example]:
    from comb.bench.comparison import drop_too_long

    return drop_too_long(setting, examples, max_new_tokens, counts)


def _show(
    out: Path | None,
    results: Sequence[Any],
    tables: Sequence[TextTable],
    draw: Callable[[Path], Path] | None,
    *,
    heading: str = "",
    **settings: Any,
) -> None:
    """Prints tables and writes files."""
    console = _console()
    if heading:
        console.print(heading, markup=False)
    for table in tables:
        console.print(table.rich())
    text = "\n".join([*([f"## {heading}\n"] if heading else []), *(table.markdown() for table in tables)])
    _write(out, results, text, draw, **settings)


def _write(
    out: Path | None, results: Sequence[Any], text: str, draw: Callable[[Path], Path] | None, **settings: Any
) -> None:
    if out is None:
        return
    from comb.bench.report import write_report

    written, missing = write_report(out, results, text, draw, settings)
    console = _console()
    if missing:
        console.print(f"no plot: {missing}", markup=False)
    console.print(f"written: {', '.join(written)}", markup=False, soft_wrap=True)

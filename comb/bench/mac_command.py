"""The commands `comb bench mac` and `comb bench mac-cost`."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Annotated, Any

import typer

from comb.bench.harness import bench
from comb.bench.inputs import make_setting, read
from comb.bench.old_options import (
    Backbone,
    DataPath,
    Device,
    DocumentTemplate,
    Dtype,
    Limit,
    MaxNewTokens,
    Model,
    Out,
    QueryTemplate,
    Seed,
    Split,
)
from comb.bench.output import show

QUALITY = "context;context:max_chain=none,max_drift=false;generation;generation:tau=0.9;context:audit_bound=0.25"
FAR: dict[str, Any] = {"recency": 7.0, "content": 1.5, "drift": 0.05, "heads": 16, "kv_heads": 4}
"""A stream whose attention isn't all near the cursor, so that old summaries show."""
SMALL = "window=64,band=32,min_length=64,audit_every=4,audit_bound=none"


@bench.command("mac")
def mac_command(
    model: Model = "nano",
    config: Annotated[
        str, typer.Option(help="MAC of the streams: a preset and parameters")
    ] = "generation:min_length=0",
    contexts: Annotated[str, typer.Option(help="tokens of context, separated by commas")] = "1024,2048,4096,8192",
    steps: Annotated[int, typer.Option(min=10, help="decode steps of a stream")] = 256,
    taus: Annotated[str, typer.Option(help="thresholds")] = "0,0.15,0.3,0.45,0.6,0.75,0.85,0.95",
    windows: Annotated[str, typer.Option(help="windows, in tokens")] = "32,64,128,256,512,1024",
    bands: Annotated[str, typer.Option(help="bands, in tokens")] = "8,16,32,64,128,256,512",
    drift: Annotated[float, typer.Option(help="how far a stream's queries move per token, 0 to 1")] = 0.15,
    recency: Annotated[float, typer.Option(help="the latest key's advantage, in nats")] = 10.0,
    quality: Annotated[
        str, typer.Option(help="configurations for the model's own answers, separated by ;, or none")
    ] = QUALITY,
    common: Annotated[str, typer.Option(help="parameters of all of these, in front of their own")] = SMALL,
    method: Annotated[str, typer.Option(help="method that links documents for the answers")] = "full",
    dataset: Annotated[str, typer.Option(help="questions, and needles and filler of the haystacks")] = "nano",
    path: DataPath = None,
    split: Split = "heldout",
    limit: Limit = 200,
    questions: Annotated[int, typer.Option(min=1, help="of those read, how many are asked as they are")] = 40,
    lengths: Annotated[str, typer.Option(help="tokens of the needles' haystacks")] = "512,1024",
    depths: Annotated[str, typer.Option(help="where the needle stands, in percent")] = "0,25,50,75,100",
    repeats: Annotated[int, typer.Option(min=1, help="haystacks per length and depth")] = 4,
    max_new_tokens: MaxNewTokens = 48,
    query_template: QueryTemplate = None,
    document_template: DocumentTemplate = None,
    seed: Seed = 0,
    out: Out = None,
    backbone: Backbone = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> None:
    """Reuse of attention while decoding: keys read, errors, drift, and answers with MAC on and off."""
    from comb.bench.haystack import ExampleHaystack
    from comb.bench.mac import QualityResult, Task, measure_quality, sweep_streams
    from comb.bench.mac_report import plot_mac, quality_tables, stream_tables
    from comb.bench.mac_stream import StreamSpec
    from comb.bench.report import check_out
    from comb.bench.specs import integers, numbers
    from comb.mac import MacConfig

    check_out(out)
    chosen = MacConfig.parse(config)
    texts = [] if quality == "none" else [text.strip() for text in quality.split(";") if text.strip()]
    configs = {text: MacConfig.parse(_with(text, common)) for text in texts}
    wanted = integers(contexts, "--contexts")
    spec = StreamSpec(wanted[len(wanted) // 2], steps, drift=drift, recency=recency, seed=seed)
    points = sweep_streams(
        spec, chosen, contexts=wanted, taus=numbers(taus, "--taus", most=1), windows=integers(windows, "--windows"),
        bands=integers(bands, "--bands"), drift_spec=replace(spec, **FAR),
    )  # fmt: skip
    answers: list[QualityResult] = []
    if configs:
        examples, _ = read(dataset, path, split, None, limit, seed)
        setting = make_setting(model, backbone, dtype, device, query_template, document_template, None)
        haystack = ExampleHaystack(examples, setting.builder, setting.query_template)
        tasks = [Task(dataset, tuple(examples[:questions]))]
        # a case holds the question as it is asked, so templates are not applied again
        for tokens in integers(lengths, "--lengths"):
            places = numbers(depths, "--depths", most=100)
            cases = [haystack.case(tokens, depth, number) for depth in places for number in range(repeats)]
            tasks.append(Task.of_cases(f"needle {tokens}", cases))
        answers = [
            result
            for task in tasks
            for result in measure_quality(
                setting if task.name == dataset else replace(setting, query_template="{query}"), [task], configs,
                method=method, max_new_tokens=max_new_tokens,
            )
        ]  # fmt: skip
    title = f"MAC, {config}: streams of {spec.heads} heads, {spec.kv_heads} of keys, width {spec.width}"
    show(
        out, [*points, *answers], [*stream_tables(points), *quality_tables(answers)],
        lambda file: plot_mac(points, file, title=title), heading=title, benchmark="mac", model=model, config=config,
        steps=steps, drift=drift, recency=recency, quality=texts, common=common, dataset=dataset, split=split,
        seed=seed,
    )  # fmt: skip


@bench.command("mac-cost")
def mac_cost_command(
    config: Annotated[str, typer.Option(help="a preset of MAC and parameters")] = "generation",
    contexts: Annotated[str, typer.Option(help="tokens of context, separated by commas")] = "4096,16384,49152",
    heads: Annotated[int, typer.Option(min=1, help="query heads of the layer")] = 32,
    kv_heads: Annotated[int, typer.Option(min=1, help="its key/value heads")] = 8,
    head_dim: Annotated[int, typer.Option(min=1, help="channels of a head")] = 128,
    rows: Annotated[int, typer.Option(min=1, help="requests in the batch")] = 1,
    repeats: Annotated[int, typer.Option(min=1, help="measurements; in each, both take their turn")] = 5,
    out: Out = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> None:
    """What a token of one layer costs on this machine, exact and with MAC where every head hits."""
    import torch

    from comb.bench.inputs import dtype_and_device
    from comb.bench.mac_cost import cost_table, measure_layer
    from comb.bench.report import check_out
    from comb.bench.specs import integers
    from comb.mac import MacConfig
    from comb.mac.breakeven import AttentionShape

    check_out(out)
    if heads % kv_heads:
        raise ValueError(f"--heads {heads} is no multiple of --kv-heads {kv_heads}")
    kind, place = dtype_and_device(dtype, device)
    found = measure_layer(
        AttentionShape(heads, kv_heads, head_dim), MacConfig.parse(config), integers(contexts, "--contexts"),
        rows=rows, repeats=repeats, dtype=kind, device=place,
    )  # fmt: skip
    title = f"{heads} query and {kv_heads} key/value heads of {head_dim} channels, {kind}, {place}, batch of {rows}"
    show(
        out, found.points, [cost_table(found)], None, heading=title, benchmark="mac-cost", config=config, heads=heads,
        kv_heads=kv_heads, head_dim=head_dim, rows=rows, repeats=repeats, dtype=str(kind), device=place,
        threads=torch.get_num_threads(), costs=asdict(found.costs), pays_from=found.pays_from,
    )  # fmt: skip


def _with(text: str, common: str) -> str:
    """``"context:tau=0.9"`` with the common parameters in front of its own, which win where both are given.

    Answers are what is measured, whatever they cost, so the break-even rule isn't asked.
    """
    preset, _, own = text.partition(":")
    return f"{preset}:break_even=false,{common},{own}"

"""The command `comb bench serve`."""

from __future__ import annotations

import os
import shlex
import signal
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from comb.bench.old_options import OfRandomModel, Out, Seed

if TYPE_CHECKING:
    from comb_serving.bench.models import Models
    from comb_serving.bench.run import Outcome


def serve_bench(
    checkpoint: Annotated[str | None, typer.Option(help="adapter to serve; by default one with random weights")] = None,
    backbone: Annotated[str | None, typer.Option(help="its backbone, for plain vLLM; by default as it says")] = None,
    requests: Annotated[int, typer.Option(min=1, help="per closed loop")] = 40,
    cold: Annotated[int, typer.Option(min=1, help="requests over documents never seen before")] = 16,
    clients: Annotated[str, typer.Option(help="of the closed loops")] = "1,4,16",
    rates: Annotated[str, typer.Option(help="of arrivals per second, or auto: around what each server does")] = "auto",
    seconds: Annotated[float, typer.Option(help="of arrivals per rate")] = 30.0,
    together: Annotated[int, typer.Option(min=1, help="clients that ask about the same documents at once")] = 16,
    soak: Annotated[int, typer.Option(min=0, help="further requests to comb, memory watched")] = 0,
    slo: Annotated[
        float | None, typer.Option(help="seconds that 90% of TTFT keep; by default three times plain vLLM's median")
    ] = None,
    pool: Annotated[int, typer.Option(min=1, help="documents that come back")] = 50,
    documents: Annotated[int, typer.Option(min=1, help="per request")] = 8,
    document_tokens: Annotated[str, typer.Option(help="length of a document, from-to")] = "256-512",
    query_tokens: Annotated[int, typer.Option(min=1, help="about so many")] = 32,
    draw: Annotated[str, typer.Option(help="how often documents come back: uniform or zipf")] = "uniform",
    max_tokens: Annotated[int, typer.Option(min=2, help="of every answer, exactly")] = 16,
    cache_bytes: Annotated[str, typer.Option(help="that each server may keep of keys and values")] = "1GiB",
    pool_bytes: Annotated[str, typer.Option(help="of them, comb's pool of documents")] = "384MiB",
    vllm: Annotated[
        str, typer.Option(help="options for both servers; auto: what a CPU needs, where there is one")
    ] = "auto",
    one_at_a_time: Annotated[bool, typer.Option(help="for a machine that can't hold both servers")] = False,
    timeout: Annotated[float, typer.Option(help="seconds after which a request has failed")] = 300.0,
    layers: OfRandomModel = 32,
    encoder_layers: OfRandomModel = 8,
    hidden: OfRandomModel = 192,
    heads: OfRandomModel = 3,
    kv_heads: OfRandomModel = 1,
    dtype: Annotated[str, typer.Option(help="of the random model")] = "bfloat16",
    seed: Seed = 0,
    out: Out = None,
) -> None:
    """`comb serve` against plain vLLM over HTTP: TTFT, throughput, bytes, start-up, memory (COMB Fig. 5a and 10)."""
    from comb.bench.report import check_out
    from comb.bench.specs import integers, numbers
    from comb_serving.bench.models import Sizes, make_models
    from comb_serving.bench.run import Bench, Outcome, RunShape
    from comb_serving.bench.servers import plans
    from comb_serving.bench.workload import Workload, WorkloadShape
    from comb_serving.config.sizes import parse_bytes

    check_out(out)
    least, most = _range(document_tokens)
    asked = WorkloadShape(pool, documents, least, most, query_tokens, draw)
    shape = RunShape(
        cold=cold, requests=requests, clients=tuple(integers(clients, "--clients")),
        rates=None if rates == "auto" else tuple(numbers(rates, "--rates")),
        seconds=seconds, together=together, soak=soak, tokens=max_tokens, timeout_s=timeout, slo_s=slo,
    )  # fmt: skip
    positions = asked.longest + max_tokens
    sizes = Sizes(layers, encoder_layers, hidden, heads, kv_heads, dtype)
    outcome, started, load_before = Outcome(), time.monotonic(), os.getloadavg()
    with ExitStack() as stack:
        stack.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, _leave))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="comb-bench-")))
        logs = folder if out is None else out.with_suffix(".logs")
        logs.mkdir(parents=True, exist_ok=True)
        log = (
            None if out is None else stack.enter_context(out.with_suffix(".records.jsonl").open("w", encoding="utf-8"))
        )
        models = _given(checkpoint, backbone) if checkpoint else make_models(folder, sizes, positions, seed)
        options = _options(vllm, dtype, random=checkpoint is None)
        servers = plans(
            models, cache_bytes=parse_bytes(cache_bytes), pool_bytes=parse_bytes(pool_bytes), max_len=positions,
            options=options,
        )  # fmt: skip
        workload = Workload(asked, _counter(models.adapter), seed)
        title = f"{models.name}: {documents} of {pool} documents of {document_tokens} tokens"
        settings: dict[str, Any] = {
            "benchmark": "serve", "models": vars(models), "workload": vars(asked), "run": vars(shape),
            "servers": {plan.name: plan.command for plan in servers}, "vllm": options, "seed": seed,
            "cache_bytes": cache_bytes, "pool_bytes": pool_bytes, "threads": os.environ.get("OMP_NUM_THREADS"),
            "one_at_a_time": one_at_a_time, "load_before": load_before,
        }  # fmt: skip
        bench = Bench(workload, shape, outcome, log=log, say=lambda line: typer.echo(line))
        try:
            bench.run(servers, logs, one_at_a_time=one_at_a_time)
        except BaseException:
            typer.echo("broken off; what was measured until then:")
            raise
        finally:
            settings |= {"seconds": time.monotonic() - started, "load_after": os.getloadavg()}
            _show(out, outcome, title, settings)


def _show(out: Path | None, outcome: Outcome, title: str, settings: dict[str, Any]) -> None:
    from comb.bench.output import show
    from comb_serving.bench.report import failures, plot_serve, serve_tables

    measured = {
        "slo_s": outcome.slo_s, "ready_s": outcome.ready_s, "first_answer_s": outcome.first_answer_s,
        "token_bytes": outcome.token_bytes, "memory": [sample.to_dict() for sample in outcome.memory],
    }  # fmt: skip
    draw = (lambda path: plot_serve(outcome, path, title=title)) if outcome.results else None
    show(out, outcome.results, serve_tables(outcome), draw, heading=title, **settings, **measured)
    wrong = failures(outcome)
    if wrong:
        raise RuntimeError("requests have failed: " + "; ".join(wrong))


def _leave(number: int, _: object) -> None:
    """SIGTERM unwinds like Ctrl-C, so that the servers end."""
    raise SystemExit(128 + number)


def _given(checkpoint: str, backbone: str | None) -> Models:
    from comb.backbones.loading import resolve_name
    from comb.model.config import CombConfig
    from comb_serving.bench.models import Models

    place = resolve_name(checkpoint)
    own = backbone or CombConfig.from_pretrained(place).backbone_name_or_path
    return Models(resolve_name(own), place, checkpoint)


def _options(text: str, dtype: str, *, random: bool) -> list[str]:
    """vLLM's options for both servers."""
    import torch

    if text != "auto":
        return shlex.split(text)
    given = ["--dtype", dtype] if random else []
    # a CPU's attention wants blocks of a multiple of 32 tokens, and compiling takes minutes there
    return given if torch.cuda.is_available() else [*given, "--enforce-eager", "--block-size", "32"]


def _counter(name: str) -> Any:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(name)
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False))


def _range(text: str) -> tuple[int, int]:
    least, _, most = text.partition("-")
    if not least.isdecimal() or not (most or least).isdecimal():
        raise ValueError(f"--document-tokens is a number, or from-to like 256-512, not {text!r}")
    return int(least), int(most or least)

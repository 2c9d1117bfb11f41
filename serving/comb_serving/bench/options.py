"""Options of `comb bench serve`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from comb.bench.harness import OutOptions
from comb.bench.options import OfRandomModel, Seed

MADE_TRACES = ("agent", "chat", "rag")


@dataclass(frozen=True)
class ServeBenchOptions(OutOptions):
    """What is asked and how often, of which model on which servers. Raises ValueError for what doesn't go together."""

    pool: Annotated[int, typer.Option(min=1, help="documents that come back")] = 50
    documents: Annotated[int, typer.Option(min=1, help="per request")] = 8
    document_tokens: Annotated[str, typer.Option(help="length of a document, from-to")] = "256-512"
    query_tokens: Annotated[int, typer.Option(min=1, help="about so many")] = 32
    max_tokens: Annotated[int, typer.Option(min=2, help="of every answer, exactly")] = 16
    cache_bytes: Annotated[str, typer.Option(help="that each server may keep of keys and values")] = "1GiB"
    pool_bytes: Annotated[str, typer.Option(help="of them, comb's pool of documents")] = "384MiB"
    vllm: Annotated[str, typer.Option(help="options for both servers; auto: what a CPU needs, where there is one")] = (
        "auto"
    )
    dtype: Annotated[str, typer.Option(help="of the model, or of the random one")] = "bfloat16"
    seed: Seed = 0
    checkpoint: Annotated[
        str | None, typer.Option(help="adapter, or a plain model with --method; by default one with random weights")
    ] = None
    method: Annotated[str | None, typer.Option(help="that links documents of a plain model: legolink:16")] = None
    backbone: Annotated[str | None, typer.Option(help="of the adapter, for plain vLLM; by default as it says")] = None
    requests: Annotated[int, typer.Option(min=1, help="per closed loop")] = 40
    cold: Annotated[int, typer.Option(min=1, help="requests over documents never seen before")] = 16
    clients: Annotated[str, typer.Option(help="of the closed loops")] = "1,4,16"
    rates: Annotated[str, typer.Option(help="of arrivals per second, or auto: around what each server does")] = "auto"
    seconds: Annotated[float, typer.Option(min=0.1, help="of arrivals per rate")] = 30.0
    together: Annotated[int, typer.Option(min=1, help="clients that ask about the same documents at once")] = 16
    trace: Annotated[
        str | None,
        typer.Option(help="clients that change nothing instead: agent, chat, rag, or files as of RAGPulse"),
    ] = None
    prompt_tokens: Annotated[int, typer.Option(min=256, help="of a made trace's prompts, about so many")] = 2048
    pause: Annotated[float, typer.Option(min=0, help="seconds before a made trace's next request")] = 1.0
    speed: Annotated[float, typer.Option(min=1e-6, help="as many times as fast as a trace was recorded")] = 1.0
    soak: Annotated[int, typer.Option(min=0, help="further requests to comb, memory watched")] = 0
    one_at_a_time: Annotated[bool, typer.Option(help="for a machine that can't hold both servers")] = False
    timeout: Annotated[float, typer.Option(help="seconds after which a request has failed")] = 300.0
    layers: OfRandomModel = 32
    encoder_layers: OfRandomModel = 8
    hidden: OfRandomModel = 192
    heads: OfRandomModel = 3
    kv_heads: OfRandomModel = 1

    def __post_init__(self) -> None:
        if not 1 <= self.documents <= self.pool:
            raise ValueError(f"a request takes 1 to {self.pool} documents, the pool, not {self.documents}")
        least, most = self.lengths
        if self.trace is not None and (self.checkpoint is None or self.method is None):
            raise ValueError("--trace is for a plain model whose segments are found: give --checkpoint and --method")
        if not 1 <= least <= most:
            raise ValueError(f"--document-tokens {self.document_tokens}: at least one token, the shorter length first")

    @property
    def lengths(self) -> tuple[int, int]:
        """Tokens of the shortest and of the longest document."""
        least, _, most = self.document_tokens.partition("-")
        if not least.isdecimal() or not (most or least).isdecimal():
            raise ValueError(f"--document-tokens is a number, or from-to like 256-512, not {self.document_tokens!r}")
        return int(least), int(most or least)

    @property
    def positions(self) -> int:
        """Tokens of the longest request and answer, with room for a chat template and documents' last line breaks."""
        return self.documents * (self.lengths[1] + 2) + 2 * self.query_tokens + 64 + self.max_tokens

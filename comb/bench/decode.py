"""`comb bench decode`: time per token of an answer over linked documents, and that COMB without any is the plain model.

Random segments and a random query, as in `comb bench context-length`; on a model with random weights, method ``comb``
gets an encoder of the backbone's own layers that all layers read (`joint_attention`). A token's time is what a longer
answer takes beyond a short one. In every repeat all methods take their turn; ratios are taken within a repeat.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import torch
import typer

from comb import methods
from comb.backbones.exclusive import backbone_of
from comb.bench.harness import BenchmarkReport, benchmark, in_turns, or_refused, ratios
from comb.bench.options import Lengths, Methods, QueryTokens, RandomModelOptions, Repeats, integers, split_methods
from comb.bench.work import RandomPrompt, synchronize, vocabulary
from comb.evaluation.run import Timing
from comb.evaluation.table import Column, Row, TextTable, ms, spread
from comb.methods.base import DecodeState
from comb.model.modeling import CombForCausalLM

SHORT = 2
"""Tokens of the answer whose time is taken off."""


@dataclass(frozen=True)
class DecodeOptions(RandomModelOptions):
    """Of `comb bench decode`."""

    methods: Methods = "full,naive,comb"
    lengths: Lengths = "512,2048"
    segment_tokens: Annotated[int, typer.Option(min=1, help="tokens per segment")] = 512
    query_tokens: QueryTokens = 32
    new_tokens: Annotated[int, typer.Option(min=1, help="tokens that are timed")] = 16
    repeats: Repeats = 5


def tables(rows: Sequence[Row]) -> list[TextTable]:
    """Time per token by context length and method."""
    columns = (
        Column("method", "method", names=True),
        Column("context", "tokens", names=True),
        Column("ms a token", "token_s", ms, "median ±half the distance of the quartiles"),
        Column("full/method", "speedup", spread, "of the same repeat, quartiles"),
    )
    return [TextTable("Decoding behind linked documents", columns, rows)]


@benchmark("decode", tables)
def decode(options: DecodeOptions, report: BenchmarkReport) -> None:
    """Time per token of an answer, by method; and whether COMB without documents is the plain model, bit for bit."""
    specs, lengths = split_methods(options.methods, control=False), integers(options.lengths, "--lengths")
    model = options.load(lengths[-1] + options.query_tokens + SHORT + options.new_tokens + 1)
    report.heading = (
        f"{options.title}: answers of {options.new_tokens} tokens over segments of {options.segment_tokens}"
    )
    report.facts |= {"threads": torch.get_num_threads(), "dtype": str(model.dtype), "device": str(model.device)}
    trained = model
    if options.is_random and any(methods.parse(spec)[0] == "comb" for spec in specs):
        trained = CombForCausalLM.from_backbone(model, shared_layers=True, joint_attention=True)
    if isinstance(trained, CombForCausalLM):
        report.facts["off_is_plain"] = off_is_plain(trained, options)
        report.heading += (
            f"; without documents the model {'is' if report.facts['off_is_plain'] else 'IS NOT'} the plain one"
        )
    for length in lengths:
        prompt = RandomPrompt.random(
            vocabulary(model), length, options.segment_tokens, options.query_tokens, options.seed
        )
        rows: dict[str, Row] = {spec: {"method": spec, "tokens": length, "refused": ""} for spec in specs}
        states: dict[str, DecodeState] = {}
        for spec in specs:
            with or_refused(rows[spec]):
                method = methods.create(spec, trained if methods.parse(spec)[0] == "comb" else model)
                states[spec] = method.link(method.compile(prompt.segments), prompt.query)
                _token_seconds(states[spec], options.new_tokens)  # whatever is lazy happens
        times = in_turns(
            {spec: partial(_token_seconds, state, options.new_tokens) for spec, state in states.items()},
            options.repeats,
        )
        for spec, row in rows.items():
            if spec in times:
                row |= {"token_s": Timing.of(times[spec]), "speedup": ratios(times.get("full", []), times[spec])}
                states[spec].release()
            report.add(row)


@torch.no_grad()
def off_is_plain(model: CombForCausalLM, options: DecodeOptions) -> bool:
    """Whether logits and an answer without documents are the backbone's to the bit, after documents were read."""
    backbone = backbone_of(model)
    prompt = RandomPrompt.random(vocabulary(backbone), 64, 32, options.query_tokens, options.seed)
    ids = torch.tensor([prompt.query], device=backbone.device)
    wanted = backbone(input_ids=ids).logits
    method = methods.create("comb", model)
    state = method.link(method.compile(prompt.segments), prompt.query)
    read = state.logits
    state.release()
    found = model(input_ids=ids).logits
    greedy: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": [], "pad_token_id": 0}
    same = torch.equal(found, wanted) and torch.equal(model.generate(ids, **greedy), backbone.generate(ids, **greedy))
    return same and not torch.equal(read[0].to(wanted), wanted[0, -1])  # documents were read, or it shows nothing


def _token_seconds(state: DecodeState, tokens: int) -> float:
    """Seconds of a token in a greedy answer."""

    def seconds(count: int) -> float:
        start = time.perf_counter()
        state.generate(max_new_tokens=count, min_new_tokens=count, do_sample=False, eos_token_id=[], pad_token_id=0)
        synchronize(state.input_ids.device)
        return time.perf_counter() - start

    return (seconds(SHORT + tokens) - seconds(SHORT)) / tokens

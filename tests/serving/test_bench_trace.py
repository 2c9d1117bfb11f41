"""`comb bench serve --trace`: what is asked, how answers are compared, and a small run against the real servers."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path

import pytest

from comb_serving.bench.client import RequestRecord
from comb_serving.bench.servers import models_of
from comb_serving.bench.tables import AS_SENT, REORDERED, alike
from comb_serving.bench.trace import Trace, made
from comb_serving.bench.workload import COMB, PLAIN, TRACES, ServeBenchOptions
from tests.helpers.bench_command import run_bench


def words(text: str) -> int:
    return len(text.split())


def begun_alike(trace: Trace) -> int:
    """Words of prompts that stand at the beginning of the prompt before, which is what an exact prefix has."""
    prompts = [" ".join(each["content"] for each in ask.messages).split() for ask in trace.asks()]
    return sum(
        next((at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), len(one))
        for one, other in pairwise(prompts)
    )


@pytest.mark.parametrize("name", TRACES)
def test_made_traces_come_again_out_of_order(name: str) -> None:
    trace = made(name, 1500, 30, 0, words)
    assert trace == made(name, 1500, 30, 0, words)
    assert trace != made(name, 1500, 30, 1, words)
    lengths = [sum(words(m["content"]) for m in ask.messages) for ask in trace.asks()]
    assert 700 < sum(lengths) / len(lengths) < 1700
    assert max(lengths) + 8 < trace.positions(8)
    assert trace.repeated() > (0.35 if name == "rag" else 0.7)
    assert len({ask.messages[-1]["content"] for ask in trace.asks()}) == 30
    again = trace.reordered()
    for one, other in zip(trace.requests, again.requests, strict=True):
        assert sorted(one.pieces, key=str) == sorted(other.pieces, key=str)
    # a client can do something for exact hits, if it knows the future: little where passages are seldom the same
    assert begun_alike(again) > (1.0 if name == "rag" else 1.5) * begun_alike(trace)


def test_a_retriever_repeats_what_field_studies_say() -> None:
    drawn = [piece.name for request in made("rag", 1500, 60, 0, words).requests for piece in request.passages]
    assert len(set(drawn)) / len(drawn) == pytest.approx(0.57, abs=0.06)


def test_tools_are_json_and_systems_go_where_a_template_takes_them() -> None:
    trace = made("agent", 1500, 7, 0, words)
    system, *_ = trace.asks()[6].messages
    tools = [json.loads(line) for line in system["content"].split("\n\n") if line.startswith("{")]
    assert len({tool["function"]["name"] for tool in tools}) == 10
    assert [m["role"] for m in trace.asks()[6].messages] == ["system", "user", "assistant", "user"]
    without = Trace("x", trace.requests, words, systems=False).asks()[6].messages
    assert [m["role"] for m in without] == ["user", "assistant", "user"]
    assert without[0]["content"].startswith(system["content"])


def said(number: int, text: str, **first: float) -> RequestRecord:
    return RequestRecord("x", AS_SENT, number, 0.0, text=text, first={k: math.log(p) for k, p in first.items()})


def test_answers_are_compared_by_text_and_first_token() -> None:
    plain = [said(0, "a", a=0.5, b=0.3), said(1, "b", b=0.9)]
    assert alike(plain, plain) == {"same": 1.0, "kl": pytest.approx(0, abs=1e-12)}
    # b isn't among the likeliest there, so it has at most what the last of them has
    found = alike([said(0, "z", a=0.6, c=0.1)], plain)
    assert found["same"] == 0.0
    assert found["kl"] == pytest.approx(
        0.5 * math.log(0.5 / 0.6) + 0.3 * math.log(0.3 / 0.1) + 0.2 * math.log(0.2 / 0.3)
    )
    assert alike([said(7, "a", a=0.5)], plain) == {"same": None, "kl": None}


def test_a_trace_needs_a_model_that_finds_segments(nano_adapter: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="segments are found: give --checkpoint"):
        ServeBenchOptions(trace="rag")
    with pytest.raises(ValueError, match="--trace is one of agent, chat, rag, not 'data'"):
        ServeBenchOptions(trace="data", checkpoint="nano", method="naive")
    with pytest.raises(ValueError, match=r"segments are found, and .* is an adapter with an encoder"):
        models_of(ServeBenchOptions(trace="rag", checkpoint=str(nano_adapter)), tmp_path)


@pytest.mark.vllm
@pytest.mark.slow
def test_the_command_against_real_servers(plugin: None, tmp_path: Path) -> None:
    out = tmp_path / "trace.json"
    arguments = [
        "bench", "serve", "--checkpoint", "nano", "--method", "legolink:4", "--trace", "chat", "--requests", "10",
        "--prompt-tokens", "800", "--pause", "0.4", "--max-tokens", "4", "--dtype", "float32",
        "--cache-bytes", "64MiB", "--pool-bytes", "32MiB", "--out", str(out),
    ]  # fmt: skip
    rows = {(found["server"], found["phase"]): found for found in run_bench(out, arguments)["results"]}
    plain, comb, reordered = (rows[way] for way in ((PLAIN, AS_SENT), (COMB, AS_SENT), (PLAIN, REORDERED)))
    assert [found["errors"] for found in rows.values()] == [0, 0, 0]
    assert plain["prompt_tokens"] == comb["prompt_tokens"]  # the same tokens with and without comb
    assert comb["computed"] < 0.8 * plain["computed"]
    assert reordered["computed"] < plain["computed"]
    assert comb["compiled"] > 0 == plain["compiled"]
    assert 0 <= comb["kl"] < 1
    assert f"| {COMB} | {AS_SENT} | 10 |" in out.with_suffix(".md").read_text()
    assert out.with_suffix(".png").exists()

"""`comb bench serve-methods`: what is compared with what, and the command against real servers."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

from comb.cli.main import app
from comb_serving.bench.serve_methods import MethodAnswer, ServeMethodsOptions, agreement, divergence, summarized
from comb_serving.bench.servers import PLAIN


def answered(method: str, number: int, tokens: str, *, workload: str = "shuffled", ttft: float = 1.0) -> MethodAnswer:
    likely = {"a": math.log(0.5), "b": math.log(0.4)}
    return MethodAnswer(workload, method, number, ttft, ttft + 3.0, tokens, list(tokens), likely, computed=10 * number)


def test_agreement_ends_where_answers_part() -> None:
    assert agreement(answered(PLAIN, 0, "abcd"), answered("x", 0, "abxd")) == 0.5
    assert agreement(answered(PLAIN, 0, "abcd"), answered("x", 0, "abcd")) == 1.0


def test_divergence_is_zero_for_the_same_and_finite_for_what_was_not_named() -> None:
    plain, other = answered(PLAIN, 0, "ab"), answered("x", 0, "ab")
    assert divergence(plain, other) == pytest.approx(0, abs=1e-12)
    other.likely = {"a": math.log(0.4), "b": math.log(0.5)}
    assert divergence(plain, other) == pytest.approx(0.5 * math.log(0.5 / 0.4) + 0.4 * math.log(0.4 / 0.5))
    other.likely = {"c": 0.0}
    assert 5 < divergence(plain, other) < 20


def test_rows_compare_what_was_asked_alike() -> None:
    found = [
        answered(method, number, text, ttft=ttft)
        for method, text, ttft in ((PLAIN, "abcd", 2.0), ("naive", "abxx", 0.5))
        for number in range(4)
    ]
    plain, naive = summarized("shuffled", found, [PLAIN, "naive"])
    assert (plain["agreed"], naive["agreed"]) == (1.0, 0.5)
    assert naive["sooner"].median == pytest.approx(4.0)
    assert (naive["tpot"], naive["computed"], naive["n"]) == (1.0, 15.0, 4)
    (cold,) = summarized("cold", found, ["naive"])  # documents of its own for each method: nothing to agree with
    assert cold["agreed"] is None
    with_turns = [*found[:4], answered("naive", 0, "abcd"), answered("naive", 1, "xxxx")]
    (turns,) = summarized("multi-turn", with_turns, ["naive"])  # later turns go on from each one's own answers
    assert turns["agreed"] == 1.0


def test_unknown_workloads_and_pools_are_refused() -> None:
    run = CliRunner().invoke(app, ["bench", "serve-methods", "--model", "nano", "--workloads", "cold,warm"])
    assert "'warm' is none of" in str(run.exception or run.output)
    with pytest.raises(ValueError, match="documents"):
        ServeMethodsOptions(documents=5, pool=4).drawing()


@pytest.mark.vllm
@pytest.mark.slow
def test_the_command_against_real_servers(plugin: None, nano_adapter: Path, tmp_path: Path) -> None:
    out = tmp_path / "methods.json"
    arguments = [
        "bench", "serve-methods", "--model", "nano", "--methods", "naive,legolink:4", "--requests", "3", "--pool", "4",
        "--adapter", str(nano_adapter),
        "--documents", "2", "--document-tokens", "8-12", "--query-tokens", "8", "--system-tokens", "40", "--max-tokens",
        "4", "--workloads", "cold,shuffled,same order,multi-turn,half without",  # nano knows no system prompt
        "--dtype", "float32", "--cache-bytes", "64MiB", "--pool-bytes", "8MiB", "--out", str(out),
    ]  # fmt: skip
    run = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert run.exit_code == 0, run.output
    rows = {(row["workload"], row["method"]): row for row in json.loads(out.read_text())["results"]}
    assert len(rows) == 5 * 5
    encoders = {name for (_, name), row in rows.items() if "encoder" in row["resident"]}
    assert encoders == {"comb"}
    assert rows["cold", "comb"]["computed"] > rows["shuffled", "comb"]["computed"]  # what it encodes counts
    for (workload, method), row in rows.items():
        assert row["n"] == 3
        assert row["cpu"] > 0
        if method == "full" and workload != "cold":  # the same computation behind comb serve
            assert row["agreed"] == pytest.approx(1.0)
            assert row["kl"] == pytest.approx(0, abs=1e-4)
        if method == "naive" and workload == "shuffled":
            assert row["computed"] < rows[workload, PLAIN]["computed"]

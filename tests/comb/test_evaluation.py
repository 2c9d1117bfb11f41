"""Evaluation: results of methods on a tiny model, tables, JSON and plots."""

from __future__ import annotations

import dataclasses
import gc
import io
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from comb import CombForCausalLM, Document, Example
from comb.engine.engine import PICEngine
from comb.evaluation.metrics import agreement
from comb.evaluation.plot import Lines, plot_results, plot_training
from comb.evaluation.record import environment, write_results
from comb.evaluation.run import MethodResult, Setting, Timing, evaluate
from comb.evaluation.summary import with_divergence
from comb.evaluation.table import FittedTable, result_table
from tests.helpers.training import TOKENIZER, backbone, comb_model

OPTIONS: dict[str, Any] = {"max_new_tokens": 6, "progress": False}


@pytest.fixture(scope="module")
def model() -> CombForCausalLM:
    wide: Any = backbone(max_position_embeddings=256, initializer_range=0.2)
    return comb_model(0.7, on=wide).eval()


@pytest.fixture(scope="module")
def questions(model: CombForCausalLM) -> list[Example]:
    """Questions whose right answer is what the backbone says with the documents in its prompt: `full` scores 100%."""
    engine = PICEngine(model, TOKENIZER, method="full")
    examples = []
    for number in range(6):
        documents = (Document(f"fact {number} here"), Document(f"other {number}"))
        query = f"what is {number}?"
        answer = engine.ask(query, documents, max_new_tokens=6).text.strip()
        examples.append(Example(documents, query, answer, id=str(number)))
    return examples


@pytest.fixture(scope="module")
def results(model: CombForCausalLM, questions: list[Example]) -> dict[str, MethodResult]:
    methods = ["full", "prefix", "comb", "none"]
    found = evaluate((model, TOKENIZER), questions, methods, timing_examples=3, batch_size=4, **OPTIONS)
    assert [result.method for result in found] == methods
    return {result.method: result for result in found}


def test_methods_that_recompute_exactly_agree(results: dict[str, MethodResult], questions: list[Example]) -> None:
    assert results["full"].em == results["prefix"].em == 1.0
    assert results["full"].predictions == tuple(example.answer for example in questions)
    assert all(result.n == 6 for result in results.values())
    assert (results["prefix"].same, results["prefix"].rouge_l_full) == (1.0, 1.0)
    for control in (results["none"], results["comb"]):  # no documents, an untrained encoder
        assert control.em < 1.0
        assert control.same is not None
        assert control.same < 1.0
    assert results["none"].predictions != results["comb"].predictions
    assert "prefix 100.0 (100.0)" in result_table(list(results.values())).markdown()
    assert agreement(["a b", ""], ["a c", ""]) == ([0.0, 1.0], [0.5, 1.0])


def test_cache_and_recomputation_are_accounted_for(results: dict[str, MethodResult]) -> None:
    document_tokens = len("fact 0 here\n") + len("other 0\n")
    assert results["full"].recomputed_tokens == document_tokens
    assert results["full"].cache_bytes_per_document_token == 0
    assert results["comb"].recomputed_tokens == 0
    # one cross layer: K and V of one head of 16 float32
    assert results["comb"].cache_bytes_per_document_token == 2 * 1 * 16 * 4
    assert results["none"].recomputed_tokens == results["none"].cache_bytes_per_document_token == 0


def test_times_are_taken_cold_and_cached(results: dict[str, MethodResult]) -> None:
    for result in results.values():
        for timing in (result.ttft_cold_s, result.ttft_cached_s):
            assert timing is not None
            assert timing.n == 3
            assert 0 < timing.low <= timing.median <= timing.high < 60


def test_times_need_examples_without_a_document_in_common(model: CombForCausalLM, questions: list[Example]) -> None:
    shared = [dataclasses.replace(example, documents=questions[0].documents) for example in questions]
    [result] = evaluate((model, TOKENIZER), shared, ["full"], timing_examples=3, **OPTIONS)
    assert result.ttft_cold_s is not None
    assert result.ttft_cold_s.n == 1
    [result] = evaluate((model, TOKENIZER), questions, ["full"], timing_examples=0, **OPTIONS)
    assert result.ttft_cold_s is None


def test_what_cannot_be_evaluated(model: CombForCausalLM, questions: list[Example]) -> None:
    with pytest.raises(ValueError, match="no examples"):
        evaluate((model, TOKENIZER), [], ["full"])
    with pytest.raises(ValueError, match="no methods"):
        evaluate((model, TOKENIZER), questions, [])
    with pytest.raises(ValueError, match="unknown method 'fool'"):
        evaluate((model, TOKENIZER), questions, ["fool"])
    with pytest.raises(ValueError, match="plain backbone"):
        evaluate((model.backbone, TOKENIZER), questions, ["comb"])


def test_no_store_outlives_its_method(
    model: CombForCausalLM, questions: list[Example], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[weakref.ref[PICEngine]] = []
    held: list[int] = []
    plain_engine, plain_ask = Setting.engine, PICEngine.ask_batch

    def engine(setting: Setting, method: str) -> PICEngine:
        made.append(weakref.ref(found := plain_engine(setting, method)))
        return found

    def ask_batch(self: PICEngine, requests: Any, **options: Any) -> Any:
        if len(requests) > 1:  # quality, with which a method begins; times are of one request
            gc.collect()
            stores = [one.store.stats() for one in (each() for each in made) if one is not None]
            held.append(sum(tier.bytes for store in stores for tier in store.tiers.values()))
        return plain_ask(self, requests, **options)

    monkeypatch.setattr(Setting, "engine", engine)
    monkeypatch.setattr(PICEngine, "ask_batch", ask_batch)
    evaluate((model, TOKENIZER), questions, ["comb", "legolink:2", "full"], timing_examples=3, **OPTIONS)
    assert held == [0, 0, 0]
    assert len(made) > 3


def test_timing_of_few_measurements() -> None:
    assert Timing.of([]) is None
    assert Timing.of([2.0]) == Timing(2.0, 2.0, 2.0, 1)
    assert Timing.of([1.0, 2.0, 3.0, 4.0, 5.0]) == Timing(3.0, 2.0, 4.0, 5)


# --- tables, JSON, plots --------------------------------------------------------------------------------------------


def result(method: str = "full", em: float = 0.5, timing: Timing | None = None) -> MethodResult:
    return MethodResult(
        method, 4, em, 0.625, 0.75, 3.0, timing, timing, 3072.0, 1230.0, 1190.0, 1.5, ("a", "b", "c", "d")
    )


def test_tables_show_percent_and_milliseconds() -> None:
    [timed, untimed] = result_table([result(timing=Timing(0.0123, 0.0091, 0.02, 5)), result("comb")]).lines()
    assert timed[:6] == ("full", "50.0", "62.5", "75.0", "12 (9.1-20)", "12 (9.1-20)")
    assert untimed[4] == "-"
    console = Console(width=80, file=io.StringIO())
    console.print(result_table([result(timing=Timing(0.0123, 0.0091, 0.02, 5))], "held-out"))
    text = console.file.getvalue()  # type: ignore[attr-defined]  # the StringIO above
    assert text.count("12 (9.1-20)") == 2
    assert all(column.name in text for column in result_table([result()]).columns)
    assert "…" not in text  # nothing is cut at 80 columns
    assert "4 questions" in text
    lines = [line for line in result_table([result(), result("comb")]).markdown().splitlines() if "|" in line]
    assert len(lines) == 4
    assert {line.count("|") for line in lines} == {8 + 1}


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_columns_without_room_stand_below_and_nothing_is_lost(width: int) -> None:
    heads = ("method", "left", *(f"head {letter}" for letter in "abcdef"))
    lines = [(name, "some words", *(f"{number}2345678" for number in range(6))) for name in ("full", "legolink:16,a=b")]
    console = Console(width=width, file=io.StringIO())
    console.print(FittedTable(heads, lines, "a title of some words", "a caption", left=("method", "left")))
    text = console.file.getvalue()  # type: ignore[attr-defined]  # the StringIO above
    assert max(map(len, text.splitlines())) <= width
    squeezed = "".join(text.split())
    for cell in ("a title of some words", "a caption", *heads[2:], *lines[0][2:]):
        assert cell.replace(" ", "") in squeezed
    blocks = text.count("method")
    assert text.count("legolink:16,a=b") == text.count("full") == blocks
    assert (blocks == 1) == (width == 120)


def test_kl_is_measured_beside_the_answers(
    model: CombForCausalLM, questions: list[Example], results: dict[str, MethodResult]
) -> None:
    found = {row.method: row for row in with_divergence((model, TOKENIZER), questions, [*results.values()], **OPTIONS)}
    assert (found["full"].kl, found["full"].closed) == (0.0, 1.0)
    assert found["none"].closed == 0.0
    assert found["prefix"].kl == pytest.approx(0, abs=1e-5)
    comb = found["comb"]
    assert comb.kl is not None
    assert comb.closed == pytest.approx(1 - comb.kl / (found["none"].kl or 0))
    low, high = comb.intervals["closed"]
    assert low < comb.closed < high
    assert comb.kl_questions == len(questions)
    assert {**comb.intervals, "kl": 0, "closed": 0} == {**results["comb"].intervals, "kl": 0, "closed": 0}
    table = result_table([*found.values()]).markdown()
    assert "6 questions; KL over all of them" in table
    assert f"{100 * comb.closed:.1f} ({100 * low:.1f}-{100 * high:.1f})" in table
    without = [dataclasses.replace(questions[0], documents=(Document("a long fact " * 20),))]
    [result] = with_divergence((model, TOKENIZER), without, [results["comb"]], **OPTIONS)
    assert result.kl is None
    assert "No KL: no question fits" in result.note


def test_json_says_how_it_was_made(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "result.json"
    write_results(path, [result(timing=Timing(1.0, 0.5, 2.0, 3))], seed=7, dataset="nano")
    content = json.loads(path.read_text())
    assert content["results"][0]["em"] == 0.5
    assert content["results"][0]["ttft_cold_s"] == {"median": 1.0, "low": 0.5, "high": 2.0, "n": 3}
    assert content["results"][0]["predictions"] == ["a", "b", "c", "d"]
    assert (content["seed"], content["dataset"]) == (7, "nano")
    assert {"argv", "versions", "commit", "machine"} <= set(content)
    assert content["versions"]["torch"] == torch.__version__
    assert [entry.name for entry in path.parent.iterdir()] == ["result.json"]  # no temporary file is left


def test_environment_works_outside_a_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert environment()["commit"] is None


def test_questions_without_room_are_left_out_for_all_methods(
    model: CombForCausalLM, questions: list[Example], caplog: pytest.LogCaptureFixture
) -> None:
    options = {**OPTIONS, "timing_examples": 0}
    long = dataclasses.replace(questions[0], documents=(Document("a long fact " * 20),))
    mixed = [*questions[:3], long]
    with caplog.at_level("WARNING"):
        full, comb = evaluate((model, TOKENIZER), mixed, ["full", "comb"], **options)
    assert (full.n, comb.n) == (3, 3)
    assert full.note.startswith("left out for all methods: 1 of 4 questions")
    assert "left out for all methods: 1 of 4" in caplog.text
    with pytest.raises(ValueError, match="no question fits"):
        evaluate((model, TOKENIZER), [long], ["full"], **options)
    [alone] = evaluate((model, TOKENIZER), mixed, ["comb"], **options)
    assert (alone.n, alone.note) == (4, "")


def test_plots_are_written_and_hold_the_last_point_of_a_curve_far_from_zero(tmp_path: Path) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot", reason="plots need matplotlib (the demo extra)")
    timing = Timing(0.01, 0.005, 0.02, 3)
    for path in (
        plot_results([result(timing=timing), result("none")], tmp_path / "a" / "results.png", title="held-out"),
        plot_training([(1, 2.0), (2, 1.0)], tmp_path / "loss.png"),
    ):
        assert path.read_bytes().startswith(b"\x89PNG")
    _, axes = pyplot.subplots()
    rows = [{"step": 50, "closed": 96.6}, {"step": 100, "closed": 97.1}]
    Lines(rows, "step", {"": "closed"}, "step", "closed").draw(axes)
    for (low, high), last in ((axes.get_xlim(), 100), (axes.get_ylim(), 97.1)):
        assert low == 0
        assert high > 1.04 * last
    _, axes = pyplot.subplots()
    Lines([{"step": 0, "closed": -1.6}, {"step": 4, "closed": -0.3}], "step", "closed", "", "", by=str).draw(axes)
    assert axes.get_ylim() == pytest.approx((-1.68, 0))  # worse than without documents
    pyplot.close("all")

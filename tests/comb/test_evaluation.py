"""What a comparison is shown and kept as: tables, JSON and plots, from hand-made rows."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

from comb.evaluation.plot import Lines, Quality, draw, plot_training
from comb.evaluation.record import environment, write_results
from comb.evaluation.summary import comparison_tables
from comb.evaluation.table import FittedTable, Row, Timing


def test_timing_of_few_measurements() -> None:
    assert Timing.of([]) is None
    assert Timing.of([2.0]) == Timing(2.0, 2.0, 2.0, 1)
    assert Timing.of([1.0, 2.0, 3.0, 4.0, 5.0]) == Timing(3.0, 2.0, 4.0, 5)


def row(method: str = "full", timing: Timing | None = None) -> Row:
    """As `summarize` makes them."""
    scores = {"em": 0.5, "f1": 0.625, "contains": 0.5, "rouge_l": 0.75, "same": 1.0, "rouge_l_full": 1.0, "kl": 0.0}
    costs = {"document_tokens": 1190.0, "cache_bytes_per_document_token": 3072.0, "computed_tokens": 1230.0}
    times = {"ttft_cold_s": timing, "ttft_cached_s": timing}
    return {"method": method, "refused": "", "n": 4, "kl_n": 9, "kl_questions": 3, **scores, **costs, **times}


def test_tables_show_percent_and_milliseconds() -> None:
    rows = [row(timing=Timing(0.0123, 0.0091, 0.02, 5)), row("comb")]
    [timed, untimed] = (line[:1] + line[1:5] + line[-4:] for line in comparison_tables(rows)[0].lines())
    assert timed == ("full", "50.0", "62.5", "50.0", "75.0", "12 ±5.5", "12 ±5.5", "3072", "1230")
    assert untimed[5:] == ("-", "-", "3072", "1230")
    console = Console(width=80, file=io.StringIO())
    console.print(comparison_tables(rows, "held-out")[0])
    text = console.file.getvalue()  # type: ignore[attr-defined]  # the StringIO above
    assert text.count("12 ±5.5") == 2
    assert "…" not in text  # nothing is cut at 80 columns
    assert "4 questions of 1190 document tokens; KL and top-1 over 9 tokens of 3 answers." in text
    lines = [line for line in comparison_tables([row(), row("comb")])[0].markdown().splitlines() if "|" in line]
    assert len(lines) == 4
    assert {line.count("|") for line in lines} == {12 + 1}  # no columns of times


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


def test_json_says_how_it_was_made(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "result.json"
    write_results(path, [row(timing=Timing(1.0, 0.5, 2.0, 3))], seed=7, dataset="nano")
    content = json.loads(path.read_text())
    assert content["results"][0]["em"] == 0.5
    assert content["results"][0]["ttft_cold_s"] == {"median": 1.0, "low": 0.5, "high": 2.0, "n": 3}
    assert (content["seed"], content["dataset"]) == (7, "nano")
    assert {"argv", "versions", "commit", "machine"} <= set(content)
    assert content["versions"]["torch"] == torch.__version__
    assert [entry.name for entry in path.parent.iterdir()] == ["result.json"]  # no temporary file is left


def test_environment_works_outside_a_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert environment()["commit"] is None


def test_plots_are_written_and_hold_the_last_point_of_a_curve_far_from_zero(tmp_path: Path) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot", reason="plots need matplotlib (the demo extra)")
    timing = Timing(0.01, 0.005, 0.02, 3)
    for path in (
        draw([Quality([row(timing=timing), row("none")])], tmp_path / "a" / "results.png", title="held-out"),
        plot_training([(1, 2.0), (2, 1.0)], tmp_path / "loss.png", heldout=[(2, 1.5)], closed=[(2, 0.4)], title="t"),
    ):
        assert path.read_bytes().startswith(b"\x89PNG")
    _, axes = pyplot.subplots()
    rows = [{"step": 50, "closed": 96.6}, {"step": 100, "closed": 97.1}]
    Lines(rows, "step", {"": "closed"}, "step", "closed").draw(axes)
    for (low, high), last in ((axes.get_xlim(), 100), (axes.get_ylim(), 97.1)):
        assert low == 0
        assert high > 1.04 * last
    _, axes = pyplot.subplots()
    Lines([{"step": 0, "closed": -1.6}, {"step": 4, "closed": -0.3}], "step", {"": "closed"}, "", "").draw(axes)
    assert axes.get_ylim() == pytest.approx((-1.68, 0))  # worse than without documents
    pyplot.close("all")

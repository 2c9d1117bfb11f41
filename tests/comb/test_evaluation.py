"""Metrics by hand and by official definitions, where documents are read, and what a comparison is shown and kept as."""

from __future__ import annotations

import errno
import io
import json
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from comb.backbones.forward import StageTimes
from comb.cli.main import app
from comb.documents.document import Prompt
from comb.evaluation.metrics import agreement, bootstrap, exact_match, f1, normalize_answer, rouge_l, score
from comb.evaluation.placement import _Batch, hidden_in, measure_placement, short_prompts
from comb.evaluation.plot import Lines, Quality, draw, plot_training
from comb.evaluation.record import environment, write_json, write_results
from comb.evaluation.summary import comparison_tables
from comb.evaluation.table import FittedTable, Row, Timing
from tests.helpers.families import tiny


def test_timing_of_few_measurements() -> None:
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


def test_json_says_how_it_was_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "deep" / "result.json"
    write_results(path, [row(timing=Timing(1.0, 0.5, 2.0, 3))], seed=7, dataset="nano")
    content = json.loads(path.read_text())
    assert content["results"][0]["em"] == 0.5
    assert content["results"][0]["ttft_cold_s"] == {"median": 1.0, "low": 0.5, "high": 2.0, "n": 3}
    assert (content["seed"], content["dataset"]) == (7, "nano")
    assert {"argv", "versions", "commit", "machine"} <= set(content)
    assert content["versions"]["torch"] == torch.__version__
    assert [entry.name for entry in path.parent.iterdir()] == ["result.json"]  # no temporary file is left
    monkeypatch.setenv("PATH", "")  # as outside a repository
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
    Lines([{"method": "m", "x": 50, "y": 96.6}, {"method": "m", "x": 100, "y": 97.1}], "x", "y", "", "").draw(axes)
    for (low, high), last in ((axes.get_xlim(), 100), (axes.get_ylim(), 97.1)):
        assert low == 0
        assert high > 1.04 * last
    _, axes = pyplot.subplots()
    Lines([{"method": "m", "x": 0, "y": -1.6}, {"method": "m", "x": 4, "y": -0.3}], "x", "y", "", "").draw(axes)
    assert axes.get_ylim() == pytest.approx((-1.68, 0))  # worse than without documents
    pyplot.close("all")


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("The  Cat!", "cat"),
        ("an apple, a pear", "apple pear"),
        ("U.S.", "us"),
        ("Theory of the a-theist", "theory of atheist"),  # articles go as whole words, punctuation before them
        ("", ""),
        ("Åsa's", "åsas"),
    ],
)
def test_normalize_answer(text: str, normal: str) -> None:
    assert normalize_answer(text) == normal


def test_exact_match_takes_the_best_reference_and_f1_counts_shared_words_with_repeats() -> None:
    assert exact_match("the 10th century.", ["11th century", "10th Century"]) == 1.0
    assert exact_match("10th centuries", ["11th century", "10th century"]) == 0.0
    # shared: "in", "10th" -> precision 2/3, recall 2/4
    assert f1("in in 10th", ["in 10th and 11th"]) == pytest.approx(2 * (2 / 3) * (2 / 4) / (2 / 3 + 2 / 4))
    assert f1("nothing shared", ["other words"]) == 0.0
    assert f1("Rome", ["Paris", "in Rome"]) == pytest.approx(2 / 3)
    # an empty side matches an empty one alone, and nothing is left of an article
    assert [f1(*pair) for pair in (("", [""]), ("the", [""]), ("", ["Rome"]), ("Rome", [""]))] == [1.0, 1.0, 0.0, 0.0]


def test_scores_average_count_and_have_intervals() -> None:
    scores = score(["Rome", "Paris"], [["Rome"], ["London"]])
    assert (scores.n, scores.em, scores.f1, scores.rouge_l) == (2, 0.5, 0.5, 0.5)
    scores = score(["Rome"] * 6 + ["Paris"] * 4, [["Rome"]] * 10)
    low, high = scores.intervals["em"]
    assert low < scores.em == 0.6 < high
    assert set(scores.intervals) == {"em", "f1", "rouge_l"}
    assert agreement(["a b", ""], ["a c", ""]) == ([0.0, 1.0], [0.5, 1.0])


def test_score_refuses_what_it_cannot_score() -> None:
    with pytest.raises(ValueError, match="no reference"):
        score(["a"], [[]])
    with pytest.raises(ValueError, match="put a single one in a list"):
        exact_match("a", "a")


def test_bootstrap_intervals_hold_the_mean_as_often_as_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the known truth: draws of a coin of 0.7, 200 questions each."""
    monkeypatch.setattr("comb.evaluation.metrics.RESAMPLES", 400)
    generator = numpy.random.default_rng(0)
    held, widths = 0, []
    for _ in range(200):
        low, high = bootstrap(list(map(float, generator.random(200) < 0.7)))
        held += low <= 0.7 <= high
        widths.append(high - low)
    assert 0.90 <= held / 200 <= 0.99
    # the normal approximation: 2 x 1.96 x sqrt(p (1 - p) / n)
    assert sum(widths) / 200 == pytest.approx(2 * 1.96 * (0.7 * 0.3 / 200) ** 0.5, rel=0.05)
    assert bootstrap([1.0] * 5) == (1.0, 1.0)
    assert bootstrap([0.0, 1.0]) == bootstrap([0.0, 1.0])


def test_rouge_l_is_the_packages() -> None:
    rouge_scorer = pytest.importorskip("rouge_score.rouge_scorer")
    scorer = rouge_scorer.RougeScorer(["rougeL"])
    texts = [
        "The cat sat on the mat.", "the mat sat on a cat", "Anna Bell's home is in Rome (Italy)!",
        "in Rome, Anna lives", "one-two three_four 5", "five 5 three four one two", "completely different words",
        "x", "",
    ]  # fmt: skip
    for prediction in texts:
        for reference in texts:
            expected = scorer.score(reference, prediction)["rougeL"].fmeasure
            assert rouge_l(prediction, [reference]) == pytest.approx(expected), (prediction, reference)


PROMPTS = [
    (Prompt((3,), ((10, 11, 12, 13), (14, 15)), (20, 21)), (30, 31)),
    (Prompt((3,), ((16, 17, 18),), (22,)), (32,)),
]


def llama_that_reads_in_layer_2() -> Any:
    backbone = tiny("llama")
    for index in (0, 1, 3):
        torch.nn.init.zeros_(backbone.model.layers[index].self_attn.o_proj.weight)
    return backbone


@torch.no_grad()
def test_the_one_layer_that_reads_documents_is_found() -> None:
    backbone = llama_that_reads_in_layer_2()
    losses, _ = measure_placement(backbone, PROMPTS)
    assert losses.pop(2) > 1e-4
    assert max(map(abs, losses.values())) < 1e-6


@torch.no_grad()
@pytest.mark.parametrize("gaps", [(), ((5,),)])
def test_every_document_is_hidden(gaps: tuple[tuple[int, ...], ...]) -> None:
    backbone = llama_that_reads_in_layer_2()
    attention = backbone.model.layers[2].self_attn

    def logprobs(*segments: tuple[int, ...], hidden: bool) -> torch.Tensor:
        batch = _Batch([(Prompt((3,), segments, (20, 21), gaps), (30, 31))], torch.device("cpu"))
        with hidden_in(attention, batch.hidden) if hidden else nullcontext():
            return batch.logprobs(backbone)

    one = (10, 11, 12, 13)
    first, second = (logprobs(one, other, hidden=True) for other in ((14, 15), (40, 41)))
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    seen = [logprobs(one, other, hidden=False) for other in ((14, 15), (40, 41))]
    assert (seen[0] - seen[1]).abs().max() > 1e-4


@pytest.mark.parametrize("family", ["llama", "gemma3", "mixtral", "deepseek_v3", "qwen3_next"])
def test_batches_and_families(family: str) -> None:
    backbone = tiny(family)
    together, without = measure_placement(backbone, PROMPTS)
    apart, without_apart = measure_placement(backbone, PROMPTS, batch_tokens=1)
    assert together.keys() == apart.keys() != set()
    assert together == pytest.approx(apart, abs=1e-5)
    assert without == pytest.approx(without_apart, abs=1e-5)
    if family == "llama":
        backbone.set_attn_implementation("eager")
        assert measure_placement(backbone, PROMPTS)[0] == pytest.approx(together, abs=1e-5)


def test_what_can_not_be_measured_is_refused() -> None:
    with pytest.raises(ValueError, match="one has none"):
        measure_placement(tiny("llama"), [(Prompt((3,), (), (4,)), (5,))])
    # the shortest come first, one at least
    assert short_prompts(PROMPTS, 7) == [PROMPTS[1]]
    assert short_prompts(PROMPTS, 1) == [PROMPTS[1]]
    assert short_prompts(PROMPTS, 100) == [PROMPTS[1], PROMPTS[0]]


def test_the_command_shows_layers_and_where_blocks_belong() -> None:
    result = CliRunner().invoke(app, ["info", "nano", "--no-check", "--placement", "nano", "--blocks", "2"])
    assert result.exit_code == 0, result.output
    assert "where documents are read" in result.output
    lines = [line.split() for line in result.output.partition("nats lost without")[2].splitlines() if line[:7].strip()]
    losses = {int(line[0]): (float(line[1]), line[-1]) for line in lines if line[0].isdigit()}
    marked = [layer for layer, (_, mark) in losses.items() if mark == "*"]
    assert len(losses) == 6
    assert max(losses, key=losses.__getitem__) in marked
    assert f"model.cross_attention_layers={marked}" in result.output
    result = CliRunner().invoke(app, ["info", "nano", "--no-check", "--placement", "nano", "--blocks", "0"])
    assert "0 cross blocks, but documents can be read in 6 layers" in str(result.exception)


def test_times_add_up_and_a_part_is_no_part_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 4.0, 9.0, 20.0, 21.0])
    monkeypatch.setattr("comb.backbones.forward.time.perf_counter", lambda: next(clock))
    times = StageTimes(torch.device("cpu"), "compose")
    assert dict(times) == {"compose": 0.0}
    with times.timed("recompute"), times.timed("compose", within="recompute"):
        pass
    with times.timed("compose"):
        pass
    assert dict(times) == {"compose": 4.0, "recompute": 6.0}


def test_on_a_gpu_nothing_waits_until_times_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    made: list[Any] = []

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing
            self.number = len(made)
            made.append(self)

        def record(self, stream: str) -> None:
            told.append(f"{self.number} on {stream}")

        def synchronize(self) -> None:
            told.append(f"{self.number} awaited")

        def elapsed_time(self, end: Event) -> float:
            return 500.0 * (end.number - self.number)  # milliseconds

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"{device}'s")
    times = StageTimes(torch.device("cuda:1"))
    with pytest.raises(ValueError, match="broken"), times.timed("link"):
        raise ValueError("broken")
    with times.timed("link"):
        pass
    assert told == ["0 on cuda:1's", "1 on cuda:1's", "2 on cuda:1's", "3 on cuda:1's"]
    assert dict(times) == {"link": 1.0}
    assert told[4:] == ["1 awaited", "3 awaited"]
    assert times["link"] == 1.0  # once


def test_a_full_disk_names_the_file_that_has_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path / 'rows.json'}'"):
        write_json(tmp_path / "rows.json", {})

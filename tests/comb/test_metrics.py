"""Metrics against values worked out by hand and against the official definitions' corner cases."""

from __future__ import annotations

import numpy
import pytest

from comb.evaluation.metrics import agreement, bootstrap, exact_match, f1, normalize_answer, rouge_l, score


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


def test_exact_match_takes_the_best_reference() -> None:
    assert exact_match("the 10th century.", ["11th century", "10th Century"]) == 1.0
    assert exact_match("10th centuries", ["11th century", "10th century"]) == 0.0


def test_f1_counts_shared_words_with_repeats() -> None:
    # shared: "in", "10th" -> precision 2/3, recall 2/4
    assert f1("in in 10th", ["in 10th and 11th"]) == pytest.approx(2 * (2 / 3) * (2 / 4) / (2 / 3 + 2 / 4))
    assert f1("nothing shared", ["other words"]) == 0.0
    assert f1("Rome", ["Paris", "in Rome"]) == pytest.approx(2 / 3)
    # an empty side matches an empty one alone, and nothing is left of an article
    assert [f1(*pair) for pair in (("", [""]), ("the", [""]), ("", ["Rome"]), ("Rome", [""]))] == [1.0, 1.0, 0.0, 0.0]


def test_rouge_l_is_the_f_measure_of_the_longest_common_subsequence() -> None:
    # the example of Lin 2004, sec. 3: police killed the gunman / police kill the gunman / the gunman kill police
    assert rouge_l("police kill the gunman", ["police killed the gunman"]) == pytest.approx(0.75)
    assert rouge_l("the gunman kill police", ["police killed the gunman"]) == pytest.approx(0.5)
    assert rouge_l("a b c d", ["b d"]) == pytest.approx(2 * 0.5 * 1.0 / 1.5)
    assert rouge_l("", ["b d"]) == 0.0


def test_score_averages_and_counts() -> None:
    scores = score(["Rome", "Paris"], [["Rome"], ["London"]])
    assert (scores.n, scores.em, scores.f1, scores.rouge_l) == (2, 0.5, 0.5, 0.5)


def test_score_refuses_what_it_cannot_score() -> None:
    with pytest.raises(ValueError, match="nothing to score"):
        score([], [])
    with pytest.raises(ValueError, match="2 predictions but references for 1"):
        score(["a", "b"], [["a"]])
    with pytest.raises(ValueError, match="no reference"):
        score(["a"], [[]])
    with pytest.raises(ValueError, match="put a single one in a list"):
        exact_match("a", "a")


def test_answers_agree_where_they_are_the_same() -> None:
    assert agreement(["a b", ""], ["a c", ""]) == ([0.0, 1.0], [0.5, 1.0])


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


def test_scores_have_intervals() -> None:
    scores = score(["Rome"] * 6 + ["Paris"] * 4, [["Rome"]] * 10)
    low, high = scores.intervals["em"]
    assert low < scores.em == 0.6 < high
    assert set(scores.intervals) == {"em", "f1", "rouge_l"}


def test_rouge_l_is_the_packages() -> None:
    rouge_scorer = pytest.importorskip("rouge_score.rouge_scorer")
    scorer = rouge_scorer.RougeScorer(["rougeL"])
    texts = [
        "The cat sat on the mat.", "the mat sat on a cat", "Anna Bell's home is in Rome (Italy)!",
        "in Rome, Anna lives", "one-two three_four 5", "five 5 three four one two", "completely different words", "x",
    ]  # fmt: skip
    for prediction in texts:
        for reference in texts:
            expected = scorer.score(reference, prediction)["rougeL"].fmeasure
            assert rouge_l(prediction, [reference]) == pytest.approx(expected), (prediction, reference)

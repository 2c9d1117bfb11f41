"""What an engine with an adapter is asked on a CPU and on a GPU alike, and whether its answers are the library's."""

from __future__ import annotations

from typing import Any

from tests.helpers.engines import Served

PROMPTS = [list(range(10, 10 + length)) for length in (7, 40)]
ASKED = [(prompt, names) for names in ("A", "", "CB") for prompt in PROMPTS]


def plain_answers(found: Served) -> list[Any]:
    """To each prompt alone, without documents."""
    return [found.ask([(prompt, "")])[0] for prompt in PROMPTS]


def answers_of_the_library(found: Served, tolerance: float) -> list[Any]:
    """The engine's answers to `ASKED`, after a look at whether they are the library's within a tolerance.

    The control: from the library's answers over another document most are more than three times as far.
    """
    answers = found.ask(ASKED)
    for (prompt, names), answer in zip(ASKED, answers, strict=True):
        assert found.apart(answer, prompt, names) < tolerance, names
    wrong = [found.apart(answer, prompt, "B" if names else "A")
             for (prompt, names), answer in zip(ASKED, answers, strict=True)]  # fmt: skip
    assert sum(one > 3 * tolerance for one in wrong) >= 4, wrong
    return answers

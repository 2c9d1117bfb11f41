"""What tests of dataset readers share: a row of each set, samples of real data, and the texts of an example."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from comb.documents.document import Example

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
"""Samples of real data, beside the checkout; tests that want them are skipped without."""

WriteRows = Callable[..., Path]
Row = dict[str, Any]


def texts(example: Example) -> list[str | None]:
    """The documents' texts."""
    return [document.text for document in example.documents]


def article(number: int, paragraphs: int = 1) -> Row:
    """Of the official SQuAD, with two questions about each paragraph."""
    answers = [{"text": text, "answer_start": 0} for text in ("Ann", "Ann B", "Ann")]
    whole: Row = {"title": f"article {number}", "paragraphs": []}
    for paragraph in range(paragraphs):
        name = f"{number}-{paragraph}"
        asked = {"question": f"Who is {name}?", "answers": answers, "is_impossible": False}
        qas = [{"id": f"{name}-{letter}", **asked} for letter in "ab"]
        whole["paragraphs"].append({"context": f"Text {paragraph} of article {number}.", "qas": qas})
    return whole


def instances(count: int, name: str = "") -> list[Row]:
    return [{"id": f"{name}-{n}", "input": f"in {name}{n} ", "output": [f"out {n} ", "other"]} for n in range(count)]


def shots(count: int) -> list[dict[str, str]]:
    return [{"input": f"shown {n}", "output": f"shot {n}", "explanation": "why"} for n in range(count)]


def task(name: str = "", count: int = 3, **fields: Any) -> Row:
    """A file of Natural-Instructions."""
    row = {"Definition": [f"Do {name}.", "Be short."], "Positive Examples": shots(3), "Negative Examples": shots(1)}
    return {**row, "Instances": instances(count, name), **fields}


def _passages(number: int, name: str) -> list[Row]:
    return [{"title": f"T{number}", name: f"Text {number}.", "isgold": True}, {"title": "", name: "Other."}]


ROWS: dict[str, Callable[[int], Row]] = {
    "jsonl": lambda n: {
        "documents": [{"text": f"Text {n}.", "title": "T", "id": f"d{n}"}, "More."], "query": f"q{n}?",
        "answer": "a", "answers": ["b"], "id": n, "group": f"g{n}",
    },
    "hotpotqa": lambda n: {
        "_id": n, "question": f"q{n}?", "answer": "x", "context": [["T", ["One.", "Two. ", " "]], ["U", ["Three."]]]
    },
    "musique": lambda n: {"id": n, "question": f"q{n}?", "answers": ["x", "y"], "ctxs": _passages(n, "text")},
    "musique, official": lambda n: {
        "id": n, "question": f"q{n}?", "answer": "x", "answer_aliases": ["y"], "answerable": True,
        "paragraphs": _passages(n, "paragraph_text"),
    },
    "nq_open": lambda n: {"question": f"q{n}?", "answers": [f"a{n}", "z"], "ctxs": _passages(n, "text")},
    "samsum": lambda n: {"id": n, "dialogue": f"A: {n}\r\nB: hm", "summary": f"It is {n}.", "summary2": "Two."},
    "xsum": lambda n: {
        "id": n, "summary": f"News {n}.",
        "document": f"Article {n} is about\nnews and more things than eight words say, {n} times.",
    },
    "multi_news": lambda n: {"document": f"one {n} ||||| two", "summary": f"Both {n}."},
    "longbench": lambda n: {
        "_id": n, "dataset": "hotpotqa", "context": f"Passage 1:\na {n}\nPassage 2:\nb", "input": "q?", "answers": ["x"]
    },
}  # fmt: skip
"""By set, in files of rows."""
HUB_ROWS: dict[str, Callable[[int], Row]] = {
    **ROWS,
    "squad": lambda n: {
        "id": n, "title": f"T{n // 4}", "context": f"Text {n // 2}.", "question": f"{n}?",
        "answers": {"text": ["Ann", "Ann B"], "answer_start": [0, 0]},
    },
    "hotpotqa": lambda n: {
        "id": n, "question": f"q{n}?", "answer": "x",
        "context": {"title": ["T", "U"], "sentences": [["One.", " Two."], ["Three."]]},
    },
    "natural_instructions": lambda n: {
        "task_name": f"task{n}_do", "id": n, "definition": f"Do {n}.", "inputs": f"in {n}", "targets": "out"
    },
}  # fmt: skip
"""On the Hub."""

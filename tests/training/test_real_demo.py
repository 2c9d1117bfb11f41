"""`comb demo` with a model by name or an adapter: questions over real passages, with and without a trained adapter."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from comb_training.cli import demonstration
from comb_training.config import config_from_dict, load_config
from comb_training.train import run_training
from tests.helpers.training import invoke, nano_run

ROOT = Path(__file__).parents[2]
ASKING = {
    "prefix": "Read:\n", "document_template": "{text}\n", "query_template": "Question: {query}\nAnswer:", "stop": "\n"
}  # fmt: skip


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    every = demonstration.demo_questions()
    monkeypatch.setattr(demonstration, "demo_questions", lambda: every[:2])


def recipe(folder: Path) -> dict[str, Any]:
    data = {"dataset": "jsonl", "path": str(folder / "rows.jsonl"), **ASKING}
    return nano_run(folder / "adapter", data, answers="gold", answer_max_new_tokens=3)


@pytest.fixture
def adapter(tmp_path: Path, write_rows: Callable[..., Path]) -> Path:
    write_rows(*({"documents": [f"A{n} is {n}."], "query": f"A{n}?", "answer": f"{n}"} for n in range(8)))
    run_training(config_from_dict(recipe(tmp_path)), progress=False)
    return tmp_path / "adapter"


def lines(output: str, method: str) -> list[str]:
    """The rows of a method, in all tables: not a command that a terminal broke in front of its name."""
    return [line for line in output.splitlines() if re.match(rf"\s*{method}\s+(?!demo)\S", line)]


@pytest.mark.usefixtures("few")
def test_all_methods_answer_side_by_side(adapter: Path) -> None:
    shown = invoke("demo", "--adapter", str(adapter))
    assert shown.exit_code == 0, shown.output
    for method in ("full", "comb", "primed", "legolink:16", "none"):  # each question, and the table
        assert len(lines(shown.output, method)) == 3
    assert "right: the Red Sea" in shown.output
    assert "nothing was trained" in shown.output
    assert "left out" not in shown.output


@pytest.mark.usefixtures("few")
def test_without_an_adapter_the_other_methods_are_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "linktokens-small.yaml").write_text(yaml.safe_dump(recipe(tmp_path)), encoding="utf-8")
    monkeypatch.setattr(demonstration, "CONFIGS", tmp_path)
    monkeypatch.setattr(demonstration, "ADAPTERS", tmp_path / "none")
    shown = invoke("demo", "--model", "small")
    assert shown.exit_code == 0, shown.output
    assert "it is left out" in shown.output
    assert f"--adapter {tmp_path / 'adapter'}" in shown.output.replace("\n", "")
    assert not lines(shown.output, "comb")
    for method in ("full", "primed", "legolink:16", "none"):
        assert len(lines(shown.output, method)) == 3


def test_how_questions_are_put_is_read_and_never_guessed(adapter: Path, tmp_path: Path) -> None:
    asked, found = demonstration._how_to_ask("anything", adapter, given=True)
    assert found
    assert {name: getattr(asked.data, name) for name in ASKING} == ASKING
    asked, found = demonstration._how_to_ask("smollm2-135m", tmp_path / "none", given=False)
    assert not found
    assert asked == load_config(ROOT / "configs" / "linktokens-smollm2-135m.yaml")
    with pytest.raises(ValueError, match="as `comb train` writes"):
        demonstration._how_to_ask("smollm2-135m", tmp_path, given=True)
    with pytest.raises(ValueError, match="no recipe"):
        demonstration._how_to_ask("another", tmp_path, given=False)
    # nor is an option of the demo that trains ignored
    assert "--train-steps" in str(invoke("demo", "--model", "smollm2-135m", "--train-steps", "5").exception)


def test_committed_adapters_are_small_and_say_how_they_are_asked() -> None:
    folders = [folder for folder in demonstration.ADAPTERS.glob("*") if folder.is_dir()]
    if not folders:
        pytest.skip("no adapter is committed")
    for folder in folders:
        sizes = [file.stat().st_size for file in folder.iterdir()]
        assert sum(sizes) <= 40 * 2**20, folder.name
        assert max(sizes) <= 10 * 10**6, f"{folder.name}: save_pretrained(..., max_shard_size='10MB')"
        assert demonstration._how_to_ask(folder.name, folder, given=False)[1]
        assert (folder / "training.json").is_file()


def test_every_question_stands_over_its_own_passage_and_three_others() -> None:
    questions = demonstration.demo_questions()
    assert len(questions) == 10
    for question in questions:
        texts = [str(document.text) for document in question.documents]
        assert len(set(texts)) == demonstration.DOCUMENTS
        assert sum(question.answer.removeprefix("the ") in text for text in texts) == 1  # and no other tells

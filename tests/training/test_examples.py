"""The programs of examples/ run as a user runs them."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from comb import CombForCausalLM

EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_ask(capsys: pytest.CaptureFixture[str]) -> None:
    example("ask").main("nano", "legolink:4")
    first, second = [line for line in capsys.readouterr().out.splitlines() if "first token" in line]
    assert first.count("compiled") == 3
    assert second.count("hit") == 3


def test_chat(capsys: pytest.CaptureFixture[str]) -> None:
    example("chat").main("nano", "legolink:4")
    first, second = [line for line in capsys.readouterr().out.splitlines() if "tokens were there" in line]
    assert ", 0 tokens" in first
    assert "'vell': 'continued', 'marta': 'compiled'" in second


def test_train(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    towns = {"Anna": "Rome", "Bo": "Oslo", "Cleo": "Bern", "Dan": "Kiel", "Eve": "Rome", "Finn": "Oslo", "Gus": "Bern"}
    rows = [
        {"documents": [f"{name} works in {town}."], "query": f"Where does {name} work?", "answer": town}
        for name, town in towns.items()
    ]
    data, folder = tmp_path / "data.jsonl", tmp_path / "adapter"
    data.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    example("train_encoder").main(
        "nano", str(data), str(folder), "train.max_seconds=null", "train.steps=2",
        "model.num_encoder_layers=2", "model.cross_attention_layers=[2,4]", "model.device=cpu",
    )  # fmt: skip
    assert "2 steps" in capsys.readouterr().out
    trained = CombForCausalLM.from_pretrained(folder)
    assert len(trained.encoder.layers) == 2
    assert trained.config.cross_attention_layers == [2, 4]

"""`comb bench overhead`: what is counted as the model's own, and the command."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from comb.backbones.forward import decoder_of
from comb.bench.overhead import pass_clock
from comb.cli import main as cli
from tests.helpers.tiny_engine import make_backbone, make_tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")


def test_passes_are_counted_once_and_also_when_broken_off() -> None:
    model = make_backbone()
    ids = torch.tensor([[5, 6, 7]])
    with pass_clock(model) as seconds:
        start = time.thread_time()
        model(ids)  # the decoder is a part of it
        decoder_of(model)(ids)
        with pytest.raises(IndexError):
            model(ids + 10**6)
        spent = time.thread_time() - start
    assert len(seconds) == 3
    assert 0 < sum(seconds) <= spent
    model(ids)
    assert len(seconds) == 3


def test_the_command_tells_methods_apart(tmp_path: Path) -> None:
    make_backbone().save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    row = {"documents": ["fact 1 is here", "and other 2"], "query": "what is 1?", "answer": "fact 1"}
    (tmp_path / "data.jsonl").write_text(json.dumps(row))
    arguments = [
        "bench", "overhead", "--model", tmp_path / "model", "--dataset", tmp_path / "data.jsonl", "--split", "all",
        "--methods", "full,legolink:2,comb", "--repeats", 2, "--out", tmp_path / "cost.json",
    ]  # fmt: skip
    result = CliRunner().invoke(cli.app, [str(each) for each in arguments], env={"COLUMNS": "100"})
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "cost.json").read_text())["results"]
    assert [row["method"] for row in rows] == ["generate alone", "full", "legolink:2", "comb"]
    assert "trained encoder" in rows[3]["refused"]
    for row in rows[:3]:
        assert 0 < row["least_s"] <= row["outside_s"]
        assert 0 < row["passes_s"] < row["total_s"]

"""The command line: what it prints, and what it says of misuse (of all else that is wrong: test_one_line)."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from comb import CombForCausalLM, PICEngine
from comb.cli import main as cli
from comb.cli.doctor import Check
from tests.comb.test_checkpoint import write_release
from tests.helpers.byte_text import byte_llama, byte_tokenizer
from tests.helpers.families import BASE, open_gates

runner = CliRunner()


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """An adapter with a byte tokenizer, its backbone beside it."""
    byte_llama(**{**BASE, "vocab_size": 300}).save_pretrained(tmp_path / "backbone")
    byte_tokenizer().save_pretrained(tmp_path / "backbone")
    model = open_gates(CombForCausalLM.from_backbone(str(tmp_path / "backbone"), num_encoder_layers=2))
    model.save_pretrained(tmp_path / "adapter", tokenizer=byte_tokenizer())
    return tmp_path / "adapter"


def run(*arguments: object) -> Any:
    return runner.invoke(cli.app, [str(argument) for argument in arguments])


def test_info_and_doctor_show_structure_and_checks(adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run("info", adapter)
    assert result.exit_code == 0, result.output
    for text in ("4 at model.layers", "before layers [1, 3]", "encoder off == backbone", "cache per document token"):
        assert text in result.output
    assert "FAIL" not in result.output
    plain = run("info", adapter.parent / "backbone", "--no-check")
    assert plain.exit_code == 0, plain.output
    assert "8 layers, bidirectional" in plain.output
    assert "encoder off" not in plain.output
    assert run("doctor", adapter).exit_code == 0
    monkeypatch.setattr("comb.cli.doctor.run_checks", lambda model: [Check("a check", False, "0.3 > 0.1")])
    result = run("doctor", adapter)
    assert result.exit_code == 1
    assert "FAIL" in result.output


def test_ask_compares_methods(adapter: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text")
    (tmp_path / "b.txt").write_text("another text")
    documents = ["--doc", tmp_path / "a.txt", "--doc", tmp_path / "b.txt", "--max-new-tokens", 4]
    cold = run("ask", adapter, "why?", *documents)
    assert cold.exit_code == 0, cold.output
    assert cold.output.count("compiled") == 2
    full = run("ask", adapter, "why?", *documents, "--method", "full")
    off = run("ask", adapter, "why?", *documents, "--encoder", "off")
    assert "a.txt: inlined" in full.output
    assert full.output.splitlines()[0] == off.output.splitlines()[0]


def test_ask_prints_an_answer_as_it_is(adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = f"[red]\t:key: {'long ' * 40}end"
    monkeypatch.setattr(PICEngine, "ask", lambda *_, **__: SimpleNamespace(text=text, report="report"))
    assert run("ask", adapter, "why?", "--max-new-tokens", 1).output.splitlines()[0] == text


def test_ask_keeps_documents_on_disk(adapter: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text")
    arguments = ["ask", adapter, "why?", "--doc", tmp_path / "a.txt", "--max-new-tokens", 2]
    arguments += ["--cache", tmp_path / "kept"]
    assert "compiled" in run(*arguments).output
    again = run(*arguments)
    assert "hit" in again.output
    assert "disk" in again.output
    (tmp_path / "a.txt").write_text("some text", encoding="utf-8-sig")  # as Windows editors save it
    assert "disk" in run(*arguments).output
    odd = tmp_path / os.fsdecode(b"caf\xe9.txt")  # a name that isn't UTF-8
    odd.write_text("more text")
    assert "caf\N{REPLACEMENT CHARACTER}.txt: compiled" in run("ask", adapter, "why?", "--doc", odd).output


def test_convert(tmp_path: Path) -> None:
    result = run("convert", write_release(tmp_path / "release"), tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "out" / "backbone" / "model.safetensors").exists()


def test_misuse_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Of every command, with the status that shells know for it."""
    for command, message in (
        ("ask nano --doc a.txt b.txt why?", "argument(s) (why?): --doc comes again before each of several (comb ask"),
        ("ask", "Missing argument 'model' (comb ask --help"),
        ("info nano --blok 3", "No such option: --blok"),
        ("info nano --blocks", "'--blocks' requires an argument"),
        ("train", "Missing argument 'config' (comb train --help"),
        ("bench method", "unknown benchmark 'method'; known: context-length"),
        ("bench methods --questions x", "Invalid value for '--questions'"),
        ("tran", "No such command 'tran'"),
        ("demo --train-steps 0", "Invalid value for '--train-steps'"),
    ):
        with pytest.raises(SystemExit) as stop:
            cli.main(command.split())
        [line] = capsys.readouterr().err.splitlines()
        assert (stop.value.code, line.startswith("error: "), message in line) == (2, True, True), line
    for command in ([], ["bench"]):
        with pytest.raises(SystemExit):
            cli.main(command)
        assert "--help" in "".join(capsys.readouterr())

"""The command line: what it prints, and that errors are one line a user can act on."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from comb import CombForCausalLM
from comb.cli import main as cli
from comb.engine.engine import PICEngine
from tests.helpers.byte_text import byte_llama, byte_tokenizer
from tests.helpers.families import BASE, open_gates, tiny

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


def test_info_shows_structure_and_gate(adapter: Path) -> None:
    result = run("info", adapter)
    assert result.exit_code == 0, result.output
    for text in ("4 at model.layers", "before layers [1, 3]", "encoder off == backbone", "cache per document token"):
        assert text in result.output
    assert "FAIL" not in result.output


def test_info_on_a_plain_backbone(adapter: Path) -> None:
    result = run("info", adapter.parent / "backbone", "--encoder-layers", 2, "--no-check")
    assert result.exit_code == 0, result.output
    assert "2 layers, bidirectional" in result.output
    assert "encoder off" not in result.output


def test_doctor_exits_with_one_on_a_failure(adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("doctor", adapter).exit_code == 0
    from comb.cli.doctor import Check

    monkeypatch.setattr("comb.cli.doctor.run_checks", lambda model: [Check("a check", False, "0.3 > 0.1")])
    result = run("doctor", adapter)
    assert result.exit_code == 1
    assert "FAIL" in result.output


def test_ask_compares_methods(adapter: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text")
    (tmp_path / "b.txt").write_text("another text")
    documents = ["--doc", tmp_path / "a.txt", "--doc", tmp_path / "b.txt", "--max-new-tokens", 4]
    cold = run("ask", adapter, "why?", *documents, "--repeat", 2)
    assert cold.exit_code == 0, cold.output
    assert cold.output.count("compiled") == 2
    assert cold.output.count("hit") >= 2
    full = run("ask", adapter, "why?", *documents, "--method", "full")
    off = run("ask", adapter, "why?", *documents, "--encoder", "off")
    assert "a.txt: inlined" in full.output
    assert full.output.splitlines()[0] == off.output.splitlines()[0]


def test_ask_prints_an_answer_as_it_is(adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = f"[red]\t:key: {'long ' * 40}end"
    monkeypatch.setattr(PICEngine, "ask", lambda *_, **__: SimpleNamespace(text=text, report="report"))
    assert run("ask", adapter, "why?", "--max-new-tokens", 1).output.splitlines()[0] == text


def test_ask_takes_the_answer_that_fits(adapter: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a" * 240)
    arguments = ["ask", adapter, "why?", "--doc", tmp_path / "a.txt", "--method", "full"]
    assert run(*arguments).exit_code == 0
    assert "ask for at most 9 tokens" in str(run(*arguments, "--max-new-tokens", 256).exception)


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


def test_convert_and_push_dry_run(tmp_path: Path, adapter: Path) -> None:
    from tests.comb.test_conversion import write_release

    result = run("convert", write_release(tmp_path / "release"), tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "out" / "backbone" / "model.safetensors").exists()
    result = run("push", adapter, "me/tiny", "--dry-run")
    assert result.exit_code == 0, result.output
    assert "nothing was uploaded" in result.output
    assert "tokenizer.json" in result.output


def test_errors_are_one_line(
    adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "empty.txt").write_text("\n")
    tiny("llama").save_pretrained(tmp_path / "bare")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    cases = [
        (["ask", adapter, "why?", "--doc", tmp_path / "binary.txt"], "is not UTF-8 text"),
        (["ask", adapter, "why?", "--doc", tmp_path / "empty.txt"], "empty document"),
        (["ask", adapter, "why?", "--doc", tmp_path / "gone.txt"], "No such file"),
        (
            ["ask", adapter, "why?", "--method", "magic"],
            "unknown method 'magic'; known: addition, attnlink, cacheblend, comb, focus, full",
        ),
        (["ask", adapter.parent / "backbone", "why?", "--method", "comb"], "from_backbone"),
        (["ask", adapter.parent / "bare", "why?"], "no tokenizer found in"),
        (["ask", adapter, "why?", "--encoder", "maybe"], "--encoder is on or off"),
        (["ask", adapter, "why?", "--device", "cuda:1"], "--device cuda:1, but there is no GPU"),
        (["doctor", adapter.parent / "backbone", "--random", "--device", "cuda"], "but there is no GPU"),
        (["info", adapter, "--dtype", "bf16"], "--dtype is auto, float32"),
        (["info", adapter.parent / "backbone", "--backbone", adapter.parent / "backbone"], "not a COMB adapter"),
        (["convert", adapter, tmp_path / "x"], "model_type 'comb'"),
        (["push", tmp_path / "nothing", "me/x"], "no config.json"),
    ]
    for arguments, message in cases:
        monkeypatch.setattr("sys.argv", ["comb", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        assert stop.value.code == 1, arguments
        error = capsys.readouterr().err
        assert message in error, (arguments, error)
        assert "Traceback" not in error


def test_a_damaged_adapter_is_one_line(adapter: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    tiny("llama", seed=4).save_pretrained(adapter.parent / "other")
    monkeypatch.setattr("sys.argv", ["comb", "info", str(adapter), "--backbone", str(adapter.parent / "other")])
    with pytest.raises(SystemExit):
        cli.main()
    assert "this adapter belongs to" in capsys.readouterr().err

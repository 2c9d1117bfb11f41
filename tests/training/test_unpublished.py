"""What is published of an adapter names no folder of the machine that it was made on, which goes on knowing them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from comb import CombForCausalLM, LinkTokensForCausalLM
from comb.cli import main as cli
from comb.hub.push import plan_push
from tests.helpers.byte_text import byte_llama, byte_tokenizer

PERSON = "jane-doe-1234"
ROWS = [{"documents": [f"the number {number}"], "query": "which?", "answer": str(number)} for number in range(20)]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A person's folder with a backbone and data, and the working folder somewhere else."""
    home = tmp_path / "home" / PERSON
    byte_llama(vocab_size=300).save_pretrained(home / "models" / "tiny-llama")
    byte_tokenizer().save_pretrained(home / "models" / "tiny-llama")
    (home / "questions.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    return home


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    given = [str(argument) for argument in arguments]
    monkeypatch.setattr("sys.argv", [f"/home/{PERSON}/.venv/bin/comb", *given])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 0, given


def published(adapter: Path) -> dict[str, bytes]:
    """What a push would upload."""
    plan = plan_push(adapter, "me/adapter")
    return {name: plan.contents.get(name) or (adapter / name).read_bytes() for name, _ in plan.files}


def shown_in(files: dict[str, bytes], place: Path) -> list[str]:
    return [name for name, data in files.items() if PERSON.encode() in data or str(place).encode() in data]


def test_a_trained_adapter(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = home / "adapters" / "mine"
    config: dict[str, Any] = {
        "model": {"backbone": str(home / "models" / "tiny-llama"), "num_encoder_layers": 1, "cpu_threads": 1},
        "data": {"dataset": "jsonl", "path": f"../home/{PERSON}/questions.jsonl", "heldout_share": 0.4},
        "train": {"steps": 1, "output_dir": str(out), "answers": "gold"},
        "eval": {"limit": 2, "methods": ["full", "comb"], "max_new_tokens": 2},
    }
    (home / "run.yaml").write_text(yaml.safe_dump(config))
    run(monkeypatch, "train", home / "run.yaml", f"data.path={home / 'questions.jsonl'}")

    files = {str(path.relative_to(out)): path.read_bytes() for path in out.iterdir() if path.is_file()}
    del files["log.jsonl"]
    assert {"README.md", "training.json", "config.json", "results.json", "tokenizer_config.json"} <= files.keys()
    assert shown_in(files, tmp_path) == []
    assert shown_in(published(out), tmp_path) == []
    config = json.loads(files["config.json"])
    assert config["backbone_name_or_path"] == "tiny-llama"
    assert "| backbone | `tiny-llama` (llama, fingerprint `" in files["README.md"].decode()
    record = json.loads(files["training.json"])
    assert record["config"]["model"]["backbone"] == "tiny-llama"
    assert record["config"]["data"]["path"] == "questions.jsonl"
    assert record["argv"] == ["comb", "train", "run.yaml", "data.path=questions.jsonl"]
    run(monkeypatch, "push", out, "me/x", "--dry-run")
    card = capsys.readouterr().out.partition("---")[2]
    assert PERSON not in card

    # and here everything is found again, without an option more, from a copy too
    shutil.copytree(out, tmp_path / "copy")
    for adapter in (out, tmp_path / "copy"):
        run(monkeypatch, "eval", adapter, "--limit", 1, "--out", adapter / "results-again.json")
        assert shown_in({"again": (adapter / "results-again.json").read_bytes()}, tmp_path) == []
        assert "](results-again.png)" in (adapter / "README.md").read_text()
        (tmp_path / "d.txt").write_text("the number 7")
        run(monkeypatch, "ask", adapter, "--doc", tmp_path / "d.txt", "--max-new-tokens", 2, "which?")
    shutil.rmtree(tmp_path / "copy" / ".cache")  # as others get it
    with pytest.raises(OSError, match=r"backbone 'tiny-llama' could not be loaded .*--backbone"):
        CombForCausalLM.from_pretrained(tmp_path / "copy")
    CombForCausalLM.from_pretrained(tmp_path / "copy", backbone=home / "models" / "tiny-llama")


def test_what_is_saved_by_hand(home: Path, tmp_path: Path) -> None:
    backbone = str(home / "models" / "tiny-llama")
    for number, kind in enumerate((CombForCausalLM, LinkTokensForCausalLM)):
        model: Any = kind.from_backbone(backbone)
        folder = home / f"adapter-{number}"
        model.save_pretrained(folder, tokenizer=byte_tokenizer())
        kind.from_pretrained(folder).save_pretrained(tmp_path / f"again-{number}")
        assert kind.from_pretrained(tmp_path / f"again-{number}").config.backbone_name_or_path == backbone
        assert shown_in(published(folder), tmp_path) == []
        assert PERSON not in model.config.to_json_string()  # what trackers are given


def test_adapters_of_before_go_up_without_their_paths(home: Path, tmp_path: Path) -> None:
    folder = home / "old"
    CombForCausalLM.from_backbone(str(home / "models" / "tiny-llama"), num_encoder_layers=1).save_pretrained(
        folder, tokenizer=byte_tokenizer()
    )
    shutil.rmtree(folder / ".cache")
    config = json.loads((folder / "config.json").read_text())
    config["backbone_name_or_path"] = str(home / "models" / "tiny-llama")
    (folder / "config.json").write_text(json.dumps(config))
    data = {"dataset": "jsonl", "path": f"{home}/q.jsonl"}
    record = {"argv": [f"/home/{PERSON}/bin/comb", "train", f"--out={home}/x.yaml"],
              "config": {"model": {"backbone": str(home / "models")}, "data": data}}  # fmt: skip
    (folder / "training.json").write_text(json.dumps(record))
    assert CombForCausalLM.from_pretrained(folder) is not None  # by the path that it still has
    files = published(folder)
    assert shown_in(files, tmp_path) == []
    assert json.loads(files["training.json"])["config"]["data"] == {"dataset": "jsonl", "path": "q.jsonl"}
    assert json.loads(files["config.json"]) == {**config, "backbone_name_or_path": "tiny-llama"}

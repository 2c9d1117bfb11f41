"""Whatever file, name or option is wrong: every command says so in one line, with the file and what to do."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from comb import CombForCausalLM
from comb.cli import main as cli
from tests.helpers.byte_text import byte_llama, byte_tokenizer

ROWS = [{"documents": [f"the number {number}"], "query": "which?", "answer": str(number)} for number in range(12)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A backbone, an adapter on it, a document and data."""
    place = tmp_path_factory.mktemp("made")
    byte_llama(vocab_size=300).save_pretrained(place / "model")
    byte_tokenizer().save_pretrained(place / "model")
    adapter = CombForCausalLM.from_backbone(str(place / "model"), num_encoder_layers=1)
    adapter.save_pretrained(place / "adapter", tokenizer=byte_tokenizer())
    (place / "d.txt").write_text("The lake is deep.")
    (place / "data.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    return place


@pytest.fixture
def place(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same, to be damaged; servers are refused or stand still."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("comb_serving.launch.preflight.find_spec", lambda name: name)
    monkeypatch.setattr("comb_serving.launch.launcher.launch", lambda *_, **__: pytest.fail("a server was started"))
    return tmp_path


def config(place: Path, model: str = "model", **data: Any) -> str:
    content = {
        "model": {"backbone": str(place / model), "num_encoder_layers": 1, "cpu_threads": 1},
        "data": {"dataset": "jsonl", "path": str(place / "data.jsonl"), **data},
        "train": {"steps": 1, "output_dir": str(place / "out"), "answers": "gold"},
    }
    (place / "run.yaml").write_text(yaml.safe_dump(content))
    return str(place / "run.yaml")


def line_of(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """What a command that fails says."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        cli.main([str(argument) for argument in arguments])
    said = capsys.readouterr().err
    assert stop.value.code == 1, (arguments, said)
    assert "Traceback" not in said
    last = said.strip().splitlines()[-1]
    assert last.startswith("error: "), (arguments, said)
    assert "--debug" not in last, last  # nobody foresaw it
    return last


def cut(name: str, count: int) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-count])


def write(name: str, text: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).write_text(text)


def edit(name: str, **values: Any) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).write_text(json.dumps({**json.loads((folder / name).read_text()), **values}))


def quantised(method: str, **more: Any) -> Callable[[Path], Any]:
    return edit("config.json", quantization_config={"quant_method": method, **more})


def old_file(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save(byte_llama(vocab_size=300).state_dict(), folder / "pytorch_model.bin")
    cut("pytorch_model.bin", 3000)(folder)


LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "weights cut off": (cut("model.safetensors", 500), "model.safetensors is damaged or cut off"),
    "weights' pointer": (write("model.safetensors", LFS), "model.safetensors is a git-lfs pointer, not the file"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "weights|model.safetensors"),
    "old weights cut off": (old_file, "pytorch_model.bin is damaged or cut off|model.safetensors"),
    "empty weights": (write("model.safetensors", ""), "model.safetensors is empty: download or copy it again"),
    "config cut off": (cut("config.json", 30), "config.json is damaged"),
    "config of a new model": (edit("config.json", model_type="new"), "new"),
    "config without a type": (edit("config.json", model_type=None), "model_type|no COMB"),
    "tokenizer cut off": (cut("tokenizer.json", 50), "tokenizer.json is damaged or cut off"),
    "tokenizer's pointer": (write("tokenizer.json", LFS), "tokenizer.json is a git-lfs pointer"),
    "newer tokenizer": (edit("tokenizer.json", model={"type": "New"}), "tokenizer.json can't be read by tokenizers"),
    "settings cut off": (write("generation_config.json", "{"), "generation_config.json is damaged or cut off"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoints(place: Path, capsys: pytest.CaptureFixture[str], damage: str) -> None:
    apply, words = DAMAGES[damage]
    apply(place / "model")
    commands = [
        ["ask", "model", "--doc", "d.txt", "why?"],
        ["train", config(place), "--no-eval"],
    ]
    if damage != "config of a new model":  # vLLM may know it
        commands.append(["serve", "model", "--method", "naive"])
    commands += [["info", "model"], ["doctor", "model"],
                 ["eval", "model", "--dataset", "jsonl", "--path", "data.jsonl", "--methods", "full"],
                 ["bench", "methods", "--model", "model", "--dataset", "jsonl", "--path", "data.jsonl"],
                 ["answers", config(place), "--engine", "transformers"]]  # fmt: skip
    for command in commands if damage == "weights cut off" else commands[:3]:
        line = line_of(capsys, *command)
        assert any(word in line for word in words.split("|")), (command, line)
    assert not (place / "out").exists()


@pytest.mark.parametrize("damage", ["weights cut off", "weights' pointer", "config cut off", "tokenizer cut off"])
def test_damaged_adapters(place: Path, capsys: pytest.CaptureFixture[str], damage: str) -> None:
    apply, words = DAMAGES[damage]
    apply(place / "adapter")
    for command in (["ask", "adapter", "--doc", "d.txt", "why?"], ["push", "adapter", "me/x", "--dry-run"],
                    ["serve", "adapter"]):  # fmt: skip
        assert words in line_of(capsys, *command), command


def test_an_adapter_that_lacks_weights_is_not_published(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = place / "adapter" / "model.safetensors"
    whole = load_file(file)
    name = max(key for key in whole if key.startswith("cross_blocks") and whole[key].ndim == 2)
    for change in ({name: whole[name][:-1].contiguous()}, {name: None}):
        damaged = {key: value for key, value in {**whole, **change}.items() if value is not None}
        save_file(damaged, file, metadata={"format": "pt"})
        assert name in line_of(capsys, "push", "adapter", "me/x", "--dry-run")
    save_file(whole, file, metadata={"format": "pt"})
    with pytest.raises(SystemExit) as stop:
        cli.main(["push", "adapter", "me/x", "--dry-run"])
    assert stop.value.code == 0


def test_a_backbone_that_is_damaged_is_found_before_its_adapter_is_served(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = CombForCausalLM.from_backbone(str(place / "model"), num_encoder_layers=1)
    adapter.save_pretrained(place / "own", tokenizer=byte_tokenizer())
    cut("model.safetensors", 500)(place / "model")
    assert "model/model.safetensors is damaged" in line_of(capsys, "serve", "own")
    (place / "model").rename(place / "moved")
    for command in (["ask", "own", "why?"], ["serve", "own"]):
        line = line_of(capsys, *command)
        assert "was the folder" in line, line
        assert "--backbone" in line, line


@pytest.mark.parametrize(
    ("package", "method", "more"),
    [
        ("gptqmodel", "awq", {"bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}),
        ("optimum", "gptq", {"bits": 4, "group_size": 128}),
        ("bitsandbytes", "bitsandbytes", {"load_in_4bit": True}),
        ("torchao", "torchao", {"quant_type": "int4_weight_only"}),
    ],
)
def test_a_quantised_model_names_the_package_that_is_missing(
    place: Path, capsys: pytest.CaptureFixture[str], package: str, method: str, more: dict[str, Any]
) -> None:
    if importlib.util.find_spec(package) is not None:
        pytest.skip(f"{package} is installed")
    quantised(method, **more)(place / "model")
    line = line_of(capsys, "ask", "model", "--doc", "d.txt", "why?")
    assert "model can't be loaded, a package is missing" in line
    assert f"pip install {package}" in line.replace("-U ", "")


def test_a_template_that_raises_is_named(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write("chat_template.jinja", "{{ messages[0].content + 1 }}")(place / "model")
    assert "template" in line_of(capsys, "ask", "model", "--doc", "d.txt", "why?")


def test_files_that_a_command_opens(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "latin.txt").write_bytes(b"caf\xe9")
    (place / "latin.yaml").write_bytes(b"model: caf\xe9")
    (place / "list.yaml").write_text("- 1")
    (place / "bad.yaml").write_text("model: {")
    (place / "out.json").mkdir()
    (place / "file").write_text("")
    jsonl = ["--dataset", "jsonl", "--path", "data.jsonl"]
    for words, *command in (
        ("gone.txt: No such file or directory: check the path", "ask", "model", "--doc", "gone.txt", "why?"),
        ("model: Is a directory: name a file in it", "ask", "model", "--doc", "model", "why?"),
        ("latin.txt is not UTF-8 text", "ask", "model", "--doc", "latin.txt", "why?"),
        ("d.txt is a file, and no GGUF file: name the model's folder", "ask", "d.txt", "why?"),
        ("no model 'modl': there is no such folder", "ask", "modl", "why?"),
        ("no model './modl': there is no such folder", "info", "./modl"),
        ("no model 'model/nested': there is no such file or folder", "doctor", "model/nested"),
        ("latin.yaml is not UTF-8 text", "train", "latin.yaml"),
        ("list.yaml: expected sections", "train", "list.yaml"),
        ("bad.yaml is not YAML", "train", "bad.yaml"),
        ("there is no configuration file 'model'", "train", "model"),
        ("there is no file or folder 'gone.jsonl'", "train", config(place), "data.path=gone.jsonl"),
        ("'model' is no COMB adapter", "serve", "model"),
        ("'modl': there is no such folder", "serve", "modl", "--method", "naive"),
        ("out.json is a folder, where a file is to be written", "eval", "model", *jsonl, "--out", "out.json"),
        ("no folder that can be written to", "bench", "methods", "--model", "model", *jsonl, "--out", "file/x.json"),
        ("no folder that can be written to", "train", config(place), "train.output_dir=file/x"),
        ("has no config.json", "convert", "out.json", "there"),
        ("has no config.json", "push", "out.json", "me/x", "--dry-run"),
    ):
        assert words in line_of(capsys, *command), command
    if os.geteuid() != 0:  # to root everything is open
        (place / "d.txt").chmod(0)
        assert "d.txt: Permission denied: see who may read" in line_of(capsys, "ask", "model", "--doc", "d.txt", "why?")


def test_a_record_that_is_damaged_is_not_read_as_none(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "adapter" / "training.json").write_text('{"config": ')
    data = ["--dataset", "jsonl", "--path", "data.jsonl"]
    for command in (["eval", "adapter"], ["bench", "methods", "--model", "adapter", *data],
                    ["push", "adapter", "me/x", "--dry-run"]):  # fmt: skip
        assert "training.json is damaged" in line_of(capsys, *command), command
    for record in ('{"config": "x", "parameters": 5}', '{"config": {"train": "x", "data": "y"}}', '{"seconds": null}'):
        (place / "adapter" / "training.json").write_text(record)
        assert "training.json is damaged" in line_of(capsys, "push", "adapter", "me/x", "--dry-run")


def test_a_full_disk(place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    monkeypatch.setattr("transformers.modeling_utils.safe_save_file", full)
    assert "No space left on device: free some space on that disk" in line_of(
        capsys, "train", config(place), "--no-eval"
    )


def test_slips_of_our_own_are_said_to_be_ours(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("comb.cli.info.describe", lambda model, *, other: "")
    monkeypatch.setenv("COMB_DEBUG", "0")  # what --debug sets goes with the test
    with pytest.raises(SystemExit):
        cli.main(["info", "model", "--no-check"])
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert "error: unexpected TypeError" in said
    assert "please report it; --debug shows the traceback" in said
    with pytest.raises(TypeError, match="other"):
        cli.main(["info", "model", "--no-check", "--debug"])


def test_a_process_of_its_own(place: Path) -> None:
    """As a shell sees it."""
    (place / "model" / "model.safetensors").write_text(LFS)
    run = subprocess.run(
        [sys.executable, "-c", "from comb.cli.main import main; main()", "ask", "model", "--doc", "d.txt", "why?"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (run.returncode, run.stdout) == (1, "")
    assert "Traceback" not in run.stderr
    assert run.stderr.strip().splitlines()[-1].endswith("run `git lfs pull` in model")

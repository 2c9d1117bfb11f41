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
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from comb import CombForCausalLM
from comb.cli import main as cli
from comb.linktokens.modeling import LinkTokensForCausalLM
from tests.helpers.byte_text import byte_llama, byte_tokenizer
from tests.helpers.gguf_files import write_gguf

JSONL = ["--dataset", "jsonl", "--path", "data.jsonl"]
ROWS = [{"documents": [f"the number {number}"], "query": "which?", "answer": str(number)} for number in range(12)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A backbone, an adapter on it, a document and data."""
    place = tmp_path_factory.mktemp("made")
    byte_llama(vocab_size=300).save_pretrained(place / "model")
    byte_tokenizer().save_pretrained(place / "model")
    adapter = CombForCausalLM.from_backbone(str(place / "model"), num_encoder_layers=1)
    adapter.save_pretrained(place / "adapter", tokenizer=byte_tokenizer())
    byte_llama(vocab_size=300).save_pretrained(place / "parts", max_shard_size="20KB")
    byte_tokenizer().save_pretrained(place / "parts")
    tuned = get_peft_model(
        byte_llama(vocab_size=300), LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    )
    tuned.save_pretrained(place / "tuned")
    LinkTokensForCausalLM.from_backbone(str(place / "model"), num_link_tokens=2).save_pretrained(place / "links")
    write_gguf(place / "whole.gguf", byte_llama(vocab_size=300), byte_tokenizer())
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


def encoder(**values: Any) -> Callable[[Path], Any]:
    def apply(folder: Path) -> None:
        of = json.loads((folder / "config.json").read_text())["encoder_config"]
        edit("config.json", encoder_config={**of, **values})(folder)

    return apply


def weights(change: Callable[[dict[str, torch.Tensor]], Any], name: str = "model.safetensors") -> Callable[[Path], Any]:
    def apply(folder: Path) -> None:
        held = load_file(folder / name)
        change(held)
        save_file(held, folder / name, metadata={"format": "pt"})

    return apply


def as_old_file(content: Any = None) -> Callable[[Path], Any]:
    def apply(folder: Path) -> None:
        held = load_file(folder / "model.safetensors")
        held.pop("model.norm.weight")
        (folder / "model.safetensors").unlink()
        torch.save(held if content is None else content, folder / "pytorch_model.bin")

    return apply


LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
C, G, T, P = "config.json", "generation_config.json", "tokenizer_config.json", "adapter_config.json"
WEIGHTS, TOKENS, RECORD = "model.safetensors", "tokenizer.json", "training.json"
INDEX, TEMPLATE = "model.safetensors.index.json", "chat_template.jinja"
MATRIX = "model.layers.0.mlp.up_proj.weight"
WHERE = {"a": "adapter", "l": "links", "m": "model", "p": "parts", "t": "tuned"}
# folder, commands, what is done to it, and what the line says behind the file's name
SAID: list[tuple[str, str, Callable[[Path], Any], str, str]] = [
    # files that are cut off, empty or something else
    ("m", "ask train serve info doctor eval bench answers", cut(WEIGHTS, 500), WEIGHTS, "is damaged or cut off"),
    ("m", "ask train serve", write(WEIGHTS, LFS), WEIGHTS, "is a git-lfs pointer, not the file"),
    ("m", "ask train serve", lambda folder: (folder / WEIGHTS).unlink(), "model", "weights|model.safetensors"),
    ("m", "ask train serve", write(WEIGHTS, ""), WEIGHTS, "is empty: download or copy it again"),
    ("m", "ask train serve", cut(C, 30), C, "is damaged"),
    ("m", "ask train", edit(C, model_type="new"), "model", "new"),  # vLLM may know it
    ("m", "ask train serve", cut(TOKENS, 50), TOKENS, "is damaged or cut off"),
    ("m", "ask train serve", edit(TOKENS, model={"type": "New"}), TOKENS, "can't be read by tokenizers"),
    ("m", "ask train serve", write(G, "{"), G, "is damaged or cut off"),
    ("a", "ask push serve", cut(WEIGHTS, 500), WEIGHTS, "is damaged or cut off"),
    ("a", "ask push serve", cut(C, 30), C, "is damaged"),
    ("a", "ask push serve", cut(TOKENS, 50), TOKENS, "is damaged or cut off"),
    ("a", "own bench push", write(RECORD, '{"config": '), RECORD, "is damaged"),  # it isn't read as none
    ("a", "push", write(RECORD, '{"config": "x", "parameters": 5}'), RECORD, "is damaged"),
    ("a", "push", write(RECORD, '{"config": {"data": {"mixture": 5}}}'), RECORD, "is damaged"),
    ("a", "push", write(RECORD, '{"seconds": null}'), RECORD, "is damaged"),
    # a backbone's configuration
    ("m", "ask train serve", edit(C, hidden_act="swosh"), C, "hidden_act is 'swosh'"),
    ("m", "ask dry serve", edit(C, num_key_value_heads=0), C, "gives no model (ZeroDivisionError"),
    ("m", "ask dry serve", edit(C, dtype="float17"), C, "float17"),
    ("m", "ask info doctor", edit(C, hidden_size="32"), C, "'hidden_size' expected int, got str"),
    ("m", "ask dry random", edit(C, num_hidden_layers=2.0), C, "'num_hidden_layers' expected int, got float"),
    ("m", "ask", edit(C, rms_norm_eps=float("nan")), "NaN", "computes NaN"),
    ("m", "ask dry serve", edit(C, pad_token_id=5000), C, "adding_idx"),
    ("m", "ask dry serve", edit(C, model_type=["llama"]), C, "model_type"),
    ("m", "ask dry serve", edit(C, model_type="t5"), C, "no causal language model of model_type 't5'"),
    ("m", "ask dry serve", write(C, "[]"), C, "should be a JSON object"),
    ("m", "ask dry", lambda folder: (folder / C).unlink(), "model", "has no config.json"),
    # how answers are generated
    ("m", "ask train", edit(G, max_new_tokens="x"), G, "TypeError"),
    ("a", "ask push serve", write(G, "[]"), G, "should be a JSON object"),
    ("m", "ask dry serve", edit(G, eos_token_id=["x"]), G, "eos_token_id"),
    ("m", "ask", lambda folder: ((folder / G).unlink(), (folder / G).mkdir()), G, "is a folder"),
    # templates and tokenizers
    ("m", "ask dry serve", lambda folder: (folder / TEMPLATE).write_bytes(b"caf\xe9"), TEMPLATE, "is not UTF-8"),
    ("m", "ask dry serve", write(TEMPLATE, "{% for m in messages %}"), TEMPLATE, "no chat template (Unexpected end"),
    ("m", "ask dry", write(TEMPLATE, "{{ nothing.of.it }}"), TEMPLATE, "fails with these messages"),
    ("m", "ask", write(TEMPLATE, "{{ messages[0].content + 1 }}"), "template", "template"),
    ("m", "ask dry serve", edit(T, chat_template="{% if %}"), T, "chat_template"),
    ("m", "ask dry serve", lambda folder: (folder / TOKENS).unlink(), "model", "no tokenizer.json"),
    ("a", "ask push serve", lambda folder: (folder / TOKENS).unlink(), "adapter", "no tokenizer.json"),
    ("m", "ask dry serve", write(T, "[]"), T, "should be a JSON object"),
    ("m", "ask", edit(T, eos_token=5), T, "eos_token has to be"),
    ("m", "ask dry serve", edit(T, extra_special_tokens="x"), T, "extra_special_tokens"),
    ("m", "ask dry serve", write("special_tokens_map.json", "[]"), "special_tokens_map.json", "JSON object"),
    # weights
    ("m", "ask train", weights(lambda w: w[MATRIX].fill_(float("nan"))), "model", f"in 1 weight ({MATRIX})"),
    ("m", "ask eval", weights(lambda w: w[MATRIX][3].fill_(float("inf"))), "model", "NaN or infinity"),
    ("m", "ask dry serve", weights(lambda w: w.pop(MATRIX)), "model", f"lacks 1 weight ({MATRIX})"),
    ("m", "ask dry serve", as_old_file(), "model", "lacks 1 weight (model.norm.weight)"),
    ("m", "ask dry serve", as_old_file([1, 2]), "pytorch_model.bin", "no file of weights by torch.save"),
    ("p", "ask dry serve", lambda folder: min(folder.glob("model-*")).unlink(), INDEX, "names 1 files that aren't in"),
    ("p", "ask dry serve", lambda folder: (folder / INDEX).unlink(), "parts", f"no {INDEX}"),
    ("p", "ask dry serve", edit(INDEX, weight_map={}), INDEX, "weight_map"),
    ("p", "ask dry serve", edit(INDEX, weight_map={"lm_head.weight": 5}), INDEX, "weight_map"),
    ("p", "ask dry serve", edit(INDEX, metadata="x"), INDEX, "metadata"),
    # adapters
    ("a", "ask push serve", edit(C, cross_attention_layers="x"), C, "'cross_attention_layers' with value 'x'"),
    ("a", "ask push serve", edit(C, cross_attention_layers=[9]), C, "exceed the backbone's 2 layers"),
    ("a", "ask push serve", edit(C, backbone_config=5), C, "'backbone_config' with value 5"),
    ("a", "ask push serve", edit(C, backbone_name_or_path=5), C, "'backbone_name_or_path' expected str, got int"),
    ("a", "ask serve", edit(C, backbone_name_or_path=""), C, "doesn't name its backbone"),
    ("a", "ask push serve", edit(C, encoder_config="x"), C, "'encoder_config' with value 'x'"),
    ("a", "ask push serve", encoder(num_attention_heads="x"), C, "'num_attention_heads' expected int, got str"),
    ("a", "ask push serve", encoder(hidden_act="swosh"), C, "hidden_act is 'swosh'"),
    ("a", "ask push serve", edit(C, format_version=99), C, "newer comb (format_version 99, this one reads 3)"),
    ("l", "ask push serve", edit(C, format_version=99), C, "newer comb (format_version 99, this one reads 1)"),
    ("l", "ask push serve", edit(C, num_link_tokens="x"), C, "'num_link_tokens' expected int, got str"),
    ("l", "ask push serve", edit(C, layer_shapes=[[1, 2]]), C, "layer_shapes"),
    ("l", "ask push serve", edit(C, backbone_name_or_path=5), C, "'backbone_name_or_path'"),
    # peft's
    ("t", "ask", edit(P, r="x"), P, "doesn't fit its weights, model or peft (TypeError"),
    ("t", "ask", edit(P, peft_type="NEW"), P, "(KeyError: 'NEW'): mend it there"),
    ("t", "ask", edit(P, base_model_name_or_path=None), P, "doesn't name its model"),
    ("t", "ask", edit(P, base_model_name_or_path="gone"), P, "no model 'gone'"),
    ("t", "ask", edit(P, target_modules=["nope"]), P, "nope not found|not found"),
    ("t", "ask", edit(P, r=8), P, "(adapter_config.json says (8, 32))"),
    ("t", "ask", weights(lambda w: w[min(w)].fill_(float("nan")), "adapter_model.safetensors"), "tuned", "NaN"),
    ("t", "serve", lambda folder: None, P, "is a PEFT adapter"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("folder", "commands", "apply", "file", "words"),
    SAID,
    ids=[f"{w}-{f}-{n}" for n, (w, _, _, f, _) in enumerate(SAID)],
)
def test_what_a_file_says_wrongly(
    place: Path, capsys: pytest.CaptureFixture[str], folder: str, commands: str, apply: Callable[[Path], Any],
    file: str, words: str,
) -> None:  # fmt: skip
    """By every command that reads it: one line with the file, what is wrong with it, and what to do."""
    name = WHERE[folder]
    if folder == "t":
        edit(P, base_model_name_or_path=str(place / "model"))(place / name)
        shutil.copy(place / "model" / "tokenizer.json", place / name)
    apply(place / name)
    arguments: dict[str, list[str]] = {
        "ask": ["ask", name, "--doc", "d.txt", "why?"],
        "train": ["train", config(place, name), "--no-eval"],
        "dry": ["train", config(place, name), "--dry-run"],
        "serve": ["serve", name] if folder in "al" else ["serve", name, "--method", "naive"],
        "push": ["push", name, "me/x", "--dry-run"],
        "info": ["info", name],
        "doctor": ["doctor", name],
        "random": ["doctor", name, "--random"],
        "eval": ["eval", name, "data=data.jsonl", "--methods", "full"],
        "own": ["eval", name],  # on the data that it was trained with
        "bench": ["bench", "methods", "--model", name, *JSONL],
        "answers": ["answers", config(place, name), "--engine", "transformers"],
    }
    for command in commands.split():
        line = line_of(capsys, *arguments[command])
        assert file in line, (command, line)
        assert any(word in line for word in words.split("|")), (command, line)
        remedies = "again|mend|take|pip install|upgrade|set |say |move|merge|run `"
        assert any(remedy in line for remedy in remedies.split("|")), (command, line)
    assert not (place / "out").exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"", "is empty"), (b"GG", "is no GGUF file"), (b"hello, world", "is no GGUF file"), (24, "damaged or cut off"),
     (100, "damaged or cut off"), (5000, "damaged or cut off"), (-100, "damaged or cut off")],
)  # fmt: skip
def test_gguf_files_that_are_cut_off(
    place: Path, capsys: pytest.CaptureFixture[str], content: bytes | int, words: str
) -> None:
    file = place / "whole.gguf"
    file.write_bytes(content if isinstance(content, bytes) else file.read_bytes()[:content])
    for command in (["ask", "whole.gguf", "why?"], ["serve", "whole.gguf", "--method", "naive"],
                    ["train", config(place, "whole.gguf"), "--dry-run"]):  # fmt: skip
        line = line_of(capsys, *command)
        assert "whole.gguf" in line
        assert words in line, line


def test_an_answer_is_never_made_from_nan(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def overflow(held: dict[str, torch.Tensor]) -> None:
        for name in ("model.norm.weight", "lm_head.weight"):
            held[name] = (held[name] * 1e38).clamp(-3e38, 3e38)

    weights(overflow)(place / "model")
    for command in (["ask", "model", "why?"], ["ask", "model", "--method", "naive", "--doc", "d.txt", "why?"],
                    ["eval", "model", "data=data.jsonl", "--methods", "full"]):  # fmt: skip
        assert "NaN" in line_of(capsys, *command)


def test_what_a_server_can_not_compare_is_said(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("comb_serving.launch.launcher.launch", lambda *_, **__: 0)
    for change, why in (
        ({"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}}, "it is quantised"),
        ({"auto_map": {"AutoModelForCausalLM": "own.Own"}}, "it has code of its own"),
        ({"model_type": "new"}, "its model_type isn't known to transformers"),
    ):
        shutil.copytree(place / "model", place / "other", dirs_exist_ok=True)
        edit(C, **change)(place / "other")
        with pytest.raises(SystemExit) as stop:
            cli.main(["serve", "other", "--method", "naive", "--tokenizer", "model"])
        assert stop.value.code == 0
        said = " ".join(capsys.readouterr().err.split())
        assert f"other: its weights weren't compared with its config.json, since {why}" in said


def test_files_of_a_run(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Path(config(place))
    whole = yaml.safe_load(run.read_text())
    for text, words in (
        ("", "is empty"), ("# nothing yet", "is empty"), ("null", "is empty"), ("- 1", "got list"),
        ("words", "got str"), ("train:", "train has no keys"), ("model:\ndata: {dataset: nano}", "model has no keys"),
        ("? [1, 2]\n: 3", "is not YAML"), ("model: {", "is not YAML"), ("data: {mixture: [5]}", "data.mixture[0]"),
    ):  # fmt: skip
        run.write_text(text)
        for command in (["train", "run.yaml"], ["train", "run.yaml", "--dry-run"], ["answers", "run.yaml"]):
            line = line_of(capsys, *command)
            assert line.startswith("error: run.yaml"), (text, line)
            assert words in line, (text, line)
    for section, key, value, words in (
        ("model", "options", {"gates": 0.5}, "gates"), ("model", "options", {"gate": "x"}, "gate"),
        ("model", "options", {"gate": 5.0}, "gate is a share"), ("model", "dtype", "float17", "model.dtype"),
        ("model", "cross_attention_layers", [99], "exceed"), ("data", "options", {"x": 1}, "no option 'x'"),
        ("data", "splitter", "nope", "unknown splitter"), ("model", "init_from", "gone", "no model 'gone'"),
        ("data", "path", "gone.jsonl", "gone.jsonl"),
    ):  # fmt: skip
        run.write_text(yaml.safe_dump({**whole, section: {**whole[section], key: value}}))
        for command in (["train", "run.yaml"], *([] if key == "path" else [["train", "run.yaml", "--dry-run"]])):
            line = line_of(capsys, *command)
            assert line.startswith("error: run.yaml"), line
            assert words in line, line
            if key == "options" and section == "model" and value != {"gate": 5.0}:
                assert "from_backbone takes adapter_dtype, cross_attention_layers" in line
    assert not (place / "out").exists()


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
    edit(C, quantization_config={"quant_method": method, **more})(place / "model")
    line = line_of(capsys, "ask", "model", "--doc", "d.txt", "why?")
    assert "model can't be loaded, a package is missing" in line
    assert f"pip install {package}" in line.replace("-U ", "")


def test_what_a_command_is_given(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    byte_llama().save_pretrained(place / "bare")
    (place / "latin.txt").write_bytes(b"caf\xe9")
    (place / "latin.yaml").write_bytes(b"model: caf\xe9")
    (place / "out.json").mkdir()
    (place / "file").write_text("")
    for words, *command in (
        ("gone.txt: No such file or directory: check the path", "ask", "model", "--doc", "gone.txt", "why?"),
        ("model: Is a directory: name a file in it", "ask", "model", "--doc", "model", "why?"),
        ("latin.txt is not UTF-8 text", "ask", "model", "--doc", "latin.txt", "why?"),
        ("kept in file (File exists): give a folder", "ask", "model", "--cache", "file", "--doc", "d.txt", "why?"),
        ("d.txt is a file, and no GGUF file: name the model's folder", "ask", "d.txt", "why?"),
        ("no model 'modl': there is no such folder", "ask", "modl", "why?"),
        ("no model './modl': there is no such folder", "info", "./modl"),
        ("no model 'model/nested': there is no such file or folder", "doctor", "model/nested"),
        ("latin.yaml is not UTF-8 text", "train", "latin.yaml"),
        ("there is no configuration file 'model'", "train", "model"),
        ("there is no file or folder 'gone.jsonl'", "train", config(place), "data.path=gone.jsonl"),
        ("'out.json': it holds no config.json", "serve", "out.json"),
        ("'out/nowhere': there is no such folder, and as a Hub id: We couldn't connect", "serve", "out/nowhere"),
        ("'modl': there is no such folder", "serve", "modl", "--method", "naive"),
        ("eval.limit is 0, so nothing would be asked", "eval", "model", "data=data.jsonl", "--limit", "0"),
        ("out.json is a folder, where a file is to be", "eval", "model", "data=data.jsonl", "--out", "out.json"),
        ("no folder that can be written to", "bench", "methods", "--model", "model", *JSONL, "--out", "file/x.json"),
        ("no folder that can be written to", "train", config(place), "train.output_dir=file/x"),
        ("has no config.json", "convert", "out.json", "there"),
        ("has no config.json", "push", "out.json", "me/x", "--dry-run"),
        ("model_type 'comb'", "convert", "adapter", "there"),
        ("a model's name is empty", "ask", "", "why?"),
        ("no tokenizer found in", "ask", "bare", "why?"),
        ("the question is empty", "ask", "adapter", " "),
        ("from_backbone", "ask", "model", "why?", "--method", "comb"),
        ("--encoder is on or off", "ask", "adapter", "why?", "--encoder", "maybe"),
        ("--prompts are for --segments: add it", "doctor", "adapter", "--prompts", "d.txt"),
        ("--device cuda:1, but there is no GPU", "ask", "adapter", "why?", "--device", "cuda:1"),
        ("--device is auto, cpu, cuda, cuda:1, ..., not 'tpu'", "info", "adapter", "--device", "tpu"),
        ("--dtype is auto, float32", "info", "adapter", "--dtype", "bf16"),
        ("not a COMB adapter", "info", "model", "--backbone", "model"),
    ):
        assert words in line_of(capsys, *command), command
    if os.geteuid() != 0:  # to root everything is open
        (place / "d.txt").chmod(0)
        assert "d.txt: Permission denied: see who may read" in line_of(capsys, "ask", "model", "--doc", "d.txt", "why?")


def test_a_full_disk(place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    monkeypatch.setattr("transformers.modeling_utils.safe_save_file", full)
    line = line_of(capsys, "train", config(place), "--no-eval")
    assert "out is as it was before, the new files can't be written ([Errno 28] No space left on device)" in line
    assert "x: No space left on device: free some space" in cli.one_line(OSError(28, "No space left on device", "x"))


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
        [sys.executable, "-m", "comb.cli.main", "ask", "model", "--doc", "d.txt", "why?"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (run.returncode, run.stdout) == (1, "")
    assert "Traceback" not in run.stderr
    assert run.stderr.strip().splitlines()[-1].endswith("run `git lfs pull` in model")

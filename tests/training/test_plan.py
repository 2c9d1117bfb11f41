"""`comb train --dry-run`: the recipes with the real sizes of their backbones, and what it says is missing."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from comb import CombForCausalLM, methods
from comb_serving.encoding.process import drop_decoder
from comb_training.config import load_config
from comb_training.models import training_method
from comb_training.plan import plan
from comb_training.plan.counting import ARCHITECTURES, Parameters, meta_model
from comb_training.plan.memory import served_memory
from comb_training.trainer.accelerator import trained_weights
from tests.helpers.training import invoke

ROOT = Path(__file__).resolve().parents[2]
RUNS = (path for path in sorted((ROOT / "configs").glob("*.yaml")) if path.stem not in ("evaluation", "longbench"))
CONFIGS = {path.stem: path for path in RUNS}
COUNTS = {
    # frozen: what the published weights hold (the text part, without multi-token prediction), and of Llama the norms of
    # its encoder's layers; trained: of this project
    "llama-3.1-8b-instruct": (8_030_261_248 + 26 * 2 * 4096, 0.51),
    "deepseek-v2-lite-chat": (15_706_484_224, 1.23),
    "qwen3.5-9b": (8_953_803_264, 3.09),
}


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No Hub, nor what is kept of it; paths in recipes are from the root of the repository."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(ROOT)


def dry_run(*arguments: str, ranks: int = 1) -> Any:
    return invoke("train", *arguments, "--dry-run", COLUMNS="80", WORLD_SIZE=str(ranks))


def counted(output: str) -> list[int]:
    """Frozen and trained parameters."""
    [line] = re.findall(r"Parameters: ([\d,]+) \([^)]*\) frozen, ([\d,]+) \(", " ".join(output.split()))
    return [int(number.replace(",", "")) for number in line]


def test_llama_in_the_paper_s_size() -> None:
    """COMB, Table 1, by the settings that the recipe names."""
    recipe = CONFIGS["llama-3.1-8b-instruct"]
    [named] = re.findall(r"\(Table 1: 3.5 B\):\n((?:#   .*\n)+)", recipe.read_text())
    counts = counted(dry_run(str(recipe), *shlex.split(named.replace("#", ""))).output)
    assert counts == [8_030_261_248, pytest.approx(3.5e9, rel=0.005)]


@pytest.mark.parametrize("name", COUNTS)
def test_recipes_with_the_real_sizes_of_their_backbones(name: str) -> None:
    result = dry_run(str(CONFIGS[name]), ranks=4)
    assert result.exit_code == 0, result.output
    frozen, trained = COUNTS[name]
    found_frozen, found_trained = counted(result.output)
    assert found_frozen == frozen
    assert found_trained == pytest.approx(trained * 1e9, rel=0.005)
    output = " ".join(result.output.split())
    assert f"({trained:.2f} B) trained" in output
    assert "memory on each of 4 GPUs" in output
    assert "the Hub did not give its configuration" in output
    assert "no data and batches: " in output  # which is missing
    assert ("linear layers count as softmax attention" in output) == (name == "qwen3.5-9b")
    assert max(map(len, result.output.splitlines())) <= 80
    assert not (ROOT / load_config(CONFIGS[name]).train.output_dir).exists()


def test_the_hub_s_configuration_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def hub(name: str, **options: Any) -> LlamaConfig:
        asked.append((name, options))
        return LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=30, num_attention_heads=4)

    monkeypatch.setattr("comb_training.plan.counting.AutoConfig.from_pretrained", hub)
    run = plan(load_config(CONFIGS["llama-3.1-8b-instruct"], ["model.options.revision=main"]))
    assert asked[0] == ("meta-llama/Llama-3.1-8B-Instruct", {"revision": "main"})
    assert run.parameters is not None
    assert run.parameters.frozen < 10**8
    assert not any("Hub" in note and "sizes" in note for note in run.notes)


@pytest.mark.parametrize("lora", [False, True])
def test_counts_without_weights_are_those_of_the_loaded_model(lora: bool, tmp_path: Path) -> None:
    config = load_config(CONFIGS["nano"], ["train.lora_rank=4", "model.dtype=bfloat16"] if lora else [])
    model = training_method("comb").load(config)
    parameters, meta = Parameters.of(model), meta_model(config)[0]
    assert parameters == Parameters.of(meta)
    assert all(parameter.is_meta for parameter in meta.parameters())
    assert (parameters.trained, parameters.total) == model.num_trainable_parameters()
    layers = model.encoder.layers.parameters()
    assert any(not parameter.requires_grad for parameter in layers) == lora
    if not lora:
        model.save_pretrained(tmp_path)
        again = load_config(CONFIGS["nano"], [f"model.init_from={tmp_path}"])
        assert Parameters.of(meta_model(again)[0]) == parameters


def test_what_will_be_served_is_what_the_processes_hold() -> None:
    run = load_config(CONFIGS["nano"], ["train.lora_rank=4", "model.dtype=bfloat16"])
    served, options = served_memory(meta_model(run)[0]), {"num_encoder_layers": run.model.num_encoder_layers}
    held = trained_weights(training_method("comb").load(run), sharded=False).values()
    assert served.file == sum(tensor.to(torch.bfloat16).nbytes for tensor in held)
    plain = CombForCausalLM.from_backbone(
        "nano", cross_attention_layers=run.model.cross_attention_layers, dtype=torch.bfloat16, **options
    )
    [document] = plain.encode([(5, 6, 7)])
    assert served.document_token == document.nbytes // 3
    decoder = [*plain.backbone.parameters(), *plain.cross_blocks.parameters()]
    assert served.decoder == sum(parameter.nbytes for parameter in decoder)
    drop_decoder(plain)  # as the encoder process does
    assert served.encoder == sum(parameter.nbytes for parameter in plain.parameters())

    links = training_method("linktokens").load(
        load_config(CONFIGS["nano"], ["train.method=linktokens", "eval.methods=[full, linktokens]"])
    )
    [document] = methods.create("linktokens", links).compile([(5, 6, 7)])
    positions = 3 * 8  # which lie beside keys and values, and not in a pool
    assert served_memory(links).document_token == (document.nbytes - positions) // 3


def test_a_front_is_counted_without_weights_as_it_is_loaded(tmp_path: Path) -> None:
    trained = ["train.method=linktokens", "eval.methods=[full, linktokens]"]
    config = load_config(CONFIGS["nano"], trained)
    model = training_method("linktokens").load(config)
    found = Parameters.of(meta_model(config)[0])
    assert found == Parameters.of(model)
    assert (found.trained, found.total) == model.num_trainable_parameters()
    model.save_pretrained(tmp_path)
    again = load_config(CONFIGS["nano"], [*trained, f"model.init_from={tmp_path}"])
    assert Parameters.of(meta_model(again)[0]) == found
    result = dry_run(str(CONFIGS["nano"]), *trained, "data.options={scenes: 60, questions: 4}")
    assert result.exit_code == 0, result.output
    assert counted(result.output) == [found.frozen, found.trained]
    assert "activations" in result.output
    real = dry_run(str(CONFIGS["front"]))
    assert counted(real.output) == [8_190_735_360, 2 * 36 * 137 * 8 * 128]  # the passage's tokens, without a tokenizer


def test_nano_has_data_and_batches_and_nothing_is_written(tmp_path: Path) -> None:
    out = tmp_path / "out"
    scenes = "data.options={scenes: 60, questions: 4}"
    small = (scenes, "train.batch_size=8", "train.steps=7", f"train.output_dir={out}")
    result = dry_run(str(CONFIGS["nano"]), *small)
    assert result.exit_code == 0, result.output
    assert "steps: 7" in result.output  # the resolved configuration
    assert "WORLD_SIZE=4 in front" in result.output
    assert "Optimizer steps: 7." in result.output
    assert "rows kept" in result.output
    assert "Note:" not in result.output
    assert not out.exists()
    assert max(map(len, result.output.replace(str(out), "").splitlines())) <= 80
    run = plan(load_config(CONFIGS["nano"], small))
    assert run.size is not None
    assert run.data is not None
    assert run.counts is not None
    assert ["all", "examples", "", "", "", "", str(run.counts.kept)] in run.data.lines
    assert 0 < run.size.targets < run.size.queries
    assert run.size.linked <= 8 * run.size.documents


def test_missing_things_are_said_and_the_rest_is_shown(tmp_path: Path) -> None:
    for name, *more in (["nano-babi"], ["nano-squad", "data.path=gone.json"]):
        gone = dry_run(str(CONFIGS[name]), *more)
        assert gone.exit_code == 0, gone.output
        assert counted(gone.output)[0] == 1_100_928
        words = " ".join(gone.output.split())
        assert "no data and batches: " in words
        assert not more or "no file or folder 'gone.json'" in words
        assert " activations " not in words.partition("no activations")[0]
        assert "no activations" in words
    unknown = dry_run(str(CONFIGS["nano"]), "model.backbone=nobody/nothing")
    assert unknown.exit_code == 0
    assert "configuration of 'nobody/nothing' is not here" in " ".join(unknown.output.split())
    assert "Parameters" not in unknown.output.split("Note:")[0].split("defaults")[1]
    # the data is there, the backbone's tokenizer is not
    rows = [{"documents": [f"The key is {n}."], "query": "Key?", "answer": str(n)} for n in range(8)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = (f"data={tmp_path / 'data.jsonl'}", "data.heldout_share=0.5")
    result = dry_run(str(CONFIGS["llama-3.1-8b-instruct"]), *data)
    assert result.exit_code == 0, result.output
    assert "tokenizer is not here" in " ".join(result.output.split())
    assert counted(result.output)[0] == COUNTS["llama-3.1-8b-instruct"][0]


def test_a_text_of_one_s_own_counts_as_long_as_it_is(tmp_path: Path) -> None:
    text = tmp_path / "front.txt"
    text.write_text("The museum is open from May to October.")
    own, none = (
        counted(dry_run(str(CONFIGS["nano"]), f"model.options={{front: {front}}}").output)[1]
        for front in (text, "none")
    )
    shape = load_config(CONFIGS["nano"]).model
    encoder = CombForCausalLM.from_backbone(
        "nano", num_encoder_layers=shape.num_encoder_layers, cross_attention_layers=shape.cross_attention_layers,
        front=str(text),
    ).encoder  # fmt: skip
    assert own - none == encoder.front.numel() + encoder.sink.numel()
    missing = dry_run(str(CONFIGS["nano"]), "model.options={front: gone.txt}")
    assert "no text to compile documents behind" in str(missing.exception)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("train.batch_query_tokens=9", r"alone has \d+ query tokens, more than train.batch_query_tokens=9"),
        ("data.chat_template_kwargs={enable_thinking: true}", "chat_template_kwargs"),
    ],
)
def test_mistakes_are_errors(argument: str, message: str) -> None:
    result = dry_run(str(CONFIGS["nano"]), "data.options={scenes: 20}", argument)
    assert isinstance(result.exception, ValueError), result.output
    assert re.search(message, str(result.exception)), result.exception


def test_recipes_and_sizes_belong_together() -> None:
    backbones = {load_config(path).model.backbone.replace("/", "--") for path in CONFIGS.values()}
    backbones -= {"nano", "smollm2-135m"}  # which need no Hub
    assert backbones == {path.stem for path in ARCHITECTURES.glob("*.json")}

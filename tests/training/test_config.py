"""Configuration files: values, overrides, and errors that name key, file and remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from comb_training.config import TrainConfig, load_config

ROOT = Path(__file__).resolve().parents[2]
# evaluation.yaml is for `comb bench methods`, the others are of runs
CONFIGS = sorted(path for path in (ROOT / "configs").glob("*.yaml") if path.stem not in ("evaluation", "longbench"))


def written(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text)
    return path


def test_values_and_overrides(tmp_path: Path) -> None:
    path = written(tmp_path, "model: {num_encoder_layers: 2, cross_attention_layers: [2, 4]}\ntrain: {steps: 30}\n")
    config = load_config(path, ["train.steps=20", "train.learning_rate=1e-3", "data.path=a/b.json", "train.steps=10"])
    assert config.model.cross_attention_layers == (2, 4)
    assert (config.train.steps, config.train.epochs, config.train.learning_rate) == (10, None, 1e-3)
    assert config.data.path == "a/b.json"
    config = load_config(
        None, ["model.cross_attention_layers=[1, 3]", "data.options.answer_style=sentence", "eval.methods=[full]"]
    )
    assert config.model.cross_attention_layers == (1, 3)
    assert (config.data.options, config.eval.methods) == ({"answer_style": "sentence"}, ("full",))
    assert load_config(None, ["train.save_steps=null", "train.steps="]).train.steps is None
    assert load_config(None, ["train.report_to=none"]).train.report_to == ()  # as transformers say it
    # one epoch is the length where no other is given
    assert [TrainConfig(**length).epochs for length in ({}, {"steps": 3}, {"max_seconds": 3})] == [1.0, None, None]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train: {learning_rat: 1}", r"run.yaml: unknown key train.learning_rat; did you mean train.learning_rate\?"),
        ("trian: {steps: 1}", r"run.yaml: unknown key trian; did you mean train\?"),
        ("model: {path: x}", r"unknown key model.path; did you mean data.path\?"),
        ("train: {zzz: 1}", "unknown key train.zzz; known keys: .*learning_rate"),
        ("train: {steps: many}", "run.yaml: train.steps must be a whole number, not 'many'"),
        ("train: {steps: true}", "train.steps must be a whole number, not True"),
        ("train: {bf16: 1}", "train.bf16 must be true or false, not 1"),
        ("train: {learning_rate: fast}", "train.learning_rate must be a number, not 'fast'"),
        ("train: {answers: golden}", "train.answers is one of 'on_policy', 'gold', not 'golden'"),
        ("train: {steps: 0}", "train.steps must be greater than 0"),
        ("train: {learning_rate: -1}", "train.learning_rate must be at least 0, not -1"),
        ("train: {ce_weight: 1e-300}", "train.ce_weight must be at least 1e-8, or 0, not '1e-300'"),
        ("train: {learning_rate: .nan}", "train.learning_rate must be a finite number, not nan"),
        ("train: {ce_weight: 1e300}", "train.ce_weight must be less than 1000000000.0, not 1e\\+?300"),
        ("train: {lora_rank: 1000000000000}", "train.lora_rank must be less than 2147483648, not"),
        ("model: {cpu_threads: 2000000000}", "model.cpu_threads must be less than 1024, not"),
        ("data: {max_repeats: 1e300, mixture: [{dataset: nano}]}", "data.max_repeats must be less than 1000"),
        ("train: {warmup: 1.5}", "train.warmup must be less than 1, not 1.5"),
        ("train: {seed: 4294967296}", "train.seed must be less than 4294967296"),
        ("data: {query_template: Why}", "query_template 'Why' has no {query}"),
        ("data: {options: {split: all}}", "data.options can't hold 'split'"),
        ("train: {teacher: nano, answers: gold}", "train.teacher answers only with train.answers=on_policy"),
        ("train: 3", "train is a section of keys, got 3"),
        ("data: {options: [a]}", "data.options must be a section of keys"),
        ("train: {steps: 1}\neval: {limit: 2}\ntrain: {epochs: 1}", "(?s)run.yaml is not YAML: train .* twice.*line 3"),
        ("data: {questions_per_row: 2}\ntrain: {answers: gold}", "questions_per_row joins .* text: give data.prefix"),
        # mixtures
        ("data: {mixture: [{dataset: nano, wieght: 1}]}", r"data.mixture\[0\].wieght; did you mean .*\.weight\?"),
        ("data: {mixture: [{dataset: nano}, 3]}", r"data.mixture\[1\] is a section of keys, got 3"),
        ("data: {mixture: [{weight: 1}]}", r"data.mixture\[0\] needs a dataset"),
        ("data: {mixture: [{dataset: nano, weight: 0}]}", r"data.mixture\[0\].weight must be greater than 0, not 0"),
        ("data: {mixture: [{dataset: nano, options: {split: all}}]}", "can't hold 'split'"),
        ("data: {mixture: [{dataset: nano, query_template: hm}]}", "has no {query}"),
        ("data: {mixture: [{dataset: nano, name: a/b}]}", "a name is a text without /"),
        ("data: {mixture: [{dataset: nano}, {dataset: nano}]}", "two sets called 'nano': give them a name each"),
        ("data: {dataset: squad, mixture: [{dataset: nano}]}", "data.dataset and data.mixture are both given"),
        ("data: {options: {scenes: 3}, mixture: [{dataset: nano}]}", "data.options and data.mixture are both given"),
        ("data: {dataset: mixture}", "data.dataset=mixture needs data.mixture"),
        ("data: {max_repeats: 3}", "are for data.mixture"),
        ("data: {max_repeats: 0.5, mixture: [{dataset: nano}]}", "data.max_repeats must be at least 1"),
        ("data: {mixture: null}", "data.mixture must be a list"),
        ("data: ''", "data has no keys"),
    ],
)
def test_mistakes_in_a_file(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_config(written(tmp_path, text))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.step=3", r"the command line: unknown key train.step; did you mean train.steps\?"),
        ("train.steps", "expected section.key=value"),
        ("train.learning_rate=x", "the command line: train.learning_rate must be a number"),
        ("data=", "'data=' is empty: give it a value, or leave it out"),
        ("data=''", "\"data=''\" is empty"),
        ("model=", "'model=' is empty"),
    ],
)
def test_mistakes_on_the_command_line_are_not_blamed_on_the_file(tmp_path: Path, override: str, message: str) -> None:
    path = written(tmp_path, "train: {steps: 30}")
    with pytest.raises(ValueError, match=message):
        load_config(path, [override])


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_shipped_configurations_load_and_explain_every_key(path: Path) -> None:
    deepspeed = load_config(path).train.deepspeed
    assert deepspeed is None or (deepspeed.startswith("configs/deepspeed/") and (ROOT / deepspeed).is_file())
    lines = [line for line in path.read_text().splitlines() if line.strip() and not line.startswith(("#", "---"))]
    keys = [line for line in lines if line.startswith("  ")]
    assert keys
    assert all("#" in line for line in keys), [line for line in keys if "#" not in line]

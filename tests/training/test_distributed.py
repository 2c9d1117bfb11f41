"""Real runs under `torchrun`, two ranks on the CPU: the same training as on one, and resumed to the last bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from comb_training.nano import CHECKPOINT

CONFIGS = Path(__file__).parents[2] / "configs" / "deepspeed"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
TIMEOUT = 300

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (CHECKPOINT / "config.json").exists(), reason=f"needs the nano checkpoint at {CHECKPOINT}"),
]


def configuration(folder: Path, *, model: dict[str, Any] | None = None, **train: Any) -> Path:
    content = {
        "model": {"backbone": "nano", "num_encoder_layers": 1, "cross_attention_layers": [2], "cpu_threads": 1,
                  "options": {"front": "prose"}, **(model or {})},
        "data": {"dataset": "nano", "limit": 96, "options": {"scenes": 40, "questions": 4}},
        "train": {
            "steps": 20, "batch_size": 8, "logging_steps": 1, "save_steps": 10, "answers": "gold",
            "output_dir": str(folder / "out"), **train,
        },
        "eval": {"methods": [train.get("method", "comb")], "limit": 4},
    }  # fmt: skip
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def command(config: Path, ranks: int, *arguments: str, run: Sequence[str] = ("-m", "comb_training.train")) -> list[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks else []
    return [sys.executable, *launcher, *run, str(config), *arguments]


def ended(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=TIMEOUT, check=False)


def train(config: Path, ranks: int, *arguments: str) -> None:
    done = ended(command(config, ranks, *arguments))
    assert done.returncode == 0, done.stderr[-4000:]


def losses(folder: Path) -> list[tuple[int, float]]:
    report = json.loads((folder / "out" / "training.json").read_text())
    return [tuple(row) for row in report["losses"]]


KILLED_AT_13 = """
import os, signal
from comb_training.trainer.run_log import RunLog
from comb.cli.main import main

def advance(self, step):
    if step == 13 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)

RunLog.advance = advance
main(["train", *os.sys.argv[1:]])
"""


def kill_at_step_13(config: Path) -> None:
    script = config.parent / "killed.py"
    script.write_text(KILLED_AT_13)
    done = ended(command(config, 2, run=[str(script)]))
    assert done.returncode != 0
    assert "SIGKILL" in done.stderr, done.stderr[-4000:]
    assert "error: another process of this run has ended, see its output" in done.stderr, done.stderr[-4000:]
    assert [path.name for path in (config.parent / "out").glob("checkpoint-*")] == ["checkpoint-10"]
    assert not (config.parent / "out" / "training.json").exists()


@pytest.mark.parametrize(("stage", "lora"), [(None, False), (2, False), (3, False), (3, True)])
def test_killed_and_resumed_is_the_same_run_to_the_bit(tmp_path: Path, stage: int | None, lora: bool) -> None:
    settings: dict[str, Any] = {"epochs": None}
    if lora:  # beside layers that stay in the backbone's dtype, which is what is published then
        settings |= {"lora_rank": 4, "model": {"dtype": "bfloat16"}}
    if stage is not None:
        pytest.importorskip("deepspeed")
        settings["deepspeed"] = str(CONFIGS / f"zero{stage}.json")
    folders = {name: tmp_path / name for name in ("straight", "killed")}
    for folder in folders.values():
        folder.mkdir()
    straight, killed = (configuration(folder, **settings) for folder in folders.values())
    train(straight, 2)
    # loaded whole by the first rank, also when the run had its weights in parts
    [result] = json.loads((folders["straight"] / "out" / "results.json").read_text())["results"]
    assert result["n"] == 4
    kill_at_step_13(killed)
    train(killed, 2, "--resume", "auto", "--no-eval")
    expected = losses(folders["straight"])
    assert [step for step, _ in expected] == list(range(1, 21))
    assert expected[-1][1] < expected[0][1]
    # 6 steps an epoch: step 10 is in the middle of the second
    assert losses(folders["killed"]) == expected
    lines = [json.loads(line) for line in (folders["killed"] / "out" / "log.jsonl").read_text().splitlines()]
    assert [(line["step"], line["loss"]) for line in lines if "loss" in line] == expected
    first, second = (load_file(folder / "out" / "model.safetensors") for folder in folders.values())
    assert set(first) == set(second)
    for name, tensor in first.items():
        assert tensor.dtype == (torch.bfloat16 if lora else torch.float32)
        assert torch.equal(tensor, second[name]), name
    # the frozen backbone (4.4 MB) is in no checkpoint
    checkpoint = folders["straight"] / "out" / "checkpoint-20"
    states = list(checkpoint.rglob("*_model_states.pt"))
    assert (stage is None) == (not states)
    for path in states:
        held = torch.load(path, map_location="cpu", weights_only=False)["module"]
        assert not any(name.startswith("backbone.") for name in held)


@pytest.mark.parametrize("method", ["comb", "linktokens"])
def test_two_ranks_train_what_one_does(tmp_path: Path, method: str) -> None:
    """The ranks have different numbers of target tokens: a mean of their means would be another loss."""
    settings: dict[str, Any] = {"steps": 6, "save_steps": None, "batch_size": 5, "max_grad_norm": 0.0}
    if method == "linktokens":
        settings |= {
            "method": method,
            "model": {"num_encoder_layers": None, "cross_attention_layers": None, "options": {}},
        }
    folders = {name: tmp_path / name for name in ("one", "two")}
    for folder in folders.values():
        folder.mkdir()
    train(configuration(folders["one"], gradient_accumulation_steps=2, **settings), 0, "--no-eval")
    train(configuration(folders["two"], **settings), 2, "--no-eval")
    one, two = (losses(folder) for folder in folders.values())
    assert [step for step, _ in one] == [step for step, _ in two] == list(range(1, 7))
    assert [loss for _, loss in two] == pytest.approx([loss for _, loss in one], rel=1e-4)
    first, second = (load_file(folder / "out" / "model.safetensors") for folder in folders.values())
    for name, tensor in first.items():
        torch.testing.assert_close(second[name], tensor, rtol=1e-3, atol=2e-4, msg=name)


def test_sigterm_saves_and_can_be_resumed(tmp_path: Path) -> None:
    config = configuration(tmp_path, steps=100_000, save_steps=None)
    process = subprocess.Popen(
        command(config, 0), env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    seen = ""
    while "step 2" not in seen:  # the progress bar
        piece = process.stderr.read(1)
        assert piece, "it ended before it was asked to"
        seen = (seen + piece)[-200:]
    process.terminate()
    output, _ = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 143, output
    assert "stopped by SIGTERM after step" in output
    [checkpoint] = (tmp_path / "out").glob("checkpoint-*")
    step = int(checkpoint.name.split("-")[1])
    assert not (tmp_path / "out" / "model.safetensors").exists()  # that would look like a finished run
    train(config, 0, f"train.steps={step + 2}", "--resume", "auto", "--no-eval")
    assert losses(tmp_path)[-1][0] == step + 2
    # a run that is over already is finished, not gone beyond
    train(config, 0, f"train.steps={step}", "--resume", str(checkpoint), "--no-eval")
    assert losses(tmp_path)[-1][0] == step

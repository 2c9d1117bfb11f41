"""A run ends with a result whatever ends it: scored before the first step and behind the last, saved, and told."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.optim.optimizer import register_optimizer_step_post_hook

from comb_training.trainer.objective import Objective
from tests.helpers.training import backbone, invoke


@pytest.fixture
def run(tiny: Path, tmp_path: Path, write_rows: Callable[..., Path]) -> Callable[..., Any]:
    """`comb train` of a small recipe that distils; its folder is tmp_path/out."""
    recipe = tmp_path / "recipe.yaml"
    rows = [{"documents": [f"Bin {n} is {n % 3}."], "query": f"Bin {n}?", "answer": f"{n % 3}"} for n in range(30)]
    train = {"steps": 4, "batch_size": 4, "answers": "gold", "ce_weight": 0, "kl_weight": 1, "logging_steps": 1}
    content = {
        "model": {"backbone": str(tiny), "num_encoder_layers": 1, "cross_attention_layers": [1], "device": "cpu"},
        "data": {"dataset": "jsonl", "path": str(write_rows(*rows))},
        "train": {**train, "output_dir": str(tmp_path / "out")},
        "eval": {"methods": ["comb"], "max_new_tokens": 2},
    }
    recipe.write_text(yaml.safe_dump(content))
    return lambda *more: invoke("train", str(recipe), *more)


@pytest.fixture
def at_step() -> Iterator[Callable[[int, Callable[[], None]], None]]:
    """Does something once so many optimizer steps were made."""
    handles = []

    def do_at(step: int, what: Callable[[], None]) -> None:
        made = 0

        def count(*_: Any) -> None:
            nonlocal made
            made += 1
            if made == step:
                what()

        handles.append(register_optimizer_step_post_hook(count))

    yield do_at
    for handle in handles:
        handle.remove()


@pytest.fixture(autouse=True)
def _ctrl_c_is_heard() -> Iterator[None]:
    """Where the tests were started in the background, it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt(times: int = 1) -> None:
    for _ in range(times):
        os.kill(os.getpid(), signal.SIGINT)


def scored(out: Path) -> list[int]:
    """The steps."""
    logged = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [row["step"] for row in logged if "eval_closed" in row]


def test_ctrl_c_once_saves_scores_and_says_how_to_go_on(
    run: Callable[..., Any], at_step: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    at_step(2, interrupt)
    stopped = run("train.batch_size=5")
    assert stopped.exit_code == 130, stopped.output
    assert "Ctrl-C again ends at once" in capfd.readouterr().err
    again = re.escape(f"comb train {tmp_path}/recipe.yaml train.batch_size=5 --resume auto")
    assert re.search(f"stopped by SIGINT after step 2.*checkpoint-2.*to go on:\n{again}\n", stopped.output)
    assert re.search(r"closed: -?\d+\.\d% \(.*\), at the start: -?\d+\.\d% \(", stopped.output)
    assert scored(out) == [0, 2]
    assert all((out / "checkpoint-2" / name).exists() for name in ("training.json", "loss.png", "model.safetensors"))
    assert not (out / "model.safetensors").exists()  # that would look like a finished run
    asked = invoke("eval", str(out / "checkpoint-2"), "--limit", "2")
    assert asked.exit_code == 0, asked.output
    assert run("train.batch_size=5", "--resume", "auto", "--no-eval").exit_code == 0
    assert scored(out) == [0, 2, 4]
    assert json.loads((out / "training.json").read_text())["ended_by"] == "steps"


@pytest.mark.parametrize(
    ("launcher", "start"),
    [
        ({}, "comb train"),
        ({"LOCAL_WORLD_SIZE": "2"}, "torchrun --standalone --nproc_per_node 2 -m comb_training.train"),
        ({"LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "3"},
         "torchrun --nnodes 3 --nproc_per_node 2 -m comb_training.train"),
    ],
)  # fmt: skip
def test_the_command_to_go_on_starts_what_was_started(
    run: Callable[..., Any], at_step: Any, tmp_path: Path, launcher: dict[str, str], start: str
) -> None:
    at_step(1, interrupt)
    with pytest.MonkeyPatch.context() as environment:
        for name, value in launcher.items():
            environment.setenv(name, value)
        stopped = run("--no-eval")
    assert f"to go on:\n{start} {tmp_path}/recipe.yaml --resume auto --no-eval\n" in stopped.output


@pytest.mark.parametrize("save_steps", ["null", "4"])
def test_a_signal_during_the_last_score_is_heard(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, save_steps: str
) -> None:
    measure = Objective.heldout_losses

    def scored_at_the_end(*arguments: Any) -> Any:
        if (tmp_path / "out" / "log.jsonl").read_text().count("learning_rate") == 4:
            interrupt()
        return measure(*arguments)

    monkeypatch.setattr(Objective, "heldout_losses", scored_at_the_end)
    stopped = run(f"train.save_steps={save_steps}")
    assert stopped.exit_code == 130, stopped.output
    assert "stopped by SIGINT after step 4" in stopped.output
    monkeypatch.undo()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    assert run(f"train.save_steps={save_steps}", "--resume", "auto", "--no-eval").exit_code == 0
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_ctrl_c_twice_ends_at_once(run: Callable[..., Any], at_step: Any, tmp_path: Path) -> None:
    at_step(2, lambda: interrupt(2))
    stopped = run()
    assert stopped.exit_code == 130, stopped.output
    assert "what isn't in a checkpoint-N is lost" in stopped.output
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["log.jsonl"]


def test_a_run_by_the_clock_ends_with_a_result(run: Callable[..., Any], tmp_path: Path) -> None:
    out = tmp_path / "out"
    ended = run("train.steps=null", "train.max_seconds=0.01", "train.save_steps=50", "--no-eval")
    assert ended.exit_code == 0, ended.output
    assert re.search(r"KL to full recompute on 3 held-out questions: .* nats per token, .* closed: ", ended.output)
    record = json.loads((out / "training.json").read_text())
    assert scored(out) == [0, record["steps"]]
    assert [step for step, _ in record["heldout_closed"]] == [0, record["steps"]]
    assert (out / f"checkpoint-{record['steps']}").is_dir()
    for end in ("start", "end"):
        assert {"closed", "closed_low", "closed_high", "kl", "kl_none", "loss"} <= record["heldout"][end].keys()
    mode = stat.S_IMODE((out / "config.json").stat().st_mode)
    assert stat.S_IMODE((out / "model.safetensors").stat().st_mode) == mode


def test_a_finished_run_is_not_begun_again_by_resume(run: Callable[..., Any], at_step: Any, tmp_path: Path) -> None:
    out, clock = tmp_path / "out", ("train.steps=null", "train.max_seconds=0.01", "--no-eval")
    assert run(*clock).exit_code == 0
    before = (out / "log.jsonl").read_text(), (out / "model.safetensors").stat().st_mtime_ns
    for more in ((), ("train.max_seconds=60",)):
        again = run(*clock, *more, "--resume", "auto")
        assert re.search(r"is finished, after \d+ steps.*left none.*model.init_from=", str(again.exception))
    assert before == ((out / "log.jsonl").read_text(), (out / "model.safetensors").stat().st_mtime_ns)
    # begun anew in the same folder and killed: nothing is finished, whatever an older run has left there
    at_step(1, lambda: interrupt(2))
    assert run(*clock).exit_code == 130
    assert run(*clock, "--resume", "auto").exit_code == 0


def test_a_finished_run_can_be_made_longer(run: Callable[..., Any], tmp_path: Path) -> None:
    assert run("train.save_steps=2", "--no-eval").exit_code == 0
    again = run("--no-eval", "--resume", "auto")
    assert "is finished, after 4 steps. To go on with it raise train.steps" in str(again.exception)
    assert run("train.steps=5", "--no-eval", "--resume", "auto").exit_code == 0
    assert scored(tmp_path / "out") == [0, 4, 5]


def test_a_run_that_measures_more_than_at_its_start_has_no_start(run: Callable[..., Any], tmp_path: Path) -> None:
    assert run("train.save_steps=2", "train.kl_weight=0", "train.ce_weight=1", "--no-eval").exit_code == 0
    resumed = run("train.steps=5", "--no-eval", "--resume", "auto")
    assert re.search(r"closed: -?\d+\.\d% \([^)]*\) \(at the data's answers\)", resumed.output), resumed.output
    assert json.loads((tmp_path / "out" / "training.json").read_text())["heldout"].keys().isdisjoint({"start"})


def test_a_run_goes_on_from_the_adapter_of_another(run: Callable[..., Any], tmp_path: Path) -> None:
    first, second = tmp_path / "out", tmp_path / "second"
    assert run("--no-eval", "train.learning_rate=0.02").exit_code == 0
    assert run("--no-eval", f"model.init_from={first}", f"train.output_dir={second}").exit_code == 0
    (fresh, *_, end), (begun, *_) = (
        json.loads((folder / "training.json").read_text())["heldout_kl"] for folder in (first, second)
    )
    assert begun == [0, pytest.approx(end[1], rel=1e-5)]
    assert begun[1] != pytest.approx(fresh[1], rel=1e-3)


def test_a_moved_backbone_is_named_where_it_is_now(run: Callable[..., Any], tiny: Path, tmp_path: Path) -> None:
    here, there, first, second = (tmp_path / name for name in ("here", "there", "out", "second"))
    shutil.copytree(tiny, here)
    assert run("--no-eval", f"model.backbone={here}").exit_code == 0
    here.rename(there)
    for file in first.glob("*token*"):  # then it is the backbone's
        file.unlink()
    again = [f"model.init_from={first}", f"train.output_dir={second}", f"model.backbone={there}"]
    for more in (["--dry-run"], ["--no-eval"]):
        result = run(*again, *more)
        assert result.exit_code == 0, result.output
    for options in ([str(first), "--backbone", str(there)], [str(second)]):  # the new one knows where
        result = invoke("eval", *options)
        assert result.exit_code == 0, result.output
    backbone(seed=1).save_pretrained(here)  # another of its size
    moved = run(*again[::2], f"train.output_dir={tmp_path / 'third'}", "--dry-run")
    assert moved.exit_code == 0, moved.output
    for result in (run(*again[:2], f"model.backbone={here}"), invoke("eval", str(first), "--backbone", str(here))):
        assert re.search("embedding differs .* this adapter belongs to", str(result.exception))
    refused = invoke("eval", str(there), "data=rows.jsonl", "--backbone", str(there))
    assert "is not a COMB adapter" in str(refused.exception)


def test_a_dry_run_shows_what_is_not_by_default_whole(run: Callable[..., Any], tmp_path: Path) -> None:
    prefix = "Answer from the texts alone, and say so where they hold nothing asked for. "
    path = tmp_path / ("a-long-name-of-a-folder-" * 6)
    shown = run(f"data.prefix={json.dumps(prefix)}", f"train.output_dir={path}", "--dry-run").stdout
    assert max(map(len, shown.partition("All other")[0].replace(str(path), "").splitlines())) <= 200
    configuration = yaml.safe_load(shown.split("All other keys")[0])
    assert (configuration["data"]["prefix"], configuration["train"]["output_dir"]) == (prefix, str(path))
    assert configuration["train"]["kl_weight"] == 1.0
    assert "learning_rate" not in configuration["train"]

"""scripts/figures finds every table it names and figures that aren't what comes out; scripts/test-gpu needs a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers.integrations.peft import MIN_PEFT_VERSION

from comb.backbones.loading import load_model
from scripts import figures

ROOT = Path(__file__).parents[1]
TABLES = yaml.safe_load((ROOT / "scripts" / "figures.yaml").read_text(encoding="utf-8"))

PAGE = """
    comb bench methods --model m \\
        --methods naive

| method | EM (95%) | KL | computed |
|---|---:|---:|---:|
| `full` | 50.0 | 0 | 12 |
| `naive` | 40.0 (1–2) | 0.25 | 3 |
"""
ROWS = [
    {"method": "full", "em": 0.5, "kl": 0.0, "computed_tokens": 12.0, "intervals": {"em": (0.4, 0.6)}},
    {"method": "naive", "em": 0.42, "kl": 0.26, "computed_tokens": 3.0,
     "intervals": {"em": (0.3, 0.5), "kl": (0.2, 0.3)}},
]  # fmt: skip
COLUMNS = {"method": 0, "em": 1, "kl": 2, "computed_tokens": 3}


@pytest.mark.parametrize("table", TABLES, ids=[f"{table['page']}: {table['command']}" for table in TABLES])
def test_a_table_and_its_command_are_found(table: dict[str, Any]) -> None:
    command, cells = figures.command_and_table((ROOT / table["page"]).read_text(encoding="utf-8"), table["command"])
    methods = f",{command[command.index('--methods') + 1]},full,none,"
    for group in table["columns"]:
        named = [line[group["method"]].split("`")[1] for line in cells]
        assert named
        assert all(f",{name}," in methods for name in named)


@pytest.mark.parametrize(
    ("changed", "wrong"),
    [
        ({}, []),
        ({"40.0 (": "51.0 ("}, [("naive", "em")]),
        ({"| 0.25 |": "| 0.19 |"}, []),  # the last digit may differ, no more
        ({"| 0.25 |": "| 0.18 |", "| 12 |": "| 14 |"}, [("full", "computed_tokens"), ("naive", "kl")]),
    ],
)
def test_a_figure_outside_of_the_interval_is_wrong(changed: dict[str, str], wrong: list[tuple[str, str]]) -> None:
    page = PAGE
    for old, new in changed.items():
        page = page.replace(old, new)
    _, cells = figures.command_and_table(page, "comb bench methods")
    found = [
        (method, value)
        for method, value, printed, least, most in figures.compared(cells, COLUMNS, ROWS)
        if not least <= printed <= most
    ]
    assert found == wrong


def test_what_a_page_lacks_is_said() -> None:
    with pytest.raises(ValueError, match="0 commands begin with 'comb eval'"):
        figures.command_and_table(PAGE, "comb eval")
    with pytest.raises(ValueError, match="no table behind"):
        figures.command_and_table(PAGE.partition("|")[0], "comb bench methods")
    with pytest.raises(ValueError, match="no row for '`naive`'"):
        list(figures.compared([["`naive`", "1", "2", "3"]], COLUMNS, ROWS[:1]))


@pytest.mark.parametrize(
    ("device", "said", "can"),
    [
        ("cuda", "scripts/test-gpu: no CUDA device for ", torch.cuda.is_available()),
        ("tpu", "COMB_GPU_TESTS_DEVICE is cuda or cpu, not 'tpu'", False),
        ("cpu", " has no vLLM: ", find_spec("vllm") is not None),
    ],
)
def test_the_tests_for_a_gpu_fail_in_one_line_where_they_can_not_run(device: str, said: str, can: bool) -> None:
    if can:
        pytest.skip("here they can run")
    done = subprocess.run(
        [ROOT / "scripts" / "test-gpu"], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHON": sys.executable, "COMB_GPU_TESTS_DEVICE": device},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert said in line


def test_a_lora_of_blocks_is_another_model_only_while_it_is_on(tmp_path: Path) -> None:
    """scripts/block-lora."""
    # transformers 5.24 asks for a peft that isn't out yet
    pytest.importorskip("peft", minversion=MIN_PEFT_VERSION)
    settings = ["data.limit=40", "train.batch_size=2", "train.max_seconds=2"]
    command = [sys.executable, "scripts/block-lora", "configs/nano.yaml", tmp_path / "lora", *settings]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    tuned, question = load_model(tmp_path / "lora"), torch.tensor([[5, 6, 7]])
    plain = load_model("nano")(question).logits
    assert not torch.allclose(tuned(question).logits, plain, atol=1e-3)
    tuned.disable_adapters()
    assert torch.equal(tuned(question).logits, plain)

"""Engines for the tests of the vLLM plug-in, and what they need to find it in a tree that isn't installed."""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import sys
import tomllib
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def in_a_loop(test: Callable[..., Any], seconds: float) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*arguments, **named), seconds))

    return run


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that are coroutines, also under hypothesis' `given`, run in a loop of their own, and not for ever."""
    for item in items:
        if isinstance(item, pytest.Function):
            seconds = 300 if item.get_closest_marker("slow") else 60
            given = getattr(item.obj, "hypothesis", None)
            if inspect.iscoroutinefunction(item.obj):
                item.obj = in_a_loop(item.obj, seconds)
            elif given is not None and inspect.iscoroutinefunction(given.inner_test):
                given.inner_test = in_a_loop(given.inner_test, seconds)


@pytest.fixture(scope="session")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> None:
    """vLLM finds the plug-in here and in processes it starts, installed or not; it works alone in this process."""
    pytest.importorskip("vllm")
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR")
    if any(entry.name == "comb" for entry in metadata.entry_points(group="vllm.general_plugins")):
        return
    folder = tmp_path_factory.mktemp("entry-points")
    info = folder / "comb_pic-0.2.0.dist-info"
    info.mkdir()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: comb-pic\nVersion: 0.2.0\n")
    (info / "entry_points.txt").write_text(
        "".join(
            f"[{group}]\n" + "".join(f"{name} = {target}\n" for name, target in entries.items())
            for group, entries in project["entry-points"].items()
        )
    )
    sys.path.insert(0, str(folder))
    places = [str(folder), *(str(ROOT / part) for part in (".", "training", "serving"))]
    os.environ["PYTHONPATH"] = os.pathsep.join([*places, os.environ.get("PYTHONPATH", "")])


@pytest.fixture(scope="session")
def nano_adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter on the nano backbone, saved with its tokenizer: its encoder is untrained, its gates are open."""
    import torch
    from transformers import AutoTokenizer

    from comb import CombForCausalLM
    from comb_training.nano import CHECKPOINT

    torch.manual_seed(3)
    folder = tmp_path_factory.mktemp("adapter")
    model = CombForCausalLM.from_backbone(str(CHECKPOINT), num_encoder_layers=2)
    with torch.no_grad():
        for block in model.cross_blocks:
            block.attention_gate.fill_(0.7)
            block.mlp_gate.fill_(0.4)
    model.save_pretrained(folder, tokenizer=AutoTokenizer.from_pretrained(CHECKPOINT))
    return folder


@pytest.fixture(scope="session")
def served(plugin: None, nano_adapter: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One `comb serve` for all tests that ask over HTTP (`served.Served`); they leave it idle."""
    from tests.helpers.served import serve

    with serve(nano_adapter, tmp_path_factory.mktemp("r")) as server:
        yield server

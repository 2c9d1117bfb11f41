"""Adapters in vLLM on a GPU: the library's answers over documents, plain vLLM's without, and which graphs steps get."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from comb.backbones.loading import resolve_name
from tests.helpers.adapter_answers import ASKED, PROMPTS, answers_of_the_library, plain_answers
from tests.helpers.engines import Served, checkpoint, engine, served
from tests.helpers.gpu_engines import EngineDevice, graphs_of

pytestmark = [pytest.mark.gpu, pytest.mark.vllm, pytest.mark.slow, pytest.mark.usefixtures("plugin")]

# graphs, dtype, and what single tokens are replayed by without documents and with them
STEPS = [
    ("NONE", "float32", "NONE", "NONE"),
    ("PIECEWISE", "float32", "PIECEWISE", "PIECEWISE"),
    ("FULL_AND_PIECEWISE", "float32", "FULL", "PIECEWISE"),
    ("FULL_AND_PIECEWISE", "bfloat16", "FULL", "PIECEWISE"),
    ("FULL_DECODE_ONLY", "float32", "FULL", "NONE"),
]
# rows that find a part of their prompt in the prefix cache are other batches
FRESH = {"enable_prefix_caching": False}


@pytest.fixture(scope="module", params=STEPS, ids=["-".join(case[:2]) for case in STEPS])
def plain(plugin: None, device: EngineDevice, request: pytest.FixtureRequest) -> Any:
    """The case; vLLM's own answers to each prompt alone, the graphs of those steps, and its answers to all at once."""
    graphs, dtype, *_ = request.param
    with (
        pytest.MonkeyPatch.context() as patch,
        engine(resolve_name("nano"), **device.options(dtype, graphs, **FRESH)) as llm,
    ):
        device.check_runner(llm)
        bare, seen = Served(llm, None, ()), graphs_of(llm, patch)
        return request.param, plain_answers(bare), list(seen), bare.ask([(prompt, "") for prompt, _ in ASKED])


def test_answers_and_graphs(plain: Any, device: EngineDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (graphs, dtype, without, with_documents), alone, steps, together = plain
    options = device.options(dtype, graphs, **FRESH)
    device.forbid_plain_ways(monkeypatch)
    with served(tmp_path, checkpoint(tmp_path, "nano"), **options) as found:
        device.check_runner(found.llm)
        assert found.pools[0].tensor.device.type == device.kind
        seen = graphs_of(found.llm, monkeypatch)
        assert plain_answers(found) == alone
        assert seen == steps
        assert seen.count(without) >= 7 * len(PROMPTS)  # eight tokens each, all but the first from single ones
        seen.clear()
        answers = answers_of_the_library(found, device.tolerance(dtype))
        assert "FULL" not in seen
        assert seen.count(with_documents) >= 7
        if graphs == "NONE":  # graphs of pieces and of the whole may choose other kernels for the same rows
            assert [one for (_, names), one in zip(ASKED, answers, strict=True) if not names] == [
                one for (_, names), one in zip(ASKED, together, strict=True) if not names
            ]
        # documents are gone, and their slower steps with them
        seen.clear()
        assert plain_answers(found) == alone
        assert seen == steps


def test_two_ranks(device: EngineDevice, tmp_path: Path) -> None:
    """Each a process on a GPU of its own, whose pool of its own heads is written from here by CUDA IPC."""
    if device.kind == "cpu" or torch.cuda.device_count() < 2:
        pytest.skip(f"two ranks need two GPUs, here are {torch.cuda.device_count()}")
    options = device.options("float32", "FULL_AND_PIECEWISE", tensor_parallel_size=2)
    with served(tmp_path, checkpoint(tmp_path, "nano"), **options) as found:
        assert [pool.tensor.device.index for pool in found.pools] == [0, 1]
        assert [pool.layout.kv_heads for pool in found.pools] == [1, 1]
        answers_of_the_library(found, device.tolerance("float32"))

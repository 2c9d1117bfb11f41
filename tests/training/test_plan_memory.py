"""The memory that `--dry-run` states, against tensors of real models and the measured peak of real steps."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from comb import CombForCausalLM, LinkTokensForCausalLM, Prompt
from comb.model.lora import add_lora
from comb_training.config import TrainConfig
from comb_training.data.batches import Collator, TrainingExample
from comb_training.models.linktokens import RowCollator
from comb_training.plan.counting import Parameters
from comb_training.plan.memory import (
    FACTOR,
    OFFLOADED,
    GpuMemory,
    PassSize,
    activation_bytes,
    deepspeed_settings,
    memory_of,
    other_ways,
)
from comb_training.trainer.losses import target_logits_only, target_loss
from comb_training.trainer.sampler import BatchSampler

SIZES = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 2048,
}  # fmt: skip
CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "deepspeed"


def peak_memory(work: Callable[[], Any]) -> int:
    """Runs `work` and returns the peak of bytes that torch allocated on top of what it held before.

    torch's profiler records every allocation and release, so the result is exact and repeatable; scratch memory that
    libraries such as MKL take on their own is not in it.
    """
    # 6 is above every level: the profiler's own lines would stand between ours
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        work()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    changes = [event for event in events if event.get("name") == "[memory]" and event["args"]["Device Type"] == 0]
    changes.sort(key=lambda event: event["args"]["Ev Idx"])
    return max(accumulate((int(event["args"]["Bytes"]) for event in changes), initial=0))


def comb_model(config: Any = None, *, bf16: bool = False) -> CombForCausalLM:
    """Two encoder layers on a random backbone; the adapter in float32."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if bf16 else torch.float32
    backbone = AutoModelForCausalLM.from_config(config or LlamaConfig(**SIZES), dtype=dtype)
    return CombForCausalLM.from_backbone(backbone, adapter_dtype=torch.float32, num_encoder_layers=2).train()


class Sizes(NamedTuple):
    """Of a batch: sets of documents, questions about each, documents of a set, their tokens, those of query, target."""

    groups: int
    questions: int
    documents: int
    document_tokens: int
    query_tokens: int
    target_tokens: int

    def examples(self) -> list[TrainingExample]:
        """Random token ids in these sizes."""
        draw = torch.Generator().manual_seed(0)

        def ids(count: int) -> tuple[int, ...]:
            return tuple(torch.randint(SIZES["vocab_size"], (count,), generator=draw).tolist())

        sets = [tuple(ids(self.document_tokens) for _ in range(self.documents)) for _ in range(self.groups)]
        return [
            TrainingExample(Prompt((), documents, ids(self.query_tokens)), ids(self.target_tokens))
            for documents in sets
            for _ in range(self.questions)
        ]

    @property
    def of_pass(self) -> PassSize:
        rows, documents = self.groups * self.questions, self.documents * self.document_tokens
        queries, targets = rows * (self.query_tokens + self.target_tokens), rows * self.target_tokens
        return PassSize(documents=self.groups * documents, queries=queries, targets=targets, linked=rows * documents,
                        rows=rows)  # fmt: skip


class Step:
    """Forward and backward of one batch."""

    def __init__(self, model: Any, batch: dict[str, Any], *, autocast: bool = False) -> None:
        self.model, self.autocast, self.labels = model, autocast, batch.pop("labels")
        self.batch = batch

    def __call__(self) -> None:
        autocast = torch.autocast("cpu", torch.bfloat16, enabled=self.autocast)
        with autocast, target_logits_only(self.model, self.labels):
            loss = target_loss(self.model(**self.batch), self.labels)
        loss.backward()

    def estimate(self, size: PassSize, *, checkpointing: bool = False) -> int:
        copies = 2 * Parameters.of(self.model).trained if self.autocast else 0
        return activation_bytes(self.model, size, autocast=self.autocast, checkpointing=checkpointing, copies=copies)


def comb_step(model: CombForCausalLM, shape: Sizes, **options: bool) -> Step:
    examples = shape.examples()
    last = examples[-1].prompt
    if len(examples) > 1 and len(last.segments) > 1:
        # a row is padded, as in real batches: otherwise keys and values aren't repeated for the queries' heads
        examples[-1] = replace(examples[-1], prompt=replace(last, segments=last.segments[:-1]))
    return Step(model, Collator(0)(examples), **options)


@pytest.mark.parametrize(("bf16", "lora"), [(False, False), (True, False), (True, True)])
def test_weights_gradients_and_moments_are_exact(bf16: bool, lora: bool) -> None:
    model = comb_model(bf16=bf16)
    if lora:
        add_lora(model, rank=4)
    shape = Sizes(1, 2, 2, 8, 4, 4)
    step = comb_step(model, shape)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, foreach=True)
    step()
    optimizer.step()
    settings = deepspeed_settings(TrainConfig())
    memory = memory_of(model, Parameters.of(model), shape.of_pass, settings, checkpointing=False)
    moments = [value for state in optimizer.state.values() for name, value in state.items() if name.startswith("exp_")]
    assert memory.states == {
        "frozen weights": sum(p.nbytes for p in model.parameters() if not p.requires_grad),
        "trained weights": sum(p.nbytes for p in trained),
        "float32 copy": 0,
        "gradients": sum(p.grad.nbytes for p in trained if p.grad is not None),
        "moments": sum(moment.nbytes for moment in moments),
        "buffers": 0,
    }
    assert len(moments) == 2 * len(trained)
    # AdamW's temporary; a step counter of four bytes per tensor comes on top
    assert peak_memory(optimizer.step) == pytest.approx(memory.temporaries, rel=0.01)


MANY_WORDS = {**SIZES, "vocab_size": 4000}
CASES: dict[str, tuple[Any, Sizes, str | None]] = {
    "documents": (LlamaConfig(**SIZES), Sizes(1, 1, 4, 100, 4, 4), "documents"),
    "linked documents": (LlamaConfig(**SIZES), Sizes(1, 16, 4, 100, 4, 4), "linked"),
    "queries": (LlamaConfig(**SIZES), Sizes(1, 8, 1, 16, 60, 4), "queries"),
    "targets": (LlamaConfig(**MANY_WORDS), Sizes(2, 2, 2, 8, 1, 80), "targets"),
    "all alike": (LlamaConfig(**SIZES), Sizes(2, 3, 3, 40, 24, 16), None),
    "normalised queries": (Qwen3Config(**SIZES), Sizes(2, 3, 3, 40, 24, 16), None),
}


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_activations_are_within_the_stated_factor(case: str, checkpointing: bool, bf16: bool) -> None:
    config, shape, decisive = CASES[case]
    model = comb_model(config, bf16=bf16)
    assert (model.config.encoder_config.qk_norm != "none") == (case == "normalised queries")
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    step = comb_step(model, shape, autocast=bf16)
    step()  # gradients are there from now on
    peak = peak_memory(step)
    assert peak / FACTOR <= step.estimate(shape.of_pass, checkpointing=checkpointing) <= peak * FACTOR
    # the other way of running is told apart, and so is a batch without what decides it
    if case == "all alike":
        other = step.estimate(shape.of_pass, checkpointing=not checkpointing)
        assert not peak / FACTOR <= other <= peak * FACTOR
    if decisive is not None and not checkpointing:
        assert step.estimate(replace(shape.of_pass, **{decisive: 0})) < peak / FACTOR


FRONT_CASES = {
    "long rows": (LlamaConfig(**SIZES), Sizes(1, 3, 3, 100, 20, 4), "queries"),
    "many documents": (LlamaConfig(**SIZES), Sizes(1, 2, 40, 4, 20, 4), "linked"),
    "targets": (LlamaConfig(**MANY_WORDS), Sizes(2, 2, 2, 8, 1, 80), "targets"),
    "normalised queries": (Qwen3Config(**SIZES), Sizes(2, 2, 3, 60, 24, 16), None),
}


@pytest.mark.parametrize("case", FRONT_CASES)
def test_activations_behind_a_front_are_within_the_stated_factor(case: str) -> None:
    config, shape, decisive = FRONT_CASES[case]
    torch.manual_seed(0)
    backbone = AutoModelForCausalLM.from_config(config)
    model = LinkTokensForCausalLM.from_backbone(backbone, token_ids=list(range(5, 17)))
    examples = shape.examples()
    step = Step(model, RowCollator(0)(examples))
    step()  # gradients are there from now on
    sampler = BatchSampler(examples, TrainConfig(method="linktokens", batch_size=len(examples)))
    size = PassSize.of_data(sampler, examples, model)
    assert (size.rows, size.queries) == (len(examples), step.batch["input_ids"].numel())
    peak = peak_memory(step)
    assert peak / FACTOR <= step.estimate(size) <= peak * FACTOR
    if decisive is not None:
        assert step.estimate(replace(size, **{decisive: 0})) < peak / FACTOR


TEN = Parameters(frozen=100, trained=40, frozen_bytes=200, trained_bytes=160)


def on_four(model: CombForCausalLM, **zero: Any) -> GpuMemory:
    """Memory of `TEN` on four GPUs; widths are the model's."""
    settings = deepspeed_settings(TrainConfig()) | {"zero_optimization": zero}
    return memory_of(model, TEN, None, settings, ranks=4, checkpointing=False)


@pytest.fixture(scope="module")
def model() -> CombForCausalLM:
    return comb_model()


@pytest.mark.parametrize(
    ("stage", "frozen", "weights", "copy", "gradients", "moments"),
    [(0, 200, 160, 0, 160, 320), (1, 200, 160, 40, 160, 80), (2, 200, 160, 40, 40, 80), (3, 50, 40, 40, 40, 80)],
)
def test_who_holds_what(
    stage: int, frozen: int, weights: int, copy: int, gradients: int, moments: int, model: CombForCausalLM
) -> None:
    memory = on_four(model, stage=stage)
    assert list(memory.states.values())[:5] == [frozen, weights, copy, gradients, moments]
    assert memory.start == 360
    assert memory.activations is None
    assert memory.total == max(360, sum(memory.states.values()) + memory.temporaries)


def test_offloaded_states_are_in_cpu_memory(model: CombForCausalLM) -> None:
    plain = on_four(model, stage=3)
    offloaded = on_four(model, stage=3, offload_optimizer=OFFLOADED, offload_param=OFFLOADED)
    assert set(offloaded.states) == {"buffers"}
    assert offloaded.host == sum(plain.states.values()) - plain.states["buffers"]
    assert offloaded.temporaries == 0 < plain.temporaries


@pytest.mark.parametrize(("stage", "offload"), [(2, False), (2, True), (3, False), (3, True)])
def test_deepspeed_configurations_are_understood(stage: int, offload: bool, model: CombForCausalLM) -> None:
    path = CONFIGS / f"zero{stage}{'-offload' if offload else ''}.json"
    settings = deepspeed_settings(TrainConfig(deepspeed=str(path)))
    ways = [memory_of(model, TEN, None, way, ranks=8, checkpointing=False) for way in (settings, *other_ways(settings))]
    assert ways[0].way == f"ZeRO-{stage}" + "+CPU" * offload
    names = ["DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3", "ZeRO-3+CPU"]
    assert sorted(way.way for way in ways) == sorted({*names, ways[0].way})
    assert ("moments" in ways[0].states) == (not offload)
    assert ("frozen weights" in ways[0].states) == (not offload or stage < 3)


def test_no_deepspeed_configuration(tmp_path: Path, model: CombForCausalLM) -> None:
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "empty.json").write_text(json.dumps({}))
    with pytest.raises(ValueError, match=r"broken.json' is no DeepSpeed configuration"):
        deepspeed_settings(TrainConfig(deepspeed=str(tmp_path / "broken.json")))
    empty = deepspeed_settings(TrainConfig(deepspeed=str(tmp_path / "empty.json")))
    assert empty == deepspeed_settings(TrainConfig())
    assert memory_of(model, TEN, None, empty, ranks=2, checkpointing=False).way == "DDP"
    assert memory_of(model, TEN, None, empty, checkpointing=False).way == "one process"
    assert deepspeed_settings(TrainConfig(bf16=True))["torch_autocast"]["enabled"]

"""A quantised backbone under an adapter that was trained on the full-precision one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file

from comb import CombForCausalLM
from tests.helpers.engines import answer, checkpoint, engine, greedy, reference, served, three_documents
from tests.helpers.families import BASE
from tests.helpers.linked import plain_model

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.usefixtures("plugin")]

WIDE = {**BASE, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
TOLERANCE = 1e-4  # the same rounding on both sides


def quantize(source: Path, target: Path) -> None:
    """Rewrites a checkpoint with int8 weights per output channel, in the format of compressed-tensors.

    `source` gets the rounded weights.
    """
    full, packed = load_file(source / "model.safetensors"), {}
    for name, weight in list(full.items()):
        if name.endswith("proj.weight"):
            scale = weight.abs().amax(dim=1, keepdim=True) / 127
            rounded = (weight / scale).round().clamp(-127, 127)
            packed[name] = rounded.to(torch.int8)
            packed[f"{name}_scale"] = scale
            full[name] = (rounded * scale).contiguous()
        else:
            packed[name] = weight
    save_file(full, source / "model.safetensors", metadata={"format": "pt"})
    target.mkdir()
    save_file(packed, target / "model.safetensors", metadata={"format": "pt"})
    eight: dict[str, Any] = {"num_bits": 8, "type": "int", "symmetric": True}
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**eight, "strategy": "channel", "dynamic": False},
                "input_activations": {**eight, "strategy": "token", "dynamic": True},
            }
        },
    }
    (target / "config.json").write_text(json.dumps(config))


def round_activations(backbone: torch.nn.Module) -> None:
    """Rounds what quantised layers read to eight bits per token, as the engine's layers do."""

    def rounded(_: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        scale = inputs[0].abs().amax(dim=-1, keepdim=True) / 127
        return ((inputs[0] / scale).round() * scale, *inputs[1:])

    for name, module in backbone.named_modules():
        if isinstance(module, torch.nn.Linear) and name.endswith("proj"):
            module.register_forward_pre_hook(rounded)


def test_a_quantised_backbone_is_itself_without_documents_and_the_library_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # on a CPU with AMX vLLM takes kernels that refuse float32, in which the library is compared
    monkeypatch.setattr("vllm.model_executor.kernels.linear.scaled_mm.cpu.check_cpu_sgl_kernel", lambda *shape: False)
    plain_model(tmp_path / "full", tf.LlamaConfig(**WIDE), std=0.1)
    quantize(tmp_path / "full", tmp_path / "int8")
    checkpoint(tmp_path / "adapter", tmp_path / "full")
    model = CombForCausalLM.from_pretrained(tmp_path / "adapter", dtype=torch.float32)
    config = tmp_path / "adapter" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "backbone_name_or_path": str(tmp_path / "int8")}))
    prompts = [list(range(10, 10 + length)) for length in (7, 40)]
    asked = [(prompt, names) for names in ("A", "", "BC") for prompt in prompts]
    documents = three_documents(model.info.vocab_size)
    unrounded = reference(model, asked[0][0], [documents["A"]], 1)[2][0]
    round_activations(model.backbone)
    expected = [reference(model, prompt, [documents[name] for name in names], 1)[2][0] for prompt, names in asked]
    assert (expected[0] - expected[2]).abs().max() > 100 * TOLERANCE  # documents matter
    assert (expected[0] - unrounded).abs().max() > 10 * TOLERANCE  # and so does the rounding
    with engine(tmp_path / "int8") as llm:
        alone = [answer(llm.generate([{"prompt_token_ids": p}], greedy(6), use_tqdm=False)[0]) for p in prompts]
    with served(tmp_path / "adapter", model) as found:
        layer = found.llm.llm_engine.model_executor.driver_worker.worker.model_runner.get_model().model.layers[0]
        assert "W8A8" in type(layer.self_attn.qkv_proj.scheme).__name__
        assert [found.ask([(prompt, "")], 6)[0] for prompt in prompts] == alone
        linked = found.ask(asked, 1)
    if not torch.cpu._is_vnni_supported():
        pytest.skip("a CPU without VNNI saturates its int8 sums, in plain vLLM as well: the library has other answers")
    for (ids, logs), first in zip(linked, expected, strict=True):
        assert logs[0] == pytest.approx(first[ids[0]].item(), abs=TOLERANCE)

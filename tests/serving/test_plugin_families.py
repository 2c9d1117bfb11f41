"""The plug-in on other backbones: layers that pass on one stream or two, biases, positions, and hybrids.

Without documents two of them are compared with plain vLLM to the bit, the others with the library: an engine less each.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers as tf

from tests.helpers.engines import answer, checkpoint, engine, greedy, reference, served, three_documents
from tests.helpers.families import BASE, LINEAR, MAMBA, MOE
from tests.helpers.linked import plain_model

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.usefixtures("plugin")]

# vLLM's CPU attention knows head sizes from 32 on
WIDE = {**BASE, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
HALF = {"dtype": "bfloat16", "block_size": None}
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen2": ("Qwen2Config", WIDE, {}),
    "qwen3": ("Qwen3Config", {**WIDE, "head_dim": 32}, {}),
    "olmo2": ("Olmo2Config", WIDE, {}),
    "gpt2": ("GPT2Config", {"vocab_size": 128, "n_embd": 64, "n_layer": 4, "n_head": 2, "n_positions": 256}, {}),
    "qwen3_next": ("Qwen3NextConfig", {**WIDE, **MOE, **LINEAR, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
                   "head_dim": 32, "shared_expert_intermediate_size": 16}, HALF),
    "falcon_h1": ("FalconH1Config", {**WIDE, **MAMBA, "head_dim": 32, "mamba_d_ssm": 64}, {"block_size": None}),
}  # fmt: skip


BITWISE = {"gpt2", "falcon_h1"}  # a stream of its own kind, and one with states


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_its_backbone_without_documents_and_the_library_with(family: str, tmp_path: Path) -> None:
    kind, values, options = FAMILIES[family]
    plain_model(tmp_path / "backbone", getattr(tf, kind)(**values), std=0.1)
    # one whose cross-attention has no norms, as its own has none, and some with LoRA beside copies
    start = {"initialization": "first", "encoder_causal": True, "lora": 4} if family == "qwen2" else {}
    start |= {"lora": 4} if family == "olmo2" else {}
    model = checkpoint(tmp_path / "adapter", tmp_path / "backbone", **start)
    prompts = [list(range(10, 10 + length)) for length in (7, 40)]
    asked = [(prompt, names) for names in ("A", "", "BC") for prompt in prompts]
    documents = three_documents(model.info.vocab_size)
    # before vLLM starts: some families it serves with transformers' classes, which then work inside it alone
    expected = [reference(model, prompt, [documents[name] for name in names], 6) for prompt, names in asked]
    tolerance = 0.05 if options.get("dtype") else 1e-5
    assert (expected[0][2][0] - expected[4][2][0]).abs().max() > 4 * tolerance  # documents matter
    alone = []
    if family in BITWISE:
        with engine(tmp_path / "backbone", **options) as llm:
            alone = [answer(llm.generate([{"prompt_token_ids": p}], greedy(6), use_tqdm=False)[0]) for p in prompts]
    with served(tmp_path / "adapter", model, **options) as found:
        for prompt, one in zip(prompts, alone, strict=False):
            assert found.ask([(prompt, "")], 6)[0] == one
        found.llm.reset_prefix_cache()
        for (ids, logs), (wanted, likely, all_logs) in zip(found.ask(asked, 6), expected, strict=True):
            assert logs[0] == pytest.approx(all_logs[0][ids[0]].item(), abs=tolerance)
            if tolerance < 0.01:  # in half precision near ties are decided either way, and then answers part
                assert ids == wanted
                assert logs == pytest.approx(likely, abs=tolerance)

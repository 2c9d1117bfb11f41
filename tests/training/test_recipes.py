"""Recipes for models that people choose, from training to the Hub, on tiny models of the same class and template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Qwen3_5TextConfig, Qwen3Config, set_seed
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from typer.testing import CliRunner

from comb import PICEngine
from comb.cli.main import app
from tests.helpers.training import byte_tokenizer, invoke

CONFIGS = Path(__file__).parents[2] / "configs"
SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 32, "num_attention_heads": 2, "head_dim": 16,
    "num_key_value_heads": 1, "max_position_embeddings": 1024, "pad_token_id": 0, "eos_token_id": 1,
    "bos_token_id": None,
}  # fmt: skip
LINEAR = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 2}
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
HEADERS = (
    "<|begin_of_text|>{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}"
    "<|eot_id|>{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
QWEN = ("<|im_start|>", "<|im_end|>", "<think>", "</think>")
MODELS: dict[str, tuple[type[Any], dict[str, Any], str, tuple[str, ...]]] = {
    "qwen3.5-9b": (Qwen3_5TextConfig, LINEAR, CHATML, QWEN),
    "front": (Qwen3Config, {"num_hidden_layers": 4}, CHATML, QWEN),
    "llama-3.1-8b-instruct": (
        LlamaConfig, {}, HEADERS, ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
    ),
}  # fmt: skip


@pytest.mark.parametrize("recipe", MODELS)
def test_a_recipe_from_training_to_the_hub(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config, more, template, special = MODELS[recipe]
    tokenizer = byte_tokenizer(*special)
    tokenizer.chat_template = template
    set_seed(0)
    made = config(**{**SIZES, **more, "vocab_size": len(tokenizer)})
    MODEL_FOR_CAUSAL_LM_MAPPING[config](made).to(torch.bfloat16).save_pretrained("backbone")
    tokenizer.save_pretrained("backbone")
    rows = [{"documents": [f"Ann {n} lives in Rome.", "Bo"], "query": f"Who {n}?", "answer": "Ann"} for n in range(24)]
    Path("mine.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "a.txt").write_text("Ann lives in Rome.")

    trained = invoke(
        "train", str(CONFIGS / f"{recipe}.yaml"), "data=mine.jsonl", "model=backbone", "train.output_dir=out",
        "train.deepspeed=null", "train.steps=2", "train.gradient_accumulation_steps=1", "train.batch_size=4",
        "train.answer_max_new_tokens=4", "eval.limit=2", "eval.max_new_tokens=4",
    )  # fmt: skip
    assert trained.exit_code == 0, trained.output
    thoughtless = "<think>\n\n</think>" in template
    asked = PICEngine.from_pretrained("out")
    prompt = asked.tokenizer.decode(asked.prompt_builder.build("Who?", [(5, 6)]).bare)
    assert prompt.endswith("<think>\n\n</think>\n\n" if thoughtless else "<|end_header_id|>\n\n")
    trained_for = "linktokens" if recipe == "front" else "comb"
    assert invoke("eval", "out", "--limit", "2", "--methods", f"full,{trained_for}").exit_code == 0
    arguments = '{"enable_thinking": false}'
    for command in (
        ["ask", "out", "--doc", "a.txt", "Who lives in Rome?", "--max-new-tokens", "3"],
        ["push", "out", f"me/comb-{recipe}", "--dry-run"],
        ["doctor", "out"],
        ["ask", "backbone", "Who?", "--max-new-tokens", "3", *thoughtless * ["--chat-template-kwargs", arguments]],
    ):
        found = CliRunner(env={"COLUMNS": "200"}).invoke(app, command)
        assert found.exit_code == 0, found.output
    if thoughtless:  # and the plain model, asked without a thought
        plain = PICEngine.from_pretrained("backbone", method="full", chat_template_kwargs=json.loads(arguments))
        assert plain.prompt_builder.build("Who?", [(5, 6)]) == asked.prompt_builder.build("Who?", [(5, 6)])

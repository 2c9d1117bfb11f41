"""Models of other families, linked inside vLLM; and those that are refused, with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers as tf

from tests.helpers.linked import (
    LATENT,
    LATENT_OPTIONS,
    PROMPTS,
    WIDE,
    largest_difference,
    library_answer,
    linked_engine,
    plain_model,
    three_documents,
)

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.usefixtures("plugin")]

_ROPE = {"rope_theta": 10_000.0, "factor": 4.0}
_SCALED = {**_ROPE, "original_max_position_embeddings": 64}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3Config", WIDE),
    "gemma3": ("Gemma3TextConfig", {**WIDE, "sliding_window": 16,
               "layer_types": ["sliding_attention", "full_attention"] * 2}),
    # by transformers' own classes inside vLLM: part of the channels; layers without positions
    "gpt_neox": ("GPTNeoXConfig", {"vocab_size": 128, "hidden_size": 128, "intermediate_size": 64, "rotary_pct": 0.5,
                 "num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": 256}),
    "smollm3": ("SmolLM3Config", WIDE),
    "glm4": ("Glm4Config", WIDE),  # part of the channels, in pairs of neighbours
}  # fmt: skip
ASKED = [(prompt, method) for method in ("legolink:4", "naive", "attnlink:4") for prompt in PROMPTS[:3]]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_linked_as_in_the_library(family: str, tmp_path: Path) -> None:
    kind, values = FAMILIES[family]
    model = plain_model(tmp_path, getattr(tf, kind)(**values))
    documents = three_documents(model.config.vocab_size)
    # before vLLM starts: some families it serves with transformers' classes, which then work inside it alone
    asked = [*ASKED, *((prompt, "focus:0.3") for prompt in PROMPTS[:3])]
    expected = [library_answer(model, documents, *each) for each in asked]
    with linked_engine(model, "focus:0.3") as linked:
        for one, other in zip(linked.ask(asked), expected, strict=True):
            assert largest_difference(one, other) < 3e-5


def test_latent_attention_is_linked_as_in_the_library(tmp_path: Path) -> None:
    model = plain_model(tmp_path, tf.DeepseekV2Config(**LATENT))
    with linked_engine(model, **LATENT_OPTIONS) as linked:
        for one, each in zip(linked.ask(ASKED), ASKED, strict=True):
            assert largest_difference(one, linked.reference(*each)) < 2e-4
        naive, full = linked.ask([(PROMPTS[0], "naive"), (PROMPTS[0], "full")])
        assert largest_difference(naive, full) > 3e-3


@pytest.mark.parametrize(
    ("kind", "values", "options", "reason"),
    [
        ("MistralConfig", {**WIDE, "sliding_window": 16}, {}, "SlidingWindowSpec"),
        ("GPT2Config", {"vocab_size": 128, "n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 256}, {},
         "a document can't be moved"),
        ("LlamaConfig", WIDE, {"kv_cache_dtype": "fp8_per_token_head"}, "kv_cache_dtype"),
        ("DeepseekV2Config", LATENT, {"method": "focus:0.1", **LATENT_OPTIONS}, "can't be seen in vLLM's MLAAttention"),
    ],
    ids=["window", "learned positions", "fp8 cache", "a question's look at latents"],
)  # fmt: skip
def test_what_cant_be_linked_is_refused_at_start(
    kind: str, values: dict[str, Any], options: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    model = plain_model(tmp_path, getattr(tf, kind)(**values))
    with pytest.raises(Exception, match=reason), linked_engine(model, **options):
        pass

"""Models of other families, linked inside vLLM; and those that are refused, with the reason."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers as tf

from tests.helpers.families import BASE, MLA
from tests.helpers.linked import (
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
LATENT = {**BASE, **MLA, "hidden_size": 64, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
          "v_head_dim": 128, "q_lora_rank": None}  # fmt: skip
# what vLLM prefers on a CPU with AMX refuses float32. Its rotary kernel for CPUs takes the keys of one head to lie
# close together, which these don't, and turns few of them: such an engine is refused, in torch they are turned
IN_TORCH = {"attention_backend": "CPU_MLA", "compilation_config": {"custom_ops": ["-rotary_embedding"]}}
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
    with linked_engine(model, **IN_TORCH) as linked:
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
        ("DeepseekV2Config", LATENT, {"method": "focus:0.1", **IN_TORCH}, "can't be seen in vLLM's MLAAttention"),
    ],
    ids=["window", "learned positions", "fp8 cache", "a question's look at latents"],
)  # fmt: skip
def test_what_cant_be_linked_is_refused_at_start(
    kind: str, values: dict[str, Any], options: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    model = plain_model(tmp_path, getattr(tf, kind)(**values))
    with pytest.raises(Exception, match=reason), linked_engine(model, **options):
        pass


def test_a_layer_with_a_state_is_refused_by_name() -> None:
    """Not by an engine: vLLM for CPUs starts no second one in a process that has loaded a hybrid's kernels."""
    from comb_serving.vllm.linking.cache_access import cached_layers

    mixer = SimpleNamespace(get_kv_cache_spec=lambda config: "a state's")
    config: Any = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context={"layers.0.mixer": mixer}))
    with pytest.raises(ValueError, match=r"documents are linked in attention layers; layers.0.mixer is a"):
        cached_layers(config)
    config.compilation_config.static_forward_context.clear()
    with pytest.raises(ValueError, match="no attention layer"):
        cached_layers(config)


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("parallel_config", "pipeline_parallel_size", 2),
        ("parallel_config", "data_parallel_size", 2),
        ("parallel_config", "decode_context_parallel_size", 2),
        ("parallel_config", "prefill_context_parallel_size", 2),
        ("parallel_config", "enable_dbo", True),
        ("model_config", "is_multimodal_model", True),
        ("model_config", "enable_sleep_mode", True),
        ("", "speculative_config", object()),
        ("", "weight_transfer_config", object()),
    ],
)
def test_engines_that_cant_link_are_refused(part: str, name: str, value: Any) -> None:
    """Not by engines: vLLM for CPUs starts none in a process in which an n-gram speculator's numba was imported."""
    from comb_serving.vllm.linking.setup import check_engine

    config: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(pipeline_parallel_size=1, data_parallel_size=1, enable_dbo=False),
        model_config=SimpleNamespace(
            is_encoder_decoder=False, is_multimodal_model=False, runner_type="generate", enable_sleep_mode=False
        ),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        speculative_config=None,
        lora_config=None,
        kv_transfer_config=SimpleNamespace(get_from_extra_config=lambda name, usual: usual),
    )
    check_engine(config)
    setattr(getattr(config, part) if part else config, name, value)
    with pytest.raises(ValueError, match="documents are linked"):
        check_engine(config)


@pytest.mark.parametrize("given", [{"link_tokens": "FOLDER"}, {"method": "hypic:8"}])
def test_lora_is_refused_beside_what_it_was_not_tried_with(given: dict[str, str]) -> None:
    from comb_serving.vllm.linking.setup import check_engine

    config: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(enable_dbo=False), cache_config=SimpleNamespace(cache_dtype="auto"),
        model_config=SimpleNamespace(
            is_encoder_decoder=False, is_multimodal_model=False, runner_type="generate", enable_sleep_mode=False
        ),
        speculative_config=None, lora_config=object(),
        kv_transfer_config=SimpleNamespace(get_from_extra_config=lambda name, usual: given.get(name, usual)),
    )  # fmt: skip
    with pytest.raises(ValueError, match="documents are linked beside LoRA by methods of attention layers"):
        check_engine(config)

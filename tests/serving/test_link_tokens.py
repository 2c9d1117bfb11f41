"""An adapter's link tokens inside vLLM: documents are compiled behind keys and values that no model computed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as tf

from comb.linktokens.front import LearnedFront, LinkTokensConfig
from comb_serving.linking.layout import LinkingLayout
from comb_training.nano import CHECKPOINT
from tests.helpers.engines import SMALL
from tests.helpers.linked import (
    LATENT,
    LATENT_OPTIONS,
    PROMPTS,
    WIDE,
    adapter,
    check_nothing_is_left,
    largest_difference,
    library_answer,
    linked_engine,
    plain_model,
)
from tests.helpers.plain import PlainLibrary, logs

pytest.importorskip("vllm")

from vllm import SamplingParams

from comb_serving import LLM
from comb_serving.vllm.linking.cache_access import TokenCodes
from comb_serving.vllm.linking.document_pool import DocumentPool

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("plugin")]

EXACT = 2e-5
ASKED = [(prompt, method) for method in ("linktokens", "full") for prompt in PROMPTS]


@pytest.mark.slow
def test_answers_are_those_of_the_library(tmp_path: Path) -> None:
    """Over two kinds of layers; link tokens lie where they were learned, so that it's no matter what turns keys."""
    config = tf.Gemma3TextConfig(**WIDE, sliding_window=16, layer_types=["sliding_attention", "full_attention"] * 2)
    model = adapter(plain_model(tmp_path / "plain", config), tmp_path / "adapter")
    with linked_engine(model, "linktokens", link_tokens=tmp_path / "adapter") as linked:
        assert linked.layout.given
        found = linked.ask(ASKED)
        for one, each in zip(found, ASKED, strict=True):
            assert largest_difference(one, linked.reference(*each)) < 3e-5
        # the controls: not full recompute, not documents alone, and not behind what its placeholders are
        for (prompt, _), one in zip(ASKED[:2], found, strict=False):
            for name in ("full", "naive", "primed"):
                other = library_answer(model.backbone, linked.documents, prompt, name, front=linked.layout.front)
                assert largest_difference(one, other) > 1e-3
        check_nothing_is_left(linked.scheduler)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        # not all requests at once, and each in steps that are shorter than the link tokens
        {"num_gpu_blocks_override": 9, "max_num_batched_tokens": 16, "enable_chunked_prefill": True},
        {"tensor_parallel_size": 2},
    ],
    ids=["preemption in chunks", "two ranks"],
)
def test_answers_are_the_same_however_steps_are_made(
    llama: Any, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "tensor_parallel_size" in options:
        monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    model = adapter(llama, tmp_path, num_link_tokens=19)
    with linked_engine(model, "linktokens", link_tokens=tmp_path, **options) as linked:
        found = linked.ask(ASKED, 40)
        if "tensor_parallel_size" not in options:  # then the scheduler is in another process
            assert linked.preemptions > 0
            check_nothing_is_left(linked.scheduler)
        for one, each in zip(found, ASKED, strict=True):
            assert largest_difference(one, linked.reference(*each, 40)) < 3 * EXACT


@pytest.mark.slow
def test_a_document_compiled_again_is_what_it_was(llama: Any, tmp_path: Path) -> None:
    """vLLM's prefix cache still has the first one's blocks, front and all; or a part of them."""
    model = adapter(llama, tmp_path, num_link_tokens=40)
    with linked_engine(model, "linktokens", link_tokens=tmp_path) as linked:
        prompt = PROMPTS[0]
        linked.documents["A"] = [3 + number % 90 for number in range(80)]
        for _ in range(2):
            for name in dict.fromkeys(prompt.names):
                linked.llm.generate(*linked.compiling(name, "linktokens", salt=f"key-{name}"), use_tqdm=False)
            (found,) = linked.ask([(prompt, "linktokens")])
            assert largest_difference(found, linked.reference(prompt, "linktokens")) < EXACT


def test_in_process_and_by_name(tmp_path: Path) -> None:
    """``LLM(adapter)``: tokenizer and weights are the backbone's, the method is the adapter's."""
    model = adapter(str(CHECKPOINT), tmp_path, dtype=torch.float32)
    library, links = PlainLibrary(), PlainLibrary()
    links.model = model
    question = [{"role": "user", "content": "Where is Ada?"}]
    texts = ["Ada went to the garden.", "Bob is in the kitchen."]
    parameters = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
    with LLM(tmp_path, pool_bytes=2**18, pool_block=4, **SMALL) as llm:
        (answer,) = llm.chat([question], parameters, documents=[texts], use_tqdm=False)
        (plain,) = llm.chat([question], parameters, documents=[texts], method="full", use_tqdm=False)
        with pytest.raises(Exception, match="naive wants documents compiled in another way"):
            llm.chat([question], parameters, documents=[texts], method="naive", use_tqdm=False)
    assert (answer.comb["method"], plain.comb["method"]) == ("linktokens", "full")
    assert [document["state"] for document in answer.comb["documents"]] == ["compiled", "compiled"]
    prompt = library.chat(question, texts)
    expected = links.logs(prompt, "linktokens", 8)
    for given, wanted in ((answer, expected), (plain, library.logs(prompt, "full", 8))):
        assert logs(given) == pytest.approx(wanted, abs=1e-4)
    assert library.logs(prompt, "full", 8) != pytest.approx(expected, abs=1e-2)


def test_another_backbone_is_refused(tmp_path: Path) -> None:
    config = tf.LlamaConfig(**WIDE)
    adapter(plain_model(tmp_path / "plain", config), tmp_path / "adapter")
    other = plain_model(tmp_path / "other", config, std=0.3)
    with (
        pytest.raises(Exception, match="and the model's embedding is another one"),
        linked_engine(SimpleNamespace(backbone=other), "linktokens", link_tokens=tmp_path / "adapter"),
    ):
        pass


def test_ranks_keep_their_own_heads() -> None:
    """Four heads on two ranks, and on eight, where two ranks have the same one."""

    def learned(layers: int) -> LearnedFront:
        made = LearnedFront(LinkTokensConfig(num_link_tokens=3, layer_shapes=[[4, 8, 6]] * layers))
        for parameter in made.parameters():
            torch.nn.init.normal_(parameter)
        return made

    front = learned(2)

    def pool(heads: int) -> Any:
        made: Any = object.__new__(DocumentPool)
        layer: Any = type("Layer", (), {"num_kv_heads": heads, "head_size": 8, "head_size_v": 6})()
        made.layers, made.num_blocks, made.block_size = {"a": layer, "b": layer}, 2, 4
        width = heads * 14
        made.columns, made.states = {"a": slice(0, width), "b": slice(width, 2 * width)}, None
        made.rows, made.codes = torch.zeros(2 * 4 + 3, 2 * width), {layer: TokenCodes(torch.float32)}
        return made

    for heads, rank, ranks, own in ((2, 1, 2, [2, 3]), (1, 5, 8, [2]), (4, 0, 1, [0, 1, 2, 3])):
        made = pool(heads)
        made.put_front(front, rank, ranks)
        keys = made.rows[8:, made.columns["b"]][:, : heads * 8].view(3, heads, 8)
        assert torch.equal(keys, front.keys[1][own].transpose(0, 1))
        assert not made.rows[:8].any()
    assert pool(4).front_digest() != made.front_digest()
    with pytest.raises(ValueError, match="for 1 layers, this model has 2"):
        pool(4).put_front(learned(1), 0, 1)
    with pytest.raises(ValueError, match="they can't be linked in vLLM"):
        pool(2).put_front(front, 0, 1)


def test_latent_attention_caches_something_else(tmp_path: Path) -> None:
    """The library's keys are those of all heads, vLLM's the latent."""
    model = adapter(plain_model(tmp_path / "plain", tf.DeepseekV2Config(**LATENT), std=0.06), tmp_path / "adapter")
    with (
        pytest.raises(Exception, match="they can't be linked in vLLM"),
        linked_engine(model, "linktokens", link_tokens=tmp_path / "adapter", **LATENT_OPTIONS),
    ):
        pass


def test_the_front_lies_behind_the_blocks() -> None:
    layout = LinkingLayout(8, 16, 24, "model", "float32", 63, 4096, front=(1,) * 17, given=True)
    assert layout.front_handle.blocks == (8, 9)
    assert replace(layout, state_rows=16).front_handle.blocks == (8, 9, 10)

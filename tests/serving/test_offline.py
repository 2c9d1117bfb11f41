"""`comb_serving.LLM`: documents in process, on the real engine, against the library's engine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from comb import Document, PICEngine
from comb_serving import LLM
from comb_serving.config.options import INSTANCE_DIR
from tests.helpers.engines import SMALL, reference
from tests.helpers.fakes import until

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("plugin")]

QUESTION = [{"role": "user", "content": "Where is Ada?"}]
TEXTS = ["Ada went to the garden.", "Bob is in the kitchen.", "Then Ada took the red ball."]
LISTS = [TEXTS, TEXTS[::-1], TEXTS[:1], [], [TEXTS[2], TEXTS[0]]]
POOL = {"pool_bytes": 2**16, "pool_block": 4}  # 64 tokens: a few of these documents


def greedy(tokens: int = 12, **more: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=tokens, **more)


@pytest.fixture(scope="module")
def library(nano_adapter: Path) -> PICEngine:
    return PICEngine.from_pretrained(nano_adapter)


@pytest.fixture(scope="module")
def llm(plugin: None, nano_adapter: Path) -> Iterator[LLM]:
    with LLM(nano_adapter, **POOL, **SMALL) as found:
        yield found
    assert INSTANCE_DIR not in os.environ


def idle(llm: LLM) -> None:
    manager = llm.preprocessor.manager

    async def check() -> None:
        await until(lambda: not manager._encoding)
        assert manager.references == manager.waiting == len(manager.queue) == 0
        manager.check_integrity()

    llm._run(check())


def states(answer: Any) -> list[str]:
    return [document["state"] for document in answer.comb["documents"]]


def logs(answer: Any) -> list[float]:
    (found,) = answer.outputs
    return [step[token].logprob for step, token in zip(found.logprobs, found.token_ids, strict=True)]


def expected(library: PICEngine, llm: LLM, texts: list[str], *, encoder: bool = True) -> list[float]:
    """The library's log-probabilities of its greedy answer to `QUESTION`."""
    builder = llm.preprocessor.builder
    prompt = builder.build(QUESTION, [builder.segment(text) for text in texts])
    documents = [list(builder.segment(text)) for text in texts] if encoder else []
    found: list[float] = reference(library.model, list(prompt.query if encoder else prompt.flat), documents, 8)[1]
    return found


def ask(llm: LLM, lists: list[list[str]], **more: Any) -> list[Any]:
    parameters = greedy(8, ignore_eos=True, logprobs=0)
    return llm.chat([QUESTION] * len(lists), parameters, documents=lists, use_tqdm=False, **more)


def same(answers: list[Any], wanted: list[list[float]]) -> None:
    for answer, one in zip(answers, wanted, strict=True):
        assert logs(answer) == pytest.approx(one, abs=1e-4)


def test_conversations_over_documents_equal_the_librarys(llm: LLM, library: PICEngine) -> None:
    together = ask(llm, LISTS)
    wanted = [expected(library, llm, texts) for texts in LISTS]
    same(together, wanted)
    with pytest.raises(AssertionError):
        same(together[::-1], wanted)
    for texts, one in zip(LISTS, wanted, strict=True):
        alone = ask(llm, [texts])
        same(alone, [one])
        assert states(alone[0]) == ["hit"] * len(texts)
    (text,) = llm.chat(QUESTION, greedy(), documents=TEXTS, use_tqdm=False)
    assert text.outputs[0].text == library.chat(QUESTION, TEXTS, max_new_tokens=12).text
    idle(llm)


def test_an_engine_in_this_process_hands_its_pool_over(llm: LLM) -> None:
    """CUDA opens no handle of a GPU's memory in the process that exported it."""
    (found,) = llm._own_pools()
    encoders = llm.preprocessor.manager.encoders
    assert encoders.worker.pools[0] is found
    assert found.owner


def test_encoder_off_for_one_call_is_the_plain_backbone_over_the_texts(llm: LLM, library: PICEngine) -> None:
    off = ask(llm, LISTS, encoder=False)
    same(off, [expected(library, llm, texts, encoder=False) for texts in LISTS])
    assert [states(answer) for answer in off] == [["inlined"] * len(texts) for texts in LISTS]
    same(ask(llm, LISTS), [expected(library, llm, texts) for texts in LISTS])
    idle(llm)


def test_completions_take_texts_ids_and_documents(llm: LLM, library: PICEngine) -> None:
    builder = llm.preprocessor.builder
    document = Document("Cy owns a cat.", id="cy", title="T")
    (first,) = llm.generate("Who owns it?", greedy(8, ignore_eos=True), documents=[document], use_tqdm=False)
    query = list(builder.complete("Who owns it?").query)
    expected = reference(library.model, query, [list(builder.segment(document))], 8)[0]
    assert list(first.outputs[0].token_ids) == expected
    assert first.comb["documents"][0] == {"id": "cy", "state": "encoded", "tokens": len(builder.segment(document))}
    (by_ids,) = llm.generate(query, greedy(8, ignore_eos=True), documents=[document], use_tqdm=False)
    assert (list(by_ids.outputs[0].token_ids), states(by_ids)) == (expected, ["hit"])
    (without,) = llm.generate("Who owns it?", greedy(8, ignore_eos=True), use_tqdm=False)
    assert list(without.outputs[0].token_ids) == reference(library.model, query, [], 8)[0] != expected
    assert without.comb["documents"] == []


@pytest.mark.parametrize("documents", [None, TEXTS[:1]])
def test_what_the_template_is_given_reaches_it(
    llm: LLM, documents: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    builder = llm.preprocessor.builder
    template = "{% for message in messages %}{{ message.content }}{% endfor %}{% if loud %} garden{% endif %}"
    monkeypatch.setattr(builder.tokenizer, "chat_template", template)
    loud, quiet = (
        llm.chat(QUESTION, greedy(1), documents=documents, chat_template_kwargs=more, use_tqdm=False)[0]
        for more in ({"loud": True}, {})
    )
    wanted = replace(builder, chat_template_kwargs={"loud": True}).build(QUESTION).query
    assert list(loud.prompt_token_ids) == list(wanted) != list(quiet.prompt_token_ids)
    with pytest.raises(ValueError, match="can't set 'tokenize'"):
        llm.chat(QUESTION, greedy(1), documents=documents, chat_template_kwargs={"tokenize": False}, use_tqdm=False)
    idle(llm)


def test_documents_are_added_named_and_removed(llm: LLM, library: PICEngine) -> None:
    assert llm.add_document(Document(TEXTS[0], id="kept"), pin=True)["tokens"] > 0
    wanted = expected(library, llm, TEXTS[:1])
    answers = llm.chat(QUESTION, greedy(8, ignore_eos=True, logprobs=0), documents=[{"id": "kept"}], use_tqdm=False)
    same(answers, [wanted])
    assert states(answers[0]) == ["hit"]
    llm.remove_document("kept")
    for forgotten in (lambda: llm.remove_document("kept"), lambda: llm.chat(QUESTION, documents=[{"id": "kept"}])):
        with pytest.raises(ValueError, match="unknown document 'kept'"):
            forgotten()
    idle(llm)


def test_more_documents_than_the_pool_holds_are_answered_in_turns(llm: LLM, library: PICEngine) -> None:
    lists = [[f"Person {index} lives in house number {7 * index}."] for index in range(12)]
    same(ask(llm, lists), [expected(library, llm, texts) for texts in lists])
    assert llm.preprocessor.manager.pool.counts["evictions"] > 0
    idle(llm)


def test_what_cannot_be_served_says_so_and_holds_nothing(llm: LLM, nano_adapter: Path) -> None:
    with pytest.raises(ValueError, match="larger --comb-pool-bytes"):
        llm.generate("x", greedy(), documents=[{"token_ids": [5] * 40}, {"token_ids": [6] * 40}] * 9)
    with pytest.raises(ValueError, match="unknown field 'colour'"):
        llm.generate("x", greedy(), documents=[{"text": "a", "colour": "red"}])
    with pytest.raises(ValueError, match="one per prompt"):
        llm.generate(["x", "y"], greedy(), documents=["one list for two"])
    with pytest.raises(ValueError, match="one each"):
        llm.generate(["x", "y"], [greedy()])
    with pytest.raises(RuntimeError, match="close"):
        LLM(nano_adapter)
    with pytest.raises(ValueError, match="pool_dtype is auto or fp8, not 'int4'"):
        LLM(nano_adapter, pool_dtype="int4")
    idle(llm)


@pytest.mark.slow
def test_with_the_engine_in_a_process_of_its_own(
    llm: LLM, library: PICEngine, nano_adapter: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from vllm.distributed import cleanup_dist_env_and_memory

    llm.close()  # later tests have engines of their own
    cleanup_dist_env_and_memory()
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    with LLM(nano_adapter, disk_path=str(tmp_path), **POOL, **SMALL) as apart:
        same(ask(apart, LISTS), [expected(library, apart, texts) for texts in LISTS])
        idle(apart)
    assert len(list(tmp_path.rglob("*.safetensors"))) == len(TEXTS)  # the next engine finds them there


@pytest.mark.slow
def test_a_pool_in_fp8_holds_more_and_answers_nearly_the_same(
    llm: LLM, library: PICEngine, nano_adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm.close()
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    with LLM(nano_adapter, pool_dtype="fp8", **POOL, **SMALL) as small:
        assert llm.preprocessor.manager is not None
        assert small.preprocessor.manager is not None
        assert (
            small.preprocessor.manager.layout.num_blocks > 2 * llm.preprocessor.manager.layout.num_blocks
        )  # float32 otherwise
        (found,) = ask(small, [TEXTS])
        error = abs(logs(found)[0] - expected(library, small, TEXTS)[0])
        assert 1e-6 < error < 0.1
        idle(small)

"""`comb_serving.LLM(model, method=...)`: a plain model in process, against the library's methods."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from comb_training.nano import CHECKPOINT
from tests.helpers.engines import SMALL
from tests.helpers.plain import PlainLibrary, logs
from tests.helpers.processes import wait_for
from tests.helpers.stores import check_manager

pytest.importorskip("vllm")

import vllm
from vllm import SamplingParams
from vllm.lora.request import LoRARequest

from comb_serving.offline import LLM

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("plugin")]

METHOD = "focus:0.3"
QUESTION = [{"role": "user", "content": "Where is Ada?"}]
TEXTS = ["Ada went to the garden.", "Bob is in the kitchen.", "Then Ada took the red ball."]
REFUSED = ("tokenizer", "tokenizer_revision", "revision", "chat_template", "skip_tokenizer_init")
LISTS = [TEXTS, TEXTS[::-1], TEXTS[:1], []]


@pytest.fixture(scope="module")
def library() -> PlainLibrary:
    return PlainLibrary()


@pytest.fixture(scope="module")
def llm(plugin: None) -> Iterator[LLM]:
    with LLM(CHECKPOINT, method=METHOD, pool_bytes=2**18, pool_block=4, **SMALL) as found:
        yield found


def ask(llm: LLM, lists: Any, **more: Any) -> list[Any]:
    parameters = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
    return llm.chat([QUESTION] * len(lists), parameters, documents=lists, use_tqdm=False, **more)


def states(answer: Any) -> list[str]:
    return [document["state"] for document in answer.comb["documents"]]


@pytest.mark.parametrize("method", [None, "legolink:4", "naive", "full"])
def test_answers_are_the_librarys(llm: LLM, library: PlainLibrary, method: str | None) -> None:
    for answer, texts in zip(ask(llm, LISTS, method=method), LISTS, strict=True):
        used = method or METHOD if texts else "full"
        expected = library.logs(library.chat(QUESTION, texts), used, 8)
        assert logs(answer) == pytest.approx(expected, abs=1e-4)
        assert answer.comb["method"] == (method or METHOD)
        assert ("linked_tokens" in answer.comb) == (used != "full")
    check_manager(llm.preprocessor.manager)


def test_weights_stay_what_documents_were_compiled_with(llm: LLM) -> None:
    with pytest.raises(Exception, match="start another"):
        llm.collective_rpc("reload_weights")
    assert llm.apply_model(lambda model: len(list(model.parameters())) > 0) == [True]

    def scale(by: float) -> Any:
        return lambda model: [parameter.data.mul_(by) for parameter in model.parameters()] and None

    for by in (2.0, 0.5):  # and back: other tests ask the same engine
        with pytest.raises(Exception, match="apply_model has changed weights"):
            llm.apply_model(scale(by))


def test_weights_written_by_other_ways_are_noticed(llm: LLM) -> None:
    """As TRL does, which loads into the driver's model, and extensions of workers."""
    worker = llm.llm_engine.model_executor.driver_worker
    with pytest.raises(RuntimeError, match="other weights can't be loaded"):
        worker.model_runner.model.load_weights([])
    assert ask(llm, [TEXTS])
    norm = next(each for name, each in worker.get_model().named_parameters() if "layernorm" in name)
    norm.data.mul_(2)
    with pytest.raises(Exception, match="weights have changed"):
        ask(llm, [TEXTS])
    norm.data.mul_(0.5)
    assert states(ask(llm, [TEXTS])[0]) == ["hit"] * 3


def test_what_waits_in_the_queue_is_nobody_elses_answer(llm: LLM) -> None:
    (name,) = llm.enqueue(["Hello"], SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)
    with pytest.raises(ValueError, match=r"wait_for_completion\(\) first"):
        ask(llm, [TEXTS])
    (answer,) = llm.wait_for_completion(use_tqdm=False)
    assert name.startswith(answer.request_id)
    assert ask(llm, [TEXTS])


def test_a_prompt_over_documents_is_not_cut(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask(llm, [TEXTS])
    inner, cut = vllm.LLM.generate, {"tokenization_kwargs": {"truncate_prompt_tokens": 20}}
    with pytest.raises(ValueError, match="tokenization_kwargs can't be beside documents"):
        ask(llm, [TEXTS], **cut)
    # what vLLM refuses in its scheduler is no answer, whoever is at fault
    monkeypatch.setattr(vllm.LLM, "generate", lambda *given, **more: inner(*given, **more, **cut))
    with pytest.raises(ValueError, match="vLLM didn't read the documents"):
        ask(llm, [TEXTS])


def test_threads_take_turns(llm: LLM, library: PlainLibrary) -> None:
    lists = [[f"{text} It was day {number}." for text in TEXTS] for number in range(4)]
    with ThreadPoolExecutor(4) as threads:
        answers = [*threads.map(lambda texts: ask(llm, [texts])[0], lists, timeout=60)]
    for answer, texts in zip(answers, lists, strict=True):
        assert logs(answer) == pytest.approx(library.logs(library.chat(QUESTION, texts), METHOD, 8), abs=1e-4)


def test_who_asks_for_all_of_a_prompt_gets_all_of_it_computed(llm: LLM, library: PlainLibrary) -> None:
    asked = {"temperature": 0, "max_tokens": 8, "ignore_eos": True, "logprobs": 0}
    chosen = [
        SamplingParams(**asked, **more) for more in ({"prompt_logprobs": 1}, {}, {"skip_reading_prefix_cache": True})
    ]
    answers = llm.chat([QUESTION] * 3, chosen, documents=[TEXTS] * 3, use_tqdm=False)
    assert [answer.comb["method"] for answer in answers] == ["full", METHOD, "full"]
    for answer in (*answers, *ask(llm, [TEXTS])):
        expected = library.logs(library.chat(QUESTION, TEXTS), answer.comb["method"], 8)
        assert logs(answer) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("documents", ["", "one text", {}, {"text": "x"}, 0, False])
def test_what_is_no_list_of_documents_is_said(llm: LLM, documents: Any) -> None:
    with pytest.raises(ValueError, match="documents is a list"):
        llm.chat(QUESTION, documents=documents, use_tqdm=False)


def test_what_shapes_a_chat_is_in_its_prompt_or_refused(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = llm.preprocessor.builder.tokenizer
    monkeypatch.setattr(tokenizer, "chat_template", "{{ tools | tojson }}{{ messages[0].content }}")
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    for answer in ask(llm, [TEXTS[:1], []], tools=tools):
        assert '"name": "look"' in tokenizer.decode(answer.prompt_token_ids)
    for documents in (TEXTS, []):
        for name, value in (("chat_template", "x"), ("add_generation_prompt", False), ("continue_final_message", True)):
            with pytest.raises(ValueError, match=f"{name} can't be"):
                llm.chat(QUESTION, documents=documents, use_tqdm=False, **{name: value})


@pytest.mark.parametrize("step", [1, 4], ids=["compiling", "answering"])
def test_who_is_interrupted_leaves_nothing_behind(
    llm: LLM, library: PlainLibrary, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    texts, inner, steps = [f"{text} It was step {step}." for text in TEXTS], llm.llm_engine.step, iter(range(1, 99))

    def stepping() -> Any:
        if next(steps) == step:
            raise KeyboardInterrupt
        return inner()

    with monkeypatch.context() as patch:
        patch.setattr(llm.llm_engine, "step", stepping)
        with pytest.raises(KeyboardInterrupt):
            ask(llm, [texts, texts[:1]])
    assert not llm.llm_engine.has_unfinished_requests()
    wait_for(lambda: not llm.preprocessor.manager.references)
    (answer,) = ask(llm, [texts])
    assert logs(answer) == pytest.approx(library.logs(library.chat(QUESTION, texts), METHOD, 8), abs=1e-4)
    assert states(answer) == ["compiled" if step == 1 else "hit"] * 3


@pytest.mark.parametrize("prompt", [{"prompt_token_ids": [5, 6]}, {"prompt": "Where is Ada?"}])
def test_a_prompt_of_another_kind_is_said(llm: LLM, prompt: Any) -> None:
    with pytest.raises(ValueError, match="prompt is a text, a list of token ids"):
        llm.generate(prompt, documents=TEXTS, use_tqdm=False)


def test_no_argument_in_vllms_order_is_lost(llm: LLM) -> None:
    with pytest.raises(ValueError, match="LoRA 'far'"):
        llm.chat(QUESTION, None, False, LoRARequest("far", 1, "/no/such/folder"), documents=TEXTS)


def test_what_has_no_place_is_computed_whole(llm: LLM, library: PlainLibrary) -> None:
    manager = llm.preprocessor.manager
    room = manager.layout.num_blocks * manager.layout.block_size
    day = "It was Monday, and it rained. "
    many = [f"{text} {number} {day}" for text in TEXTS for number in range(room // len(TEXTS) // 8)]
    assert sum(len(library.builder.segment(text)) for text in many) > room
    lists = [many[start : start + 4] for start in range(0, len(many), 4)]
    answers = ask(llm, lists)
    assert {answer.comb["method"] for answer in answers} == {METHOD, "full"}
    for answer, texts in [*zip(answers, lists, strict=True)][:: max(1, len(lists) // 6)]:
        assert (answer.comb["method"] == "full") == (states(answer)[0] == "inlined")
        expected = library.logs(library.chat(QUESTION, texts), answer.comb["method"], 8)
        assert logs(answer) == pytest.approx(expected, abs=1e-4)
    assert manager.references == 0
    assert states(ask(llm, [TEXTS])[0])[0] in ("hit", "compiled")


def test_options_that_do_not_fit(tmp_path: Path, nano_adapter: Path) -> None:
    for checkpoint, options, message in (
        (nano_adapter, {}, "LLM links documents in plain models"),
        (nano_adapter, {"method": "naive"}, "is a COMB adapter"),
        (CHECKPOINT, {"method": "cacheblend"}, "vLLM links documents with"),
        (CHECKPOINT, {"method": "full"}, "LLM links documents in plain models"),
        (CHECKPOINT, {"method": METHOD, "worker_cls": "a.B"}, "worker_cls can't be given: linking documents needs"),
        *((CHECKPOINT, {"method": METHOD, name: "x"}, f"{name} can't be given") for name in REFUSED),
    ):
        with pytest.raises(ValueError, match=message):
            LLM(checkpoint, **options)


def test_what_cannot_be_served_says_so_and_holds_nothing(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="unknown field 'colour'"):
        llm.generate("x", documents=[{"text": "a", "colour": "red"}])
    with pytest.raises(ValueError, match="a list for each of them"):
        llm.generate(["x", "y"], documents=["one list for two"])
    with pytest.raises(RuntimeError, match=r"close.* behind if __name__"):
        LLM(CHECKPOINT, method=METHOD)
    (plain,) = llm.generate("A question", documents=None, use_tqdm=False)
    assert not hasattr(plain, "comb")
    ended = threading.Thread(target=lambda: None)
    ended.start()
    ended.join()
    with monkeypatch.context() as closed:  # as `close` leaves it
        closed.setattr(llm, "_thread", ended)
        with pytest.raises(RuntimeError, match="this LLM is closed"):
            llm.generate("A question", documents=["A document."])
        with pytest.raises(RuntimeError, match="this LLM is closed"):
            llm.generate("A question")
    assert llm.preprocessor.manager.references == 0

"""The vLLM plug-in on a real engine: without documents the plain backbone, with them the library's answers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from comb.backbones.loading import resolve_name
from comb_serving.pool.capability import KEY, MARK, Capability
from tests.helpers.engines import Served, answer, check_seeds, engine, greedy, served

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("plugin")]

DRAW = random.Random(7)
PROMPTS = [[DRAW.randrange(5, 900) for _ in range(length)] for length in (9, 20, 37, 70)]
SETS = ("", "A", "AB", "C", "CAB", "B")
MIXED = [(index, names) for names in ("", "A", "AB", "C", "") for index in range(3)]
# a context of 70 tokens and 96 of answer, ten times, in 20 blocks of 32: somebody has to be turned out
TIGHT = {"max_num_batched_tokens": 32, "num_gpu_blocks_override": 20, "disable_log_stats": False}


@pytest.fixture(scope="module")
def plain(plugin: None) -> Any:
    """The backbone in vLLM itself: answers to each prompt alone, and to `MIXED` without its documents."""
    with engine(resolve_name("nano"), **TIGHT) as llm:
        bare = Served(llm, None, ())
        alone = [bare.ask([(prompt, "")])[0] for prompt in PROMPTS]
        llm.reset_prefix_cache()
        return alone, bare.ask([(PROMPTS[index], "") for index, _ in MIXED])


@pytest.fixture(scope="module")
def nano(plain: Any, nano_comb: Any) -> Iterator[Served]:
    """An adapter on the nano backbone, served."""
    with served(*nano_comb, **TIGHT) as found:
        yield found


@pytest.fixture(scope="module")
def references(nano: Served) -> dict[tuple[int, str], Any]:
    """The library's answers: prompt index and document set -> (ids, log-probabilities)."""
    return {(index, names): nano.reference(prompt, names) for index, prompt in enumerate(PROMPTS) for names in SETS}


@pytest.fixture(autouse=True)
def _no_cached_prefixes(nano: Served) -> None:
    nano.llm.reset_prefix_cache()


def same(found: Any, expected: Any, tolerance: float = 2e-5) -> None:
    """As vLLM computes in float32: it is 1.3e-5 from the library's float64 at most, documents move 3e-1."""
    assert found[0] == expected[0]
    torch.testing.assert_close(torch.tensor(found[1]), torch.tensor(expected[1]), atol=tolerance, rtol=0)


def test_without_documents_it_is_plain_vllm_bit_for_bit(nano: Served, plain: Any) -> None:
    alone, together = plain
    assert [nano.ask([(prompt, "")])[0] for prompt in PROMPTS] == alone
    assert [nano.ask([(prompt, "A")])[0] for prompt in PROMPTS] != alone
    nano.llm.reset_prefix_cache()
    mixed = nano.ask([(PROMPTS[index], names) for index, names in MIXED])
    for (_, names), found, expected in zip(MIXED, mixed, together, strict=True):
        assert (found == expected) is not bool(names)


def test_rows_of_a_batch_answer_as_they_do_alone_and_as_the_library_does(nano: Served, references: Any) -> None:
    together = nano.ask([(PROMPTS[index], names) for index, names in MIXED])
    for (index, names), found in zip(MIXED, together, strict=True):
        nano.llm.reset_prefix_cache()
        same(found, nano.ask([(PROMPTS[index], names)])[0])
        same(found, references[index, names])
    with pytest.raises(AssertionError):
        same(together[0], references[0, "A"])
    with pytest.raises(AssertionError):
        same(references[0, "C"], references[0, "A"])


def test_a_prompt_of_one_token_reads_documents(nano: Served) -> None:
    same(nano.ask([([7], "AB")])[0], nano.reference([7], "AB"))
    with pytest.raises(AssertionError):
        same(nano.ask([([7], "C")])[0], nano.reference([7], "AB"))


def test_prefixes_are_shared_by_requests_with_the_same_documents_alone(nano: Served, references: Any) -> None:
    prompt, first, other = PROMPTS[3], "A", "C"
    nano.ask([(prompt, first)])
    same(nano.ask([(prompt, first)])[0], references[3, first])
    assert nano.cached[-1] == 64
    same(nano.ask([(prompt, other)])[0], references[3, other])
    same(nano.ask([(prompt, "")])[0], references[3, ""])
    assert nano.cached[-2:] == [0, 0]
    # the control: under one salt the second request is answered from the first one's document
    nano.llm.reset_prefix_cache()
    nano.ask([(prompt, first)], salt=f"{MARK}x")
    stale = nano.ask([(prompt, other)], salt=f"{MARK}x")[0]
    assert nano.cached[-1] == 64
    with pytest.raises(AssertionError):
        same(stale, references[3, other])


@pytest.mark.parametrize("prefix", [3, 32, 66])
def test_a_prefix_that_reads_no_documents_is_shared_whatever_they_are(
    nano: Served, references: Any, prefix: int
) -> None:
    """In steps of 32 tokens, some of which begin in front of the documents, and in blocks of 32."""
    prompt, whole = PROMPTS[3], prefix // 32 * 32
    stated = {"prefixes": (prefix,), "prefix_salt": ""}
    for names, cached in (("A", 0), ("A", 64), ("C", whole), ("CAB", whole)):
        same(nano.ask([(prompt, names)], **stated)[0], expected := nano.reference(prompt, names, prefix=prefix))
        assert nano.cached[-1] == cached
        with pytest.raises(AssertionError):
            same(expected, references[3, names])
    same(nano.ask([(prompt, "")])[0], references[3, ""])  # a prompt without documents begins alike
    assert nano.cached[-1] == whole
    nano.ask([(prompt, "A")], prefixes=(prefix,), prefix_salt="another tenant's")
    nano.ask([(prompt, "B")], prefixes=(prefix,), prefix_salt="another tenant's", salt=f"{MARK}theirs")
    assert nano.cached[-2:] == [64 if prefix < 32 else 0, whole]


def test_a_request_that_was_turned_out_comes_back_to_its_documents(nano: Served) -> None:
    asked = [(PROMPTS[3], names) for names in (*SETS, "A", "AB", "", "C")]
    before = preemptions(nano)
    together = nano.ask(asked, tokens=96)
    assert preemptions(nano) > before
    expected = {names: nano.reference(PROMPTS[3], names, tokens=96) for names in SETS}
    for (_, names), found in zip(asked, together, strict=True):
        same(found, expected[names], 2e-5)


def test_a_seed_is_answered_in_parts_and_at_once(nano: Served) -> None:
    check_seeds(nano.llm)


def test_never_another_requests_document(nano: Served, references: Any) -> None:
    draw = random.Random(5)
    core, running, answered, gone = nano.llm.llm_engine, {}, 0, 0
    waiting = [(f"r{number}", draw.randrange(len(PROMPTS)), draw.choice(SETS)) for number in range(200)]
    while waiting or running:
        for _ in range(min(draw.randrange(4), len(waiting))):
            name, index, names = waiting.pop()
            prompt, parameters = nano.request(PROMPTS[index], names)
            running[name] = (index, names)
            core.add_request(name, prompt, parameters)
        if running and draw.random() < 0.05:
            victim = draw.choice(list(running))
            core.abort_request([victim])
            del running[victim]
            gone += 1
        for output in core.step():
            if output.finished and output.request_id in running:
                same(answer(output), references[running.pop(output.request_id)])
                answered += 1
    assert answered + gone == 200
    assert answered > 150


@pytest.mark.parametrize(
    "token",
    [[4, 1, 0], "A", "", 3, "0" * 64 + '["", "", [4, 1, 0], []]', "é" * 70, Capability("", "", (), ()).sign(b"other")],
)
def test_handles_that_nobody_signed_are_an_error(nano: Served, references: Any, token: Any) -> None:
    (output,) = nano.llm.generate([{"prompt_token_ids": PROMPTS[0]}], greedy(8, {KEY: token}), use_tqdm=False)
    assert (output.outputs[0].finish_reason, list(output.outputs[0].token_ids)) == ("error", [])
    same(nano.ask([(PROMPTS[0], "A")])[0], references[0, "A"])


def test_documents_that_were_lost_or_swapped_on_the_way_are_an_error_and_poison_nothing(
    nano: Served, references: Any
) -> None:
    prompt, parameters = nano.request(PROMPTS[3], "A")
    bare, other = greedy(8), nano.request(PROMPTS[3], "C")
    mixed_up: list[tuple[Any, Any]] = [
        (prompt, bare),  # as beams are
        ({**prompt, "cache_salt": "mine"}, parameters),
        ({"prompt_token_ids": PROMPTS[3]}, parameters),
        (other[0], parameters),
        ({**prompt, "prompt_token_ids": PROMPTS[2]}, parameters),
        nano.request(PROMPTS[3], "A", request_id="another"),
        nano.request(PROMPTS[3], "A", salt="mine"),
    ]
    nano.llm.reset_prefix_cache()
    prompts, given = zip(*mixed_up, nano.request(PROMPTS[1], "B"), strict=True)
    *wrong, right = nano.llm.generate(list(prompts), list(given), use_tqdm=False)
    for output in wrong:
        assert (output.outputs[0].finish_reason, list(output.outputs[0].token_ids)) == ("error", [])
    same(answer(right), nano.reference(PROMPTS[1], "B"))
    for names in ("A", "C", ""):
        same(nano.ask([(PROMPTS[3], names)])[0], nano.reference(PROMPTS[3], names))
        assert nano.cached[-1] == 0
    # a prompt that vLLM has rendered itself is stated by nobody
    found = nano.llm.generate(*nano.request(PROMPTS[3], "A", prompts=()), use_tqdm=False)
    same(answer(found[0]), references[3, "A"])


def test_the_encoder_is_not_in_the_worker(nano: Served) -> None:
    worker = nano.llm.llm_engine.model_executor.driver_worker
    names = dict(worker.get_model().named_parameters())
    assert not [name for name in names if "encoder" in name]
    theirs = [name for name, _ in nano.model.cross_blocks.named_parameters() if "up_proj" not in name]
    assert sum(".comb." in name for name in names) == len(theirs)  # gate and up are one product here


def preemptions(nano: Served) -> float:
    return sum(metric.value for metric in nano.llm.get_metrics() if metric.name == "vllm:num_preemptions")

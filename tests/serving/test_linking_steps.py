"""However vLLM makes its steps, what it says to prompts with linked documents is what the library says."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.helpers.engines import answer, check_seeds, greedy
from tests.helpers.linked import (
    PROMPTS,
    LinkedEngine,
    LinkedPrompt,
    check_nothing_is_left,
    largest_difference,
    linked_engine,
)

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.usefixtures("plugin")]

ASKED = [(prompt, method) for method in ("naive", "legolink:4", "focus:0.3", "full") for prompt in PROMPTS]
EXACT = 2e-5


def check_answers(linked: LinkedEngine) -> None:
    found = linked.ask(ASKED, 40)
    check_nothing_is_left(linked.scheduler)
    for one, each in zip(found, ASKED, strict=True):
        assert largest_difference(one, linked.reference(*each, 40)) < 3 * EXACT


@pytest.mark.parametrize(
    "options",
    [
        {"enforce_eager": False, "max_num_batched_tokens": 256, "max_num_seqs": 1},
        {"async_scheduling": True, "num_gpu_blocks_override": 9},  # not all requests at once: some are preempted
    ],
    ids=["compiled, one row", "async, preemption"],
)
def test_answers_are_the_same_however_steps_are_made(llama: Any, options: dict[str, Any]) -> None:
    with linked_engine(llama, "focus:0.3", **options) as linked:
        check_answers(linked)
        if "num_gpu_blocks_override" in options:
            assert linked.preemptions > 0


@pytest.mark.parametrize(
    ("options", "steps"),
    [({}, 1), ({"max_num_batched_tokens": 16}, 2), ({"max_num_seqs": 3}, 2)],
    ids=["room for all seams", "too few tokens", "too few rows"],
)
def test_seams_and_question_are_one_step_where_they_fit(llama: Any, options: dict[str, Any], steps: int) -> None:
    with linked_engine(llama, **options) as linked:
        driver = linked.llm.llm_engine
        for prompt in (PROMPTS[0], PROMPTS[4]):
            driver.add_request("asked", *linked.request(prompt, "legolink:4", 4))
            taken, outputs = 0, []
            while not any(output.outputs[0].token_ids for output in outputs):
                outputs, taken = driver.step(), taken + 1
            while driver.has_unfinished_requests():
                outputs = driver.step()
            assert (taken > 1) == (steps > 1)
            check_nothing_is_left(linked.scheduler)
            assert list(outputs[0].outputs[0].token_ids) == linked.reference(prompt, "legolink:4", 4)[0]


@pytest.mark.parametrize("rows", [1, 2])
def test_who_links_has_its_turn_while_others_fill_the_batch_and_queue(llama: Any, rows: int) -> None:
    """Its seams can't begin beside others: it waits with its blocks, and who comes later isn't let in first."""
    with linked_engine(llama, "focus:0.3", max_num_seqs=rows) as linked:
        driver = linked.llm.llm_engine
        for prompt, method in ((PROMPTS[0], "focus:0.3"), (LinkedPrompt("ABCBACABC"), "legolink:1")):
            asked, names, answers, steps = linked.request(prompt, method, 1), itertools.count(), [], 0
            while not answers:
                while driver.get_num_unfinished_requests() < rows + 3:
                    name = f"{method} {next(names)}"
                    driver.add_request(name, *(asked if name.endswith(" 2") else linked.request(PROMPTS[5], "full", 6)))
                answers = [one for one in driver.step() if one.request_id == f"{method} 2" and one.finished]
                steps += 1
                assert steps < 60
            assert list(answers[0].outputs[0].token_ids) == linked.reference(prompt, method, 1)[0]
            while driver.has_unfinished_requests():
                driver.step()
        check_nothing_is_left(linked.scheduler)


def test_no_prompt_that_is_not_cut_waits_for_ever_for_seams_behind_it(llama: Any) -> None:
    uncut = {"enable_chunked_prefill": False, "max_num_batched_tokens": 256}
    with linked_engine(llama, **uncut) as linked:
        driver, asked = linked.llm.llm_engine, linked.request(PROMPTS[0], "legolink:4", 4)
        for name, long in (("one", 250), ("other", 248)):
            driver.add_request(name, {"prompt_token_ids": [5 + place % 50 for place in range(long)]}, greedy(4))
        driver.add_request("linked", *asked)
        answers = {}
        for _ in range(30):
            answers |= {one.request_id: answer(one) for one in driver.step() if one.finished}
        assert list(answers) == ["one", "other", "linked"]
        assert largest_difference(answers["linked"], linked.reference(PROMPTS[0], "legolink:4", 4)) < EXACT
        check_nothing_is_left(linked.scheduler)


def test_two_ranks_link_each_its_own_heads(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    with linked_engine(llama, "focus:0.3", tensor_parallel_size=2) as linked:
        for one, each in zip(linked.ask(ASKED), ASKED, strict=True):
            assert largest_difference(one, linked.reference(*each)) < EXACT


def test_in_half_precision_answers_are_near(llama: Any) -> None:
    """A first token's log-probability: within bfloat16 of the library's, and much nearer than full recompute's."""
    with linked_engine(llama, dtype="bfloat16") as linked:
        for prompt in PROMPTS[:2]:
            found, wanted, full = (linked.ask([(prompt, "legolink:4")])[0], *(
                linked.reference(prompt, method) for method in ("legolink:4", "full")))  # fmt: skip
            assert found[0][0] == wanted[0][0]
            assert found[1][0] == pytest.approx(wanted[1][0], abs=0.15)
            assert full[0][0] != wanted[0][0] or abs(full[1][0] - wanted[1][0]) > 0.3


def test_in_chunks_who_leaves_leaves_nothing_and_disturbs_nobody(llama: Any) -> None:
    with linked_engine(
        llama, "focus:0.3", max_num_batched_tokens=16, max_num_seqs=3, enable_chunked_prefill=True
    ) as other:
        check_seeds(other.llm)
        check_answers(other)  # and now all are compiled
        # waiting, while its question looks, in the middle of its seams, at its query, while it answers
        for method, steps in itertools.product(("legolink:16", "focus:0.3"), range(8)):
            other.leave(other.request(PROMPTS[4], method, 20), steps)
        other.llm.llm_engine.step()
        check_nothing_is_left(other.scheduler)
        for asked in ((PROMPTS[0], "legolink:4"), (PROMPTS[0], "focus:0.3"), (PROMPTS[1], "full")):
            assert largest_difference(other.ask([asked])[0], other.reference(*asked)) < EXACT

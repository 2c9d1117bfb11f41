"""Linking inside a real vLLM, against the library's methods and against vLLM without it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from comb import methods
from comb.linking.cache import Span
from comb.methods.linked import selects
from comb.methods.selection import QueryLook
from comb_serving.pool.capability import KEY
from tests.helpers.engines import answer, engine, greedy
from tests.helpers.linked import (
    PROMPTS,
    LinkedEngine,
    LinkedPrompt,
    check_nothing_is_left,
    largest_difference,
    linked_engine,
    three_documents,
)

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.usefixtures("plugin")]

RULES = ["naive", "legolink:1", "legolink:4", "legolink:16", "attnlink:6", "test-thirds", "focus:0.3", "test-looked"]
EXACT = 2e-5


@pytest.fixture(scope="module")
def alone(llama: Any) -> list[Any]:
    """What vLLM without linking says to the same prompts, each asked alone."""
    documents = three_documents(llama.config.vocab_size)
    with engine(llama.name_or_path, enable_prefix_caching=False) as llm:
        prompts = [{"prompt_token_ids": prompt.built(documents)[0]} for prompt in PROMPTS]
        return [answer(llm.generate([prompt], greedy(8), use_tqdm=False)[0]) for prompt in prompts]


@pytest.fixture(scope="module", params=["focus:0.3", "focus:0.3,front=prose"])
def linked(llama: Any, alone: list[Any], request: pytest.FixtureRequest) -> Iterator[LinkedEngine]:
    with linked_engine(llama, request.param) as found:  # one engine at a time in a process
        yield found


@pytest.fixture(scope="module", autouse=True)
def rule_of_the_test() -> Iterator[None]:
    """Rules that nothing else knows of, to be served as the library's own are."""

    @selects("test-thirds")
    def thirds(spans: Sequence[Span]) -> list[int]:
        return [position for span in spans for position in range(span.start + 2, span.end, 3)]

    @selects("test-looked", by_query=True)
    def looked(look: QueryLook) -> list[int]:
        return sorted(span.start + int(look.paid[span.start : span.end].argmax()) for span in look.spans)

    yield
    for name in ("test-thirds", "test-looked"):
        del methods.registry._entries[name]


@pytest.mark.parametrize("rule", RULES)
def test_answers_are_those_of_the_library(linked: LinkedEngine, rule: str) -> None:
    method = linked.behind(rule)
    found = linked.ask([(prompt, method) for prompt in PROMPTS])
    for prompt, one in zip(PROMPTS, found, strict=True):
        assert largest_difference(one, linked.reference(prompt, method)) < EXACT
    # the control: linking isn't full recompute
    full = [linked.reference(prompt, "full") for prompt in PROMPTS]
    apart = [largest_difference(one, other) > 100 * EXACT for one, other in zip(found, full, strict=True)]
    # exact are documents computed again whole, and those that nothing stands in front of, unless they had a front
    fronted = linked.front != "none"
    assert apart == [True, True, rule != "legolink:16", fronted, True, True]


def test_a_seam_as_long_as_its_document_is_plain_prefill_to_the_bit(linked: LinkedEngine, alone: list[Any]) -> None:
    assert (linked.ask([(PROMPTS[3], linked.behind("naive"))]) == [alone[3]]) == (linked.front == "none")
    whole = [linked.ask([(prompt, linked.behind("legolink:64"))])[0] for prompt in PROMPTS]
    for one, other in zip(whole, alone, strict=True):
        assert largest_difference(one, other) < EXACT
    assert whole[:2] == alone[:2]  # one seam: the same rows of the same step


def test_reports_say_what_was_computed(linked: LinkedEngine) -> None:
    linked.llm.reset_prefix_cache()
    linked.ask([(PROMPTS[0], linked.behind("legolink:4"))])
    (report,) = linked.reports
    assert (report.prefix_tokens, report.linked_tokens, report.computed_tokens) == (0, 13 + 8 + 30 - 12, 7 + 12 + 4)
    linked.ask([(PROMPTS[0], linked.behind("legolink:4"))])
    (again,) = linked.reports
    assert again.prefix_tokens == 32  # the same prompt once more: from the prefix cache, whole blocks of it
    assert again.prefix_tokens + again.linked_tokens + again.computed_tokens == 62


def test_a_batch_is_what_each_is_alone_and_plain_rows_are_vllms_own(linked: LinkedEngine, alone: list[Any]) -> None:
    rules = ["naive", "full", "legolink:4", "full", "attnlink:6", "legolink:16"]
    methods = [rule if rule == "full" else linked.behind(rule) for rule in rules]
    asked = list(zip(PROMPTS, methods, strict=True))
    each = []
    for one in asked:
        linked.llm.reset_prefix_cache()
        each += linked.ask([one])
    linked.llm.reset_prefix_cache()
    together = linked.ask(asked)
    assert [together[1], together[3]] == [each[1], each[3]] == [alone[1], alone[3]]
    for one, other in zip(together, each, strict=True):
        assert largest_difference(one, other) < EXACT


@pytest.mark.parametrize("rule", ["naive", "legolink:4", "attnlink:6"])
def test_linked_keys_never_answer_for_plain_prompts(linked: LinkedEngine, alone: list[Any], rule: str) -> None:
    """Twins: the same tokens, linked first, then plain, then linked again; blocks are small enough to be shared."""
    method = linked.behind(rule)
    linked.llm.reset_prefix_cache()
    first = linked.ask([(prompt, method) for prompt in PROMPTS])
    plain = [linked.ask([(prompt, "full")])[0] for prompt in PROMPTS]
    for one, other in zip(plain, alone, strict=True):
        assert largest_difference(one, other) < EXACT
    again = [linked.ask([(prompt, method)])[0] for prompt in PROMPTS]
    for one, other in zip(again, first, strict=True):
        assert largest_difference(one, other) < EXACT


def test_the_head_is_shared_with_plain_prompts_and_between_methods(linked: LinkedEngine) -> None:
    linked.llm.reset_prefix_cache()
    prefix = tuple(range(10, 80))  # two blocks of 32, and some
    linked.ask([(LinkedPrompt("A", prefix=prefix), "full")])
    for rule in ("naive", "legolink:4", "attnlink:6"):
        linked.ask([(LinkedPrompt("BC", prefix=prefix), linked.behind(rule))])
        (report,) = linked.reports
        assert report.prefix_tokens == 64


def test_what_is_computed_is_never_found_where_it_is_loaded(linked: LinkedEngine) -> None:
    """A document's last token is computed where nothing follows it, and the rest of it by methods with seams."""
    linked.llm.reset_prefix_cache()
    for names, prefix in (("A", 19), ("BB", 16), ("C", 2), ("AB", 11)):  # together whole blocks of 32
        ends = LinkedPrompt(names, prefix=tuple(range(10, 10 + prefix)), query=())
        longer = LinkedPrompt(names, prefix=ends.prefix, query=(20, 21, 22))
        for method in map(linked.behind, ("naive", "legolink:4", "attnlink:6", "legolink:16", "naive")):
            linked.ask([(ends, method)])
            (found,) = linked.ask([(longer, method)])
            assert largest_difference(found, linked.reference(longer, method)) < EXACT, (names, method)


def test_a_prefix_that_is_gone_before_its_request_begins_is_computed(linked: LinkedEngine) -> None:
    """Of found segments: which of them are linked was settled by what the cache had when it came."""
    prompt, rule = LinkedPrompt("AC", prefix=tuple(range(40, 80))), linked.behind("legolink:4")
    driver, expected = linked.llm.llm_engine, linked.reference(prompt, rule)
    for evicted in (False, True):
        linked.llm.reset_prefix_cache()
        linked.ask([(LinkedPrompt("", prefix=prompt.prefix), "full")])  # one block of it
        driver.add_request("found", *linked.request(prompt, rule, found=True))
        if evicted:
            assert linked.llm.reset_prefix_cache()
            for layer in linked.pool.layers.values():  # the blocks that it gets have held something else
                layer.kv_cache.fill_(3.0)
        outputs = []
        while driver.has_unfinished_requests():
            outputs += driver.step()
        assert largest_difference(answer(outputs[-1]), expected) < EXACT
        check_nothing_is_left(linked.scheduler)


def test_who_wants_all_of_a_prompt_computed_gets_no_linked_answer(linked: LinkedEngine) -> None:
    """vLLM loads nothing then: what would be computed must not lie under the hashes of what is loaded."""
    expected = linked.reference(PROMPTS[0], linked.behind("naive"))
    for wanted in ({"prompt_logprobs": 1}, {"skip_reading_prefix_cache": True}):
        linked.llm.reset_prefix_cache()
        prompt, parameters = linked.request(PROMPTS[0], linked.behind("naive"))
        asked = greedy(8, parameters.extra_args, **wanted)
        (output,) = linked.llm.generate([prompt], [asked], use_tqdm=False)
        assert output.outputs[0].finish_reason == "error"
        (found,) = linked.ask([(PROMPTS[0], linked.behind("naive"))])
        assert largest_difference(found, expected) < EXACT
    check_nothing_is_left(linked.scheduler)


def test_statements_that_dont_fit_end_in_an_error_and_touch_nobody(linked: LinkedEngine) -> None:
    plain, others = PROMPTS[1], [(PROMPTS[0], linked.behind("naive"))]
    expected = linked.ask(others)
    wrong: list[dict[str, Any]] = [
        {"spans": (((7, 13), (20, 8)),)},  # a document too few
        {"spans": (((7, 13), (20, 8), (28, 31)),)},  # longer than in the pool
        {"spans": (((7, 13), (18, 8), (28, 30)),)},  # overlapping
        {"salt": "other"},
        {"prompts": ("0" * 32,)},
        {"documents": (13, 4, 0, 1, 2, 9999, 8, 2, 4, 5, 30, 8, *range(8))},
        {"method": "cacheblend:0.1"},
        {"method": "", "documents": (), "spans": (), "prompts": ("0" * 32,)},  # computed in full, with another prompt
        {"method": "naive" if linked.front != "none" else "primed"},  # compiled in another way
    ]
    for stated in wrong:
        prompt, parameters = linked.request(PROMPTS[0], linked.behind("naive"), **stated)
        good = linked.request(*others[0])
        outputs = linked.llm.generate([prompt, good[0]], [parameters, good[1]], use_tqdm=False)
        assert outputs[0].outputs[0].finish_reason == "error"
        assert largest_difference(answer(outputs[1]), expected[0]) < EXACT
    in_full = linked.request(PROMPTS[0], linked.behind("naive"), method="", documents=(), spans=())
    (output,) = linked.llm.generate(*map(list, zip(in_full, strict=True)), use_tqdm=False)
    assert largest_difference(answer(output), linked.ask([(PROMPTS[0], "full")])[0]) < EXACT
    forged = linked.request(PROMPTS[0], linked.behind("naive"))
    forged[1].extra_args[KEY] = forged[1].extra_args[KEY].replace("naive", "legolink:4")
    (output,) = linked.llm.generate([forged[0]], [forged[1]], use_tqdm=False)
    assert output.outputs[0].finish_reason == "error"
    assert linked.ask([(plain, "full")])[0][0]


def test_several_samples_of_one_prompt_are_linked_each(linked: LinkedEngine) -> None:
    prompt, parameters = linked.request(PROMPTS[0], linked.behind("legolink:4"))
    parameters.n, parameters.temperature, parameters.top_k = 3, 1.0, 1
    (output,) = linked.llm.generate([prompt], [parameters], use_tqdm=False)
    expected = linked.reference(PROMPTS[0], linked.behind("legolink:4"))[0]
    assert [list(one.token_ids) for one in output.outputs] == [expected] * 3

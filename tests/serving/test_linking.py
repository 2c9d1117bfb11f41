"""What front and engine of a plain model have in common: methods, plans, capabilities, reports, the layout."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from comb_serving.api.response import cached_and_made
from comb_serving.linking.layout import LinkingLayout, check_spans, plan
from comb_serving.linking.methods import LinkMethod
from comb_serving.manager.leases import Lease, LeasedDocument
from comb_serving.pool.capability import (
    COMPILE,
    Capability,
    LinkReport,
    PoolHandle,
    ReportReceiver,
    ReportSender,
    digest,
)
from tests.helpers.processes import wait_for

SECRET = b"secret"


@pytest.mark.parametrize(
    ("spec", "name", "again", "compiled"),
    [
        ("naive", "naive", [], "alone"),
        ("legolink", "legolink:16", [*range(6, 10), *range(12, 28)], "alone"),
        ("legolink:k=2", "legolink:2", [6, 7, 12, 13], "alone"),
        ("legolink:0", "legolink:0", [], "alone"),
        ("focus:ratio=0.2", "focus:0.2", None, "alone"),
        ("focus:0.2,seam=0,front=prose", "focus:0.2,seam=0,front=prose", None, "prose"),
        ("attnlink:2", "attnlink:2", [5, 6, 12], "alone"),
        ("legolink-0", "legolink-0", [0], "dummies:4"),
        ("naive,front=dummies:4", "naive,front=dummies:4", [0], "dummies:4"),
        ("naive,front=dummies", "naive,front=dummies:4", [0], "dummies:4"),
        ("primed", "primed", [0], "prose"),
        ("primed:0", "primed", [0], "prose"),
        ("primed:k=1", "primed:1", [0, 6, 12], "prose"),
        ("legolink:1,front=prose", "legolink:1,front=prose", [0, 6, 12], "prose"),
        ("primed:front=none", "primed,front=none", [], "alone"),
        ("linktokens", "linktokens", [0], "adapter"),
        ("full", "full", [], "alone"),
        ("hypic", "hypic:8", [], "hypic:8"),
        ("hypic:w=4", "hypic:4", [], "hypic:4"),
        ("hypic:front=none", "hypic:8", [], "hypic:8"),
        ("hypic:front=prose,w=4", "hypic:4,front=prose", [0], "hypic:4,front=prose"),
    ],
)
def test_methods_have_one_name_each(spec: str, name: str, again: list[int] | None, compiled: str) -> None:
    method = LinkMethod.parse(spec)
    assert (method.name, method.compiled) == (name, compiled)
    assert method.recomputed([(0, 6), (6, 4), (12, 20)]) == again
    assert LinkMethod.parse(method.name) == method
    assert method.states == spec.startswith("hypic")


def test_what_the_question_looks_at_is_computed_again_as_the_library_does() -> None:
    method, spans = LinkMethod.parse("focus:0.2,seam=0"), [(0, 6), (6, 4), (12, 20)]
    paid = torch.zeros(40)
    paid[[2, 8, 12, 30, 25, 26, 27, 38]] = torch.tensor([9.0, 8, 7, 6, 5, 4, 3, 99])
    assert method.recomputed(spans, paid) == [8, 12, 25, 26, 27, 30]  # 6 of 30; the first is in its place
    assert LinkMethod.parse("focus:0.2,seam=0,front=prose").recomputed(spans, paid) == [0, 2, 8, 12, 25, 26, 30]
    assert method.recomputed(spans[:1]) == []  # nothing to look for


@pytest.mark.parametrize("spec", ["cacheblend:0.1", "legolink:-1", "legolink:x", "naive:rotate=false", "legolink-0:4",
                                  "naive,front=dummies:0", "primed:x", "focus:2", "nothing", "full:1", "",
                                  "hypic:-1", "hypic:k=4", "hypic:mode=addition", "legolink:4,w=8"])  # fmt: skip
def test_other_methods_are_refused_by_name(spec: str) -> None:
    with pytest.raises(ValueError, match=r"naive|method|number of tokens|a share of|at least 0"):
        LinkMethod.parse(spec)


@st.composite
def prompts(draw: st.DrawFn) -> tuple[int, list[tuple[int, int]]]:
    spans, position = [], 0
    for gap, tokens in draw(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 7)), min_size=1, max_size=5)):
        spans.append((position + gap, tokens))
        position += gap + tokens
    return position + draw(st.integers(0, 3)), spans


def token_by_token(length: int, spans: list[tuple[int, int]], chosen: set[int]) -> list[str]:
    """The plan as a word for each token: "load", "seam" or "query"; the plain way to say what `plan` computes."""
    words = ["seam"] * length
    for start, tokens in spans:
        for offset in range(tokens):
            if start + offset not in chosen and start + offset < length - 1:
                words[start + offset] = "load"
    end = min(spans[-1][0] + spans[-1][1], length - 1) if "load" in words else 0
    return [word if place < end else "query" for place, word in enumerate(words)]


@given(prompts(), st.sets(st.integers(0, 50)), st.integers(0, 40))
def test_a_plan_says_of_every_token_what_the_plain_way_says(
    prompt: tuple[int, list[tuple[int, int]]], chosen: set[int], known: int
) -> None:
    length, spans = prompt
    inside = {start + offset for start, tokens in spans for offset in range(tokens)} & chosen
    found = plan(length, spans, sorted(inside))
    words = token_by_token(length, spans, inside)
    for left, least in ((found, 0), (found.behind(known), known)):
        said = ["query" if place >= found.query else "?" for place in range(length)]
        for load in left.loads:
            start, tokens = spans[load.document]
            assert load.start - start == load.offset
            assert load.end <= start + tokens
            said[load.start : load.end] = ["load"] * (load.end - load.start)
        for start, end in left.seams:
            assert start < end
            said[start:end] = ["seam"] * (end - start)
        assert said[least:] == words[least:]
    assert length == 1 or words[-1] == "query"  # something has to be sampled from


@pytest.mark.parametrize("spans", [[(0, 3), (2, 2)], [(0, 0)], [(4, 7)], [(-1, 2)], [(5, 1), (0, 2)]])
def test_spans_that_overlap_or_leave_the_prompt_are_refused(spans: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="a document at"):
        check_spans(10, spans)


def test_a_capability_holds_method_and_places_and_is_good_for_its_prompt_alone() -> None:
    prompt, other = [1, 2, 3, 4], [5, 6, 7]
    spans = (((0, 2), (2, 1)), ((1, 2), (3, 1)))
    stated = Capability("", "tenant", (2, 1, 5), (digest(other), digest(prompt)), "naive", spans)
    token = stated.sign(SECRET)
    found = Capability.verify(token, SECRET)
    assert found == stated
    found.check("any", "tenant", prompt)
    assert found.spans_in(prompt) == ((1, 2), (3, 1))
    with pytest.raises(ValueError, match="prompt"):
        found.check("any", "tenant", [1, 2, 3])
    with pytest.raises(ValueError, match="salt"):
        found.check("any", "other", prompt)
    with pytest.raises(ValueError, match="signed"):
        Capability.verify(token.replace("naive", "other"), SECRET)
    Capability("", "", (), (digest(prompt),), COMPILE, (((0, 4),),)).check("x", None, prompt)
    in_full = Capability("", "tenant", (), (digest(prompt),))
    in_full.check("x", "tenant", prompt)
    with pytest.raises(ValueError, match="prompt"):
        in_full.check("x", "tenant", other)
    with pytest.raises(
        ValueError, match="salt"
    ):  # a trained encoder's documents aren't in the prompt: the salt says so
        Capability("", "tenant", (2, 1, 5), (digest(prompt),)).check("x", "tenant", prompt)


def test_reports_arrive_once_and_all_of_a_burst(tmp_path: Path) -> None:
    sender = ReportSender(tmp_path)
    sender.send("lost", LinkReport(1, 2, 3))  # nobody listens yet
    receiver = ReportReceiver(tmp_path)
    sender.send("a", LinkReport(1, 2, 3))
    sender.send("b", LinkReport(4, 5, 6))
    assert receiver.take("b") == LinkReport(4, 5, 6)
    assert receiver.take("a") == LinkReport(1, 2, 3)
    assert receiver.take("a") is receiver.take("lost") is None
    for number in range(10_000):
        sender.send(str(number), LinkReport(number, 0, 0))
    assert [receiver.take(str(number)) for number in range(10_000)] == [LinkReport(n, 0, 0) for n in range(10_000)]
    # both at once
    with ThreadPoolExecutor(1) as engine:
        sent = engine.submit(lambda: [sender.send(str(number), LinkReport(number, 0, 0)) for number in range(3000)])
        for number in range(3000):
            assert wait_for(lambda name=str(number): receiver.take(name), step=0) == LinkReport(number, 0, 0)
        sent.result()
    receiver.close()
    sender.send("late", LinkReport(1, 2, 3))


def test_seams_of_what_was_compiled_were_not_cached_and_take_nothing_from_what_was() -> None:
    method, spans = LinkMethod.parse("legolink:4"), [(3, 20), (23, 9), (40, 20)]
    left = LinkingLayout(10, 16, 2048, "print", "float32", 255, 128).plan(method, 70, spans).behind(10)
    tiers = ("pool", "compiled", "disk")
    documents = [LeasedDocument("k", PoolHandle(n, (0,)), tier) for (_, n), tier in zip(spans, tiers, strict=True)]
    each = left.loaded_of(3)
    assert each == (13, 5, 16)
    assert sum(each) == left.loaded_tokens
    lease = Lease(tuple(documents), [])
    assert cached_and_made(LinkReport(10, 34, 26, each), lease) == (10 + 13 + 16, 5)
    assert LinkReport(10, 34, 26, each).said == {"prefix_tokens": 10, "linked_tokens": 34, "computed_tokens": 26}


def test_the_layout_goes_through_its_file(tmp_path: Path) -> None:
    layout = LinkingLayout(10, 16, 2048, "print", "float32", 255, 128, front=(1, 2))
    with pytest.raises(FileNotFoundError):
        LinkingLayout.read(tmp_path)
    layout.write(tmp_path)
    assert LinkingLayout.read(tmp_path) == layout
    assert (layout.nbytes, layout.blocks_for(17)) == (10 * 16 * 2048, 2)

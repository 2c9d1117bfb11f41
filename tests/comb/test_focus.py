"""Tokens chosen by the question: exact where everything is chosen, by the right scores, and refused where unseen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from comb import methods
from comb.methods.linked import PromptLayout
from tests.comb.test_linking import DOCUMENTS, GAPS, HEAD, LINKABLE, QUERY, error, link, model_of, spans_of

pytestmark = pytest.mark.usefixtures("one_thread")

UNSEEN = ("bloom", "falcon", "falcon_alibi", "gptj", "mpt")


@pytest.mark.parametrize("family", sorted({*LINKABLE} - {*UNSEEN}))
def test_all_tokens_chosen_is_full_prefill(family: str) -> None:
    model = model_of(family)
    reference = link(model, "full", head=HEAD, gaps=GAPS).logits
    state = link(model, "focus:1.0", head=HEAD, gaps=GAPS)
    assert state.recomputed == (sum(map(len, DOCUMENTS)),)
    assert error(state.logits, reference) < 1e-4
    assert error(link(model, "focus:0.2", head=HEAD, gaps=GAPS).logits, reference) > 1e-3  # the control
    alone = link(model, "focus:0.2", DOCUMENTS[:1])
    assert alone.recomputed == (0,)
    assert error(alone.logits, link(model, "full", DOCUMENTS[:1]).logits) < 1e-4


@pytest.mark.parametrize("family", UNSEEN)
def test_attention_that_cannot_be_seen_is_refused(family: str) -> None:
    with pytest.raises(ValueError, match=r"'focus' can't be used with this model: \w+ computes attention in its own"):
        methods.create("focus", model_of(family))


@pytest.mark.parametrize(
    ("options", "seam"), [({}, 4), ({"front": [5, 6, 7]}, 0), ({"seam": 2, "front": [5, 6, 7]}, 2)]
)
def test_seams_come_first_where_documents_are_compiled_alone(options: dict[str, Any], seam: int) -> None:
    chosen = []
    for seams in ({}, {"seam": seam}, {"seam": 4 - seam}):
        method = methods.create("focus:0.2", model_of("llama"), **{**options, **seams})
        noted = recorded(method)
        method.link(method.compile(DOCUMENTS), QUERY, head_ids=HEAD)
        chosen += noted
    assert chosen[0] == chosen[1]
    assert (chosen[1] == chosen[2]) == (seam == 2)


@pytest.mark.parametrize("family", ["llama", "qwen3", "glm4", "deepseek_v3"])
def test_the_chosen_are_those_that_the_query_looks_at(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the weights that eager attention returns, over an ordinary cache with the naively linked documents."""
    model = model_of(family)
    spans, _, length = spans_of(DOCUMENTS, HEAD, QUERY)
    paid = attention_of_query(model)
    documents = torch.tensor([position for span in spans for position in range(span.start, span.end)])
    seams = {position for span in spans for position in (span.start, span.start + 1)}
    for seam, expected in ((0, {*documents[paid[documents].topk(8).indices].tolist()}), (2, seams)):
        method = methods.create(f"focus:0.25,seam={seam}", model)
        chosen = recorded(method)
        state = method.link(method.compile(DOCUMENTS), QUERY, head_ids=HEAD)
        assert state.recomputed == (8,)
        assert {*chosen[0]} >= expected if seam else {*chosen[0]} == expected
    assert paid[documents].topk(8).values[-1] > 1.001 * paid[documents].topk(9).values[-1]  # no close call decides
    assert length == len(paid)


def attention_of_query(model: Any) -> Tensor:
    """Attention [N] by the query's tokens, over layers and heads, behind the naive method's cache of the documents."""
    state = link(model, "naive", head=HEAD)
    before = DynamicCache()
    width = sum(map(len, (HEAD, *DOCUMENTS)))
    for number, layer in enumerate(state.past_key_values.layers):
        before.update(layer.keys[:, :, :width], layer.values[:, :, :width], number)
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            weights = model(input_ids=torch.tensor([QUERY]), past_key_values=before, output_attentions=True).attentions
    finally:
        model.set_attn_implementation("sdpa")
    return torch.stack([layer.sum(dim=(0, 1, 2)) for layer in weights]).sum(0)


def recorded(method: Any) -> list[list[int]]:
    chosen: list[list[int]] = []
    inner = method.rule.choose

    def note(prompt: PromptLayout, **parameters: Any) -> list[int]:
        chosen.append(inner(prompt, **parameters))
        return chosen[-1]

    method.rule = replace(method.rule, choose=note)
    return chosen


def test_a_long_question_asks_in_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    model, query = model_of("llama"), list(range(20, 60))
    whole = link(model, "focus:0.4", query=query, head=HEAD)
    monkeypatch.setattr("comb.linking.passes._MAX_ROWS", 7)
    portions = link(model, "focus:0.4", query=query, head=HEAD)
    assert portions.recomputed == whole.recomputed
    assert error(portions.logits, whole.logits) < 1e-5


def test_a_prompt_that_ends_with_a_document_is_asked_by_its_last_token() -> None:
    model = model_of("llama")
    assert error(link(model, "focus:1.0", query=[]).logits, link(model, "full", query=[]).logits) < 1e-4
    assert link(model, "focus:0.1", query=[]).recomputed[0] in (4, 5)  # the last token is computed in any case


def test_what_is_computed_is_counted() -> None:
    link(model_of("llama"), "focus:0.25", head=HEAD)
    state = link(model_of("llama"), "focus:0.25", head=HEAD)  # the head is cached by now
    assert state.computed == (2 * len(QUERY) + 8 + 1,)  # the query twice, and its last token for the answer

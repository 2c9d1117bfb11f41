"""Documents compiled behind a front: what is kept of them, what is exact, and where the front's tokens come from."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from comb import methods
from comb.backbones.forward import counted_passes
from comb.backbones.tokenizer import PASSAGE
from comb.engine.engine import PICEngine
from comb.methods.linked import Linked
from tests.comb.test_linking import DOCUMENTS, GAPS, HEAD, LINKABLE, QUERY, error, model_of
from tests.helpers.byte_text import byte_llama, byte_tokenizer
from tests.helpers.families import tiny

FRONT = [3, 41, 17, 8, 99, 23]


def primed(model: Any, spec: str = "primed", front: Any = FRONT) -> Any:
    return methods.create(spec, model, front=front)


def logits(method: Any, documents: Any = DOCUMENTS, **fresh: Any) -> torch.Tensor:
    found: torch.Tensor = method.link(method.compile(documents), QUERY, **fresh).logits
    return found


@pytest.mark.parametrize("family", LINKABLE)
def test_recomputing_everything_is_full_prefill(family: str) -> None:
    # a model of its own, and the shorter prompt first: dynamic rotary embeddings keep the reach of the longest they saw
    model = tiny(family, std=0.15)
    full, longest = methods.create("full", model), max(map(len, DOCUMENTS))
    for fresh in ({}, {"head_ids": HEAD, "gaps": GAPS}):
        reference = logits(full, **fresh)
        assert error(logits(primed(model, f"primed:{longest}"), **fresh), reference) < 1e-4
        assert error(logits(primed(model), **fresh), reference) > 1e-3  # the control


def test_a_segment_is_what_it_is_behind_the_front() -> None:
    model = model_of("llama")
    method = primed(model)
    (picache,) = method.compile(DOCUMENTS[:1])
    behind = DynamicCache()
    with torch.no_grad():
        model(input_ids=torch.tensor([[*FRONT, *DOCUMENTS[0]]]), past_key_values=behind, use_cache=True)
    assert torch.allclose(picache.keys[1], behind.layers[1].keys[0, :, len(FRONT) :], atol=1e-6)
    assert picache.num_tokens == len(DOCUMENTS[0])
    # where the prompt really has the front in front, one document is exact
    full = methods.create("full", model)
    reference = logits(full, DOCUMENTS[:1], head_ids=FRONT)
    assert error(logits(method, DOCUMENTS[:1], head_ids=FRONT), reference) < 1e-4
    assert error(logits(method, DOCUMENTS[:1], head_ids=HEAD), reference) > 1e-3


def test_a_prompt_that_begins_with_a_document_has_its_own_sink() -> None:
    model = model_of("llama")
    method = primed(model)
    picaches = method.compile(DOCUMENTS)
    state = method.link(picaches, QUERY)
    assert state.recomputed == (1,)
    exact = DynamicCache()
    with torch.no_grad():
        model(input_ids=torch.tensor([[*DOCUMENTS[0], *DOCUMENTS[1]]]), past_key_values=exact, use_cache=True)
    for layer in (0, 1):
        own, right = state.past_key_values.layers[layer].keys[0], exact.layers[layer].keys[0]
        assert torch.allclose(own[:, 0], right[:, 0], atol=1e-5)
    assert not torch.allclose(own[:, 1], right[:, 1], atol=1e-3)
    assert method.link(picaches, QUERY, head_ids=HEAD).recomputed == (0,)  # the head has it


@pytest.mark.parametrize("spec", ["naive", "legolink:2", "attnlink:4", "cacheblend:0.3", "focus:0.3", "legolink-0"])
def test_every_choice_of_tokens_takes_a_front_and_shares_its_documents(spec: str) -> None:
    model = model_of("llama")
    method, other = primed(model, spec), primed(model)
    assert method.fingerprint == other.fingerprint
    assert method.compile_name == other.compile_name == Linked.compile_name
    method.link(other.compile(DOCUMENTS), QUERY, head_ids=HEAD)
    with pytest.raises(ValueError, match="another model, dtype or method"):
        method.link(methods.create(spec, model).compile(DOCUMENTS), QUERY)
    with pytest.raises(ValueError, match="another model, dtype or method"):
        method.link(primed(model, front=FRONT[1:]).compile(DOCUMENTS), QUERY)


def test_without_a_front_nothing_changes() -> None:
    model = model_of("llama")
    assert methods.create("naive", model, front="none").fingerprint == methods.create("naive", model).fingerprint
    off = methods.create("primed:3", model, front="none")
    assert torch.equal(logits(off, head_ids=HEAD), logits(methods.create("legolink:3", model), head_ids=HEAD))


def test_the_passage_is_tokenised_by_the_engine(tmp_path: Path) -> None:
    model, tokenizer = byte_llama(max_position_embeddings=2048), byte_tokenizer()
    engine = PICEngine(model, tokenizer, method="primed")
    assert tokenizer.decode(engine.method.compiled_behind, skip_special_tokens=True).strip() == PASSAGE.strip()
    # another process gets the ids
    again = methods.create(engine.method.spec.name, model, **engine.method.spec.parameters)
    assert again.fingerprint == engine.method.fingerprint
    own = tmp_path / "front.txt"
    own.write_text("One sentence of mine.")
    mine = PICEngine(model, tokenizer, method=f"focus:0.2,front={own}")
    assert tokenizer.decode(mine.method.compiled_behind, skip_special_tokens=True) == "One sentence of mine."
    assert mine.ask("Who?", ["Ida lives in Rome."]).report.documents[0].state == "compiled"


def test_errors_say_what_to_do(backbone: Any, tokenizer: Any, tmp_path: Path) -> None:
    model = tiny("llama")
    with pytest.raises(ValueError, match="no tokenizer beside its weights: give its token ids"):
        methods.create("primed", model)
    with pytest.raises(ValueError, match="primed:front has token ids below 128, got 128"):
        primed(model, front=[1, 128])
    with pytest.raises(ValueError, match="the front's 129 tokens take more than half of the 256 positions"):
        primed(model, front=[5] * 129)
    with pytest.raises(ValueError, match="the front's 33 tokens take more than half of the 32 positions"):
        primed(tiny("dynamic_ntk"), front=[5] * 33)  # of its 256, so many that a segment may be compiled in
    for wrong in (3, 0, 0.5, True, []):
        with pytest.raises(ValueError, match="front is none, dummies:n, prose, a text file, token ids, adapter, or"):
            primed(model, front=wrong)
    empty = tmp_path / "empty.txt"
    empty.write_text(" \n")
    for front, said in ((empty, r"empty\.txt is empty"), (tmp_path / "none.txt", "no such file or folder")):
        with pytest.raises(ValueError, match=said):
            PICEngine(backbone, tokenizer, method=f"primed:front={front}")


def test_the_front_is_computed_once_for_all_documents() -> None:
    model = tiny("llama", std=0.15)
    method = primed(model)
    with counted_passes() as first:
        before = method.compile(DOCUMENTS)
    with counted_passes() as second:
        primed(model, "focus:0.2").compile(DOCUMENTS)
    documents = sum(map(len, DOCUMENTS))
    assert (first.tokens, second.tokens) == (len(FRONT) + documents, documents)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(1.5)
    after = primed(model).compile(DOCUMENTS)
    fresh = primed(copy.deepcopy(model)).compile(DOCUMENTS)
    assert torch.equal(after[1].values[1], fresh[1].values[1])  # other weights, another front
    assert not torch.allclose(after[1].values[1], before[1].values[1], atol=1e-3)

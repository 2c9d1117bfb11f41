"""Documents compiled behind a primer: what is kept of them, what is exact, and where the primer's tokens come from."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from comb import methods
from comb.backbones.forward import counted_passes
from comb.backbones.primer import PASSAGE
from comb.engine.engine import PICEngine
from comb.methods.decoder import Decoder
from tests.comb.test_linking import DOCUMENTS, GAPS, HEAD, LINKABLE, QUERY, error, model_of
from tests.helpers.byte_text import byte_llama, byte_tokenizer
from tests.helpers.families import tiny

PRIMER = [3, 41, 17, 8, 99, 23]


def primed(model: Any, spec: str = "primed", primer: Any = PRIMER) -> Any:
    return methods.create(spec, model, primer=primer)


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


def test_a_segment_is_what_it_is_behind_the_primer() -> None:
    model = model_of("llama")
    method = primed(model)
    (picache,) = method.compile(DOCUMENTS[:1])
    behind = DynamicCache()
    with torch.no_grad():
        model(input_ids=torch.tensor([[*PRIMER, *DOCUMENTS[0]]]), past_key_values=behind, use_cache=True)
    assert torch.allclose(picache.keys[1], behind.layers[1].keys[0, :, len(PRIMER) :], atol=1e-6)
    assert picache.num_tokens == len(DOCUMENTS[0])
    # where the prompt really has the primer in front, one document is exact
    full = methods.create("full", model)
    reference = logits(full, DOCUMENTS[:1], head_ids=PRIMER)
    assert error(logits(method, DOCUMENTS[:1], head_ids=PRIMER), reference) < 1e-4
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


@pytest.mark.parametrize("spec", ["naive", "legolink:2", "attnlink:4", "cacheblend:0.3", "focus:0.3", "block"])
def test_every_choice_of_tokens_takes_a_primer_and_shares_its_documents(spec: str) -> None:
    model = model_of("llama")
    method, other = primed(model, spec), primed(model)
    assert method.fingerprint == other.fingerprint
    assert method.compile_name == other.compile_name == Decoder.compile_name
    method.link(other.compile(DOCUMENTS), QUERY, head_ids=HEAD)
    with pytest.raises(ValueError, match="another model, dtype or method"):
        method.link(methods.create(spec, model).compile(DOCUMENTS), QUERY)
    with pytest.raises(ValueError, match="another model, dtype or method"):
        method.link(primed(model, primer=PRIMER[1:]).compile(DOCUMENTS), QUERY)


def test_without_a_primer_nothing_changes() -> None:
    model = model_of("llama")
    assert methods.create("naive", model, primer=False).fingerprint == methods.create("naive", model).fingerprint
    off = methods.create("primed:3", model, primer=False)
    assert torch.equal(logits(off, head_ids=HEAD), logits(methods.create("legolink:3", model), head_ids=HEAD))


def test_the_passage_is_tokenised_by_the_engine(tmp_path: Path) -> None:
    model, tokenizer = byte_llama(max_position_embeddings=2048), byte_tokenizer()
    engine = PICEngine(model, tokenizer, method="primed")
    assert tokenizer.decode(engine.method.primer, skip_special_tokens=True).strip() == PASSAGE.strip()
    # another process gets the ids
    again = methods.create(engine.method.spec.name, model, **engine.method.spec.parameters)
    assert again.fingerprint == engine.method.fingerprint
    own = tmp_path / "primer.txt"
    own.write_text("One sentence of mine.")
    mine = PICEngine(model, tokenizer, method=f"focus:0.2,primer={own}")
    assert tokenizer.decode(mine.method.primer, skip_special_tokens=True) == "One sentence of mine."
    assert mine.ask("Who?", ["Ida lives in Rome."]).report.documents[0].state == "compiled"


def test_errors_say_what_to_do(backbone: Any, tokenizer: Any, tmp_path: Path) -> None:
    model = tiny("llama")
    with pytest.raises(ValueError, match="no tokenizer beside its weights: give its token ids"):
        methods.create("primed", model)
    with pytest.raises(ValueError, match="primed:primer has token ids below 128, got 128"):
        primed(model, primer=[1, 128])
    with pytest.raises(ValueError, match="the primer's 129 tokens take more than half of the 256 positions"):
        primed(model, primer=[5] * 129)
    with pytest.raises(ValueError, match="the primer's 33 tokens take more than half of the 32 positions"):
        primed(tiny("dynamic_ntk"), primer=[5] * 33)  # of its 256, so many that a segment may be compiled in
    for spec in ("legolink-0", "legolink-0:2"):
        with pytest.raises(ValueError, match="takes no primer"):
            primed(model, spec)
    for wrong in (3, 0, 0.5):
        with pytest.raises(ValueError, match="primer is true, a text file to compile documents behind, or token ids"):
            primed(model, primer=wrong)
    empty = tmp_path / "empty.txt"
    empty.write_text(" \n")
    for primer, said in ((empty, r"empty\.txt is empty"), (tmp_path / "none.txt", "primer is true, or a text file")):
        with pytest.raises(ValueError, match=said):
            PICEngine(backbone, tokenizer, method=f"primed:primer={primer}")


def test_the_primer_is_computed_once_for_all_documents() -> None:
    model = tiny("llama", std=0.15)
    method = primed(model)
    with counted_passes() as first:
        before = method.compile(DOCUMENTS)
    with counted_passes() as second:
        primed(model, "focus:0.2").compile(DOCUMENTS)
    documents = sum(map(len, DOCUMENTS))
    assert (first.tokens, second.tokens) == (len(PRIMER) + documents, documents)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(1.5)
    after = primed(model).compile(DOCUMENTS)
    fresh = primed(copy.deepcopy(model)).compile(DOCUMENTS)
    assert torch.equal(after[1].values[1], fresh[1].values[1])  # other weights, another front
    assert not torch.allclose(after[1].values[1], before[1].values[1], atol=1e-3)

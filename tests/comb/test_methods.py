"""Methods: full, prefix and comb give the logits they promise, and refuse what they can't do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from comb import CombForCausalLM, methods
from comb.bench.methods import every_method
from comb.cache.picache import CrossPICache
from comb.cli.doctor import check_methods
from comb.linking.cache import Span
from comb.methods.base import LinkRequest
from comb.methods.linked import selects
from comb.methods.prefix import PrefixMethod, prefixes_of
from comb.methods.selection import Tokens
from tests.helpers.families import open_gates, tiny
from tests.helpers.hybrids import tiny_hybrid

PREFIX, QUERY = [1, 5], [7, 8, 9]
DOCUMENTS = [[11, 12, 13, 14, 15], [21, 22, 23], [31, 32, 33, 34]]


def make(family: str, **changes: Any) -> Any:
    """With weights large enough that its tokens depend on its input."""
    return tiny(family, std=0.15, **changes)


@pytest.fixture(scope="module", params=["llama", "qwen3", "gpt_neox"])
def backbone(request: pytest.FixtureRequest) -> Any:
    return make(request.param)


@pytest.fixture(scope="module")
def comb_model() -> CombForCausalLM:
    return open_gates(CombForCausalLM.from_backbone(make("llama"), num_encoder_layers=2), 1.0, 0.5)


def flat(documents: list[list[int]]) -> torch.Tensor:
    return torch.tensor([PREFIX + [token for document in documents for token in document] + QUERY])


def plain_logits(model: Any, documents: list[list[int]]) -> torch.Tensor:
    with torch.no_grad():
        return model(flat(documents)).logits[:, -1].float()


def test_a_method_is_one_class_and_its_parameters_come_from_the_spec() -> None:
    class Mine(methods.get("full")):  # type: ignore[misc]
        positional = ("k",)

        def __init__(self, model: object, *, k: int = 4, scale: float = 1.0, exact: bool = False) -> None:
            super().__init__(model)
            self.parameters = (k, scale, exact)

    methods.register("test-mine")(Mine)
    try:
        model = make("llama")
        assert Mine.name == "test-mine"
        assert methods.create("test-mine", model).parameters == (4, 1.0, False)
        assert methods.create("test-mine:16", model).parameters == (16, 1.0, False)
        assert methods.create("test-mine:16,scale=0.5,exact=true", model).parameters == (16, 0.5, True)
        assert methods.create("test-mine:16", model, k=2).parameters[0] == 2
        with pytest.raises(ValueError, match="says twice what k is"):
            methods.create("test-mine:16,k=2", model)
        for spec in ("test-mine:", "test-mine:16,", "test-mine:,scale=1", "test-mine:=2"):
            with pytest.raises(ValueError, match=f"method '{spec}': a parameter is empty"):
                methods.create(spec, model)
        with pytest.raises(ValueError, match="registered already"):
            methods.register("test-mine")(type("Other", (Mine,), {}))
    finally:
        del methods.registry._entries["test-mine"]


def test_a_rule_of_selection_is_one_function() -> None:
    """Registered, it is a method behind every front, with its doctor's checks, and in the comparison."""

    @selects("test-last")
    def last(spans: Sequence[Span], k: Tokens = 1) -> list[int]:
        """Recomputes the last `k` tokens of every document."""
        return [position for span in spans for position in range(max(span.start, span.end - k), span.end)]

    try:
        model = make("llama")
        assert methods.parse("test-last:2,front=dummies:3") == ("test-last", {"k": 2, "front": "dummies:3"})
        method = methods.create("test-last:2", model)
        assert method.link(method.compile(DOCUMENTS), QUERY, prefix_ids=PREFIX).recomputed == (6,)
        with pytest.raises(ValueError, match="test-last:k is a number of tokens, an integer of at least 0, got -1"):
            methods.create("test-last:-1", model)
        for spec in ("test-last", "test-last:3,front=dummies:2"):
            (verdict,) = check_methods(model, [spec])
            assert verdict.passed
            assert "everything recomputed == full" in [check.name for check in verdict.checks]
        assert {"test-last", "test-last:front=prose"} <= set(every_method())
        assert methods.get("test-last").__doc__ == last.__doc__
    finally:
        del methods.registry._entries["test-last"]


WRONG: dict[str, dict[str, str]] = {
    "llama": {
        "legolink:-1": "at least 0",
        "legolink:1.5": "integer",
        "attnlink:3": "even",
        "cacheblend:0": "0 < ratio <= 1",
        "cacheblend:0.2,layers=4": "less than the model's 4 layers",
        "cacheblend:0.2,layers=0": "at least 1",
        "focus:0": "0 < ratio <= 1",
        "focus:0.1,seam=-1": "at least 0",
        "legolink-0:4": "no unnamed parameter for '4'",
        "naive:front=dummies:0": "at least 1",
        "naive:front=dummies:x": "at least 1",
        "naive,front=nowhere": "there is no such file or folder",
        "naive,front=adapter": "has none: train some",
        "naive:rotate=2": "true or false",
        "naive:k=2": "no parameter k",
        "full:3": "full",
        "legolinc:2": "known: .*legolink, legolink-0",
        "naive:quantize=int3": "one of int8, fp8, int4, not 'int3'",
        "full:quantize=int8": "keeps token ids only",
        "prefix:quantize=int8": "promises what full recompute gives",
    },
    "bamba": {
        "hypic:-1": "w is a number of tokens",
        "hypic:w=true": "w is a number of tokens",
        "hypic:mode=magic": "mode is one of addition, transition, rotation, seam",
        "hypic:storage=bfloat16": "storage is one of float32, float16",
        "hypic:k=3": "no parameter k",
        "addition:mode=seam": "mode",
        "addition:rotate=1": "rotate is true or false",
        "hypic:compose=1": "compose is true or false",
        "hypic:front=prose": "no tokenizer beside its weights",
        "hypic:quantize=int8": "can't be quantised",
    },
}


@pytest.mark.parametrize("family", WRONG)
def test_wrong_parameters_are_refused(family: str) -> None:
    model = tiny_hybrid(family) if family == "bamba" else tiny(family)
    for spec, message in WRONG[family].items():
        with pytest.raises((ValueError, TypeError), match=message):
            methods.create(spec, model)
    assert methods.create("addition" if family == "bamba" else "naive:quantize=none", model).fingerprint


# ---- full ----


def test_prompt_longer_than_the_positions(backbone: Any) -> None:
    for name in ("full", "prefix"):
        method = methods.create(name, backbone)
        with pytest.raises(ValueError, match=r"258 tokens \(253 of documents, 5 of query\).*256 positions"):
            method.link(method.compile([[3] * 253]), QUERY, prefix_ids=PREFIX)
        with pytest.raises(ValueError, match="empty"):
            method.link([], [])
        with pytest.raises(ValueError, match="gaps has 2 lists of tokens for 2 PICaches"):
            method.link(method.compile(DOCUMENTS[:2]), QUERY, gaps=[[1], [2]])


def test_a_picache_of_another_method_is_refused(comb_model: CombForCausalLM) -> None:
    full, comb = methods.create("full", comb_model), methods.create("comb", comb_model)
    with pytest.raises(ValueError, match="TokenPICache"):
        full.link(comb.compile(DOCUMENTS), QUERY)
    with pytest.raises(ValueError, match="CrossPICache"):
        comb.link(full.compile(DOCUMENTS), QUERY)


# ---- prefix ----


def test_prefix_is_exact_and_reuses_the_longest_stored_prefix(backbone: Any) -> None:
    prefix = methods.create("prefix", backbone)
    prefixes_of(backbone).clear()
    picaches = prefix.compile(DOCUMENTS)

    def link(order: list[int]) -> tuple[list[str], int]:
        documents = [DOCUMENTS[index] for index in order]
        state = prefix.link([picaches[index] for index in order], QUERY, prefix_ids=PREFIX)
        torch.testing.assert_close(state.logits, plain_logits(backbone, documents), atol=1e-5, rtol=1e-5)
        return [use.state for use in state.uses[0]], state.recomputed_tokens

    assert link([0, 1]) == (["compiled", "compiled"], 8)
    assert link([0, 1]) == (["hit", "hit"], 0)
    assert link([0, 1, 2]) == (["hit", "hit", "compiled"], 4)
    assert link([0, 2]) == (["hit", "compiled"], 4)
    # the same documents in another order are another prefix
    assert link([1, 0]) == (["compiled", "compiled"], 8)
    assert link([]) == ([], 0)
    # the same tokens as other documents are the same prefix
    parts = prefix.link(prefix.compile([DOCUMENTS[0][:2], DOCUMENTS[0][2:]]), QUERY, prefix_ids=PREFIX)
    assert [use.state for use in parts.uses[0]] == ["hit", "hit"]


def test_prefix_without_query_computes_the_last_segment_anew(backbone: Any) -> None:
    prefix = methods.create("prefix", backbone)
    prefixes_of(backbone).clear()
    state = prefix.link(prefix.compile(DOCUMENTS), [], prefix_ids=PREFIX)
    with torch.no_grad():
        expected = backbone(flat(DOCUMENTS)[:, : -len(QUERY)]).logits[:, -1]
    torch.testing.assert_close(state.logits, expected, atol=1e-5, rtol=1e-5)
    assert [use.state for use in state.uses[0]] == ["compiled", "compiled", "inlined"]


def test_prefix_refuses_what_it_cannot_store() -> None:
    with pytest.raises(ValueError, match="length of the prompt"):
        PrefixMethod(tiny("dynamic_ntk"))


# ---- comb ----


@pytest.mark.parametrize("exact", [True, False], ids=["exact prefix", "as the release reads"])
def test_comb_is_the_model_with_documents(
    comb_model: CombForCausalLM, monkeypatch: pytest.MonkeyPatch, exact: bool
) -> None:
    monkeypatch.setattr(comb_model.config, "exact_prefix", exact)
    comb = methods.create("comb", comb_model)
    picaches = comb.compile(DOCUMENTS)
    assert all(isinstance(picache, CrossPICache) for picache in picaches)
    prompt, reads = torch.tensor([PREFIX + QUERY]), {"documents": [picaches], "prefix_tokens": [len(PREFIX) * exact]}
    with torch.no_grad():
        expected = comb_model(prompt, **reads).logits[:, -1]
        without = comb_model(prompt).logits[:, -1]
        otherwise = comb_model(prompt, documents=[picaches], prefix_tokens=[len(PREFIX) * (not exact)]).logits[:, -1]
    state = comb.link(picaches, QUERY, prefix_ids=PREFIX)
    torch.testing.assert_close(state.logits, expected, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(state.logits, without, atol=1e-2)
    assert not torch.allclose(state.logits, otherwise, atol=1e-3)
    tokens = comb_model.generate(prompt, **reads, max_new_tokens=8, do_sample=False)
    assert torch.equal(state.generate(max_new_tokens=8, do_sample=False), tokens)
    # each step computes the prompt again, whose prefix reads no more than it did
    assert torch.equal(comb_model.generate(prompt, **reads, max_new_tokens=8, do_sample=False, use_cache=False), tokens)
    assert state.recomputed_tokens == 0
    # the order of documents does not matter, a missing one does
    reordered = comb.link(picaches[::-1], QUERY, prefix_ids=PREFIX).logits
    torch.testing.assert_close(reordered, expected, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(comb.link(picaches[:2], QUERY, prefix_ids=PREFIX).logits, expected, atol=1e-3)


def test_an_exact_prefix_is_cached_and_rows_of_a_batch_have_their_own(comb_model: CombForCausalLM) -> None:
    comb = methods.create("comb", comb_model)
    prefixes_of(comb.backbone).clear()  # other tests' too
    picaches, answer = comb.compile(DOCUMENTS), [41, 42, 43]
    cold, warm = (comb.link(picaches, QUERY, prefix_ids=PREFIX) for _ in range(2))
    assert (cold.prefix_tokens, warm.prefix_tokens, warm.computed) == (0, len(PREFIX), (len(QUERY),))
    torch.testing.assert_close(warm.answer_logits(answer), cold.answer_logits(answer))
    short = LinkRequest(picaches[:1], QUERY[1:], PREFIX[:1])
    rows = [LinkRequest(picaches, QUERY, PREFIX), short, LinkRequest([], QUERY)]
    alone = [comb.link_batch([row]) for row in rows]
    batch = comb.link_batch(rows)
    assert batch.prefixes == [len(PREFIX), 1, 0]
    torch.testing.assert_close(batch.logits, torch.cat([each.logits for each in alone]), atol=1e-4, rtol=1e-4)
    copies = {"num_beams": 2, "num_return_sequences": 2, "max_new_tokens": 4, "do_sample": False}
    found = batch.generate(**copies)[:, -4:]
    assert torch.equal(found, torch.cat([each.generate(**copies)[:, -4:] for each in alone]))
    # a prompt that ends where its documents begin asks with its last token
    torch.testing.assert_close(
        comb.link(picaches, [], prefix_ids=PREFIX).logits,
        comb.link(picaches, PREFIX[-1:], prefix_ids=PREFIX[:-1]).logits,
    )
    with pytest.raises(ValueError, match="less than the row has tokens"):
        comb_model(torch.tensor([PREFIX]), documents=[picaches], prefix_tokens=[len(PREFIX)])
    for size in (1, 2):  # a token of the prompt is none of the answer's, which all read
        with pytest.raises(ValueError, match="is taken whole"):
            comb_model.generate(
                torch.tensor([PREFIX + QUERY]),
                documents=[picaches],
                prefix_tokens=[len(PREFIX)],
                prefill_chunk_size=size,
                max_new_tokens=2,
            )


def test_comb_refuses_nan_and_other_adapters() -> None:
    model = open_gates(CombForCausalLM.from_backbone(make("llama"), num_encoder_layers=2), 1.0, 0.5)
    comb = methods.create("comb", model)
    picaches = comb.compile(DOCUMENTS[:1])
    parameter = next(p for name, p in model.encoder.named_parameters() if "v_proj" in name)
    with torch.no_grad():
        parameter[0, 0] += 1.0
    with pytest.raises(ValueError, match="another model or adapter"):
        comb.link(picaches, QUERY)
    with torch.no_grad():
        parameter.fill_(float("nan"))
    with pytest.raises(ValueError, match="NaN"):
        comb.compile(DOCUMENTS[:1])


# ---- base ----


def test_training_mode_is_switched_off_for_the_run_only() -> None:
    model = make("llama", attention_dropout=0.5).train()
    full = methods.create("full", model)
    state = full.link(full.compile(DOCUMENTS), QUERY, prefix_ids=PREFIX)
    assert torch.equal(state.logits, state.logits)
    assert model.training
    assert all(module.training for module in model.modules())
    with torch.no_grad():  # negative control: dropout is there
        assert not torch.equal(model(flat(DOCUMENTS)).logits, model(flat(DOCUMENTS)).logits)

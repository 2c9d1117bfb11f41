"""Who a model is: found out once per call, and found out anew after everything that changes its weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from comb import PICEngine, methods
from comb.backbones import identity
from comb.backbones.identity import identity_of, one_walk, weights_fingerprint
from comb.linking.support import find_support
from tests.helpers.families import tiny
from tests.helpers.tiny_engine import CITY, LAKE, QUESTION, TEMPLATE, make_backbone, make_comb, make_tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")

Change = Callable[[Any], Any]
DOCUMENTS = [list(range(20, 31)), list(range(50, 57)), list(range(70, 83))]


def optimizer_step(model: Any) -> None:
    weight = model.model.layers[1].mlp.up_proj.weight
    weight.grad = torch.ones_like(weight)
    torch.optim.AdamW([weight], lr=1e-2).step()
    weight.grad = None


def other_weights(model: Any) -> None:
    model.load_state_dict({name: tensor + 0.25 for name, tensor in model.state_dict().items()})


def swapped_rows(model: Any) -> None:
    weight = model.model.layers[0].self_attn.k_proj.weight
    with torch.no_grad():
        weight[[0, 1]] = weight[[1, 0]]


def replaced_weight(model: Any) -> None:
    layer = model.model.layers[0].self_attn.k_proj
    layer.weight = torch.nn.Parameter(layer.weight.detach() * 2)


def assigned_weights(model: Any) -> None:
    model.load_state_dict({name: tensor * 2 for name, tensor in model.state_dict().items()}, assign=True)


def replaced_layer(model: Any) -> None:
    layers = model.model.layers
    layers[1] = copy.deepcopy(layers[0])
    layers[1].self_attn.layer_idx = 1


def other_dtype(model: Any) -> None:
    model.to(torch.float64)


def changed_buffer(model: Any) -> None:
    model.model.layers[0].mlp.gate_proj.qweight[0] = 5


CHANGES = [optimizer_step, other_weights, swapped_rows, replaced_weight, assigned_weights, replaced_layer, other_dtype]


@pytest.mark.parametrize("change", [*CHANGES, changed_buffer])
def test_a_change_of_weights_is_another_identity(change: Change) -> None:
    model = tiny("llama", std=0.15)
    model.model.layers[0].mlp.gate_proj.register_buffer("qweight", torch.tensor([1, 2, 3], dtype=torch.int32))
    known, name, support = identity_of(model), weights_fingerprint(model), find_support(model)
    method = methods.create("naive", model)
    picaches = method.compile([[5, 6, 7]])
    assert identity_of(model) is known
    assert find_support(model) is support
    change(model)
    assert identity_of(model) is not known
    assert weights_fingerprint(model) != name
    assert method.support is find_support(model) is not support
    with pytest.raises(ValueError, match="compiled by another model"):
        method.link(picaches, [8])
    fresh = methods.create("naive", model)
    now, anew = (each.link(each.compile([[5, 6, 7]]), [8]).logits for each in (method, fresh))
    assert torch.equal(now, anew)


def test_adapters_added_switched_off_scaled_and_merged_are_other_identities() -> None:
    peft = pytest.importorskip("peft")
    plain = tiny("llama", std=0.15)
    names = [weights_fingerprint(plain)]
    settings = peft.LoraConfig(r=4, target_modules=["k_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(plain, settings).eval()
    names.append(weights_fingerprint(plain))
    with model.disable_adapter():
        names.append(weights_fingerprint(plain))
    model.add_adapter("other", settings)
    method = methods.create("legolink:99", model)
    picaches = method.compile(DOCUMENTS)
    model.set_adapter("other")
    names.append(weights_fingerprint(plain))
    with pytest.raises(ValueError, match="compiled by another model"):
        method.link(picaches, [8, 9])
    full = methods.create("full", model)
    ours, exact = (each.link(each.compile(DOCUMENTS), [8, 9]).logits for each in (method, full))
    assert float((ours - exact).abs().max() / exact.abs().max()) < 1e-4
    for module in model.modules():
        if isinstance(getattr(module, "scaling", None), dict):
            module.scaling["other"] *= 5
    names.append(weights_fingerprint(plain))
    model.delete_adapter("other")
    model.set_adapter("default")
    model.base_model.merge_adapter()
    names.append(weights_fingerprint(plain))
    model.base_model.unmerge_adapter()
    model.delete_adapter("default")
    names.append(weights_fingerprint(plain))
    assert len(set(names)) == len(names)


def test_moving_or_copying_the_same_weights_is_the_same_model() -> None:
    model = tiny("llama", std=0.15)
    known, name = identity_of(model), weights_fingerprint(model)
    double = copy.deepcopy(model)
    assert weights_fingerprint(double) == name
    with torch.no_grad():
        double.lm_head.weight.mul_(2)
    assert weights_fingerprint(double) != name
    model.load_state_dict(copy.deepcopy(model.state_dict()))  # the same values, written again
    assert identity_of(model) is not known
    assert weights_fingerprint(model) == name


@pytest.fixture
def walks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The models that were walked, in order."""
    walked: list[Any] = []
    look = identity._look

    def noted(model: Any, modules: Any) -> Any:
        walked.append(model)
        return look(model, modules)

    monkeypatch.setattr(identity, "_look", noted)
    return walked


@pytest.mark.parametrize(
    "method", ["full", "prefix", "comb", "naive", "legolink:2", "cacheblend:0.5", "naive:quantize=int8"]
)
def test_a_cached_question_walks_the_weights_once(method: str, walks: list[Any]) -> None:
    model = make_comb() if method == "comb" else make_backbone()
    engine = PICEngine(model, make_tokenizer(), method=method)
    engine.ask(QUESTION, [LAKE, CITY], max_new_tokens=2)
    walks.clear()
    answer = engine.ask(QUESTION, [LAKE, CITY], max_new_tokens=2)
    assert len(walks) <= 1
    assert {document.state for document in answer.report.documents} == {"inlined" if method == "full" else "hit"}


def test_a_turn_that_goes_on_walks_the_weights_once(walks: list[Any]) -> None:
    engine = PICEngine(make_backbone(), make_tokenizer(template=TEMPLATE), method="naive")
    chat = engine.conversation([LAKE])
    chat.ask(QUESTION, max_new_tokens=2)
    walks.clear()
    assert chat.ask(QUESTION, max_new_tokens=2).report.continued_tokens
    assert len(walks) == 1


def test_one_walk_lasts_for_one_call_and_compiling_looks_again() -> None:
    model = tiny("llama", std=0.15)
    with one_walk():
        known = identity_of(model)
        optimizer_step(model)
        assert identity_of(model) is known
        with one_walk():
            assert identity_of(model) is not known
        assert identity_of(model) is known
    assert identity_of(model) is not known


def test_weights_that_change_between_compiling_and_linking_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = PICEngine(make_backbone(), make_tokenizer(), method="naive")
    compile = engine.method.compile

    def late(segments: Any) -> Any:  # another thread's optimizer, while documents wait for the model
        optimizer_step(engine.model)
        return compile(segments)

    monkeypatch.setattr(engine.method, "compile", late)
    with pytest.raises(ValueError, match="ask again"):
        engine.ask(QUESTION, [LAKE], max_new_tokens=1)

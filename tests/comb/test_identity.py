"""Who a model is: found out once per call, and found out anew after everything that changes its weights."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from comb import PICacheStore, PICEngine, methods
from comb.backbones import identity
from comb.backbones.identity import exclusive, identity_of, one_walk, weights_fingerprint
from comb.linking.support import find_support
from tests.helpers.families import tiny
from tests.helpers.tiny_engine import (
    CITY,
    LAKE,
    NEW,
    QUESTION,
    TEMPLATE,
    make_backbone,
    make_comb,
    make_tokenizer,
    states,
)  # fmt: skip

Change = Callable[[Any], Any]
DOCUMENTS = [list(range(20, 31)), list(range(50, 57)), list(range(70, 83))]


def optimizer_step(model: Any) -> None:
    weight = model.model.layers[1].mlp.up_proj.weight
    weight.grad = torch.ones_like(weight)
    torch.optim.AdamW([weight], lr=1e-2).step()
    weight.grad = None


def swapped_rows(model: Any) -> None:
    weight = model.model.layers[0].self_attn.k_proj.weight
    with torch.no_grad():
        weight[[0, 1]] = weight[[1, 0]]


def replaced_weight(model: Any) -> None:
    layer = model.model.layers[0].self_attn.k_proj
    layer.weight = torch.nn.Parameter(layer.weight.detach() * 2)


def replaced_layer(model: Any) -> None:
    layers = model.model.layers
    layers[1] = copy.deepcopy(layers[0])
    layers[1].self_attn.layer_idx = 1


def as_numpy(old: Tensor, new: Tensor) -> None:
    old.detach().numpy()[...] = new.detach().numpy()


def other_memory(old: Tensor, new: Tensor) -> None:
    with torch.no_grad():
        old.set_(new.clone())


def each_weight(how: Callable[[Tensor, Tensor], None]) -> Change:
    """Written where torch doesn't count."""

    def change(model: Any) -> None:
        torch.manual_seed(5)
        for tensor in model.parameters():
            how(tensor, tensor.detach() + torch.randn_like(tensor) * 0.3)

    return change


CHANGES: list[Change] = [
    optimizer_step,
    lambda model: model.load_state_dict({name: tensor + 0.25 for name, tensor in model.state_dict().items()}),
    swapped_rows,
    replaced_weight,
    lambda model: model.load_state_dict({name: 2 * tensor for name, tensor in model.state_dict().items()}, assign=True),
    replaced_layer,
    lambda model: model.to(torch.float64),
    lambda model: model.model.layers[0].mlp.gate_proj.qweight.fill_(5),
    *map(each_weight, (as_numpy, other_memory)),
]


@pytest.mark.parametrize("change", CHANGES)
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


def lora(seed: int, folder: Path, **options: Any) -> Path:
    peft = pytest.importorskip("peft")
    backbone = make_backbone()
    settings = {"r": 4, "lora_alpha": 8, "target_modules": ["k_proj", "v_proj", "up_proj"], **options}
    torch.manual_seed(seed)
    made = peft.get_peft_model(backbone, peft.LoraConfig(**settings, init_lora_weights=False, task_type="CAUSAL_LM"))
    made.save_pretrained(folder / str(seed))
    return folder / str(seed)


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize(
    ("seed", "other"),
    # the last: the same numbers, and nothing but a scale changes, which may be a tensor that peft fills
    [(2, {}), (2, {"lora_alpha": 24}), (2, {"r": 2}), (1, {"lora_alpha": 24})],
)
def test_an_adapter_that_peft_exchanges_is_another(
    prepared: bool, seed: int, other: dict[str, int], tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    from peft.utils.hotswap import hotswap_adapter, prepare_model_for_compiled_hotswap

    first, second = lora(1, tmp_path / "first"), lora(seed, tmp_path, **other)
    model = peft.PeftModel.from_pretrained(make_backbone(), first).eval()
    if prepared:
        prepare_model_for_compiled_hotswap(model, target_rank=4)
    engine = PICEngine(model, make_tokenizer(), method="naive", store=PICacheStore(disk_path=tmp_path / "disk"))
    answers = []
    for folder in (first, second, first):
        hotswap_adapter(model, folder, "default")
        answers.append(engine.ask(QUESTION, [LAKE, CITY], max_new_tokens=NEW))
        loaded = peft.PeftModel.from_pretrained(make_backbone(), folder).eval()
        plain = PICEngine(loaded, make_tokenizer(), method="naive").ask(QUESTION, [LAKE, CITY], max_new_tokens=NEW)
        assert answers[-1].token_ids == plain.token_ids
    assert answers[0].token_ids != answers[1].token_ids
    assert states(answers[1]) == ["compiled", "compiled"]
    assert states(answers[2]) == ["hit", "hit"]  # it is known who was here before


def test_an_adapter_that_transformers_exchanges_is_another(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    folders = [lora(seed, tmp_path) for seed in (1, 2, 3)]
    model = make_backbone()
    model.enable_peft_hotswap(target_rank=4)
    model.load_adapter(str(folders[0]), "default")
    chat = PICEngine(model, make_tokenizer(template=TEMPLATE), method="naive").conversation([LAKE, CITY])
    store, answers = PICacheStore(), []
    for folder in folders:
        model.load_adapter(str(folder), "default", hotswap=True)
        loaded = make_backbone()
        loaded.load_adapter(str(folder), "default")
        for each, options in ((model, {"store": store}), (loaded, {})):
            engine = PICEngine(each, make_tokenizer(template=TEMPLATE), method="naive", **options)
            answers.append(engine.ask(QUESTION, [LAKE, CITY], max_new_tokens=NEW).token_ids)
        assert answers[-2] == answers[-1]
        assert "weights have changed" in chat.ask(QUESTION, max_new_tokens=1).report.relinked or len(answers) == 2
    assert len(set(answers)) == len(folders)


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


def test_threads_that_look_first_at_once_find_one_model(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(identity.Identity):
        def __init__(self, *facts: Any) -> None:
            time.sleep(0.05)
            super().__init__(*facts)

    monkeypatch.setattr(identity, "Identity", Slow)
    with ThreadPoolExecutor(3) as threads:
        assert len(set(threads.map(identity_of, [tiny("llama")] * 3))) == 1


def test_a_look_in_the_middle_of_a_pass_is_no_change_to_who_waits() -> None:
    model, looked = tiny("llama"), threading.Event()

    def waits() -> None:
        with one_walk():
            identity_of(model)
            looked.set()
            with exclusive(model):
                pass

    with ThreadPoolExecutor(2) as threads:
        with one_walk():
            identity_of(model)
            with exclusive(model):
                waiting = threads.submit(waits)
                looked.wait()
                time.sleep(0.1)  # until it waits
                model.model.layers[0].state = torch.ones(1)  # as RecurrentGemma's passes do
                threads.submit(identity_of, model).result()
        waiting.result()

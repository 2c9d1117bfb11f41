"""Gradients through linked documents, with and without checkpointing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, FalconConfig, GPT2Config, PhimoeConfig, Starcoder2Config

from comb import CombForCausalLM
from tests.helpers.families import open_gates, tiny

SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
DOCUMENTS = [[[5, 6, 7, 8], [9, 10]], [[11, 12, 13]], []]


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(3, 100, (3, 9), generator=torch.Generator().manual_seed(2))
    labels = ids.clone()
    labels[:, :5] = -100
    return ids, labels


def fresh(family: str = "llama", **kwargs: object) -> CombForCausalLM:
    torch.manual_seed(1)
    return open_gates(CombForCausalLM.from_backbone(tiny(family), num_encoder_layers=2, **kwargs))


def gradients(model: CombForCausalLM, documents: object = DOCUMENTS) -> dict[str, torch.Tensor]:
    ids, labels = batch()
    model.zero_grad()
    model(ids, documents=documents, labels=labels).loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, gradient in left.items():
        torch.testing.assert_close(gradient, right[name], rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def test_gradients_reach_every_trainable_parameter_and_no_other() -> None:
    model = fresh().train()
    found = gradients(model)
    assert found.keys() == {n for n, p in model.named_parameters() if p.requires_grad}
    assert not any(name.startswith("backbone.") for name in found)
    # nothing reads what the last encoder layer's neighbours don't: all layers feed a cross block here
    assert [name for name, gradient in found.items() if not gradient.abs().max() > 0] == []


def test_no_gradient_spans_all_layers_or_segments_once_per_layer_or_segment() -> None:
    model = fresh().train()
    with model.linked(DOCUMENTS) as link:
        assert link is not None
        outputs = [*link.keys, *link.values]
    seen = {output.grad_fn for output in outputs}
    waiting = list(seen)
    while waiting:
        for node, _ in waiting.pop().next_functions:
            if node is not None and node not in seen:
                seen.add(node)
                waiting.append(node)
    names = [node.name() for node in seen]
    # one for keys and one for values, of the layers and of the segments; an index is a gradient of zeros, as large
    # as what it is taken from, for each of them
    assert names.count("UnbindBackward0") == 4
    assert "SelectBackward0" not in names


def test_gates_of_a_fresh_model_get_gradients_first() -> None:
    model = fresh().train()
    open_gates(model, 0.0, 0.0)
    alive = {name for name, gradient in gradients(model).items() if gradient.abs().max() > 0}
    assert alive == {f"cross_blocks.{i}.{gate}" for i in (0, 1) for gate in ("attention_gate", "mlp_gate")}


@pytest.mark.parametrize("front", ["none", [5, 6, 7]], ids=["alone", "behind a front"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_next"])
def test_checkpointing_recomputes_with_the_documents_of_its_forward(family: str, front: object) -> None:
    plain = fresh(family, front=front).train()
    wanted = gradients(plain)
    assert ("encoder.front" in wanted and "encoder.sink" in wanted) == (front != "none")
    model = fresh(family, front=front).train()
    model.gradient_checkpointing_enable()
    ids, labels = batch()
    model.zero_grad()
    loss = model(ids, documents=DOCUMENTS, labels=labels).loss
    # the documents of another forward in between must not be taken for its own
    with torch.no_grad():
        model(ids, documents=[[[20, 21]], [[22]], [[23, 24, 25]]])
    loss.backward(retain_graph=True)
    assert_same({n: p.grad for n, p in model.named_parameters() if p.grad is not None}, wanted)
    assert not any(layer._forward_pre_hooks for layer in model.backbone.model.layers)
    loss.backward()
    assert_same({n: p.grad / 2 for n, p in model.named_parameters() if p.grad is not None}, wanted)


@pytest.mark.parametrize(
    "config",
    [
        GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=64),
        Starcoder2Config(**SMALL, num_key_value_heads=2, residual_dropout=0.3, embedding_dropout=0.3),
        PhimoeConfig(**SMALL, num_key_value_heads=2, num_local_experts=4, input_jitter_noise=0.5),
        FalconConfig(**SMALL, hidden_dropout=0.3, attention_dropout=0.3),
    ],
    ids=lambda config: config.model_type,
)  # fmt: skip
def test_what_is_frozen_drops_nothing_out(config: Any) -> None:
    torch.manual_seed(0)
    backbone = AutoModelForCausalLM.from_config(config)
    ids, mine = torch.arange(5, 20)[None], {"documents": [[[20, 21, 22], [30, 31]]]}

    def loss() -> torch.Tensor:
        return model(ids, labels=ids, **mine).loss

    assert backbone.train()(ids, labels=ids).loss != backbone(ids, labels=ids).loss
    model = open_gates(CombForCausalLM.from_backbone(backbone, num_encoder_layers=2))
    wanted = loss()
    wanted.backward()
    exact = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    for checkpointing in (False, True):
        model.train().zero_grad()
        if checkpointing:
            model.gradient_checkpointing_enable()
        found = loss()
        found.backward()
        assert found == wanted
        assert_same({name: p.grad for name, p in model.named_parameters() if p.grad is not None}, exact)
    model.gradient_checkpointing_disable()
    assert not any(module.training for module in model.backbone.modules())
    assert not any(module.training for module in model.eval().modules())


def test_checkpointing_really_recomputes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = fresh().train()
    calls: list[int] = []
    block = model.cross_blocks[0]
    monkeypatch.setattr(block, "forward", lambda *args, f=block.forward: calls.append(1) or f(*args))
    gradients(model)
    once = len(calls)
    model.gradient_checkpointing_enable()
    calls.clear()
    gradients(model)
    assert len(calls) == 2 * once
    with pytest.raises(ValueError, match="use_reentrant=False"):
        fresh().gradient_checkpointing_enable({"use_reentrant": True})


def test_token_ids_in_a_forward_equal_picaches() -> None:
    model = fresh()
    ids, _ = batch()
    with torch.no_grad():
        pics = [model.encode(row) if row else [] for row in DOCUMENTS]
        wanted = model(ids, documents=pics).logits
        for documents in (DOCUMENTS, [[pics[0][0], DOCUMENTS[0][1]], DOCUMENTS[1], []]):
            torch.testing.assert_close(model(ids, documents=documents).logits, wanted, rtol=1e-5, atol=1e-6)

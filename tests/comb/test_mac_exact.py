"""What MAC leaves to exact attention, counted by its reason; and queries as they were before their rotary embedding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from comb.backbones.forward import decoder_of
from comb.mac import mac
from comb.mac.rotation import UnsupportedModelError, find_queries
from tests.helpers.families import tiny
from tests.helpers.mac_models import FREE, NEVER, NEW, batch, decode, forward, model_of

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("family", "producer"),
    [("llama", "q_proj"), ("qwen3", "q_norm"), ("yarn", "q_proj"), ("phi", "q_proj"), ("dynamic_ntk", "q_proj"),
     ("deepseek_v3", "q_proj"), ("smollm3", "q_proj")],
)  # fmt: skip
def test_queries_are_those_before_the_rotary_embedding(family: str, producer: str) -> None:
    model = model_of(family)
    ids, _ = batch(rows=1, length=60 if family == "dynamic_ntk" else 40)
    made: dict[int, Tensor] = {}
    for index, layer in enumerate(decoder_of(model).layers):

        def keep(module: Any, args: Any, output: Tensor, index: int = index) -> None:
            made[index] = output

        getattr(layer.self_attn, producer).register_forward_hook(keep)
    config = replace(FREE, window=64)
    with torch.no_grad(), mac(model, config) as session:
        model(ids, past_key_values=DynamicCache(config=model.config))
        states = session.states()
        assert len(states) == len(decoder_of(model).layers)
        for index, state in states.items():
            query = made[index].reshape(ids.shape[1], *state.query.shape[2:])
            kept = state.query[0, : ids.shape[1]]
            if family == "deepseek_v3":  # it also reorders the channels, which leaves distances as they are
                query, kept = query.sort(-1)[0], kept.sort(-1)[0]
            assert float((query - kept).abs().max()) < 2e-4 * float(query.abs().max())


def test_rotated_queries_would_be_noticed() -> None:
    model, (_ids, _) = model_of("llama"), batch(rows=1)
    queries = find_queries(model)[1]
    rotated = torch.randn(1, 4, 40, 8, generator=torch.Generator().manual_seed(0))
    turned = queries.unrotated(rotated, torch.arange(40)[None])
    assert torch.equal(turned[:, :, 0], rotated[:, :, 0])
    assert float((turned - rotated)[:, :, 1:].abs().amax(-1).min()) > 1e-2
    assert torch.allclose(turned.norm(dim=-1), rotated.norm(dim=-1), atol=1e-5)


# --- what is left to exact attention --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "reasons"),
    [
        ("mistral", {"sliding window"}),
        ("gemma2", {"sliding window", "soft cap"}),
        ("gpt_oss", {"sliding window", "attention sinks"}),
        ("opt", {"queries that no rotary embedding explains"}),
        ("gpt2", {"queries that no rotary embedding explains"}),
    ],
)
def test_what_mac_does_not_know_is_exact_and_counted(family: str, reasons: set[str]) -> None:
    model, (ids, mask) = tiny(family, std=0.2), batch()
    tokens, logits = decode(model, ids, mask)
    with mac(model, FREE) as session:
        again, same = decode(model, ids, mask)
    assert torch.equal(tokens, again)
    assert torch.equal(logits, same)
    report = session.report()
    assert set(report.exact) == reasons
    assert report.layers == ()
    layers = len(find_queries(model))
    assert sum(report.exact.values()) == layers * (NEW - 1)


@pytest.mark.parametrize(("family", "layers"), [("doge", 4), ("llama4", 3)])
def test_keys_that_a_layer_chooses_by_itself_are_noticed(family: str, layers: int) -> None:
    """Dynamic masks and chunks are nowhere but in the mask that attention gets."""
    model, (ids, _) = model_of(family), batch(rows=1)

    def run() -> Tensor:
        cache = DynamicCache()  # it isn't told the model's kinds of layers, so it keeps all keys of all of them
        return torch.stack([forward(model, part, cache) for part in (ids, *ids[:, :6].split(1, dim=1))])

    plain = run()
    with mac(model, NEVER) as session:
        again = run()
    assert float((plain - again).abs().max()) < 1e-4
    assert session.report().exact == {"mask of the layer's own": 6 * layers}


def test_autocast_takes_no_sums_in_16_bits() -> None:
    model, (ids, _) = model_of("llama"), batch(rows=1)
    seen = []
    config = replace(NEVER, audit_every=1, audit_bound=None)
    for cast in (False, True):
        with mac(model, config) as session, torch.autocast("cpu", torch.bfloat16, enabled=cast):
            decode(model, ids)
        seen.append(session.report().error_max)
    for error in seen:
        assert error is not None
        assert error < 1e-5


def test_quantised_caches_are_exact() -> None:
    class QuantizedLayer(DynamicLayer):
        """As transformers' own, whose keys aren't what attention sees; without the packages that those need."""

    model, (ids, _) = model_of("llama"), batch(rows=1)
    cache = DynamicCache()
    cache.layers = [QuantizedLayer() for _ in range(4)]
    with mac(model, FREE) as session:
        forward(model, ids, cache)
        forward(model, ids[:, :1], cache)
    assert session.report().exact == {"quantised cache": 4}


def test_static_caches_holes_and_other_masks_are_exact() -> None:
    model, (ids, mask) = model_of("llama"), batch()
    plain = decode(model, ids, mask, cache_implementation="static", disable_compile=True)
    with mac(model, FREE) as session:
        static = decode(model, ids, mask, cache_implementation="static", disable_compile=True)
    assert torch.equal(plain[1], static[1])
    assert set(session.report().exact) == {"static cache"}

    holes = mask.clone()
    holes[0, 20] = 0
    plain = decode(model, ids, holes)
    with mac(model, FREE) as session:
        again = decode(model, ids, holes)
    assert torch.equal(plain[1], again[1])
    assert set(session.report().exact) == {"mask with holes"}

    own = torch.ones(1, 1, 1, 41, dtype=torch.bool)
    with mac(model, FREE) as session, torch.no_grad():
        cache = DynamicCache(config=model.config)
        model(ids[:1], past_key_values=cache)
        model(ids[:1, :1], past_key_values=cache, attention_mask=own)
        model(ids[:1, :1], use_cache=False)
    assert session.report().exact == {"mask of the caller's own": 4, "no cache": 4}


@pytest.mark.parametrize("by", ["argument", "configuration"])
def test_attention_weights_that_are_asked_for_are_given(by: str) -> None:
    model, (ids, _) = model_of("llama"), batch(rows=1)
    model.set_attn_implementation("eager")
    model.config.output_attentions = by == "configuration"
    arguments = {"output_attentions": True} if by == "argument" else {}

    def run() -> Any:
        cache = DynamicCache(config=model.config)
        forward(model, ids, cache)
        with torch.no_grad():
            return model(ids[:, :1], past_key_values=cache, **arguments).attentions

    plain = run()
    with mac(model, FREE) as session:
        again = run()
    assert session.report().exact == {"attention weights asked for": 4}
    assert len(again) == len(plain) == 4
    assert all(torch.equal(*pair) for pair in zip(plain, again, strict=True))


def test_gradients_flow_through_exact_attention() -> None:
    model, (ids, _) = model_of("llama"), batch(rows=1)
    cache = DynamicCache(config=model.config)
    with mac(model, FREE) as session:
        forward(model, ids, cache)
        loss = model(ids[:, :1], past_key_values=cache).logits.square().mean()
        loss.backward()
    assert session.report().exact == {"gradients": 4}
    assert float(model.model.layers[0].self_attn.q_proj.weight.grad.abs().max()) > 0


def test_short_prompts_are_exact_until_they_are_long_enough() -> None:
    model, (ids, _) = model_of("llama"), batch(rows=1)
    plain = decode(model, ids)[1]
    with mac(model, FREE, min_length=50) as session:
        mixed = decode(model, ids)[1]
    report = session.report()
    assert report.exact == {"below min_length": 4 * 10}  # positions 40 to 49
    assert report.hit_rate > 0.9  # rows were kept before, so the first search succeeds
    assert torch.equal(plain[:, :11], mixed[:, :11])
    assert not torch.equal(plain[:, 11:], mixed[:, 11:])


def test_layers_are_switched_off_by_an_audit() -> None:
    model, (ids, _) = model_of("llama"), batch(rows=1)
    plain = decode(model, ids)[1]
    with mac(model, FREE, audit_every=1, audit_bound=0.0) as session:
        audited = decode(model, ids)[1]
    report = session.report()
    assert all("audit: error" in layer.off for layer in report.layers)
    assert torch.equal(plain, audited)  # found out at the first step, which takes the exact output
    with mac(model, FREE, audit_every=1, audit_bound=None) as session:
        free = decode(model, ids)[1]
    assert not any(layer.off for layer in session.report().layers)
    assert session.report().error_max > 0.1  # type: ignore[operator]
    assert not torch.equal(plain, free)


@pytest.mark.parametrize(
    ("family", "message"), [
        ("gptj", "its own code"), ("bloom", "position_ids"), ("mpt", "position_ids"), ("deepseek_v32", "indexer"),
    ],
)  # fmt: skip
def test_models_that_mac_cannot_stand_in_for_are_refused(family: str, message: str) -> None:
    model = model_of(family)
    with pytest.raises(UnsupportedModelError, match=message), mac(model):
        pass
    assert model.config._attn_implementation in ("eager", "sdpa")

"""MAC attention in transformers: exact where nothing matches or it can't stand in, never another prompt's summaries."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from comb.backbones.attention_calls import ANSWERING, attention
from comb.backbones.forward import decoder_of
from comb.mac import MacSession, mac
from comb.mac.rotation import UnsupportedModelError, find_queries
from comb.mac.session import KeysIdentity
from tests.helpers.families import BASE, tiny
from tests.helpers.mac_models import FREE, NEVER, NEW, batch, decode, forward, model_of

# --- M10: generate() ------------------------------------------------------------------------------------------------

REUSED = {
    "llama": 4, "qwen3": 4, "mistral_full": 4, "deepseek_v2": 4, "deepseek_v3": 4, "qwen3_moe": 4, "qwen3_next": 1,
    "falcon_h1": 4, "gemma3": 2, "yarn": 4, "phi": 4, "three_to_one": 4, "five_to_one": 4, "eager": 4,
}  # fmt: skip


@pytest.mark.parametrize(("family", "layers"), REUSED.items(), ids=list(REUSED))
def test_without_a_match_generation_is_exact(family: str, layers: int) -> None:
    model, (ids, mask) = model_of("llama" if family == "eager" else family), batch()
    if family == "eager":
        model.set_attn_implementation("eager")
    implementation = model.config._attn_implementation
    tokens, logits = decode(model, ids, mask)
    for config in (NEVER, replace(FREE, band=10**6)):
        with mac(model, config) as session:
            again, close = decode(model, ids, mask)
        report = session.report()
        assert torch.equal(tokens, again)
        assert torch.equal(logits[:, 0], close[:, 0])  # the prompt is the exact attention's, bit for bit
        assert float((logits - close).abs().max()) < 1e-4
        assert len(report.layers) == layers
        assert report.hit_rate == 0.0
        assert report.read_share == 1.0
    assert report.steps == NEW - 1
    assert model.config._attn_implementation == implementation

    with mac(model, FREE) as session:
        _, free = decode(model, ids, mask)
    assert session.report().hit_rate > 0.5
    assert session.report().read_share < 0.6
    assert float((logits - free).abs().max()) > 1e-2  # reuse is noticed, so the equality above says something


@pytest.mark.parametrize(
    ("dtype", "cast", "bound"),
    [(torch.float32, False, 1e-5), (torch.float32, True, 1e-5), (torch.bfloat16, False, 1e-2)],  # 8 bits of mantissa
    ids=["float32", "autocast", "bfloat16"],
)
def test_audits_of_exact_steps_find_nothing(dtype: torch.dtype, cast: bool, bound: float) -> None:
    """Under autocast sums aren't taken in 16 bits."""
    model, (ids, mask) = model_of("llama").to(dtype), batch()
    config = replace(NEVER, audit_bound=100 * bound)
    with mac(model, config) as session, torch.autocast("cpu", torch.bfloat16, enabled=cast):
        decode(model, ids, mask)
    for layer in session.report().layers:
        assert layer.audits == (NEW - 1) // 4
        assert layer.error_max is not None
        assert layer.error_max < bound
        assert not layer.off
    with mac(model, FREE):
        assert decode(model, ids, mask)[1].isfinite().all()


def test_rows_of_a_batch_are_as_if_alone() -> None:
    model, (ids, mask) = model_of("llama"), batch()
    # only the last query is searched: equal tokens have queries that differ by rounding alone, which would then choose
    with mac(model, FREE, max_gap=1) as session:
        tokens, logits = decode(model, ids, mask)
    assert session.report().hit_rate > 0.5
    for row in range(3):
        with mac(model, FREE, max_gap=1):
            alone, own = decode(model, ids[row : row + 1, 7 * row :])
        assert torch.equal(alone[0], tokens[row])
        assert float((own[0] - logits[row]).abs().max()) < 1e-4


@pytest.mark.parametrize("how", ["another model", "the prompt itself"])
def test_guessed_tokens_are_checked_by_exact_attention(how: str) -> None:
    """Assisted decoding: several tokens at once behind a cache, of which wrong ones are cropped away again."""
    model, (ids, _) = model_of("llama"), batch(rows=1)
    guesses = {"assistant_model": tiny("llama", seed=1, std=0.2)} if how == "another model" else {}
    arguments: dict[str, Any] = guesses or {"prompt_lookup_num_tokens": 3}
    arguments |= {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    plain = model.generate(ids, attention_mask=torch.ones_like(ids), **arguments)
    with mac(model, NEVER) as session:
        again = model.generate(ids, attention_mask=torch.ones_like(ids), **arguments)
    assert torch.equal(plain, again)
    assert session.report().events == {}
    assert session.prompts > 1


def test_two_models_in_turn() -> None:
    models, (ids, _) = [model_of("llama"), model_of("qwen3")], batch(rows=1)
    alone = [decode(model, ids)[0] for model in models]
    caches = [DynamicCache(config=model.config) for model in models]
    tokens: list[list[Tensor]] = [[], []]
    with mac(models[0], NEVER) as first, mac(models[1], NEVER) as second:
        for _ in range(NEW):
            for model, cache, own in zip(models, caches, tokens, strict=True):
                own.append(forward(model, own[-1] if own else ids, cache).argmax(-1, keepdim=True))
    for own, expected, session in zip(tokens, alone, (first, second), strict=True):
        assert torch.equal(torch.cat(own, 1), expected)
        assert session.report().events == {}
        assert len(session.report().layers) == 4


# --- M8: another prompt, a cropped, reordered or swapped cache ------------------------------------------------------


def test_a_swapped_cache_of_the_same_length_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two conversations in turn, both at the same length: the case that lengths alone can't tell apart."""
    model = model_of("llama")
    prompts = [batch(rows=1)[0], batch(rows=1)[0].flip(1)]

    def turns(check: bool) -> tuple[Tensor, MacSession]:
        caches = [DynamicCache(config=model.config) for _ in prompts]
        with mac(model, FREE) as session:
            for prompt, cache in zip(prompts, caches, strict=True):
                forward(model, prompt, cache)
            with monkeypatch.context() as patch:
                if not check:
                    patch.setattr(KeysIdentity, "continues", lambda self, layer: True)
                return forward(model, torch.tensor([[5]]), caches[0]), session

    exact_cache = DynamicCache(config=model.config)
    forward(model, prompts[0], exact_cache)
    exact = forward(model, torch.tensor([[5]]), exact_cache)
    logits, session = turns(check=True)
    assert session.report().events == {"new prompt": 1, "cache changed": 1}
    assert session.report().hit_rate == 0
    assert float((logits - exact).abs().max()) < 1e-4
    wrong, session = turns(check=False)
    assert session.report().hit_rate > 0
    assert float((wrong - exact).abs().max()) > 1e-2


def test_a_continued_and_a_cropped_cache_keep_their_rows() -> None:
    model, (ids, _) = model_of("llama"), batch(rows=1)
    cache = DynamicCache(config=model.config)
    with mac(model, FREE) as session:
        forward(model, ids, cache)
        for token in range(5):
            forward(model, torch.tensor([[10 + token]]), cache)
        assert int(session.states()[0].pos.max()) == 44
        cache.crop(-3)
        forward(model, torch.tensor([[50]]), cache)
        assert session.states()[0].pos.sort().values[0, -1] == 42
        assert sorted(session.states()[2].pos[0].tolist())[2:] == list(range(29, 43))  # 43 and 44 are gone
        forward(model, ids[:, :6], cache)  # the next turn of a conversation
        assert int(session.states()[0].pos.max()) == 48
        assert session.report().events == {}
        hits = session.report().hit_rate
    assert hits > 0.9


@pytest.mark.parametrize("how", ["mask of the caller's own", "mask with holes"])
def test_what_an_exact_pass_replaces_is_forgotten(how: str) -> None:
    """A cropped cache that goes on with other tokens, of which the rings hear nothing."""
    model, (ids, _) = model_of("llama"), batch(rows=1)
    cache, other = DynamicCache(config=model.config), torch.arange(50, 58)[None]
    with torch.no_grad(), mac(model, FREE) as session:
        model(ids, past_key_values=cache)
        cache.crop(-8)
        mask = torch.ones(1, 40, dtype=torch.long)
        if how == "mask of the caller's own":
            model(other, past_key_values=cache, attention_mask=torch.ones(1, 1, 8, 40, dtype=torch.bool).tril(32))
        else:
            mask[0, 5] = 0
            model(other, past_key_values=cache, attention_mask=mask)
        model(other[:, :1], past_key_values=cache)
        states = session.states().values()
        assert len(states) == 4
        for state in states:
            assert sorted(state.pos[0][state.pos[0] >= 0].tolist()) == [*range(25, 32), 40]


def test_keys_written_in_place_are_noticed() -> None:
    model, (ids, _) = model_of("llama"), batch(rows=1)
    cache = DynamicCache(config=model.config)
    with mac(model, FREE) as session:
        forward(model, ids, cache)
        with torch.no_grad():
            cache.layers[2].keys[:, :, 0] += 1.0
        forward(model, torch.tensor([[5]]), cache)
        assert session.report().events == {"cache changed": 1}
        by_layer = {layer.layer: layer.hit_rate for layer in session.report().layers}
    assert by_layer == {0: 1.0, 1: 1.0, 2: 0.0, 3: 1.0}


def test_beams_are_exact() -> None:
    model, (ids, mask) = model_of("llama"), batch(rows=2)
    beams = {"num_beams": 3, "max_new_tokens": 10, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    plain = model.generate(ids, attention_mask=mask, **beams)
    with mac(model, FREE) as session:
        again = model.generate(ids, attention_mask=mask, **beams)
    assert torch.equal(plain, again)
    assert session.report().hit_rate == 0
    assert session.report().events["cache changed"] >= 9


# --- leaving --------------------------------------------------------------------------------------------------------


def test_leaving_restores_everything() -> None:
    model, (ids, mask) = model_of("llama"), batch()
    before = decode(model, ids, mask)[1]
    decoder = decoder_of(model)
    session = mac(model, FREE)

    def fail() -> None:
        with session:
            decode(model, ids, mask)
            assert session.nbytes > 0
            with pytest.raises(RuntimeError, match="already"), mac(model, FREE):
                pass
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        fail()
    assert model.config._attn_implementation == "sdpa"
    assert not decoder._forward_hooks
    assert not decoder._forward_pre_hooks
    assert session.nbytes == 0
    assert session.report().hit_rate > 0  # what was counted stays
    assert torch.equal(before, decode(model, ids, mask)[1])


def test_a_session_that_is_entered_again_goes_on_counting() -> None:
    model, (ids, _) = model_of("llama"), batch(rows=1)
    session = mac(model, FREE, audit_every=10, audit_bound=0.0)
    reports = []
    for _ in range(2):
        with session:
            decode(model, ids)
        reports.append(session.report())
    first, second = reports
    assert first.steps == NEW - 1
    assert second.steps == 2 * first.steps
    # the audit at the tenth step has switched all layers off, and they stay off
    assert all("audit" in layer.off for layer in second.layers)
    assert second.layers == first.layers
    with session, pytest.raises(RuntimeError, match="already"):
        session.__enter__()


def test_a_pass_that_fails_leaves_no_trace() -> None:
    model, (ids, _) = model_of("llama"), batch(rows=1)
    with mac(model, FREE) as session:
        with pytest.raises(IndexError):
            model(torch.tensor([[10**6]]))
        other = tiny("qwen3")
        decode(other, ids)  # in the same thread, not in the session's pass
        assert session.report().steps == 0 or not session.report().layers
        decode(model, ids)
    assert session.report().hit_rate > 0.5


def test_an_interrupted_pass_leaves_no_trace() -> None:
    """Behind Ctrl-C torch calls no hooks, so that nothing has ended the pass when the block is left."""
    model, (ids, _) = model_of("llama"), batch(rows=1)
    plain, passes = decode(model, ids)[1], iter([None, None, KeyboardInterrupt])

    def interrupt(module: Any, args: Any) -> None:
        if error := next(passes):
            raise error

    hook = decoder_of(model).layers[2].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt), mac(model, FREE):
        decode(model, ids)
    hook.remove()
    assert ANSWERING.get() is None
    with attention(model, "comb_sdpa"):
        assert torch.equal(decode(model, ids)[1], plain)


def test_parts_of_a_composite_model_get_back_their_own_attention() -> None:
    text, vision = tf.LlamaConfig(**BASE), tf.CLIPVisionConfig(**BASE, image_size=28, patch_size=14)
    config = tf.LlavaConfig(text_config=text, vision_config=vision, image_token_id=99)
    model = tf.LlavaForConditionalGeneration(config)
    model.set_attn_implementation({"": "sdpa", "text_config": "sdpa", "vision_config": "eager"})
    with mac(model, FREE):
        assert config.text_config._attn_implementation == "comb_sdpa"
    names = [each._attn_implementation for each in (config, config.text_config, config.vision_config)]
    assert names == ["sdpa", "sdpa", "eager"]


# --- threads --------------------------------------------------------------------------------------------------------


def test_a_pass_beside_another_threads_is_exact() -> None:
    model, (ids, _) = model_of("llama"), batch(rows=1)
    plain, here = decode(model, ids)[1], threading.get_ident()
    beside: list[Tensor] = []
    with mac(model, FREE):
        alone = decode(model, ids)[1]

    def meanwhile(module: Any, args: Any) -> None:
        if threading.get_ident() == here and len(beside) < 2:  # in the prompt's pass and in the first step
            beside.append(pool.submit(decode, model, ids).result()[1])

    with ThreadPoolExecutor(1) as pool, mac(model, FREE) as session:
        hook = decoder_of(model).layers[2].register_forward_pre_hook(meanwhile)
        assert torch.equal(decode(model, ids)[1], alone)
        hook.remove()
        assert all(torch.equal(each, plain) for each in beside)
        assert session.report().events == {"pass beside another thread's": 2 * NEW}
        assert torch.equal(pool.submit(decode, model, ids).result()[1], alone)  # it has the session to itself


def test_a_pass_of_another_thread_outlives_the_block() -> None:
    model, (ids, _) = model_of("llama"), batch(rows=1)
    plain, inside, left = decode(model, ids)[1], threading.Event(), threading.Event()

    def wait(module: Any, args: Any) -> None:
        inside.set()
        left.wait(60)

    def stood_in() -> Tensor:
        with attention(model, "comb_sdpa"):
            return decode(model, ids)[1]

    with ThreadPoolExecutor(1) as pool:
        with mac(model, FREE):
            hook = decoder_of(model).layers[2].register_forward_pre_hook(wait)
            answer = pool.submit(decode, model, ids)
            assert inside.wait(60)
        left.set()
        assert torch.equal(answer.result()[1], plain)  # its prompt's pass has been the only one in the block
        hook.remove()
        assert torch.equal(pool.submit(stood_in).result(), plain)


@pytest.mark.parametrize(("kernels", "counted"), [("auto", False), ("torch", False), ("triton", True)])
def test_steps_without_kernels_are_counted_where_they_were_asked_for(kernels: str, counted: bool) -> None:
    ids, _ = batch(1, 24)
    with mac(model_of("llama"), NEVER, kernels=kernels) as session:
        decode(session.backbone, ids)
    events = {event: count for event, count in session.report().events.items() if event.startswith("no kernels")}
    assert bool(events) is counted
    if counted:
        (reason,) = events
        assert reason in ("no kernels: device cpu", "no kernels: triton is not installed")
        assert events[reason] == session.report().layers[0].searches // 4 * len(session.report().layers)


def test_a_second_prompt_starts_anew_and_padding_that_changes_is_noticed() -> None:
    """Layers compare the tensor that a pass hands to all of them, and only if it isn't the last pass's."""
    model, (ids, mask) = model_of("llama"), batch()
    with mac(model, FREE) as session:
        tokens, _ = decode(model, ids, mask)
        assert len({id(layer.start) for layer in session._layers.values()}) == 1
        again, turned = decode(model, ids.flip(0), mask.flip(0))
    assert torch.equal(again.flip(0), tokens)
    assert session.report().events == {"new prompt": 1}
    with mac(model, FREE):  # as if it was the first
        assert torch.equal(decode(model, ids.flip(0), mask.flip(0))[1], turned)


# --- queries as they were before their rotary embedding -------------------------------------------------------------


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


# --- what is left to exact attention --------------------------------------------------------------------------------


STATIC = {"cache_implementation": "static", "disable_compile": True}


@pytest.mark.parametrize(
    ("family", "given", "reasons"),
    [
        ("mistral", {}, {"sliding window"}),
        ("gemma2", {}, {"sliding window", "soft cap"}),
        ("gpt_oss", {}, {"sliding window", "attention sinks"}),
        ("opt", {}, {"queries that no rotary embedding explains"}),
        ("gpt2", {}, {"queries that no rotary embedding explains"}),
        ("llama", STATIC, {"static cache"}),
        ("llama", {"hole": (0, 20)}, {"mask with holes"}),
    ],
)
def test_what_mac_does_not_know_is_exact_and_counted(family: str, given: dict[str, Any], reasons: set[str]) -> None:
    model, (ids, mask) = model_of(family), batch()
    if "hole" in given:
        mask[given["hole"]], given = 0, {}
    tokens, logits = decode(model, ids, mask, **given)
    with mac(model, FREE) as session:
        again, same = decode(model, ids, mask, **given)
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


def test_single_steps_that_are_exact() -> None:
    class QuantizedLayer(DynamicLayer):
        """As transformers' own, whose keys aren't what attention sees; without the packages that those need."""

    model, (ids, _) = model_of("llama"), batch(rows=1)
    cache, quantised = DynamicCache(config=model.config), DynamicCache()
    quantised.layers = [QuantizedLayer() for _ in range(4)]
    with mac(model, FREE) as session, torch.no_grad():
        forward(model, ids, cache)
        model(ids[:, :1], past_key_values=cache, attention_mask=torch.ones(1, 1, 1, 41, dtype=torch.bool))
        model(ids[:, :1], use_cache=False)
        forward(model, ids, quantised)
        forward(model, ids[:, :1], quantised)
    assert session.report().exact == {"mask of the caller's own": 4, "no cache": 4, "quantised cache": 4}


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
        ("falcon", "its own code"), ("bloom", "position_ids"), ("mpt", "position_ids"), ("deepseek_v32", "indexer"),
    ],
)  # fmt: skip
def test_models_that_mac_cannot_stand_in_for_are_refused(family: str, message: str) -> None:
    model = model_of(family)
    with pytest.raises(UnsupportedModelError, match=message), mac(model):
        pass
    assert model.config._attn_implementation in ("eager", "sdpa")

"""Keys turned as the model turns them, below and beyond the lengths at which its rotary embedding changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn
from transformers import DynamicCache

from comb import PICEngine, methods
from comb.backbones.rotary import compile_limit, front_limit
from comb.cli.doctor import check_methods
from comb.linking.positions import UnmovableError
from comb.linking.support import find_support
from comb.mac import mac
from tests.helpers.byte_text import byte_tokenizer
from tests.helpers.families import BASE, FAMILIES, LINK_FAMILIES, STATE_FAMILIES, tiny
from tests.helpers.mac_models import FREE, batch, decode

LIMIT = 24
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0, 3.0, 5.0, 8.0],
            "original_max_position_embeddings": LIMIT, "factor": 8.0}  # fmt: skip
DOCUMENTS = [[5, 6, 7, 8, 9, 10, 11], [12, 13, 14, 15, 16]]
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}


class Stretched(nn.Module):
    """In front of a model's own embedding: a pass beyond some length has closer positions and larger turns.

    The model's buffers say nothing of it.
    """

    def __init__(self, own: nn.Module, power: float = 1.0) -> None:
        super().__init__()
        self.own, self.power = own, power

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        beyond = int(position_ids.max()) >= LIMIT
        places = position_ids.float() ** self.power / (3 if beyond else 1)
        cos, sin = self.own(x, places)
        return (1.3 * cos, 1.3 * sin) if beyond else (cos, sin)


def made(config: Any) -> Any:
    model = tf.AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.15, generator=torch.Generator().manual_seed(parameter.numel()))
    return model


def phimoe() -> Any:
    rope = {**LONGROPE, "short_mscale": 1.1, "long_mscale": 1.4}
    return made(
        tf.PhimoeConfig(**BASE, num_local_experts=4, original_max_position_embeddings=LIMIT, rope_parameters=rope)
    )


def phi3() -> Any:
    return made(tf.Phi3Config(**BASE, original_max_position_embeddings=LIMIT, rope_parameters=LONGROPE))


def llama(rope: dict[str, Any], **changes: Any) -> Any:
    return made(tf.LlamaConfig(**{**BASE, **changes}, rope_parameters=rope))


def gemma3() -> Any:
    """One module, asked for each kind of layer."""
    rope = {"sliding_attention": PLAIN, "full_attention": {**LONGROPE, "rope_type": "yarn"}}
    kinds = ["sliding_attention", "full_attention"] * 2
    return made(tf.Gemma3TextConfig(**BASE, head_dim=8, sliding_window=128, rope_parameters=rope, layer_types=kinds))


def stretched(power: float = 1.0) -> Any:
    model = llama(PLAIN)
    model.model.rotary_emb = Stretched(model.model.rotary_emb, power)
    return model


OWN_CODE: dict[str, Callable[[], Any]] = {"its own code": stretched, "not in proportion": lambda: stretched(1.2)}
MODELS: dict[str, Callable[[], Any]] = {
    "phimoe": phimoe,
    "phi3": phi3,
    "longrope": lambda: llama(LONGROPE),
    "dynamic": lambda: llama(DYNAMIC, max_position_embeddings=LIMIT),
    "yarn": lambda: llama({**LONGROPE, "rope_type": "yarn"}),
    "gemma3": gemma3,
    **OWN_CODE,
}
# tokens in front of a query of four and two documents: below the limit, at it, just beyond, far beyond
HEADS = (2, LIMIT - 16, LIMIT - 14, 60)


def plain(model: Any, ids: list[int]) -> tuple[Any, Tensor]:
    """The cache of a pass over a prompt, and its last logits; after a short one, which some embeddings forget by."""
    with torch.no_grad():
        model(input_ids=torch.tensor([[3]]), use_cache=False)
        cache = DynamicCache()
        return cache, model(input_ids=torch.tensor([ids]), past_key_values=cache).logits[0, -1]


def error(left: Tensor, right: Tensor) -> float:
    return float((left - right).norm() / right.norm())


@pytest.mark.parametrize("name", MODELS)
def test_a_linked_prompt_has_the_keys_of_a_plain_one(name: str) -> None:
    model, query = MODELS[name](), [20, 21, 22, 23]
    naive, everything = methods.create("naive", model), methods.create("legolink:99", model)
    for count in HEADS:
        prefix = [3 + index % 90 for index in range(count)]
        cache, logits = plain(model, [*prefix, *DOCUMENTS[0], *DOCUMENTS[1], *query])
        state = naive.link(naive.compile(DOCUMENTS), query, prefix_ids=prefix)
        # in the first layer they depend on a token and its place alone
        linked = state.past_key_values.layers[0].keys
        assert error(linked, cache.layers[0].keys[:, :, : linked.shape[2]]) < 1e-5, count
        if count != LIMIT - 15:
            whole = everything.link(everything.compile(DOCUMENTS), query, prefix_ids=prefix)
            assert error(whole.answer_logits([1])[0], logits) < 1e-4, count


def test_what_is_no_rotation_beyond_the_limit_is_refused() -> None:
    """Below it is one, so that a probe there believes it."""
    model = llama(LONGROPE)
    for layer in model.model.layers:
        layer.self_attn.k_proj.register_forward_hook(
            lambda module, args, out: out + 0.2 if model.model.rotary_emb.inv_freq[1] < 0.05 else out
        )
    with pytest.raises(ValueError, match="no rotary embedding explains"):
        methods.create("naive", model)


def deep(family: str, times: int = 5) -> Any:
    """A family's tiny model with its layers so many times."""
    config = (FAMILIES | LINK_FAMILIES)[family]()
    told, layers = config.to_dict(), config.num_hidden_layers
    for name in ("model_type", "transformers_version"):
        told.pop(name)
    for name, value in told.items():
        if name in ("num_hidden_layers", "n_layer", "num_layers") and value == layers:
            told[name] = times * layers
        elif name in ("attn_layer_indices", "full_attn_idxs"):
            told[name] = [layers * time + index for time in range(times) for index in value or ()]
        elif isinstance(value, list) and len(value) == layers:
            told[name] = times * value
    return made(type(config)(**told))


def linkable(model: Any) -> bool:
    try:
        return bool(find_support(model))
    except UnmovableError:
        return False


@pytest.mark.parametrize("family", FAMILIES | LINK_FAMILIES)
def test_rounding_hides_no_rotation_from_deep_models(family: str) -> None:
    """What a lone token adds to an attention sink rounds by position in 16 bits, more with each layer and router."""
    assert linkable(deep(family).to(torch.bfloat16)) == linkable(deep(family, 1))


def test_what_a_layer_hands_on_by_position_is_refused() -> None:
    model = llama(PLAIN)
    model.model.layers[0].register_forward_hook(
        lambda _, args, kwargs, out: out + 0.3 * kwargs["position_embeddings"][0].mean(-1, keepdim=True),
        with_kwargs=True,
    )
    with pytest.raises(ValueError, match="of layer 1 change with the position"):
        methods.create("naive", model)


def test_an_embedding_that_counts_tokens_is_refused() -> None:
    """It knows how long a pass is, which for a linked prompt is any length."""
    model = llama(PLAIN)
    model.model.rotary_emb.register_forward_hook(
        lambda module, args, out: (1.2 * out[0], 1.2 * out[1]) if out[0].shape[1] > LIMIT else out
    )
    with pytest.raises(ValueError, match="number of tokens in a pass"):
        methods.create("naive", model)


def test_a_query_that_grows_beyond_a_length_is_not_taken_for_its_rotation() -> None:
    """Ministral 3 scales queries by position from a length on that only its configuration knows."""
    rope = {**PLAIN, "llama_4_scaling_beta": 0.5, "original_max_position_embeddings": 2048}
    config = tf.Ministral3Config(
        **{**BASE, "max_position_embeddings": 4096}, head_dim=8, sliding_window=None, rope_parameters=rope
    )
    model, (ids, mask) = made(config), batch()
    with mac(model, FREE) as session:
        decode(model, ids, mask)
    assert set(session.report().exact) == {"queries that no rotary embedding explains"}


# --- answers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["longrope", "dynamic"])
@pytest.mark.parametrize("spec", ["full", "legolink:99"])
def test_an_answer_across_the_limit_is_that_of_a_new_model(name: str, spec: str) -> None:
    """Whatever was asked before: embeddings keep the longest pass in mind."""
    prompt = [*DOCUMENTS[0], *DOCUMENTS[1], *range(30, 40)]
    fresh = MODELS[name]()
    ids = torch.tensor([prompt])
    expected = fresh.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False,
                              output_logits=True, return_dict_in_generate=True)  # fmt: skip
    answer = expected.sequences[0, len(prompt) :].tolist()
    model = MODELS[name]()
    method = methods.create(spec, model)
    method.link(method.compile(DOCUMENTS), list(range(3, 80))).logits  # noqa: B018  a longer prompt, and its reach
    state = method.link(method.compile(DOCUMENTS), prompt[12:])
    assert state.generate(max_new_tokens=12, do_sample=False)[0, len(prompt) :].tolist() == answer
    assert error(state.answer_logits(answer), torch.cat(expected.logits)) < 1e-4


@pytest.mark.parametrize("make", [phi3, phimoe])
def test_a_model_that_forgets_its_prompt_at_the_limit_says_so(make: Callable[[], Any]) -> None:
    """transformers gives up the cache of Phi-3 there and goes on from one token."""
    model = make()
    for spec in ("full", "naive", "legolink:2"):
        method = methods.create(spec, model)
        state = method.link(method.compile(DOCUMENTS), list(range(30, 38)))  # 20 tokens
        assert state.generate(max_new_tokens=5, min_new_tokens=5).shape[1] == 25
        with pytest.raises(ValueError, match="at most 5 new tokens"):
            state.generate(max_new_tokens=6)
        beyond = method.link(method.compile(DOCUMENTS), list(range(30, 44)))
        assert beyond.generate(max_new_tokens=6, min_new_tokens=6).shape[1] == 32
    with pytest.raises(ValueError, match="drops a cache of 24 tokens in a prompt of 25"):
        method.link(method.compile(DOCUMENTS), list(range(30, 43))).logits  # noqa: B018


def test_the_doctor_looks_beyond_the_limit() -> None:
    naive, whole = check_methods(llama(LONGROPE), ["naive", "legolink"])
    assert f"turned beyond {LIMIT} tokens as the model turns" in {check.name for check in naive.checks}
    assert naive.passed
    assert whole.passed
    assert all("beyond" not in check.name for check in check_methods(tiny("llama"), ["naive"])[0].checks)


@pytest.mark.parametrize("name", ["longrope", "dynamic"])
def test_a_long_prompt_does_not_change_a_short_one_of_its_batch(name: str) -> None:
    model = MODELS[name]()
    model.resize_token_embeddings(260)
    engine = PICEngine(model, byte_tokenizer(), method="full")
    requests: list[Any] = [("Who?", ["Ida lives."]), ("Where does she live?", ["Ida lives in Rome since May."])]
    alone = [engine.ask(*request, max_new_tokens=8).token_ids for request in requests]
    assert [answer.token_ids for answer in engine.ask_batch(requests, max_new_tokens=8)] == alone


@pytest.mark.parametrize("name", [*MODELS, *(FAMILIES | LINK_FAMILIES | STATE_FAMILIES)])
def test_a_configuration_says_what_a_front_may_have(name: str) -> None:
    """A server and a plan for a training compile behind the same passage without a model; what its code alone says is
    refused where the passage is too long for it."""
    model = MODELS.get(name, lambda: tiny(name))()
    limit = compile_limit(model)
    if name in OWN_CODE:
        with pytest.raises(ValueError, match=f"more than half of the {LIMIT} positions"):
            methods.create("primed", model, front=[5] * 128)
        return
    assert front_limit(model.config) == (None if limit is None else limit // 2)

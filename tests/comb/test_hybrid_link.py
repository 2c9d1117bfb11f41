"""Compiling and linking hybrids of many families: where it is exact, and controls that must not be.

"Full" is one forward pass over the whole prompt. All errors are relative, in the Frobenius norm.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from comb import methods
from comb.backbones.forward import counted_passes, empty_cache_of
from comb.backbones.identity import exclusive
from comb.hybrid.caches import attention_layers, read_state, run
from comb.hybrid.compile import compile_segment
from comb.hybrid.link import LinkedPrompt, link_segments
from comb.hybrid.picache import HybridPICache
from comb.hybrid.scans import listen
from comb.hybrid.support import find_hybrid_support, record, transition_of
from comb.linking.cache import RoomyLayer
from tests.helpers.hybrids import HYBRIDS, tiny_hybrid
from tests.helpers.recurrences import dense_of, recurrence
from tests.helpers.ring_model import tiny_ring

MODELS = (*HYBRIDS, "ring", "ring_dense")
NO_START = ("jamba", "mamba", "falcon_mamba")  # whose scans can't start from a state
RECURRENT = tuple(name for name in MODELS if name != "lfm2")
EXACT = 5e-6


@functools.cache
def model_of(name: str) -> Any:
    if name.startswith("ring"):
        return tiny_ring("dense" if name.endswith("dense") else "scalar")
    return tiny_hybrid(name)


def ids(count: int, seed: int) -> list[int]:
    return torch.randint(3, 101, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


A, B, C = ids(41, 1), ids(30, 2), ids(26, 3)
QUERY = ids(6, 4)
PRIMER = ids(21, 5)


def compiled(model: Any, segments: Sequence[list[int]], first: int, last: int, **options: Any) -> list[HybridPICache]:
    with exclusive(model):
        support = find_hybrid_support(model)
        return [compile_segment(model, support, "f", s, seams=(first, last), **options) for s in segments]


def linked(model: Any, picaches: Sequence[HybridPICache], query: list[int] = QUERY, **options: Any) -> LinkedPrompt:
    fresh = [*([] for _ in picaches), query]
    with exclusive(model):
        return link_segments(model, find_hybrid_support(model), picaches, fresh, **options)


def full_states(model: Any, token_ids: list[int]) -> dict[int, Tensor]:
    """Recurrent states by layer behind one pass over `token_ids`."""
    with exclusive(model):
        cache = empty_cache_of(model)
        run(model, token_ids, cache, 0)
        return states_in(model, cache)


def states_in(model: Any, cache: Any) -> dict[int, Tensor]:
    found = {number: read_state(cache, number)[1] for number in find_hybrid_support(model).linear}
    return {number: state for number, state in found.items() if state is not None}


def error(left: Tensor, right: Tensor) -> float:
    return float((left.float() - right.float()).norm() / right.float().norm())


def logits(model: Any, spec: str, documents: Sequence[list[int]], query: list[int] = QUERY, **options: Any) -> Tensor:
    method = methods.create(spec, model)
    return method.link(method.compile(documents), query, **options).logits


@pytest.mark.parametrize("name", MODELS)
def test_what_is_found(name: str) -> None:
    with exclusive(model_of(name)):
        support = find_hybrid_support(model_of(name))
    families = {layer.family for layer in support.linear.values()}
    assert families <= {"scalar", "dense", "convolution", "elementwise"}
    assert name != "bamba" or families == {"scalar"}  # the smallest form: a number per head where it is a scalar
    known = {"lfm2": None, "ring": "probe", "ring_dense": "probe"}
    assert {layer.source for layer in support.linear.values()} == {known.get(name, "scan")}
    assert all((layer.rotation is not None) == name.startswith("ring") for layer in support.linear.values())
    assert support.step == (1 if name in NO_START else None)


@pytest.mark.parametrize("front", [(), PRIMER], ids=["alone", "primed"])
@pytest.mark.parametrize("name", RECURRENT)
def test_first_layer_states_are_exact_for_any_order(name: str, front: Sequence[int]) -> None:
    """P2 and P7: one set of PICaches, every order and repetition. The control: transitions dropped."""
    model = model_of(name)
    a, b, c = compiled(model, [A, B, C], 3, 2, front=front)
    for row in ([b, c], [c, b], [b, b, c], [a, b, c]):
        prompt = [token for picache in row for token in picache.token_ids.tolist()] + QUERY
        exact = full_states(model, prompt[:-1])
        layer = min(exact)
        assert error(states_in(model, linked(model, row).cache)[layer], exact[layer]) < EXACT
        dropped = states_in(model, linked(model, row, compose=False).cache)
        assert error(dropped[layer], exact[layer]) > 1e3 * EXACT


@pytest.mark.parametrize("name", MODELS)
def test_behind_its_front_a_document_is_full_recompute(name: str) -> None:
    """The controls: another text in front, and a document that was compiled alone."""
    model = model_of(name)
    method = methods.create("hypic:1", model, front=PRIMER)
    picaches = method.compile([A])
    (picache,) = picaches
    assert picache.num_tokens == len(A)
    with counted_passes() as passed:  # the front was computed for the first one
        method.compile([B])
    assert name in NO_START or passed.tokens < len(B) + max(method.seams)

    def linked_behind(prefix: list[int]) -> float:
        reference = logits(model, "full", [A], prefix_ids=prefix)
        return error(method.link(picaches, QUERY, prefix_ids=prefix).logits, reference)

    assert linked_behind(PRIMER) < EXACT
    assert linked_behind(ids(21, 6)) > 20 * EXACT
    reference = logits(model, "full", [A], prefix_ids=PRIMER)
    assert error(logits(model, "hypic:1", [A], prefix_ids=PRIMER), reference) > 20 * EXACT


KERNELS = {"qwen3_next": 4, "bamba": 4, "kimi_linear": 4, "jamba": 4}  # none is of one token


@pytest.mark.parametrize(("name", "w"), [(name, w) for name in KERNELS for w in range(KERNELS[name])])
def test_the_convolution_needs_its_warm_up(name: str, w: int) -> None:
    """P2: exact from kernel - 1 tokens on, and not below."""
    model, least = model_of(name), KERNELS[name] - 1
    row = compiled(model, [A, B, C], w, 0)
    exact = full_states(model, A + B + C + QUERY[:-1])[0]
    found = error(states_in(model, linked(model, row).cache)[0], exact)
    assert found < EXACT if w == least else found > 100 * EXACT


@pytest.mark.parametrize("name", MODELS)
def test_generate_goes_on_from_the_cache(name: str) -> None:
    """P9: `generate` from a linked cache is decoding by hand from it, twice. Beams work as in the plain model."""
    model = model_of(name)
    method = methods.create("hypic", model)
    state: Any = method.link(method.compile([A, B]), QUERY)
    roomy = [type(layer) is RoomyLayer for layer in attention_layers(state.past_key_values).values()]
    assert all(roomy) or name in ("falcon_h1", "zamba2")  # whose layers hold a state, too
    generated = [state.generate(max_new_tokens=5, min_new_tokens=5, do_sample=False)[0, -5:].tolist() for _ in "ab"]
    assert generated[0] == generated[1]
    result = linked(model, [p for p in method.compile([A, B]) if isinstance(p, HybridPICache)])
    token, answer = QUERY[-1], []
    with exclusive(model):
        for position in range(len(result.token_ids) - 1, len(result.token_ids) + 4):
            hidden = run(model, [token], result.cache, position)
            assert hidden is not None
            scores = model.lm_head(hidden[-1]).float()
            scores[model.config.eos_token_id] = -torch.inf
            token = int(scores.argmax())
            answer.append(token)
    assert answer == generated[0]
    whole = methods.create("hypic:100", model)
    beams = {"max_new_tokens": 4, "num_beams": 3, "do_sample": False}
    ours = whole.link(whole.compile([A, B]), QUERY).generate(**beams)
    full = methods.create("full", model)
    assert torch.equal(ours, full.link(full.compile([A, B]), QUERY).generate(**beams))


@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 130])
@pytest.mark.parametrize("name", ["qwen3_next", "olmo_hybrid", "kimi_linear"])
def test_dense_transitions_are_the_product_of_the_tokens(name: str, tokens: int) -> None:
    """P10, P12 and P14: against I - beta k k^T multiplied up one by one, at lengths around the scan's chunks."""
    model = model_of(name)
    start = 3
    with exclusive(model):
        support = find_hybrid_support(model)
        recording = record(model, ids(start + tokens, 9), start)
        number = min(support.linear)
        fast, state = transition_of(model, recording, number, support.linear[number], None)
        with listen(model, lambda call: call.arguments) as heard:
            run(model, ids(start + tokens, 9), empty_cache_of(model), 0)
    arguments = heard[0]
    gates, betas, keys, values = (arguments[key][0, start:].double() for key in ("g", "beta", "key", "value"))
    keys = keys / (keys.square().sum(dim=-1, keepdim=True) + 1e-6).sqrt()
    keys = keys.repeat_interleave(values.shape[1] // keys.shape[1], dim=1)  # from transformers 5.23 on the scan does it
    naive = dense_of(gates, betas, keys)
    assert fast.tensor.shape == naive.tensor.shape
    assert error(fast.tensor.double(), naive.tensor) < 1e-5
    assert state is not None
    zeros = torch.zeros(keys.shape[1], keys.shape[2], values.shape[2], dtype=torch.float64)
    assert error(state.double(), recurrence(gates, keys, values, zeros, betas=betas)) < 1e-5
    assert float(torch.linalg.matrix_norm(fast.tensor, 2).amax()) <= 1 + 1e-5
    if tokens > 1:  # the control: earlier tokens on the left
        assert error(dense_of(gates.flip(0), betas.flip(0), keys.flip(0)).tensor, naive.tensor) > 1e-3


def test_positions_inside_of_a_layer_with_a_decay_per_channel_are_refused() -> None:
    with pytest.raises(ValueError, match="rotates keys by their position inside of a diagonal linear layer"):
        methods.create("hypic", tiny_ring("diagonal"))


@pytest.mark.parametrize("count", [1, 2, 15, 16, 17, 18])
def test_short_segments(count: int) -> None:
    """Up to both seams there is no interior: the segment is computed again, and alone it is exact at any length."""
    model = model_of("qwen3_5")
    (picache,) = compiled(model, [A[:count]], 8, 8)
    assert picache.num_tokens == count
    assert (picache.end - picache.start) == max(0, count - 16)
    assert bool(picache.attention) == (count > 16)
    assert error(logits(model, "hypic", [A[:count]]), logits(model, "full", [A[:count]])) < EXACT
    exact = full_states(model, B + A[:count] + QUERY[:-1])
    row = [*compiled(model, [B], 8, 8), picache]
    assert error(states_in(model, linked(model, row).cache)[0], exact[0]) < EXACT


@pytest.mark.parametrize("w", [0, 8])
@pytest.mark.parametrize("name", ["qwen3_next", "falcon_h1", "jamba"])
def test_a_prompt_may_end_with_a_document(name: str, w: int) -> None:
    model = model_of(name)
    method = methods.create(f"hypic:{w}", model)
    ours = method.link(method.compile([A]), [])
    assert error(ours.logits, logits(model, "full", [A], [])) < EXACT
    assert ours.recomputed_tokens == (16 if w else len(A))

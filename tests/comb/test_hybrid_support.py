"""How a hybrid's layers are read: the listener comes off cleanly, and a wrong reading is noticed and not used."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.cache_utils import Cache

from comb import methods
from comb.backbones.forward import decoder_of, empty_cache_of
from comb.backbones.identity import exclusive, identity_of, one_walk
from comb.hybrid import packed, scans
from comb.hybrid.caches import attention_layers, read_state, run
from comb.hybrid.link import SequentialLinker
from comb.hybrid.packed import PackedLinker
from comb.hybrid.probe import TransitionProbe
from comb.hybrid.scans import listen
from comb.hybrid.support import find_hybrid_support, record
from comb.hybrid.transition import DenseTransition
from comb.linking.positions import UnmovableError, explain_states, states_by_position
from comb.methods.decode_state import DecodeState
from tests.comb.test_hybrid_link import EXACT, MODELS, PRIMER, QUERY, A, B, C, error, ids, logits, model_of
from tests.helpers.families import random_of
from tests.helpers.hybrids import HYBRIDS, tiny_hybrid

SCAN = "torch_chunk_gated_delta_rule"


def namespace(model: Any) -> dict[str, Any]:
    return vars(sys.modules[type(model).__module__])


def test_the_listener_changes_nothing_and_comes_off() -> None:
    model = tiny_hybrid("qwen3_next")
    before = namespace(model)[SCAN]
    with exclusive(model):
        plain = run(model, A, empty_cache_of(model), 0)
        with listen(model, lambda call: call.name) as heard:
            assert namespace(model)[SCAN] is not before
            heard_output = run(model, A, empty_cache_of(model), 0)
        assert heard == [SCAN] * 3
        assert torch.equal(plain, heard_output)  # type: ignore[arg-type]
        assert namespace(model)[SCAN] is before
        with pytest.raises(RuntimeError, match="boom"), listen(model, lambda call: call.name):
            raise RuntimeError("boom")
    assert namespace(model)[SCAN] is before


def test_the_listener_hears_its_own_thread_only() -> None:
    model, other = tiny_hybrid("qwen3_next"), tiny_hybrid("qwen3_next", seed=1)
    with exclusive(model), listen(model, lambda call: call.name) as heard:

        def work() -> None:
            with exclusive(other):
                run(other, B, empty_cache_of(other), 0)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert not heard
        run(model, B, empty_cache_of(model), 0)
        assert len(heard) == 3


def off_by_a_percent(call: Any, start: int) -> Any:
    transition, state = RIGHT(call, start)
    return DenseTransition(0.99 * transition.tensor), state


RIGHT = scans.SCAN_READERS.get(SCAN)


@pytest.mark.parametrize(
    ("name", "family", "readers"),
    [("qwen3_next", "dense", {**scans.SCAN_READERS._entries, SCAN: off_by_a_percent}), ("bamba", "scalar", {})],
    ids=["wrong", "unknown"],
)
def test_a_scan_that_is_read_wrongly_or_by_nobody_is_probed(
    name: str, family: str, readers: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is noticed on the model in hand, and nothing comes out wrong."""
    model = tiny_hybrid(name)
    monkeypatch.setattr(scans.SCAN_READERS, "_entries", readers)
    with exclusive(model):
        support = find_hybrid_support(model)
    assert {(layer.family, layer.source) for layer in support.linear.values()} == {(family, "probe")}
    assert error(logits(model, "hypic", [A]), logits(model, "full", [A])) < EXACT


def test_rows_of_a_pass_may_differ_by_rounding() -> None:
    model = tiny_hybrid("qwen3_next")
    linear = [number for number, layer in enumerate(model.model.layers) if hasattr(layer, "linear_attn")]
    for number in linear:
        model.model.layers[number].linear_attn.in_proj_qkvz.register_forward_hook(
            lambda _, __, out: out * (1 + 0.01 * torch.arange(len(out))[:, None, None])
        )
    seen = states_by_position(model, linear)
    assert list(seen) == linear
    for number, states in seen.items():
        assert error(states[1], states[0]) > 1e-2  # another token, in another row
        assert explain_states(model, number, states) == (None, -2)
        rows_apart = states * (1 + 0.01 * torch.arange(states.shape[1])[None, :, None, None, None])
        with pytest.raises(UnmovableError, match=f"state of linear layer {number}"):
            explain_states(model, number, rows_apart)


def test_a_layer_that_forgets_the_probe_is_known_by_its_scan_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fresh model of transformers decays within a few tokens: seen from outside any family would fit."""
    fresh = random_of(HYBRIDS["qwen3_next"]())
    support = find_hybrid_support(fresh)
    assert {(layer.family, layer.source) for layer in support.linear.values()} == {("dense", "scan")}
    number = min(support.linear)
    with torch.no_grad():
        recording = record(fresh, list(range(5, 20)), 4)
        assert TransitionProbe(fresh, recording.layers[number], recording.cache, 4).classify() is None
    with torch.no_grad():
        fresh.lm_head.weight.mul_(1.5)  # to be looked at again
    monkeypatch.setattr(scans.SCAN_READERS, "_entries", {})
    with pytest.raises(UnmovableError, match="forgets its state within"):
        find_hybrid_support(fresh)


# ---- The packed link is the sequential one: the same states, keys and logits, in one pass of the backbone.


PACKED = {*MODELS} - {"falcon_h1", "zamba2", "jamba", "mamba", "mamba2", "falcon_mamba"}
if not hasattr(Cache, "get_conv_state"):
    PACKED -= {"olmo_hybrid"}  # until transformers 5.21 each of its layers asks whether the last linear one has a state
SHORT = ids(5, 8)


def pair(name: str, spec: str = "hypic:4", **options: Any) -> tuple[Any, Any]:
    """The method packed, and run by run, as models are linked that take no packed pass."""
    made = [methods.create(spec, model_of(name), **options) for _ in range(2)]
    plain, link_row = made[1], made[1].link_row

    def in_order(*given: Any) -> DecodeState:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("comb.methods.hypic.linker_for", lambda model, support: SequentialLinker)
            return link_row(*given)

    plain.link_row = in_order
    return made[0], plain


def held(state: DecodeState) -> list[Tensor]:
    cache: Any = state.past_key_values
    layers = attention_layers(cache)
    states = [s for number in range(len(cache.layers)) for s in read_state(cache, number) if s is not None]
    return [*states, *(tensor for layer in layers.values() for tensor in (layer.keys, layer.values))]


@contextmanager
def passes(model: Any) -> Iterator[list[int]]:
    """Tokens of each pass of the decoder."""
    seen: list[int] = []

    def count(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        seen.append(kwargs["input_ids"].shape[1])

    with one_walk():
        identity_of(model)  # with the hook it is another
        with decoder_of(model).register_forward_pre_hook(count, with_kwargs=True):
            yield seen


@pytest.mark.parametrize("name", MODELS)
def test_packed_is_sequential(name: str) -> None:
    packed, plain = pair(name, front=PRIMER)
    model, picaches = model_of(name), packed.compile([A, B, C, A])
    packed.link(picaches, QUERY)  # tries out what the model takes
    with passes(model) as counted:
        one = packed.link(picaches, QUERY)
    with passes(model) as reference:
        other = plain.link(picaches, QUERY)
    if name in PACKED:
        assert (len(counted), len(reference)) == (1, 5)
        assert sum(counted) == sum(reference)
    else:
        assert counted == reference
    assert len(held(one)) == len(held(other)) > 0
    assert max(error(left, right) for left, right in zip(held(one), held(other), strict=True)) < EXACT
    assert error(one.logits, other.logits) < EXACT
    answer = ids(5, 9)
    assert error(one.answer_logits(answer), other.answer_logits(answer)) < EXACT
    assert one.recomputed == other.recomputed
    swapped = packed.link([picaches[1], picaches[0], *picaches[2:]], QUERY)  # the control
    assert error(swapped.logits, other.logits) > 20 * EXACT


PROMPTS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "prefix and gaps": lambda m: {"picaches": m.compile([A, B]), "prefix_ids": ids(7, 5), "gaps": [ids(9, 6)]},
    "covered by its seams": lambda m: {"picaches": m.compile([A, SHORT, B])},
    "one token asks": lambda m: {"picaches": m.compile([A, B]), "query_ids": [7]},
    "a document at the end": lambda m: {"picaches": m.compile([A, B]), "query_ids": []},
    "nothing to jump over": lambda m: {"picaches": m.compile([SHORT]), "query_ids": QUERY},
}


@pytest.mark.parametrize("prompt", list(PROMPTS))
@pytest.mark.parametrize(("name", "spec"), [("qwen3_next", "hypic:4"), ("bamba", "hypic:0"),
                                            ("kimi_linear", "hypic:mode=rotation"), ("lfm2", "addition")])  # fmt: skip
def test_packed_prompts_of_many_shapes(name: str, spec: str, prompt: str) -> None:
    packed, plain = pair(name, spec)
    row = {"query_ids": QUERY, **PROMPTS[prompt](packed)}
    one, other = packed.link(**row), plain.link(**row)
    assert torch.equal(one.input_ids, other.input_ids)
    assert error(one.logits, other.logits) < EXACT
    assert max(error(left, right) for left, right in zip(held(one), held(other), strict=True)) < EXACT


def test_a_mask_that_would_be_too_large_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    packed, plain = pair("qwen3_next")
    picaches = packed.compile([A, B])
    packed.link(picaches, QUERY)  # which way its model links is tried out once, in passes of their own
    monkeypatch.setattr("comb.hybrid.packed._MAX_MASK_ELEMENTS", 100)
    with passes(packed.backbone) as counted:
        one = packed.link(picaches, QUERY)
    assert len(counted) == 3
    assert torch.equal(one.logits, plain.link(picaches, QUERY).logits)


def test_what_does_not_agree_is_linked_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial compares: a model whose packed states come out wrong never links that way."""
    method, _ = pair("qwen3_next")
    with exclusive(method.backbone):
        assert packed.linker_for(method.backbone, method.support) is not SequentialLinker
        identity_of(method.backbone)._facts.pop("hybrid linker")
        jump = SequentialLinker.jump
        late = lambda self, number, *rest: None if isinstance(self, PackedLinker) else jump(self, number, *rest)  # noqa: E731
        with monkeypatch.context() as broken:
            broken.setattr(SequentialLinker, "jump", late)
            assert packed.linker_for(method.backbone, method.support) is SequentialLinker
        identity_of(method.backbone)._facts.pop("hybrid linker")


def test_layers_are_as_before() -> None:
    """Also when the pass fails; and another thread's run of the model meanwhile is an ordinary one."""
    packed, _ = pair("qwen3_next")
    model, picaches = packed.backbone, packed.compile([A, B])
    plain = model(torch.tensor([A])).logits
    seen: list[Tensor] = []

    def elsewhere(*_: Any) -> None:
        handle.remove()
        with torch.no_grad():
            thread = threading.Thread(target=lambda: seen.append(model(torch.tensor([A])).logits.detach()))
            thread.start()
            thread.join()
        raise RuntimeError("the lights went out")

    packed.link(picaches, QUERY)
    with one_walk():
        identity_of(model)  # with the hook it is another
        handle = decoder_of(model).layers[2].register_forward_pre_hook(elsewhere)
        with pytest.raises(RuntimeError, match="lights"):
            packed.link(picaches, QUERY)
    assert torch.equal(seen[0], plain)
    assert torch.equal(model(torch.tensor([A])).logits, plain)
    assert not any("forward" in vars(module) for module in model.modules())

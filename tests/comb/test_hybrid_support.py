"""How a hybrid's layers are read: the listener comes off cleanly, and a wrong reading is noticed and not used."""

from __future__ import annotations

import sys
import threading
from functools import partial
from typing import Any

import pytest
import torch
import transformers as tf

from comb import methods
from comb.backbones.identity import exclusive
from comb.hybrid import scans
from comb.hybrid.caches import attention_layers, give_room, new_cache, read_state, run, write_state
from comb.hybrid.probe import TransitionProbe
from comb.hybrid.scans import listen
from comb.hybrid.support import find_hybrid_support, read_states, record
from comb.hybrid.transition import DenseTransition
from comb.linking.cache import RoomyLayer, fork_cache
from comb.linking.positions import UnmovableError, explain_states, states_by_position
from tests.comb.test_hybrid_link import EXACT, A, B, error, logits
from tests.helpers.hybrids import HYBRIDS, tiny_hybrid

SCAN = "torch_chunk_gated_delta_rule"


def namespace(model: Any) -> dict[str, Any]:
    return vars(sys.modules[type(model).__module__])


def test_the_listener_changes_nothing_and_comes_off() -> None:
    model = tiny_hybrid("qwen3_next")
    before = namespace(model)[SCAN]
    with exclusive(model):
        plain = run(model, A, new_cache(model), 0)
        with listen(model, lambda call: call.name) as heard:
            assert namespace(model)[SCAN] is not before
            heard_output = run(model, A, new_cache(model), 0)
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
                run(other, B, new_cache(other), 0)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert not heard
        run(model, B, new_cache(model), 0)
        assert len(heard) == 3


def test_a_wrong_reading_is_replaced_by_the_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that is off by a percent: noticed on the model in hand, and nothing comes out wrong."""
    right = scans.SCAN_READERS.get(SCAN)

    def wrong(call: Any, start: int) -> Any:
        transition, state = right(call, start)
        return DenseTransition(0.99 * transition.tensor), state

    model = tiny_hybrid("qwen3_next")
    monkeypatch.setitem(scans.SCAN_READERS._entries, SCAN, wrong)
    with exclusive(model):
        support = find_hybrid_support(model)
    assert {layer.source for layer in support.linear.values()} == {"probe"}
    assert error(logits(model, "hypic", [A]), logits(model, "full", [A])) < EXACT


def test_a_scan_nobody_knows_is_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(scans.SCAN_READERS._entries, "mamba2_chunk_scan")
    model = tiny_hybrid("bamba")
    with exclusive(model):
        support = find_hybrid_support(model)
    assert {(layer.family, layer.source) for layer in support.linear.values()} == {("scalar", "probe")}
    assert error(logits(model, "hypic", [A]), logits(model, "full", [A])) < EXACT


def test_rows_of_a_pass_may_differ_by_rounding() -> None:
    model = tiny_hybrid("qwen3_next")
    linear = [number for number, layer in enumerate(model.model.layers) if hasattr(layer, "linear_attn")]
    for number in linear:
        model.model.layers[number].linear_attn.in_proj_qkvz.register_forward_hook(
            lambda _, __, out: out * (1 + 0.01 * torch.arange(len(out))[:, None, None])
        )
    seen = states_by_position(model, linear, partial(new_cache, model), read_states)
    assert list(seen) == linear
    for number, states in seen.items():
        assert error(states[1], states[0]) > 1e-2  # another token, in another row
        assert explain_states(model, number, states) == (None, -2)
        rows_apart = states * (1 + 0.01 * torch.arange(states.shape[1])[None, :, None, None, None])
        with pytest.raises(UnmovableError, match=f"state of linear layer {number}"):
            explain_states(model, number, rows_apart)


def test_support_is_found_anew_when_weights_change() -> None:
    model = tiny_hybrid("bamba")
    with exclusive(model):
        first = find_hybrid_support(model)
        assert find_hybrid_support(model) is first
        with torch.no_grad():
            model.lm_head.weight.mul_(1.5)
        assert find_hybrid_support(model) is not first
    before = methods.create("hypic", model).fingerprint
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)
    assert methods.create("hypic", model).fingerprint != before


@pytest.mark.parametrize("name", ["qwen3_next", "falcon_h1", "lfm2", "minimax", "nemotron_h"])
def test_states_are_read_written_and_forked(name: str) -> None:
    """A cache made of another's parts continues like it; a fork's growth doesn't reach the original."""
    model = tiny_hybrid(name)
    with exclusive(model):
        support = find_hybrid_support(model)
        source, target = new_cache(model), new_cache(model)
        run(model, A, source, 0)
        for number in support.linear:
            columns, state = read_state(source, number)
            write_state(target, number, *(None if part is None else part[None] for part in (columns, state)))
        for number, layer in attention_layers(source).items():
            target.update(layer.keys.clone(), layer.values.clone(), number)
        give_room(target, len(A) + len(B))
        fork = fork_cache(target)
        expected = run(model, B, source, len(A))
        for cache in (fork, fork_cache(target), target):
            found = run(model, B, cache, len(A))
            assert error(found, expected) < EXACT  # type: ignore[arg-type]
        # the control: a cache without the states
        empty = new_cache(model)
        for number, layer in attention_layers(source).items():
            empty.update(layer.keys[:, :, : len(A)], layer.values[:, :, : len(A)], number)
        assert error(run(model, B, empty, len(A)), expected) > 100 * EXACT  # type: ignore[arg-type]
        roomy = [type(target.layers[number]) is RoomyLayer for number in support.attention]
        assert all(roomy) or name == "falcon_h1"


def test_a_layer_that_forgets_the_probe_is_known_by_its_scan() -> None:
    """A fresh model of transformers decays within a few tokens: seen from outside any family would fit."""
    torch.manual_seed(0)
    fresh = tf.AutoModelForCausalLM.from_config(HYBRIDS["qwen3_next"]()).eval()
    support = find_hybrid_support(fresh)
    assert {(layer.family, layer.source) for layer in support.linear.values()} == {("dense", "scan")}
    number = min(support.linear)
    with torch.no_grad():
        recording = record(fresh, list(range(5, 20)), 4)
        assert TransitionProbe(fresh, recording.layers[number], recording.cache, 4).classify() is None


def test_a_forgetful_layer_whose_scan_nobody_knows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    fresh = tf.AutoModelForCausalLM.from_config(HYBRIDS["qwen3_next"]()).eval()
    monkeypatch.setattr(scans.SCAN_READERS, "_entries", {})
    with pytest.raises(UnmovableError, match="forgets its state within"):
        find_hybrid_support(fresh)

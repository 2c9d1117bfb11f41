"""Decode steps of MAC at fixed addresses: the ordinary step's results, tensors that don't move, no size from data."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from comb.backbones.forward import decoder_of
from comb.kernels.mac.step import step
from comb.mac import MacConfig, MacSession, graphs, mac
from tests.helpers.mac_decode import Decode, noise
from tests.helpers.mac_models import FREE, NEW, batch, decode, model_of

pytestmark = pytest.mark.usefixtures("one_thread")

# only the last query is searched: equal tokens have queries that differ by rounding alone, which would then choose
NEAR = replace(FREE, max_gap=1, audit_every=5)


def fixed(model: Any, config: MacConfig, monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, MacSession, list[set[int]]]:
    """Logits, the session, and by tensor where it lay in the fixed steps."""
    ids, mask = batch()
    places: list[set[int]] = []
    with mac(model, config, graphs=True) as session:
        own = graphs.FixedStep.step

        def noted(self: graphs.FixedStep) -> Any:
            tensors = [self.ids, self.positions, self.at, self.start, *(part for room in self.rooms for part in room)]
            for state in session.states().values():
                tensors += [ring for ring in vars(state).values() if ring is not None]
            places.append({tensor.data_ptr() for tensor in tensors})
            return own(self)

        monkeypatch.setattr(graphs.FixedStep, "step", noted)
        _, logits = decode(model, ids, mask)
        monkeypatch.undo()
    return logits, session, places


@pytest.mark.parametrize("family", ["llama", "qwen3", "deepseek_v2", "yarn"])
@pytest.mark.parametrize("changes", [{}, {"gate": 0.0, "max_chain": 1, "sink": 2}], ids=["", "more"])
def test_a_fixed_step_equals_the_ordinary_one(
    family: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, config = model_of(family), replace(NEAR, **changes)
    with mac(model, config) as session:
        _, expected = decode(model, *batch())
    logits, own, places = fixed(model, config, monkeypatch)
    assert float((logits - expected).abs().max()) < 1e-4
    assert own.report().layers[0].keys_read == session.report().layers[0].keys_read
    assert own.report().hit_rate == session.report().hit_rate > 0.2
    assert len(places) == NEW - 1 - 1 - (NEW - 1) // 5  # without the first and the audited ones
    assert all(place == places[0] for place in places)
    assert own.events == {**session.events, "fixed steps made": 1}
    assert "forward" not in vars(decoder_of(model))


def test_keys_that_move_are_a_step_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The room is used up every four tokens; where tensors lie then differs, which the test above would notice."""
    model, config = model_of("llama"), replace(NEAR, audit_every=0)
    whole, *_ = fixed(model, config, monkeypatch)
    monkeypatch.setattr(graphs, "ROOM", 4)
    logits, session, places = fixed(model, config, monkeypatch)
    assert session.events["fixed steps made"] > 2
    assert any(place != places[0] for place in places)
    assert float((logits - whole).abs().max()) < 1e-4


def test_layers_that_are_off_are_exact_at_fixed_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    model, off = model_of("llama"), replace(NEAR, layers={1: {"enabled": False}})
    with mac(model, off):
        _, expected = decode(model, *batch())
    logits, session, places = fixed(model, off, monkeypatch)
    assert places
    assert len(session.report().layers) == 3
    assert float((logits - expected).abs().max()) < 1e-4


def test_what_cannot_be_fixed_is_not_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama")
    with mac(model, NEAR, graphs=True, break_even=True, min_length=2**20) as session:
        decode(model, *batch())
    assert "fixed steps made" not in session.events  # nothing was reused, so nothing is fixed
    with mac(model, NEAR, graphs=True) as session:
        decode(model, *batch(), output_hidden_states=True)
    assert session.events["no graph: argument output_hidden_states"] > 0
    hybrid = model_of("qwen3_next")
    with mac(hybrid, NEAR, graphs=True) as session:
        decode(hybrid, *batch())
    assert "fixed steps made" not in session.events


def test_the_fixed_step_has_no_size_from_data() -> None:
    """Traced without numbers; the ordinary step can't be."""
    config = replace(FREE, gate=0.0, max_chain=1, sink=1)
    made = Decode(config, noise(2, 4, 40, 8), noise(2, 2, 40, 8, seed=1), noise(2, 2, 40, 8, seed=2))
    made.fill(30)
    state, unrotated, query, _, _, start, _, scale = made.inputs(30)

    def traced(query: Tensor, unrotated: Tensor, lengths: Tensor | None) -> Tensor:
        done = step(
            state, unrotated, query, made.keys[:, :, :36], made.values[:, :, :36], start, config, scale, lengths=lengths
        )
        state.write(done.rows)
        return done.output

    lengths = torch.full((2,), 31)
    graph = make_fx(traced, tracing_mode="fake", _allow_non_fake_inputs=True)(query, unrotated, lengths)
    ordinary = step(*made.inputs(30)).output
    assert float((graph(query, unrotated, lengths) - ordinary).abs().max()) < 1e-12
    with pytest.raises(Exception, match=r"(?i)data.?dependent|fake"):
        make_fx(traced, tracing_mode="fake", _allow_non_fake_inputs=True)(query, unrotated, None)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_captured_step_equals_the_one_it_was_captured_from() -> None:
    model = model_of("llama").cuda()
    ids, mask = (tensor.cuda() for tensor in batch())
    with mac(model, NEAR) as session:
        _, expected = decode(model, ids, mask)
    with mac(model, NEAR, graphs=True) as own:
        _, logits = decode(model, ids, mask)
        assert own._fixed is not None
        assert own._fixed.graph is not None
    assert float((logits - expected).abs().max()) < 1e-3
    assert own.report().hit_rate == session.report().hit_rate

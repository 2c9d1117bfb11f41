"""MAC attention as plain functions: exactness where it must be exact, and that each of these tests can fail."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from comb.kernels.mac.mac_config import MacConfig
from comb.kernels.mac.state import EMPTY, MacState
from comb.kernels.mac.step import MacStep, attend, find_match, merge
from tests.helpers.mac_decode import Decode, noise

EXACT = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 1e-5}
SMALL = MacConfig(window=8, band=4, tau=0.0, min_length=0, max_chain=None, max_drift=False)


def made(
    config: MacConfig, length: int, *, rows: int = 1, heads: int = 4, groups: int = 2,
    dtype: torch.dtype = torch.float64, same: bool = False, start: tuple[int, ...] | None = None,
) -> Decode:  # fmt: skip
    queries = noise(rows, heads, length, 8).to(dtype)
    if same:
        queries = queries[:, :, :1].expand(-1, -1, length, -1).contiguous()
    keys, values = (noise(rows, groups, length, 8 + 2 * n, seed=1 + n).to(dtype) for n in (0, 1))
    return Decode(config, queries, keys, values, start=start)


def error(left: Tensor, right: Tensor) -> float:
    return float((left.double() - right.double()).abs().max())


def attend_range(query: Tensor, keys: Tensor, values: Tensor, low: int, high: int, scale: float) -> Any:
    """`attend` to the keys [low, high) of [..., T, D]; an empty range where `high` is not above `low`."""
    seen = slice(low, max(high, low))
    return attend(query, keys[..., seen, :], values[..., seen, :], scale)


def exact_steps(decode: Decode, prompt: int, bound: float, *, hits: bool) -> int:
    """Decodes all behind a prompt, each step exactly, all or none of them by reuse; returns the keys read."""
    if prompt:
        decode.fill(prompt)
    read = 0
    for m in range(prompt, decode.queries.shape[2]):
        done = decode.step(m)
        assert done.match.hit.all() if hits else not done.match.hit.any()
        assert error(done.output, decode.exact(m)) < bound
        saved = decode.config.end(done.match.pos) - decode.config.sink if hits else 0
        assert bool((done.keys_read == m + 1 - saved).all())
        read += int(done.keys_read.sum())
    return read


# --- M1: tau = 1 is exact attention ---------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [4, 2, 1], ids=["mha", "gqa", "mqa"])
@pytest.mark.parametrize("dtype", list(EXACT), ids=str)
@pytest.mark.parametrize("sink", [0, 4, 64])
@pytest.mark.parametrize("prompt", [0, 1, 5, 30])
def test_tau_one_is_exact(groups: int, dtype: torch.dtype, sink: int, prompt: int) -> None:
    config = replace(SMALL, tau=1.0, sink=sink, min_length=12)
    exact_steps(made(config, prompt + 20, groups=groups, dtype=dtype, same=True), prompt, EXACT[dtype], hits=False)


def test_a_lower_tau_is_not_exact() -> None:
    decode = made(SMALL, 40)
    decode.fill(30)
    assert max(error(decode.step(m).output, decode.exact(m)) for m in range(30, 40)) > 1e-2


# --- M2, M3: a band as long as the prompt; equal queries without positions ------------------------------------------


@pytest.mark.parametrize("band", [40, 10**6])
def test_a_band_over_everything_is_exact(band: int) -> None:
    exact_steps(made(replace(SMALL, band=band), 40, same=True), 30, 1e-13, hits=False)


@pytest.mark.parametrize("sink", [0, 3])
def test_equal_queries_without_positions_are_exact_at_a_fraction_of_the_keys(sink: int) -> None:
    read = exact_steps(made(replace(SMALL, sink=sink), 80, same=True), 40, 1e-13, hits=True)
    assert read < 0.4 * 4 * sum(range(41, 81))


# --- M4, M12: what an entry holds -----------------------------------------------------------------------------------


def covered(decode: Decode, p: int) -> tuple[Tensor, Tensor]:
    """The summary of [F, E(p)) for the query at p, computed directly."""
    group = torch.arange(4) // 2
    keys, values = decode.keys[:, group], decode.values[:, group]
    high = max(p + 1 - decode.config.band, 0)
    return attend_range(decode.rotated[:, :, p], keys, values, decode.config.sink, high, decode.scale)


@pytest.mark.parametrize("sink", [0, 3])
def test_entries_hold_the_keys_from_the_sink_to_the_band(sink: int) -> None:
    decode = made(replace(SMALL, sink=sink), 60, same=True)
    decode.fill(30)
    for m in range(30, 59):
        decode.step(m)
    assert int(decode.state.chain.max()) > 3
    for slot, p in enumerate(decode.state.pos[0].tolist()):
        o, lse = covered(decode, p)
        assert error(decode.state.o[:, slot], o) < 1e-12
        assert error(decode.state.lse[:, slot], lse) < 1e-12
        # one key more would be seen
        assert error(decode.state.lse[:, slot], covered(decode, p + 1)[1]) > 1e-6


# --- M5: algebra ----------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 12), min_size=0, max_size=4), st.integers(0, 100))
@example([0, 0, 5, 12], 0)  # empty sets: beside each other, and on either side of some
def test_any_split_merges_to_the_whole(cuts: list[int], seed: int) -> None:
    query, keys, values = noise(2, 6, seed=seed), noise(2, 12, 6, seed=seed + 1), noise(2, 12, 5, seed=seed + 2)
    o, lse = torch.zeros(2, 5, dtype=torch.float64), torch.full((2,), EMPTY, dtype=torch.float64)
    edges = [0, *sorted(cuts), 12]
    for low, high in itertools.pairwise(edges):
        o, lse = merge(o, lse, *attend_range(query, keys, values, low, high, 0.4))
    whole = attend(query, keys, values, 0.4)
    assert error(o, whole[0]) < 1e-13
    assert error(lse, whole[1]) < 1e-13
    nothing = attend_range(query, keys, values, 3, 3, 0.4)
    for o, lse in (nothing, merge(*nothing, *nothing)):
        assert bool((o == 0).all())
        assert bool((lse == EMPTY).all())


# --- M6: the match --------------------------------------------------------------------------------------------------


def ring(config: MacConfig, positions: list[int], queries: list[float], chain: float = 0, drift: float = 0) -> MacState:
    """One head, queries (x, 0), entries that hold something."""
    state = MacState.empty(1, 1, 2, 2, config, torch.zeros((), dtype=torch.float64))
    count = len(positions)
    query = torch.zeros(1, count, 1, 2, dtype=torch.float64)
    query[0, :, 0, 0] = torch.tensor(queries, dtype=torch.float64)
    ones = torch.ones(1, count, 1)
    state.write(torch.tensor([positions]), query=query, lse=0 * ones, chain=ones * chain, drift=ones * drift)
    return state


def found(state: MacState, config: MacConfig, m: int) -> int:
    return int(find_match(state, torch.zeros(1, 1, 2, dtype=torch.float64), torch.tensor([m]), config).pos)


def test_match_takes_the_nearest_and_the_older_of_two() -> None:
    assert found(ring(SMALL, [10, 11, 12], [1.0, 0.5, 0.7]), SMALL, 13) == 11
    assert found(ring(SMALL, [10, 11, 12], [0.5, -0.5, 0.5]), SMALL, 13) == 10
    # 8 lies in slot 0, 7 in slot 7: the older one isn't the one in the lower slot
    assert found(ring(SMALL, [7, 8], [0.5, 0.5]), SMALL, 13) == 7


@pytest.mark.parametrize(
    ("changes", "m", "hit"),
    [
        # the last position whose window reaches back to 10: the very slot of 18; itself; the future
        ({}, 18, True), ({}, 19, False), ({}, 10, False), ({}, 9, False),
        ({"max_gap": 2}, 12, True), ({"max_gap": 2}, 13, False),
        ({"band": 10}, 12, True), ({"band": 11}, 12, False),  # E(10) = 0: nothing is summed up
        ({"sink": 6}, 12, True), ({"sink": 7}, 12, False),
        ({"min_length": 12}, 12, True), ({"min_length": 13}, 12, False),
        ({"tau": 1.0}, 11, False),
    ],
)  # fmt: skip
def test_window_gap_band_sink_and_length_limit_the_search(changes: dict[str, float], m: int, hit: bool) -> None:
    assert found(ring(SMALL, [10], [0.0]), replace(SMALL, **changes), m) == (10 if hit else -1)


def test_the_threshold_is_strict_and_what_holds_nothing_never_matches() -> None:
    half = replace(SMALL, tau=0.5)  # 2 d (1 - tau)^2 = 1
    assert found(ring(half, [10], [1.0]), half, 11) == -1
    state = ring(half, [10], [1 - 1e-12])
    assert found(state, half, 11) == 10
    state.lse.fill_(EMPTY)
    assert found(state, half, 11) == -1


def left(decode: Decode, done: MacStep, name: str) -> Tensor:
    """What a step has put into one of the rings. [B, H, ...]"""
    rows = torch.arange(len(done.position)), done.position % decode.config.window
    ring: Tensor = getattr(decode.state, name)[rows]
    return ring


# --- M7: chains and drift -------------------------------------------------------------------------------------------


def test_chain_and_drift_are_capped() -> None:
    one = replace(SMALL, max_chain=1)
    assert found(ring(one, [10], [0.0], chain=0), one, 11) == 10
    assert found(ring(one, [10], [0.0], chain=1), one, 11) == -1
    assert found(ring(SMALL, [10], [0.0], chain=1), SMALL, 11) == 10
    careful = replace(SMALL, max_drift=True)  # their distances must add up to less than 2
    assert found(ring(careful, [10], [1.0], drift=0.9), careful, 11) == 10
    assert found(ring(careful, [10], [1.0], drift=1.1), careful, 11) == -1
    # a nearer query beyond its cap doesn't hide a farther one within
    state = ring(one, [10, 11], [1.0, 0.5])
    state.chain[0, 11 % 8] = 1
    assert found(state, one, 12) == 10


def test_chain_and_drift_add_up() -> None:
    decode = made(SMALL, 60, heads=2, groups=1)
    decode.queries[:] = decode.queries[:, :, :1] + 0.01 * noise(1, 2, 60, 8, seed=9)
    decode.rotated = noise(1, 2, 60, 8, seed=10)  # these say nothing about a match
    decode.fill(40)
    decode.state.chain.fill_(3)
    decode.state.drift.fill_(0.5)
    done = decode.step(40)
    assert bool((left(decode, done, "chain") == 4).all())
    assert error(left(decode, done, "drift"), 0.5 + done.match.distance) < 1e-6
    assert torch.equal(done.group_keys_read[0], done.keys_read.amax(1))
    assert done.keys_read[0, 0] != done.keys_read[0, 1]


# --- M8: state ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["invalidate", "crop", "jump"])
def test_no_hit_after_invalidation(how: str) -> None:
    decode = made(SMALL, 80, same=True)
    decode.fill(40)
    m = 40
    assert decode.step(m).match.hit.all()
    if how == "invalidate":
        decode.state.invalidate(torch.tensor([True]))
    elif how == "crop":
        decode.state.crop(30)
    m = m + 9 if how == "jump" else m + 1
    decode.state.drift.fill_(1.0)
    done = decode.step(m)
    assert not done.match.hit.any()
    assert not (left(decode, done, "chain") + left(decode, done, "drift")).any()
    assert decode.step(m + 1).match.hit.all()  # its own row again


def test_bytes_are_those_of_the_rings() -> None:
    config = MacConfig(window=16, ring_dtype="bfloat16")
    state = MacState.empty(2, 4, 8, 6, config, torch.zeros(()))
    assert state.nbytes == 2 * 16 * (4 * (8 + 6) * 2 + 4 * 4 + 8 + 4 * 4 + 4 * 4)
    assert state.lse.dtype == torch.float32


# --- M9, M11: what is read, and rows of prompts --------------------------------------------------------------------


def test_a_hit_never_looks_at_the_prefix() -> None:
    """Keys in front of what is counted may be anything; the negative control changes one that is counted."""
    outputs = []
    for changed in (0, 29, 30):  # the oldest query that may match stands at 32, its summary ends before key 29
        decode = made(SMALL, 60, same=True)
        decode.fill(40)
        decode.keys[:, :, :changed], decode.values[:, :, :changed] = math.nan, math.nan
        done = decode.step(40)
        assert bool((done.match.pos == 32).all())
        assert bool((done.keys_read == 41 - 29).all())
        outputs.append(done.output)
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.isfinite(outputs[2]).any()


@pytest.mark.parametrize("context", [0, 3, 9, 33])
@pytest.mark.parametrize("pieces", [1, 3])
def test_rows_of_a_prompt_equal_rows_of_decoding_it(context: int, pieces: int) -> None:
    config = replace(SMALL, tau=1.0, sink=2)
    filled, decoded = made(config, 40, rows=2, start=(0, 4)), made(config, 40, rows=2, start=(0, 4))
    filled.rotated = decoded.rotated = noise(*filled.queries.shape, seed=9)
    for m in range(context):
        decoded.step(m)
    for piece in torch.arange(context).chunk(pieces) if context else ():
        filled.fill(int(piece[-1]) + 1)
    for row in range(2):
        for slot in range(8):
            p = int(filled.state.pos[row, slot])
            assert p == max(int(decoded.state.pos[row, slot]), -1)
            if p >= 0:
                assert torch.allclose(filled.state.lse[row, slot], decoded.state.lse[row, slot], atol=1e-12)
                assert error(filled.state.o[row, slot], decoded.state.o[row, slot]) < 1e-12
                assert p % 8 == slot
                assert torch.equal(filled.state.query[row, slot], decoded.state.query[row, slot])


# --- configuration -------------------------------------------------------------------------------------------------


def test_presets_and_parsing() -> None:
    assert MacConfig.parse("generation") == MacConfig.generation()
    assert MacConfig.parse("context:max_chain=none,max_drift=false") == MacConfig.context().uncapped()
    assert (MacConfig.context().tau, MacConfig.context().window, MacConfig.context().band) == (0.45, 1024, 256)
    parsed = MacConfig.parse("context:tau=0.6,max_chain=none,max_drift=false,ring_dtype=bfloat16")
    assert (parsed.tau, parsed.max_chain, parsed.max_drift, parsed.ring_dtype) == (0.6, None, False, "bfloat16")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fast", "presets"),
        ("context:speed=3", "no parameter"),
        ("context:band=x", "takes a number"),
        ("context:tau=2", "tau must lie"),
        ("context:band=0", "band must be"),
        ("context:max_drift=1", "true or false"),
        ("context:ring_dtype=int8", "ring_dtype"),
        ("context:gate=0.5", "no parameter"),
    ],
)
def test_bad_configurations_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MacConfig.parse(text)
    with pytest.raises(ValueError, match="max_drift must be True or False, got 'off'"):
        MacConfig(max_drift="off")  # type: ignore[arg-type]

"""The kernels against the plain step, under Triton's interpreter. Run by test_mac_kernels.py in a process of its own.

New memory is filled with NaN (and the largest integers), so that whatever is read before it is written shows.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from comb.kernels.launch import Launch
from comb.kernels.mac import attend as attend_module
from comb.kernels.mac import match_kernel as match_module
from comb.kernels.mac import merge as merge_module
from comb.kernels.mac import schedule as schedule_module
from comb.kernels.mac.algebra import EMPTY, attend_range, merge
from comb.kernels.mac.attend import PartialAttention, attend_spans
from comb.kernels.mac.config import MacConfig
from comb.kernels.mac.match import find_match
from comb.kernels.mac.match_kernel import nearest_in_tiles
from comb.kernels.mac.merge import merge_spans
from comb.kernels.mac.schedule import make_schedule
from comb.kernels.mac.state import MacState
from comb.kernels.mac.step import MacStep, step
from comb.kernels.mac.step_kernel import mac_step_triton
from comb.mac import mac
from tests.helpers.interpreted_kernels import distance, mutate, unwritten_memory_is_nan, watch_launches  # noqa: F401  a fixture
from tests.helpers.mac_decode import Decode, noise

SMALL = MacConfig(window=20, band=9, tau=0.6, min_length=0, max_chain=None, max_drift=False)
TILES = Launch(ring_tile=16, key_tile=16, programs=3)
EXACT, HALF = 1e-5, 2e-2


class Stream(Decode):
    """Requests of H query and G key/value heads, odd widths; queries have a common part, so that some match."""

    def __init__(
        self, config: MacConfig, length: int, *, rows: int = 1, heads: int = 6, groups: int = 2, alike: float = 0.8,
        width: int = 10, value_width: int = 12, dtype: torch.dtype = torch.float32, start: tuple[int, ...] = (5, 0),
    ) -> None:  # fmt: skip
        own, *stored = (
            noise(rows, count, length, channels, seed=seed, dtype=torch.float32)
            for count, channels, seed in ((heads, width, 1), (groups, width, 2), (groups, value_width, 3))
        )
        common = noise(rows, heads, 1, width, seed=0, dtype=torch.float32)
        queries = (alike * common + (1 - alike**2) ** 0.5 * own).to(dtype)
        keys, values = (tensor.to(dtype) for tensor in stored)
        super().__init__(config, queries, keys, values, rotated=queries.roll(1, -1), start=start[:rows])


def assert_same(fast: MacStep, plain: MacStep, bound: float) -> None:
    assert torch.equal(fast.match.hit, plain.match.hit)
    for name in ("keys_read", "group_keys_read", "position"):
        assert torch.equal(getattr(fast, name), getattr(plain, name)), name
    assert torch.equal(fast.match.pos, plain.match.pos)
    hit = plain.match.hit
    assert torch.equal(fast.match.slot[hit], plain.match.slot[hit])
    assert distance(fast.match.distance, plain.match.distance) < EXACT
    assert torch.equal(fast.rows.pos, plain.rows.pos)
    assert torch.equal(fast.rows.chain, plain.rows.chain)
    assert torch.equal(fast.rows.query, plain.rows.query)
    assert distance(fast.rows.drift, plain.rows.drift) < EXACT
    for name in ("output", "lse", "tail_lse"):
        assert distance(getattr(fast, name), getattr(plain, name)) < bound, name
        assert getattr(fast, name).dtype == getattr(plain, name).dtype
    assert distance(fast.rows.o, plain.rows.o) < bound
    assert distance(fast.rows.lse, plain.rows.lse) < bound


def copy_of(state: MacState) -> MacState:
    names = ("query", "o", "lse", "pos", "chain", "drift")
    return MacState(*(getattr(state, name).clone() for name in names))


def assert_same_rings(left: MacState, right: MacState, bound: float) -> None:
    assert torch.equal(left.pos, right.pos)
    assert torch.equal(left.chain, right.chain)
    for name in ("query", "o", "lse", "drift"):
        assert distance(getattr(left, name), getattr(right, name)) < bound, name


def assert_same_step(stream: Stream, m: int, bound: float, kept: float, launch: Launch = TILES) -> MacStep:
    """A step of the kernels that writes its rows, and the rings behind it, against the plain one, which is returned."""
    plain, before = step(*stream.inputs(m)), copy_of(stream.state)
    assert_same(mac_step_triton(*stream.inputs(m), launch=launch, write=True), plain, bound)
    before.write(plain.rows)
    assert_same_rings(stream.state, before, kept)
    return plain


# --- whole steps ----------------------------------------------------------------------------------------------------

CASES = {
    # some heads of a group match and others don't; K no multiple of the tile
    "mixed": (SMALL, {"rows": 2}, 50),
    "16 bits": (SMALL, {"dtype": torch.bfloat16}, 50),
    "half": (SMALL, {"dtype": torch.float16}, 50),
    "caps": (replace(SMALL, max_chain=1, max_drift=True, tau=0.5), {}, 50),
    "gap": (replace(SMALL, max_gap=3, sink=2), {}, 50),
    "sink": (replace(SMALL, sink=19), {}, 50),
    "all hit": (replace(SMALL, tau=0.0), {"alike": 1.0}, 50),
    "all miss": (replace(SMALL, tau=1.0), {"alike": 1.0}, 50),
    "below min_length": (replace(SMALL, min_length=46), {"rows": 2}, 50),  # the first row, by its padding
    "one key": (SMALL, {"start": (0,)}, 0),
    "shorter than r": (SMALL, {}, 8),
    "as long as r": (SMALL, {"start": (0,)}, 9),
    "at K": (SMALL, {"start": (0,)}, 20),
    "five heads to one": (SMALL, {"heads": 5, "groups": 1, "width": 17, "value_width": 3}, 50),
    "one head to one": (SMALL, {"heads": 3, "groups": 3}, 50),
    "16-bit rings": (replace(SMALL, ring_dtype="bfloat16"), {}, 50),
}


@pytest.mark.parametrize(("config", "sizes", "m"), CASES.values(), ids=list(CASES))
def test_steps_equal_the_plain_ones(config: MacConfig, sizes: dict[str, Any], m: int) -> None:
    stream = Stream(config, 60, **sizes)
    stream.fill(m)
    bound = EXACT if sizes.get("dtype", torch.float32) == torch.float32 else HALF
    # the interpreter cuts numbers to bfloat16, torch rounds them
    hit = assert_same_step(stream, m, bound, bound if config.ring_dtype == "auto" else HALF).match.hit
    if config is SMALL and m == 50:
        assert 0 < int(hit.sum()) < hit.numel()


def test_a_ring_that_has_come_round_and_the_slot_that_is_its_own() -> None:
    """The oldest match lies in the slot that the step writes: it must be read first."""
    config = replace(SMALL, window=4, band=3, tau=0.0)
    stream = Stream(config, 40, heads=3, groups=1, alike=1.0, start=(0,))
    stream.fill(20)
    for m in range(20, 23):  # equal queries: the older one wins, so each step reuses position m - K
        assert bool((assert_same_step(stream, m, EXACT, EXACT).match.pos == m - 4).all())


def test_empty_rings_and_forgotten_rows() -> None:
    stream = Stream(SMALL, 60, rows=2, alike=1.0)
    assert_same(mac_step_triton(*stream.inputs(50), launch=TILES), step(*stream.inputs(50)), EXACT)
    stream.fill(50)
    stream.state.invalidate(torch.tensor([True, False]))
    stream.state.lse[1, :, 2] = EMPTY
    plain = step(*stream.inputs(50))
    assert plain.match.hit.tolist() == [[False] * 6, [True, True, False, True, True, True]]
    assert_same(mac_step_triton(*stream.inputs(50), launch=TILES), plain, EXACT)


@pytest.mark.parametrize("programs", [1, 2, 7, 64])
def test_any_number_of_programs_gives_the_same(programs: int) -> None:
    stream = Stream(SMALL, 60)
    stream.fill(50)
    before = copy_of(stream.state)
    fast = mac_step_triton(*stream.inputs(50), launch=replace(TILES, programs=programs))
    assert_same(fast, step(*stream.inputs(50)), EXACT)
    assert_same_rings(stream.state, before, 1e-30)  # it wasn't asked to write


def test_keys_may_have_any_strides() -> None:
    stream = Stream(SMALL, 60, rows=2, heads=3, groups=1)
    stream.fill(50)
    plain = mac_step_triton(*stream.inputs(50), launch=TILES)
    stream.keys = stream.keys.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(mac_step_triton(*stream.inputs(50), launch=TILES).output, plain.output)


def test_launches_are_on_the_device_of_the_query(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = watch_launches(
        monkeypatch, (match_module, "_match_kernel"), (schedule_module, "_select_kernel"),
        (schedule_module, "_schedule_kernel"), (attend_module, "_attend_kernel"), (merge_module, "_merge_kernel"),
    )  # fmt: skip
    stream = Stream(SMALL, 60)
    stream.fill(50)
    inputs = stream.inputs(50)
    mac_step_triton(*inputs, launch=TILES)
    assert len(launches) == 5
    assert all(len(devices) == 1 and devices[0] is inputs[2] for devices in launches.values())


def test_a_hit_never_reads_the_prefix() -> None:
    """What isn't counted may be anything; what is counted is read."""
    config, outputs = replace(SMALL, tau=0.0, window=8), []
    for changed in (0, 34, 35):  # p = 42, so E(p) = 34
        stream = Stream(config, 60, heads=3, groups=1, alike=1.0, start=(0,))
        stream.fill(50)
        stream.keys[:, :, :changed], stream.values[:, :, :changed] = math.nan, math.nan
        done = mac_step_triton(*stream.inputs(50), launch=TILES)
        assert bool((done.keys_read == 51 - 34).all())
        outputs.append(done.output)
    assert torch.equal(outputs[0], outputs[1])
    assert outputs[2].isnan().all()


# --- each kernel alone ----------------------------------------------------------------------------------------------


def test_match_is_the_reference_s() -> None:
    stream = Stream(replace(SMALL, max_drift=True, tau=0.0), 60)
    stream.fill(50)
    stream.state.drift.uniform_(0, 2)
    state, unrotated, *_ = stream.inputs(50)
    position = 50 - stream.start
    near, near_pos = nearest_in_tiles(state, unrotated, position, stream.config, TILES)
    schedule = make_schedule(near, near_pos, position, 2, 20, stream.config, TILES)
    plain = find_match(state, unrotated, position, stream.config)
    assert torch.equal(schedule.match.pos, plain.pos)
    assert distance(schedule.match.distance, plain.distance) < EXACT
    assert plain.hit.any()
    # ties: the older of two equal ones, wherever the ring has put them
    state.query[:] = unrotated[:, None]
    near, near_pos = nearest_in_tiles(state, unrotated, position, stream.config, TILES)
    tied = make_schedule(near, near_pos, position, 2, 20, stream.config, TILES).match
    plain = find_match(state, unrotated, position, stream.config)
    assert torch.equal(tied.pos, plain.pos)
    assert bool((near_pos.amax(-1) > tied.pos).any())


def test_the_threshold_is_strict() -> None:
    config = replace(SMALL, tau=0.5)  # 2 d (1 - tau)^2 = 5 at width 10
    stream = Stream(config, 60, rows=1, heads=1, groups=1)
    stream.fill(50)
    for gap, hit in ((5.0, False), (math.nextafter(5.0, 0) - 1e-6, True)):
        stream.state.query[:] = stream.queries[:, :, 50]
        stream.state.query[..., 0] += 100
        stream.queries[0, 0, 50] = 0
        stream.state.query[0, 12, 0] = 0
        stream.state.query[0, 12, 0, :5] = (gap / 5) ** 0.5
        assert bool(mac_step_triton(*stream.inputs(50), launch=TILES).match.hit) is hit
        assert bool(step(*stream.inputs(50)).match.hit) is hit


def test_the_schedule_shares_all_tiles_evenly() -> None:
    stream = Stream(replace(SMALL, sink=3), 60, rows=2)
    stream.fill(50)
    state, unrotated, *_ = stream.inputs(50)
    position = 50 - stream.start
    near, near_pos = nearest_in_tiles(state, unrotated, position, stream.config, TILES)
    for programs in (1, 4, 100):
        schedule = make_schedule(near, near_pos, position, 2, 20, stream.config, replace(TILES, programs=programs))
        own_end = position + 1 - 9
        expected = []
        for b in range(2):
            for g in range(2):
                low = int(schedule.low[b, 3 * g : 3 * g + 3].min())
                spans = (3, int(own_end[b]) - low, 9)
                expected += [-(-span // 16) for span in spans]
        assert schedule.first_tile.tolist() == [0, *torch.tensor(expected).cumsum(0).tolist()]
        share, total = int(schedule.share), sum(expected)
        assert share * programs >= total > (share - 1) * programs
    assert len(set(expected)) > 1  # spans of different lengths


def test_pieces_and_merge_are_the_reference_s() -> None:
    """Attention of each span alone, and merged rows from pieces that the test makes."""
    stream = Stream(replace(SMALL, sink=3), 60, rows=1, start=(0,))
    stream.fill(50)
    state, unrotated, query, keys, values, start, config, scale = stream.inputs(50)
    position = 50 - start
    near, near_pos = nearest_in_tiles(state, unrotated, position, config, TILES)
    whole = replace(TILES, programs=1)  # a span is one piece
    schedule = make_schedule(near, near_pos, position, 2, 20, config, whole)
    pieces = attend_spans(query, keys, values, start, position, schedule, config, scale, whole)
    spans = []
    for h in range(6):
        g, low = h // 3, int(schedule.low[0, h])
        for kind, (first, last) in enumerate(((0, 3), (low, 42), (42, 51))):
            o, lse = attend_range(query[0, h], keys[0, g], values[0, g], first, last, scale)
            spans.append((o, lse))
            assert distance(pieces.o[g * 3 + kind, h % 3], o) < EXACT
            assert distance(pieces.lse[g * 3 + kind, h % 3], lse) < EXACT
    made = PartialAttention(noise(7, 3, 12, seed=7).float(), noise(7, 3, seed=8).float())
    merged = merge_spans(state, unrotated, position, schedule, made, write=False)
    for h in range(6):
        sink, band, tail = ((made.o[h // 3 * 3 + kind, h % 3], made.lse[h // 3 * 3 + kind, h % 3]) for kind in range(3))
        entry = band
        if schedule.match.hit[0, h]:
            slot = int(schedule.match.slot[0, h])
            entry = merge(state.o[0, slot, h], state.lse[0, slot, h], *band)
        result = merge(*merge(*entry, *tail), *sink)
        assert distance(merged.entry_o[0, h], entry[0]) < EXACT
        assert distance(merged.entry_lse[0, h], entry[1]) < EXACT
        assert distance(merged.output[0, h], result[0]) < EXACT
        assert distance(merged.lse[0, h], result[1]) < EXACT


# --- each of these comparisons can fail -----------------------------------------------------------------------------


MUTANTS: dict[tuple[Any, str], dict[str, tuple[str, str]]] = {
    (match_module, "_match_kernel"): {
        "the younger of two": ("tl.min(tl.where(able & (squared == near), pos, NO_POSITION)",
                               "tl.max(tl.where(able & (squared == near), pos, 0)"),
        "the oldest left out": ("tl.maximum(m - reach, 0), m)", "tl.maximum(m - reach + 1, 0), m)"),
    },
    (schedule_module, "_select_kernel"): {
        "a span too short": ("tl.cdiv(own_end - farthest, KEYS)", "((own_end - farthest) // KEYS)"),
    },
    (schedule_module, "_schedule_kernel"): {"tiles twice": ("axis=0) - count", "axis=0)")},
    (attend_module, "_attend_kernel"): {
        "no start": ("index = place + start", "index = place"),
        "heads share the first key": (" & (place[None, :] >= low[:, None])", ""),
        "no rescaling": ("o = o * shrink[:, None] + ", "o = o + "),
    },
    (merge_module, "_merge_kernel"): {
        "the neighbour's pieces": ("(last - 1) // share + span + 1, begin)", "(last - 1) // share + span + 2, begin)"),
        "another slot": ("slot = tl.maximum(m, 0) % window", "slot = tl.maximum(m + 1, 0) % window"),
        "chain": ("other=-1) + 1", "other=-1) + 2"),
    },
}  # fmt: skip


def _compare() -> None:
    # equal queries in one group, unlike ones in the other; the oldest match is in the step's own slot
    stream = Stream(replace(SMALL, sink=2), 60)
    stream.queries[:, :2] = stream.queries[:, :2, :1]
    stream.fill(50)
    assert_same_step(stream, 50, EXACT, EXACT, replace(TILES, programs=1))


@pytest.mark.parametrize(
    ("module", "name", "old", "new"),
    [pytest.param(*place, *change, id=what) for place, each in MUTANTS.items() for what, change in each.items()],
)
def test_a_wrong_kernel_is_noticed(
    module: Any, name: str, old: str, new: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    mutate(module, name, old, new, monkeypatch, tmp_path)

    with pytest.raises(AssertionError):
        _compare()


def test_the_right_kernels_pass_what_wrong_ones_do_not() -> None:
    _compare()


# --- in transformers ------------------------------------------------------------------------------------------------


def test_a_session_takes_the_kernels_and_gives_the_same_tokens() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    torch.use_deterministic_algorithms(False)
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=24, intermediate_size=32, num_hidden_layers=1, num_attention_heads=3, num_key_value_heads=1,
            vocab_size=50, max_position_embeddings=128,
        )
    ).eval()  # fmt: skip
    ids, mask = torch.randint(3, 50, (2, 24)), torch.ones(2, 24, dtype=torch.long)
    mask[1, :5] = 0
    config = replace(SMALL, window=8, band=4, tau=0.0, audit_bound=None)
    found = {}
    for kernels in ("torch", "triton"):
        with mac(model, replace(config, kernels=kernels)) as session:
            output = model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False, pad_token_id=0)
            state = session.states()[0]
            found[kernels] = output.tolist(), state.pos.tolist(), session.report().layers[0].keys_read, state.o
            assert not any(event.startswith("no kernels") for event in session.events)
    assert found["torch"][:3] == found["triton"][:3]
    assert distance(found["torch"][3], found["triton"][3]) < EXACT

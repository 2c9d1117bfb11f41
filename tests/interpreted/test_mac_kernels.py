"""The kernel against its plain twin, under Triton's interpreter.

New memory is filled with NaN (and the largest integers), so that whatever is read before it is written shows.
"""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from comb.kernels.dispatch import computed_step
from comb.kernels.launch import Launch
from comb.kernels.mac import kernel as kernel_module
from comb.kernels.mac.mac_config import MacConfig
from comb.kernels.mac.state import EMPTY
from comb.kernels.mac.step import attend_ranges, step
from comb.mac import mac
from tests.helpers.mac_decode import Decode, noise
from tests.interpreted.faults import distance, mutate, unwritten_memory_is_nan, watch_launches  # noqa: F401  a fixture

SMALL = MacConfig(window=20, band=9, tau=0.6, min_length=0, max_chain=None, max_drift=False, kernels="triton")
TILES = Launch(key_tile=16, programs=6)
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
    check_step(config, sizes, m)


def check_step(config: MacConfig, sizes: dict[str, Any], m: int, decoded: int = 0) -> None:
    """At position m, behind a prompt and so many decoded tokens."""
    stream = Stream(config, 60, **sizes)
    stream.fill(m - decoded)
    for one in range(m - decoded, m):
        stream.step(one)
    bound = EXACT if sizes.get("dtype", torch.float32) == torch.float32 else HALF
    written = deepcopy(stream.state)
    plain = step(written, *stream.inputs(m)[1:])
    fast, left = computed_step(*stream.inputs(m))
    assert not left
    for name in ("keys_read", "group_keys_read", "position"):
        assert torch.equal(getattr(fast, name), getattr(plain, name)), name
    assert torch.equal(fast.match.pos, plain.match.pos)
    hit = plain.match.hit
    assert torch.equal(fast.match.slot[hit], plain.match.slot[hit])
    # of an equal query nothing but rounding is left
    assert distance(fast.match.distance, plain.match.distance) < max(bound, 1e-3)
    for name in ("output", "lse"):
        assert distance(getattr(fast, name), getattr(plain, name)) < bound, name
        assert getattr(fast, name).dtype == getattr(plain, name).dtype
    for name, ring in vars(stream.state).items():
        # the interpreter cuts numbers to bfloat16, torch rounds them
        assert distance(ring, getattr(written, name)) < (bound if config.ring_dtype == "auto" else HALF), name
    if config is SMALL and m == 50:
        assert 0 < int(hit.sum()) < hit.numel()


def test_a_hit_never_reads_the_prefix() -> None:
    """What isn't counted may be anything; what is counted is read."""
    config, outputs = replace(SMALL, tau=0.0, window=8), []
    for changed in (0, 34, 35):  # p = 42, so E(p) = 34
        stream = Stream(config, 60, heads=3, groups=1, alike=1.0, start=(0,))
        stream.fill(50)
        stream.keys[:, :, :changed], stream.values[:, :, :changed] = math.nan, math.nan
        done, _ = computed_step(*stream.inputs(50))
        assert bool((done.keys_read == 51 - 34).all())
        outputs.append(done.output)
    assert torch.equal(outputs[0], outputs[1])
    assert outputs[2].isnan().all()


# --- the kernel alone -----------------------------------------------------------------------------------------------


def ranges(seed: int = 0) -> tuple[Tensor, ...]:
    """Two rows of six heads over two, each with other ranges, a third of them empty: query, keys, values, low, high."""
    draw = torch.Generator().manual_seed(seed)
    low = torch.randint(0, 60, (3, 2, 6), generator=draw)
    high = (low + torch.randint(-20, 60, low.shape, generator=draw)).clamp(low, torch.tensor(90))
    low[2, 0], high[2, 0] = 7, 7  # all of a row's
    query, keys, values = noise(2, 6, 10, seed=1), noise(2, 2, 90, 10, seed=2), noise(2, 2, 90, 12, seed=3)
    return query.float(), keys.float(), values.float(), low, high


def check(launch: Launch = TILES, *given: Tensor) -> None:
    given = given or ranges()
    query, keys, values, low, high = given
    pieces, parts = kernel_module.range_pieces(query, keys, values, low.int(), high.int(), 0.3, launch)
    lse = torch.logsumexp(parts, dim=0)
    o = (pieces * torch.exp(parts - torch.where(lse == EMPTY, 0.0, lse))[..., None]).sum(0)
    wanted_o, wanted_lse = attend_ranges(*given, 0.3)
    assert distance(o, wanted_o) < EXACT
    assert distance(lse, wanted_lse) < EXACT
    assert bool((wanted_lse == EMPTY).any())


@pytest.mark.parametrize("programs", [1, 2, 7, 64])
def test_any_number_of_programs_gives_the_same(programs: int) -> None:
    check(replace(TILES, programs=programs))


def test_keys_may_have_any_strides() -> None:
    query, keys, values, low, high = ranges()
    check(TILES, query, keys.transpose(1, 2).contiguous().transpose(1, 2), values.flip(1), low, high)
    room = torch.nn.functional.pad(keys, (0, 0, 0, 5), value=math.nan)
    check(TILES, query, room[:, :, :90], values, low, high)


def test_launches_are_on_the_device_of_the_query(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = ("_match_kernel", "_ranges_kernel", "_complete_kernel")
    launches = watch_launches(monkeypatch, *((kernel_module, name) for name in kernels))
    stream = Stream(SMALL, 60)
    stream.fill(50)
    given = stream.inputs(50)
    computed_step(*given)
    assert [devices == [given[2]] for devices in launches.values()] == [True] * 3


# --- each of these comparisons can fail -----------------------------------------------------------------------------

MUTANTS = {
    "heads share the first key": ("(place[None, :] >= low[:, None]) & ", ""),
    "heads share the last key": (" & (place[None, :] < high[:, None])", ""),
    "no rescaling": ("o = o * shrink[:, None] + ", "o = o + "),
    "a range too short": ("count = tl.cdiv(tl.maximum(finish - begin, 0), KEYS)",
                          "count = tl.maximum(finish - begin, 0) // KEYS"),
    "shares that overlap": ("before = program * share", "before = program * (share - 1)"),
    "shares too small": ("share = tl.cdiv(tiles, programs)", "share = tiles // programs"),
}  # fmt: skip


@pytest.mark.parametrize(("old", "new"), MUTANTS.values(), ids=list(MUTANTS))
def test_a_wrong_kernel_is_noticed(old: str, new: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    mutate(kernel_module, "_ranges_kernel", old, new, monkeypatch, tmp_path)
    with pytest.raises(AssertionError):
        check()


WRONG_STEPS = {
    "the latest of equal ones": ("match", "pos < oldest", "pos > oldest"),
    "summaries without a key": ("match", 'tl.where(summary > float("-inf"), squared', "tl.where(slot >= 0, squared"),
    "any gap": ("match", "tl.maximum(position - reach, 0)", "0"),
    "any length": ("match", "able &= position >= min_length", "able &= position >= 0"),
    "any drift": ("match", "squared, float(\"inf\")) if DRIFT", "squared, squared) if DRIFT"),
    "a chain too long": ("match", "other=0) < max_chain", "other=0) <= max_chain"),
    "the sink isn't counted": ("match", "tl.where(hit, sink - low, 0)", "tl.where(hit, 0 - low, 0)"),
    "padding": ("match", "(start + low).to", "(low).to"),
    "the band in the summary": ("complete", "if one == 0:", "if one == 1:"),
    "drift forgotten": ("complete", "drift += ", "drift = "),
    "chains never grow": ("complete", "other=-1) + 1", "other=-1)"),
    "another head's summary": ("complete", "found_ptr + here), ", "found_ptr + here) * 0, "),
    "pieces not rescaled": ("complete", "range_o = range_o * shrink", "range_o = range_o"),
    "half of the pieces": ("complete", "range(0, programs, PIECES)", "range(0, programs // 2, PIECES)"),
}  # fmt: skip
CAPPED = replace(SMALL, max_chain=1, max_drift=True, tau=0.5)
EQUAL = replace(SMALL, tau=0.0), {"alike": 1.0}, 43  # the oldest lies in a slot that shares its lane
SEEING = [
    *((*case, 0) for case in (*CASES.values(), EQUAL)),
    # rings with chains and drift
    (SMALL, {}, 50, 12), (CAPPED, {"alike": 0.95}, 50, 12), (replace(CAPPED, max_chain=3), {"alike": 0.9}, 50, 12),
    (replace(CAPPED, max_chain=None), {"alike": 0.9}, 50, 12),
]  # fmt: skip


def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """More slots than one turn of the match reads, and more pieces than one of the merge."""
    monkeypatch.setattr(kernel_module, "SLOTS", 16)
    monkeypatch.setattr(kernel_module, "PIECES", 2)
    monkeypatch.setattr(kernel_module, "Launch", lambda: Launch(key_tile=16, programs=16))


@pytest.mark.parametrize(("kernel", "old", "new"), WRONG_STEPS.values(), ids=list(WRONG_STEPS))
def test_a_wrong_step_is_noticed(
    kernel: str, old: str, new: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    small_pieces(monkeypatch)
    mutate(kernel_module, f"_{kernel}_kernel", old, new, monkeypatch, tmp_path)
    with pytest.raises(AssertionError):
        check_all()


def check_all() -> None:
    for case in SEEING:
        check_step(*case)


def test_the_right_kernels_pass_what_wrong_ones_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    check()
    small_pieces(monkeypatch)
    check_all()


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

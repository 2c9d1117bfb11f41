"""The kernels of MAC attention against the plain step, on whatever device is at hand."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from comb.bench.mac_stream import rings_behind
from comb.evaluation.table import Row
from comb.kernels.launch import Launch, Pages
from comb.kernels.mac.config import MacConfig
from comb.kernels.mac.state import MacState
from comb.kernels.mac.step import step
from comb.kernels.mac.step_kernel import mac_step_triton

BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-2}
_RINGS = ("query", "o", "lse", "chain", "drift")

CheckCase = tuple[torch.dtype, MacConfig, int, tuple[int, int, int, int, int, int]]
"""Dtype, configuration, page size (0: contiguous), and sizes: rows, query heads, key/value heads, channels of queries,
channels of values, tokens of the prompt."""


def cases(tiny: bool) -> dict[str, CheckCase]:
    """Every check by its name."""
    base = MacConfig(window=48, band=20, tau=0.6, min_length=0, max_chain=None, max_drift=False)
    some = (2, 6, 2, 10, 12, 60) if tiny else (3, 6, 2, 72, 40, 150)
    found: dict[str, CheckCase] = {
        "mixed": (torch.float32, base, 0, some),
        "mixed, 16 bits, pages": (torch.bfloat16, base, 16, some),
        "sink and caps": (torch.float32, replace(base, sink=7, max_chain=1, max_drift=True, tau=0.5), 0, some),
        "nothing matches": (torch.float32, replace(base, tau=1.0), 0, some),
        "all match": (torch.float16, replace(base, tau=0.0), 0, some),
        "16-bit rings": (torch.bfloat16, replace(base, ring_dtype="bfloat16"), 0, some),
    }
    if tiny:
        return found
    real, llama = replace(base, window=1024, band=256, tau=0.55), (4, 32, 8, 128, 128, 6000)
    return found | {
        "five heads to one, pages": (torch.bfloat16, replace(base, window=100), 64, (2, 5, 1, 128, 128, 700)),
        "one head to one": (torch.float32, base, 0, (2, 3, 3, 192, 128, 200)),
        "widest": (torch.float32, base, 0, (1, 4, 2, 256, 256, 200)),
        "llama": (torch.bfloat16, real, 0, llama),
        "llama, pages": (torch.bfloat16, real, 16, llama),
        "llama, nothing matches": (torch.bfloat16, replace(real, tau=1.0), 0, (2, *llama[1:])),
    }


def check(name: str, case: CheckCase, steps: int, device: torch.device, launch: Launch | None = None) -> Row:
    """Decodes `steps` tokens behind a prompt by both; every step starts from the plain one's rings.

    Returns:
        ``hits`` and ``searches`` of the plain step; ``other_matches``, heads that matched another query at the same
        distance up to rounding, left out of ``error``, the largest difference of outputs, entries and log-sum-exps;
        ``ring_error`` after all steps; and ``failed``, why it didn't pass, empty if it did.
    """
    dtype, config, page, (rows, heads, groups, width, value_width, prompt) = case

    def noise(seed: int, *sizes: int) -> Tensor:
        return torch.randn(rows, *sizes, generator=torch.Generator().manual_seed(seed)).to(device, dtype)

    length, scale = prompt + steps, width**-0.5
    # a common part, so that some match
    queries = 0.8 * noise(0, heads, 1, width) + 0.6 * noise(1, heads, length, width)
    rotated, keys, values = queries.roll(1, -1), noise(2, groups, length, width), noise(3, groups, length, value_width)
    start = torch.arange(rows, device=device) * 5
    state = rings_behind(prompt, queries, rotated, keys, values, start, config)
    found: Row = {"case": name, "steps": steps, "hits": 0, "searches": 0, "other_matches": 0, "error": 0.0,
                  "ring_error": 0.0, "failed": ""}  # fmt: skip
    for m in range(prompt, length):
        own, cached = (queries[:, :, m].float(), rotated[:, :, m]), (keys[:, :, : m + 1], values[:, :, : m + 1])
        plain = step(state, *own, *cached, start, config, scale)
        written = MacState(*(getattr(state, ring).clone() for ring in ("query", "o", "lse", "pos", "chain", "drift")))
        stored, pages = paged(*cached, page) if page else (cached, None)
        fast = mac_step_triton(written, *own, *stored, start, config, scale, write=True, pages=pages, launch=launch)
        state.write(plain.rows)
        same = fast.match.pos == plain.match.pos
        near = torch.isclose(fast.match.distance, plain.match.distance, rtol=1e-5, atol=0)
        if not bool((same | near).all()) or not torch.equal(written.pos, state.pos):
            found["failed"] = found["failed"] or f"another match at step {m}"
        if bool((fast.keys_read != plain.keys_read)[same].any()):
            found["failed"] = found["failed"] or f"other keys read at step {m}"
        pairs = [(getattr(fast, part), getattr(plain, part)) for part in ("output", "lse", "tail_lse")]
        pairs += [(fast.rows.o[:, 0], plain.rows.o[:, 0]), (fast.rows.lse[:, 0], plain.rows.lse[:, 0])]
        found["error"] = max(found["error"], *(_distance(left[same], right[same]) for left, right in pairs))
        slot, row = plain.position % config.window, torch.arange(rows, device=device)
        for ring in _RINGS:
            new, wanted = (getattr(rings, ring)[row, slot][same].float() for rings in (written, state))
            apart = _distance(new, wanted) / (1 + float(wanted[wanted.isfinite()].abs().max()))
            found["ring_error"] = max(found["ring_error"], apart)
        found["hits"] += int(plain.match.hit.sum())
        found["searches"] += plain.match.hit.numel()
        found["other_matches"] += int((~same).sum())
    ring_bound = max(BOUNDS[dtype], 1e-2 if config.ring_dtype != "auto" else 0.0)
    if not found["error"] < BOUNDS[dtype] or not found["ring_error"] < ring_bound:
        found["failed"] = found["failed"] or "off by {error:.3g}, rings by {ring_error:.3g}".format(**found)
    if found["other_matches"] > 0.02 * found["searches"]:
        found["failed"] = found["failed"] or "{other_matches} of {searches} matches differ".format(**found)
    return found


def paged(keys: Tensor, values: Tensor, page: int) -> tuple[tuple[Tensor, Tensor], Pages]:
    """Keys [B, G, L, D] and values in shuffled pages [N, page, G, ...], and the table of them."""
    rows, groups, length, _ = keys.shape
    count = -(-length // page)
    table = torch.randperm(rows * count, generator=torch.Generator().manual_seed(4)).to(keys.device)
    stored = []
    for tensor in (keys, values):
        whole = tensor.new_zeros(rows, groups, count * page, tensor.shape[-1])
        whole[:, :, :length] = tensor
        pages = torch.empty_like(whole).view(rows * count, page, groups, -1)
        pages[table] = whole.unflatten(2, (count, page)).permute(0, 2, 3, 1, 4).flatten(0, 1)
        stored.append(pages)
    lengths = torch.full((rows,), length, device=keys.device)
    return (stored[0], stored[1]), Pages(table.view(rows, count).int(), lengths)


def _distance(left: Tensor, right: Tensor) -> float:
    """Largest absolute difference; equal infinities are equal, NaN is infinitely far."""
    if not left.numel():
        return 0.0
    apart = torch.where(left == right, 0.0, (left - right).abs())
    return float(torch.nan_to_num(apart, nan=torch.inf).max())

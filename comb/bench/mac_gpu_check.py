"""The kernels of MAC attention against the plain step, on whatever device is at hand."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from comb.kernels.launch import Launch, Pages
from comb.kernels.mac.config import MacConfig
from comb.kernels.mac.fill import prompt_rows
from comb.kernels.mac.state import MacState
from comb.kernels.mac.step import MacStep, step
from comb.kernels.mac.step_kernel import mac_step_triton

BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-2}
_RINGS = ("query", "o", "lse", "chain", "drift")


@dataclass(frozen=True)
class Shape:
    """Sizes of a check: rows, query heads, key/value heads, channels of queries and of values, prompt."""

    rows: int
    heads: int
    groups: int
    width: int
    value_width: int
    prompt: int


@dataclass(frozen=True)
class Check:
    """One case: what was compared and how far apart it was.

    Args:
        hits, searches: of the plain step.
        other_matches: heads that matched another query at the same distance up to rounding; left out of `error`.
        error: largest difference of outputs, entries and log-sum-exps. ring_error: of the rings after all steps.
        failed: why it didn't pass; empty if it did.
    """

    case: str
    steps: int
    hits: int
    searches: int
    other_matches: int
    error: float
    ring_error: float
    failed: str

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def cases(tiny: bool) -> list[tuple[str, Shape, torch.dtype, MacConfig, int]]:
    """Name, sizes, dtype, configuration and page size (0: contiguous) of every check."""
    base = MacConfig(window=48, band=20, tau=0.6, min_length=0, max_chain=None, max_drift=False)
    odd, small = Shape(3, 6, 2, 72, 40, 150), Shape(2, 6, 2, 10, 12, 60)
    some = small if tiny else odd
    listed = [
        ("mixed", some, torch.float32, base, 0),
        ("mixed, 16 bits, pages", some, torch.bfloat16, base, 16),
        ("sink and caps", some, torch.float32, replace(base, sink=7, max_chain=1, max_drift=True, tau=0.5), 0),
        ("nothing matches", some, torch.float32, replace(base, tau=1.0), 0),
        ("all match", some, torch.float16, replace(base, tau=0.0), 0),
        ("16-bit rings", some, torch.bfloat16, replace(base, ring_dtype="bfloat16"), 0),
    ]
    if tiny:
        return listed
    real = replace(base, window=1024, band=256, tau=0.55)
    return [
        *listed,
        ("five heads to one, pages", Shape(2, 5, 1, 128, 128, 700), torch.bfloat16, replace(base, window=100), 64),
        ("one head to one", Shape(2, 3, 3, 192, 128, 200), torch.float32, base, 0),
        ("widest", Shape(1, 4, 2, 256, 256, 200), torch.float32, base, 0),
        ("llama", Shape(4, 32, 8, 128, 128, 6000), torch.bfloat16, real, 0),
        ("llama, pages", Shape(4, 32, 8, 128, 128, 6000), torch.bfloat16, real, 16),
        ("llama, nothing matches", Shape(2, 32, 8, 128, 128, 6000), torch.bfloat16, replace(real, tau=1.0), 0),
    ]


def check(name: str, shape: Shape, dtype: torch.dtype, config: MacConfig, page: int, steps: int, device: torch.device,
          launch: Launch | None = None) -> Check:  # fmt: skip
    """Decodes `steps` tokens behind a prompt by both; every step starts from the plain one's rings."""
    length = shape.prompt + steps

    def noise(seed: int, *sizes: int) -> Tensor:
        made = torch.randn(*sizes, generator=torch.Generator().manual_seed(seed))
        return made.to(device, dtype)

    common = noise(0, shape.rows, shape.heads, 1, shape.width)
    queries = 0.8 * common + 0.6 * noise(1, shape.rows, shape.heads, length, shape.width)
    keys = noise(2, shape.rows, shape.groups, length, shape.width)
    values = noise(3, shape.rows, shape.groups, length, shape.value_width)
    start = torch.arange(shape.rows, device=device) * 5
    state = MacState.empty(shape.rows, shape.heads, shape.width, shape.value_width, config, queries)
    scale = shape.width**-0.5
    index = torch.arange(max(0, shape.prompt - config.window), shape.prompt, device=device)
    before = slice(0, shape.prompt)
    turned = queries.roll(1, -1)
    state.write(
        prompt_rows(
            queries[:, :, index].float(), turned[:, :, index], keys[:, :, before], values[:, :, before], index, start,
            config, scale,
        )
    )  # fmt: skip
    hits = searches = others = 0
    error = ring_error = 0.0
    failed = ""
    for m in range(shape.prompt, length):
        seen = slice(0, m + 1)
        own = queries[:, :, m].float(), turned[:, :, m]
        plain = step(state, *own, keys[:, :, seen], values[:, :, seen], start, config, scale)
        written = MacState(*(getattr(state, ring).clone() for ring in ("query", "o", "lse", "pos", "chain", "drift")))
        if page:
            stored, pages = paged(keys[:, :, seen], values[:, :, seen], page)
            fast = mac_step_triton(written, *own, *stored, start, config, scale, write=True, pages=pages, launch=launch)
        else:
            fast = mac_step_triton(
                written, *own, keys[:, :, seen], values[:, :, seen], start, config, scale, write=True, launch=launch
            )
        state.write(plain.rows)
        same = fast.match.pos == plain.match.pos
        others += int((~same).sum())
        near = torch.isclose(fast.match.distance, plain.match.distance, rtol=1e-5, atol=0)
        if not bool((same | near).all()) or not torch.equal(written.pos, state.pos):
            failed = failed or f"another match at step {m}"
        if bool((fast.keys_read != plain.keys_read)[same].any()):
            failed = failed or f"other keys read at step {m}"
        error = max(error, _apart(fast, plain, same))
        slot = plain.position % config.window
        row = torch.arange(shape.rows, device=device)
        for ring in _RINGS:
            new, wanted = (getattr(rings, ring)[row, slot][same].float() for rings in (written, state))
            ring_error = max(ring_error, _distance(new, wanted) / (1 + float(wanted[wanted.isfinite()].abs().max())))
        hits += int(plain.match.hit.sum())
        searches += plain.match.hit.numel()
    ring_bound = max(BOUNDS[dtype], 1e-2 if config.ring_dtype != "auto" else 0.0)
    if not error < BOUNDS[dtype] or not ring_error < ring_bound:
        failed = failed or f"off by {error:.3g}, rings by {ring_error:.3g}"
    if others > 0.02 * searches:
        failed = failed or f"{others} of {searches} matches differ"
    return Check(name, steps, hits, searches, others, error, ring_error, failed)


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


def _apart(fast: MacStep, plain: MacStep, same: Tensor) -> float:
    pairs = [(getattr(fast, name), getattr(plain, name)) for name in ("output", "lse", "tail_lse")]
    pairs += [(fast.rows.o[:, 0], plain.rows.o[:, 0]), (fast.rows.lse[:, 0], plain.rows.lse[:, 0])]
    return max(_distance(left[same], right[same]) for left, right in pairs)


def _distance(left: Tensor, right: Tensor) -> float:
    """Largest absolute difference; equal infinities are equal, NaN is infinitely far."""
    if not left.numel():
        return 0.0
    apart = torch.where(left == right, 0.0, (left - right).abs())
    return float(torch.nan_to_num(apart, nan=torch.inf).max())

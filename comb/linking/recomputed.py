"""How recomputed tokens attend: a pass over scattered rows, under the mask by position or in a way that needs none.

Under the mask, which is the plain way, transformers repeats keys and values for each query head, and every row of a
pass is multiplied with all keys of the last one. On a CPU, `GroupedAttention`: heads that share keys are so many more
rows of one product, and few rows at a time look at no more keys than the last of them may see. On CUDA,
`VarlenAttention`: a run of neighbouring rows is causal attention over the prefix that ends where it does, and all runs
of a pass are one call of varlen attention (FlashAttention) with grouped heads.

Shapes: S rows in R runs, K keys that the last row sees, H query heads, G key/value heads, D and V channels.
"""

from __future__ import annotations

import functools
import inspect
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from comb.backbones.attention_calls import ANSWERING, Attended, AttentionCall, attention, stand_in
from comb.linking.cache import ScatteredRows
from comb.linking.masks import exact_attention
from comb.waits import on_device

logger = logging.getLogger(__name__)

_LEAST_KEYS = 512  # on a CPU; below, answering the calls takes longer than it saves
# Of a tile with the keys that it sees, over the mask's. On an H200 a call takes .68 of the mask's time at .56 of its
# tiles and 1.7 to 3 times as long at 4 times as many (docs/gpu.md): as long at 1 to 1.7.
_MOST_TILES = 1.0

_ROWS = 16  # that are taken at a time

TILE_ROWS = 128
"""Rows that flash attention computes at once, of one run and head."""
_BOUND = 2e-2  # of the kernel's first answer, relative per vector; right ones in bfloat16 have a fourth of it

Part = tuple[slice, int, Tensor]
VarlenFunction = Callable[..., Any]
"""As ``torch.nn.attention.varlen.varlen_attn``: query [S, H, D], keys and values [K, G, D] -> [S, H, D]."""

WindowedMasks = Sequence[tuple[Tensor, int | None]]
"""The masks of a pass, each with the sliding window that it shows; None: all earlier keys."""


@contextmanager
def recomputed_attention(model: Any, rows: ScatteredRows, masks: WindowedMasks) -> Iterator[None]:
    """Within it, passes of `model` over `rows` attend in the way of its device; eager attention keeps its mask."""
    way = chosen(rows, model.get_input_embeddings().weight.device.type)
    if way is None or exact_attention(model) != "sdpa":
        yield
        return
    with attention(model, stand_in("sdpa")):
        token = ANSWERING.set(way(rows, masks).attend)
        try:
            yield
        finally:
            ANSWERING.reset(token)


def chosen(rows: ScatteredRows, device: str) -> type[ScatteredAttention] | None:
    """What answers a pass over `rows`; None: the mask."""
    if device == "cuda":
        plan = RunPlan(tuple(rows.runs()))
        return VarlenAttention if plan.tiles <= _MOST_TILES * plan.masked_tiles else None
    return GroupedAttention if device == "cpu" and rows.length >= _LEAST_KEYS else None


class ScatteredAttention(ABC):
    """Answers calls under a mask of its pass over `rows`; what it can't answer is left to the exact attention."""

    def __init__(self, rows: ScatteredRows, masks: WindowedMasks) -> None:
        self.rows = rows
        self.masks = masks

    def attend(self, call: AttentionCall) -> Attended:
        """The call's output [1, S, H, V]."""
        known = next(((mask, window) for mask, window in self.masks if mask is call.mask), None)
        if known is None or known[0].dtype != torch.bool:
            return call.exact()
        whole = known[0].shape == (1, 1, len(self.rows.positions), call.keys.shape[2])
        alone = call.query.shape[0] == 1 and call.query.shape[1] % call.keys.shape[1] == 0
        takes = whole and alone and not call.dropout and call.options.get("position_bias") is None
        mixed = self.mixed(call, *known) if takes else None
        return call.exact() if mixed is None else (mixed, None)

    @abstractmethod
    def mixed(self, call: AttentionCall, mask: Tensor, window: int | None) -> Tensor | None:
        """The output [1, S, H, V] of a call with one row of a batch, under `mask` [1, 1, S, K]; None: not this call."""


class GroupedAttention(ScatteredAttention):
    """Part of the rows after part, each over the keys up to its last row."""

    def __init__(self, rows: ScatteredRows, masks: WindowedMasks) -> None:
        super().__init__(rows, masks)
        self._parts: list[tuple[Tensor, list[Part]]] = []  # of each mask of the pass that is running

    def mixed(self, call: AttentionCall, mask: Tensor, window: int | None) -> Tensor:
        groups = call.query.shape[1] // call.keys.shape[1]
        mixed = []
        for here, end, allowed in self.parts(mask, groups):
            rows = call.query[:, :, here].unflatten(1, (-1, groups)).flatten(2, 3)
            part = F.scaled_dot_product_attention(
                rows, call.keys[:, :, :end], call.values[:, :, :end], attn_mask=allowed, scale=call.scaling
            )
            mixed.append(part.unflatten(2, (groups, -1)).flatten(1, 2))
        return torch.cat(mixed, dim=2).transpose(1, 2).contiguous()

    def parts(self, mask: Tensor, groups: int) -> list[Part]:
        """Rows that are taken together, how many keys they see, and their mask [1, 1, groups * rows, keys]."""
        for known, parts in self._parts:
            if known is mask:
                return parts
        positions, made = self.rows.positions.tolist(), []
        for start in range(0, len(positions), _ROWS):
            here = slice(start, min(start + _ROWS, len(positions)))
            end = positions[here.stop - 1] + 1
            made.append((here, end, mask[:, :, here, :end].repeat(1, 1, groups, 1)))
        self._parts.append((mask, made))
        return made


@dataclass(frozen=True)
class RunPlan:
    """The runs of a pass as half-open ranges of positions; what a varlen call takes instead of a mask."""

    runs: tuple[tuple[int, int], ...]

    @property
    def rows(self) -> list[int]:
        """How many rows each run has."""
        return [end - start for start, end in self.runs]

    @property
    def keys(self) -> list[int]:
        """How many keys each run's last row sees."""
        return [end for _, end in self.runs]

    @property
    def tiles(self) -> int:
        """Tiles of rows times the keys that each is multiplied with, of one head."""
        return sum(-(-rows // TILE_ROWS) * keys for rows, keys in zip(self.rows, self.keys, strict=True))

    @property
    def masked_tiles(self) -> int:
        """The same under one mask over all rows."""
        return -(-sum(self.rows) // TILE_ROWS) * max(self.keys)

    def arguments(self, device: torch.device) -> dict[str, Any]:
        """``cu_seq_q`` and ``cu_seq_k`` [R + 1], ``seqused_k`` [R], int32 and sent in one copy, and the maxima."""
        counts = torch.tensor([0, *self.rows]).cumsum(0)
        sent = on_device(torch.cat([counts, torch.zeros_like(counts), torch.tensor(self.keys)]).int(), device)
        starts, keys, used = sent.split([len(counts), len(counts), len(self.runs)])
        most = {"max_q": max(self.rows), "max_k": max(self.keys)}
        return {"cu_seq_q": starts, "cu_seq_k": keys, "seqused_k": used, **most}


class VarlenAttention(ScatteredAttention):
    """One call of varlen attention for all rows of a layer.

    All sequences of that call begin at the same first key: ``cu_seq_k`` is zero throughout, ``seqused_k`` says where
    each ends, and causality is aligned to that end. Flash attention computes a tile of 128 rows for every run and head,
    however few rows the run has: many short runs are more work than one mask over all of them (`RunPlan.tiles`).
    """

    def __init__(self, rows: ScatteredRows, masks: WindowedMasks) -> None:
        super().__init__(rows, masks)
        self.plan = RunPlan(tuple(rows.runs()))
        self._sent: dict[torch.device, dict[str, Any]] = {}  # one copy for all layers of a pass

    def mixed(self, call: AttentionCall, mask: Tensor, window: int | None) -> Tensor | None:
        query, keys, values = (tensor[0].transpose(0, 1) for tensor in (call.query, call.keys, call.values))
        function = function_for(query, keys, values, windowed=window is not None)
        if function is None:
            return None
        if query.device not in self._sent:
            self._sent[query.device] = self.plan.arguments(query.device)
        mixed: Tensor = function(
            query, keys, values, **self._sent[query.device],
            scale=call.scale, window_size=(-1 if window is None else window - 1, 0),
        )  # fmt: skip
        return mixed[None]


def varlen_plain(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int,
    *, scale: float, window_size: tuple[int, int], seqused_k: Tensor,
) -> Tensor:  # fmt: skip
    """The specification of what is asked of varlen attention: sequence by sequence, causal up to its last used key.

    `window_size`: keys in front of a row's own that it sees (-1: all), and 0.
    """
    mixed = torch.empty(*query.shape[:2], value.shape[-1], dtype=query.dtype, device=query.device)
    bounds, firsts, used = cu_seq_q.tolist(), cu_seq_k.tolist(), seqused_k.tolist()
    groups = query.shape[1] // key.shape[1]
    for start, end, first, count in zip(bounds, bounds[1:], firsts, used, strict=False):
        assert end - start <= max_q
        assert count <= max_k
        places = torch.arange(count - (end - start), count, device=query.device)[:, None]
        at = torch.arange(count, device=query.device)
        seen = (at <= places) if window_size[0] < 0 else (at <= places) & (at >= places - window_size[0])
        keys, values = (
            tensor[first : first + count].transpose(0, 1).repeat_interleave(groups, 0) for tensor in (key, value)
        )
        part = F.scaled_dot_product_attention(
            query[start:end].transpose(0, 1)[None], keys[None], values[None], attn_mask=seen, scale=scale
        )
        mixed[start:end] = part[0].transpose(0, 1)
    return mixed


def torch_varlen() -> VarlenFunction:
    """Torch's varlen attention with `seqused_k`, windows and grouped heads: the public function where it takes them
    (2.13 does), else the operator below it, which has taken them for longer.
    """
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return _operator
    takes = inspect.signature(varlen_attn).parameters
    if not {"scale", "window_size", "seqused_k"} <= takes.keys():
        return _operator
    # versions that don't ask for it take grouped heads as they come
    return functools.partial(varlen_attn, enable_gqa=True) if "enable_gqa" in takes else varlen_attn


def _operator(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int,
    *, scale: float, window_size: tuple[int, int], seqused_k: Tensor,
) -> Tensor:  # fmt: skip
    """What `varlen_attn` calls; torch 2.9 to 2.13."""
    found: Tensor = torch.ops.aten._flash_attention_forward(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, 0.0, window_size == (-1, 0), False, scale=scale,
        window_size_left=window_size[0], window_size_right=window_size[1], seqused_k=seqused_k,
    )[0]  # fmt: skip
    return found


def function_for(query: Tensor, keys: Tensor, values: Tensor, *, windowed: bool) -> VarlenFunction | None:
    """What takes a call of these tensors' kind; None if nothing does, which is found out once for each kind."""
    if query.device.type == "cpu":
        return varlen_plain
    if query.dtype not in (torch.float16, torch.bfloat16) or query.shape[2] != values.shape[2]:
        return None
    return _checked(query.device, query.dtype, query.shape[1], keys.shape[1], query.shape[2], windowed)


@functools.cache
def _checked(
    device: torch.device, dtype: torch.dtype, heads: int, shared: int, width: int, windowed: bool
) -> VarlenFunction | None:
    function = torch_varlen()
    try:
        error = error_of(function, device, dtype, heads, shared, width, windowed=windowed)
    except (RuntimeError, TypeError, AttributeError, ValueError) as refused:
        logger.info("varlen attention isn't used for recomputed tokens: %s", refused)
        return None
    if not error <= _BOUND:
        logger.warning(
            "torch %s's varlen attention is off by %.2g on %s (%s, %d heads over %d, width %d): recomputed tokens "
            "attend under a mask instead", torch.__version__, error, device, dtype, heads, shared, width,
        )  # fmt: skip
        return None
    return function


def error_of(
    function: VarlenFunction, device: torch.device, dtype: torch.dtype, heads: int, shared: int, width: int,
    *, windowed: bool,
) -> float:  # fmt: skip
    """How far a small call of `function` is from `varlen_plain` in float32, relative, of every vector by its length."""
    plan = RunPlan(((3, 4), (9, 139), (139, 142), (200, 216), (330, 331)))
    rows, total = sum(plan.rows), max(plan.keys) + 7
    draw = torch.Generator().manual_seed(0)
    tensors = [
        # behind the last key lies what must not be read
        torch.randn(shape[1], shape[0], width, generator=draw).to(device, dtype).transpose(0, 1)
        for shape in ((rows, heads), (total, shared), (total, shared))
    ]
    for tensor in tensors[1:]:
        tensor[max(plan.keys) :] = torch.nan
    given = {**plan.arguments(device), "scale": width**-0.5, "window_size": (49 if windowed else -1, 0)}
    query, keys, values = (tensor.float() for tensor in tensors)
    with torch.inference_mode():
        found = function(*tensors, **given).float()
        wanted = varlen_plain(query, keys, values, **given)
    return float(((found - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max())

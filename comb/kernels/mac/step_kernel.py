"""One decode step of MAC attention by the kernels: the same inputs and results as `comb.kernels.mac.step.step`.

Differences: sums are taken in another order; with 16-bit keys, weights are rounded to 16 bits. Heads that share a
key/value head share what is loaded, so a value that isn't finite spreads to those of them that didn't need it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from comb.kernels.launch import Launch
from comb.kernels.mac.attend import attend_spans
from comb.kernels.mac.config import MacConfig
from comb.kernels.mac.match_kernel import nearest_in_tiles
from comb.kernels.mac.merge import merge_spans
from comb.kernels.mac.schedule import make_schedule
from comb.kernels.mac.state import MacState, RingEntries
from comb.kernels.mac.step import MacStep


def mac_step_triton(
    state: MacState,
    unrotated: Tensor,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    start: Tensor,
    config: MacConfig,
    scale: float,
    *,
    write: bool = False,
    launch: Launch | None = None,
) -> MacStep:
    """Attention of one new token per row, its own key included. Never waits for the device.

    Args:
        unrotated, query, keys, values, start, config, scale: as in `comb.kernels.mac.step.step`.
        write: puts the step's rows into the rings as well; ``state.write(result.rows)`` is some launches more.
    """
    launch = launch or Launch()
    unrotated, query, keys, values = (_adjacent(tensor) for tensor in (unrotated, query, keys, values))
    groups = keys.shape[1]
    position = keys.shape[2] - 1 - start
    with torch.cuda.device_of(query):  # triton launches on the current device, wherever the tensors are
        near, near_pos = nearest_in_tiles(state, unrotated, position, config, launch)
        schedule = make_schedule(near, near_pos, position, groups, state.window, config, launch)
        pieces = attend_spans(query, keys, values, start, position, schedule, config, scale, launch)
        merged = merge_spans(state, unrotated, position, schedule, pieces, write=write)
    rows = RingEntries(
        query=unrotated.to(merged.output.dtype)[:, None],
        o=merged.entry_o[:, None],
        lse=merged.entry_lse[:, None],
        chain=merged.chain[:, None],
        drift=merged.drift[:, None],
        pos=position[:, None],
    )
    return MacStep(
        merged.output, rows, schedule.match, position, schedule.keys_read, schedule.group_keys_read,
        merged.tail_lse, merged.lse,
    )  # fmt: skip


def _adjacent(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()

"""Constants of the break-even rule, measured: exact attention and a step of MAC, timed as a session runs them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import torch

from comb.backbones.attention_calls import AttentionCall
from comb.kernels.mac.config import MacConfig
from comb.kernels.mac.dispatch import computed_step
from comb.kernels.mac.state import MacState
from comb.kernels.mac.step import MacStep
from comb.mac.breakeven import AttentionShape, Costs, fit_costs
from comb.mac.rotation import LayerQueries

# keys and values of one layer: more than the device's caches hold
_BYTES = {"cpu": 2**27, "cuda": 2**29}
_MOST_TOKENS = 2**17
_BATCHES, _BATCH_S, _MOST_CALLS = 3, 0.02, 20


def shape_of(call: AttentionCall) -> AttentionShape:
    """What decides how many bytes `call` reads per key."""
    heads, width = call.query.shape[1], call.query.shape[3]
    return AttentionShape(heads, call.keys.shape[1], width, call.values.shape[-1], call.keys.element_size())


@torch.no_grad()
def measure_costs(call: AttentionCall, queries: LayerQueries, config: MacConfig) -> Costs:
    """Costs of attention like `call`'s [B, H, 1, D], in some tenths of a second.

    Exact attention at two lengths, and steps of MAC whose heads all reuse the oldest query of the window. Python's
    share is part of what is measured, as it is of what a session takes. No random numbers are drawn: who samples in the
    session gets the same tokens.
    """
    rows, shape, device = call.query.shape[0], shape_of(call), call.query.device
    fitting = _budget(device) // (rows * shape.key_bytes)
    length = max(min(fitting, _MOST_TOKENS), 2 * config.hit_keys())
    whole = at_length(call, length)
    exact = []
    for tokens in (length // 4, length):
        one = replace(whole, keys=whole.keys[:, :, :tokens], values=whole.values[:, :, :tokens])
        exact.append((float(rows * tokens * shape.key_bytes), seconds(one.exact, device)))
    read = rows * (config.hit_keys() * shape.key_bytes + config.window * shape.query_bytes)
    reused = float(read), seconds(reusing(whole, queries, config), device)
    try:
        return fit_costs(exact, [reused])
    except ValueError:  # too fast or too noisy to see what reading costs: then MAC saves nothing that could be seen
        return Costs(exact_s=exact[-1][1], mac_s=reused[1], bytes_per_s=float("inf"))


def at_length(call: AttentionCall, length: int) -> AttentionCall:
    """A call like this one over so many keys, all alike."""
    keys, values = (t.new_full((*t.shape[:2], length, t.shape[-1]), 0.1) for t in (call.keys, call.values))
    return replace(call, query=torch.full_like(call.query, 0.1), keys=keys, values=values, mask=None)


def reusing(call: AttentionCall, queries: LayerQueries, config: MacConfig) -> Callable[[], MacStep]:
    """A step of MAC in place of `call` (of `at_length`) in which all heads reuse the oldest query of the window."""
    # nothing but the price counts here: everything hits
    config = replace(config, min_length=0, tau=0.0, max_drift=False, gate=None if config.gate is None else 0.0)
    query, keys, values, device = call.query, call.keys, call.values, call.query.device
    (rows, heads, _, width), last = query.shape, keys.shape[2] - 1
    position = torch.full((1, 1), last, device=device)
    state = MacState.empty(rows, heads, width, values.shape[-1], config, query)
    state.query.copy_(queries.unrotated(query, position).transpose(1, 2).expand_as(state.query))
    state.lse.zero_()
    latest = torch.arange(last - config.window, last, device=device)
    state.pos[:, latest % config.window] = latest
    start = torch.zeros(rows, dtype=torch.long, device=device)

    def reuse() -> MacStep:
        unrotated = queries.unrotated(query, position)[:, :, 0]
        with torch.autocast(device.type, enabled=False):  # as in a session
            return computed_step(state, unrotated, query[:, :, 0], keys, values, start, config, call.scale)[0]

    return reuse


def _budget(device: torch.device) -> int:
    most = _BYTES.get(device.type, _BYTES["cpu"])
    return min(most, torch.cuda.mem_get_info(device)[0] // 4) if device.type == "cuda" else most


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """Of one call: the best of some batches of calls, each of which waits for the device only at its end."""

    def batch(calls: int) -> float:
        _wait(device)
        begun = time.perf_counter()
        for _ in range(calls):
            call()
        _wait(device)
        return (time.perf_counter() - begun) / calls

    batch(1)  # compiles
    calls = min(_MOST_CALLS, max(1, int(_BATCH_S / batch(1))))
    return min(batch(calls) for _ in range(_BATCHES))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

"""The break-even rule of a session: whether reuse pays in a layer at a step, by costs that are given or measured."""

from __future__ import annotations

from typing import Any

from comb.backbones.attention_calls import AttentionCall
from comb.kernels.mac.config import MacConfig
from comb.mac.breakeven import Costs, least_context, pays_reading
from comb.mac.measure import measure_costs, shape_of
from comb.mac.rotation import LayerQueries

HIT_RATE = 0.99
"""Of one query head, that a session counts on unless told otherwise."""


class BreakEvenRule:
    """Asked at every step; what it needs is found out once per batch size and layer, by index.

    Args:
        model: measured costs are kept on it, for later sessions.
        enabled: False lets everything pay.
        costs: None: measured.
        hit_rate: of one query head, that the rule counts on.
    """

    def __init__(self, model: Any, *, enabled: bool, costs: Costs | None, hit_rate: float) -> None:
        self.model, self.enabled, self.costs, self.hit_rate = model, enabled, costs, hit_rate
        self._known: dict[tuple[int, int], tuple[Costs, int | None]] = {}

    def pays(self, call: AttentionCall, layer: int, queries: LayerQueries, config: MacConfig) -> bool:
        """Whether a step of MAC is at least as fast as this exact one."""
        if not self.enabled:
            return True
        rows = call.query.shape[0]
        if (rows, layer) not in self._known:
            costs = self.costs or self._measured(call, queries, config)
            self._known[rows, layer] = costs, least_context(rows, self.hit_rate, shape_of(call), config, costs)
        _, least = self._known[rows, layer]
        return least is not None and call.keys.shape[2] >= least

    def never_pays(self, rows: int, layer: int) -> bool:
        """Whether no context is long enough, as far as is known."""
        return (rows, layer) in self._known and self._known[rows, layer][1] is None

    def pays_at(self, share: float, call: AttentionCall, layer: int, config: MacConfig) -> bool:
        """Whether it pays if this share of the keys is read, rather than what `hit_rate` makes of it."""
        rows, length = call.query.shape[0], call.keys.shape[2]
        if (rows, layer) not in self._known:
            return True
        costs, _ = self._known[rows, layer]
        return pays_reading(share, length, rows, shape_of(call), config, costs)

    def pays_from(self) -> dict[int, int | None]:
        """By rows of a batch, the context from which on all layers pay; None: some never do."""
        found: dict[int, int | None] = {}
        for (rows, _), (_, least) in self._known.items():
            known = found.get(rows, 0)
            found[rows] = None if least is None or known is None else max(least, known)
        return found

    def _measured(self, call: AttentionCall, queries: LayerQueries, config: MacConfig) -> Costs:
        kept: dict[Any, Costs] = self.model.__dict__.setdefault("_comb_mac_costs", {})
        key = call.query.shape[0], shape_of(call), str(call.query.device), call.query.dtype, config
        if key not in kept:
            kept[key] = measure_costs(call, queries, config)
        return kept[key]

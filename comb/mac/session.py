"""`with mac(model, config) as session: model.generate(...)`: MAC attention on a Hugging Face model, for a while.

The model's attention is set to one registered with transformers; hooks on its decoder say where a pass begins and ends
and which cache it uses. Prompts are computed by the exact attention, and leave their rows; a step of one token per row
goes through `step`; whatever that can't handle is computed exactly, and counted by its reason. Leaving the block
restores everything. The model's lock is held inside of it: engines wait, plain `generate` of other threads doesn't.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from comb.backbones.attention_calls import ANSWERING, STAND_INS, Attended, AttentionCall, attention, stand_in
from comb.backbones.forward import cache_in, decoder_of
from comb.backbones.identity import backbone_of
from comb.backbones.torch_private import base_of, writes
from comb.backbones.transformers_private import attention_name
from comb.kernels.dispatch import computed_step
from comb.kernels.mac.mac_config import MacConfig
from comb.kernels.mac.state import MacState, rows_to_keep, write_prompt
from comb.locks import held_here, lock_of
from comb.mac.accounting import LayerCounts, MacReport
from comb.mac.passes import DecoderPass, PassReader, cache_layer, why_exact
from comb.mac.rotation import LayerQueries, find_queries

_SHORT = "below min_length"


@dataclass(frozen=True)
class KeysIdentity:
    """Whether a cache still holds the keys [B, G, L, D] that a pass left in it, without reading or keeping them.

    A summary is right only for the keys that it was made from. transformers' caches replace their tensors when they
    grow, are reordered (beams) or repeated, and cut views from them when they are cropped; the cache that linking makes
    is written in place. So a layer goes on from what was seen if its tensor is the one seen last, or a beginning of it,
    and nobody wrote into it since. Anything else counts as another prompt.
    """

    root: weakref.ref[Tensor]
    pointer: int
    version: int
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, layer: Any) -> KeysIdentity | None:
        """What `layer` of a cache holds now; None if it holds nothing."""
        keys = getattr(layer, "keys", None)
        if not isinstance(keys, Tensor) or not keys.numel():
            return None
        root, (rows, heads, _, width) = base_of(keys), keys.shape
        return cls(weakref.ref(root), keys.data_ptr(), writes(root), (rows, heads, width, *keys.stride()))

    def continues(self, now: KeysIdentity | None) -> bool:
        """Whether these are the same keys `now`, or a beginning of them, or have grown behind them where they lie."""
        if now is None or now.root() is not self.root():
            return False
        return (now.pointer, now.version, now.sizes) == (self.pointer, self.version, self.sizes)


@dataclass
class _LayerState:
    """What the session knows of one layer: `seen` are the keys that the rings are of, `off` why it is left alone."""

    queries: LayerQueries
    off: str
    state: MacState | None = None
    start: Tensor | None = None
    seen: KeysIdentity | None = None
    counts: LayerCounts | None = None


class MacSession:
    """MAC attention on `model` inside of a ``with`` block; made by `mac`.

    Holds the rings of one batch at a time: that of the cache which was used last. While a thread's pass is under way,
    those of others are exact. Entered again, it goes on counting, and layers that an audit has switched off stay off.

    Raises:
        UnsupportedModelError: on entering, when MAC can't stand in for the model's attention.
        RuntimeError: on entering, when a session is on this model already.
    """

    def __init__(self, model: Any, config: MacConfig) -> None:
        self.backbone = backbone_of(model)
        self.config = config
        self.steps = 0
        self.prompts = 0
        self.exact: Counter[str] = Counter()
        self.events: Counter[str] = Counter()
        self._layers: dict[int, _LayerState] = {}
        self._pass: DecoderPass | None = None
        self._token: Any = None
        self._thread: int | None = None  # whose pass it is
        self._claiming = threading.Lock()
        self._stack = ExitStack()

    # ---- the block ----

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(lock_of(self.backbone))
            before = held_here.get()
            held_here.set((*before, self.backbone))
            stack.callback(held_here.set, before)
            name = attention_name(self.backbone)
            if name in STAND_INS:
                raise RuntimeError("a MAC session is on this model already: leave it first, or use that one")
            for index, queries in find_queries(self.backbone).items():
                layer = self._layers.setdefault(index, _LayerState(queries, queries.unknown))
                layer.queries = queries  # anew where weights have changed since the session was left
            stack.enter_context(attention(self.backbone, stand_in(name)))
            decoder = decoder_of(self.backbone)
            self._reader = PassReader(decoder)
            stack.callback(decoder.register_forward_pre_hook(self._begin, with_kwargs=True).remove)
            stack.callback(decoder.register_forward_hook(self._finish, with_kwargs=True, always_call=True).remove)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()
        self._end_pass()  # torch calls no hooks behind a KeyboardInterrupt
        for layer in self._layers.values():
            layer.state = layer.seen = None

    def report(self) -> MacReport:
        """What was reused, read and left to exact attention since the session began."""
        layers = tuple(
            layer.counts.report(index, layer.off)
            for index, layer in sorted(self._layers.items())
            if layer.counts is not None
        )
        return MacReport(self.steps, self.prompts, layers, dict(self.exact), dict(self.events), self.nbytes)

    @property
    def nbytes(self) -> int:
        return sum(state.nbytes for state in self.states().values())

    def states(self) -> dict[int, MacState]:
        """The rings by layer, as they are now."""
        return {index: layer.state for index, layer in self._layers.items() if layer.state is not None}

    # ---- a pass ----

    def _begin(self, decoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with self._claiming:
            if self._thread not in (None, threading.get_ident()):
                self.events["pass beside another thread's"] += 1
                return
            self._end_pass()  # an exception may have kept this thread's last one from finishing
            self._thread = threading.get_ident()
        if attention_name(self.backbone) not in STAND_INS:
            # somebody has put another attention in place, and what it does to the cache isn't seen
            for layer in self._layers.values():
                layer.seen = None
            return
        self._pass = self._reader.read(args, kwargs)
        if self._pass.decodes:
            self.steps += 1
            self._pass.audited = self.config.audit_every > 0 and self.steps % self.config.audit_every == 0
        else:
            self.prompts += 1
        events = set()
        for index, layer in self._layers.items():  # rings of other keys than those that were seen last are emptied
            if layer.state is None:
                continue
            now = KeysIdentity.of(cache_layer(self._pass.cache, index))
            if layer.seen is None or not layer.seen.continues(now):
                events.add("new prompt" if now is None else "cache changed")
                layer.state = layer.start = None
        self.events.update(events)
        self._token = ANSWERING.set(self.attend)

    def _finish(self, decoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if self._thread != threading.get_ident():
            return
        if current := self._pass:
            cache = current.cache
            if cache is None:  # the model has made one
                cache = cache_in(output) if isinstance(output, Mapping) else None
            for index, layer in self._layers.items():
                if layer.state is not None:
                    layer.seen = KeysIdentity.of(cache_layer(cache, index))
        self._end_pass()  # from here on, the rings may be another thread's

    def _end_pass(self) -> None:
        token, self._token, self._pass, self._thread = self._token, None, None, None
        if token is not None:
            with suppress(ValueError):  # another thread's, where it goes on asking `attend`
                ANSWERING.reset(token)

    # ---- a layer ----

    def attend(self, call: AttentionCall) -> Attended:
        """Answers one attention call of the pass under way."""
        current = self._pass
        if current is None or self._thread != threading.get_ident():
            return call.exact()  # the block was left while this thread's pass was under way
        index = getattr(call.module, "layer_idx", None)
        layer = self._layers.get(index) if isinstance(index, int) else None
        if layer is None or call.module is not layer.queries.module:
            return call.exact()  # another attention than the decoder's own layers
        reason = layer.off or why_exact(call, current, index)
        if current.decodes and not reason and call.keys.shape[2] - 1 < self.config.min_length:
            reason = _SHORT
        if reason and current.decodes:
            self.exact[reason] += 1
        if reason and reason != _SHORT:
            if layer.state is not None and layer.start is not None:
                # this pass leaves no rows, and those of an earlier one at its positions are of other tokens
                layer.state.crop(current.key_indices(call)[0] - layer.start)
            return call.exact()
        if call.values.dtype != call.keys.dtype:  # under autocast, in caches of transformers 5.24
            call = replace(call, values=call.values.to(call.keys.dtype))
        # autocast would take sums in 16 bits
        with torch.autocast(call.query.device.type, enabled=False):
            return self._reuse(call, layer, current, decodes=current.decodes and not reason)

    def _reuse(self, call: AttentionCall, layer: _LayerState, current: DecoderPass, *, decodes: bool) -> Attended:
        """Exact attention that leaves rows, or one step of MAC."""
        config = self.config
        heads, tokens = call.query.shape[1:3]
        assert current.start is not None
        start = current.start.to(call.query.device)
        index = current.key_indices(call)
        positions = index[None] if current.positions is None else current.positions.to(start.device)
        if layer.state is None or layer.start is None:
            sizes = len(start), heads, call.query.shape[-1], call.values.shape[-1]
            layer.state = MacState.empty(*sizes, config, call.query)
        elif layer.start is not start and not torch.equal(layer.start, start):
            self.events["padding changed"] += 1
            layer.state.invalidate(layer.start != start)
        layer.start, state = start, layer.state
        state.crop(index[0] - start)
        if not decodes:
            output = call.exact()
            here = current.key_indices(call, torch.device("cpu"))
            if kept := rows_to_keep(here, config):
                query = call.query[:, :, -kept:]
                unrotated = layer.queries.unrotated(query, positions.expand(-1, tokens)[:, -kept:])
                given = call.keys, call.values, here[-kept:], start, config, call.scale
                write_prompt(state, unrotated, query, *given)
            return output
        unrotated = layer.queries.unrotated(call.query, positions)[:, :, 0]
        query = call.query[:, :, 0]
        done, plain = computed_step(state, unrotated, query, call.keys, call.values, start, config, call.scale)
        if plain:
            self.events[f"no kernels: {plain}"] += 1
        if layer.counts is None:
            layer.counts = LayerCounts(call.query.device)
        layer.counts.add(done, config)
        if current.audited:
            exact = call.exact()
            error = layer.counts.audit(done, exact[0][:, 0])
            bound = config.audit_bound
            if bound is not None and not error <= bound:  # NaN is an error, too
                layer.off = f"audit: error {error:.3f} above {bound:g}"
                layer.state = None
                return exact
        return done.output.to(call.query.dtype)[:, None], None


def mac(model: Any, config: MacConfig | str | None = None, **changes: Any) -> MacSession:
    """MAC attention on `model` (a causal LM, or a COMB model's backbone) for the length of a ``with`` block.

    Args:
        config: a `MacConfig`, or a preset as `MacConfig.parse` reads it; the paper's context preset by default.
        changes: of the configuration: ``mac(model, "generation", band=128)``.

    Raises:
        ValueError: for a configuration that isn't one.
    """
    chosen = MacConfig.context() if config is None else MacConfig.parse(config) if isinstance(config, str) else config
    return MacSession(model, replace(chosen, **changes))

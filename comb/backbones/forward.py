"""Runs a backbone's decoder stack, without its head, through the interfaces that all of transformers shares; counts the
tokens that pass through it, and the time of its stages.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    LinearAttentionCacheLayerMixin,
)

from comb.waits import on_device


def decoder_of(model: Any) -> Any:
    """The stack of decoder layers with embeddings and final norm; the model itself where it has no such part."""
    find = getattr(model, "get_decoder", None)
    decoder = find() if callable(find) else None
    # transformers goes by the name, and ModernBERT's output head is called `decoder`
    reads = decoder is not None and "input_ids" in inspect.signature(decoder.forward).parameters
    return decoder if reads else getattr(model, "base_model", model)


def takes_positions(model: Any) -> bool:
    """Whether positions can be given from outside; ALiBi models count keys instead."""
    return "position_ids" in inspect.signature(decoder_of(model).forward).parameters


CACHES = ("cache", "past_key_values", "cache_params")
"""Names of the cache: in transformers from 5.24 on, in versions before, and there in models that keep states alone."""


def cache_argument(model: Any) -> str:
    """Under which name a forward pass of `model`, and its `generate`, take a cache."""
    names = inspect.signature(decoder_of(model).forward).parameters
    return next((name for name in CACHES if name in names), CACHES[1])


def cache_in(named: Mapping[str, Any]) -> Any:
    """The cache among the arguments or the results of a pass; None where there is none."""
    return next((named[name] for name in CACHES if named.get(name) is not None), None)


def run_decoder(
    model: Any,
    input_ids: Tensor,
    cache: Cache,
    *,
    position_ids: Tensor | None = None,
    attention_mask: Tensor | Mapping[str, Tensor | None] | None = None,
) -> Tensor:
    """Last hidden states [rows, tokens, hidden] of `input_ids` [rows, tokens] behind what `cache` holds."""
    device = model.get_input_embeddings().weight.device
    arguments: dict[str, Any] = {"input_ids": on_device(input_ids, device), "use_cache": True}
    arguments[cache_argument(model)] = cache
    if position_ids is not None:
        arguments["position_ids"] = on_device(position_ids, device)
    if isinstance(attention_mask, Mapping):
        arguments["attention_mask"] = {
            kind: None if mask is None else on_device(mask, device) for kind, mask in attention_mask.items()
        }
    elif attention_mask is not None:
        arguments["attention_mask"] = on_device(attention_mask, device)
    hidden: Tensor = decoder_of(model)(**arguments)[0]
    count_tokens(input_ids.numel())
    count_in(cache, input_ids.shape[1])
    return hidden


# --- caches of models whose layers all keep a state (Mamba, Mamba-2, Falcon-Mamba) -------------------------
# Nothing in such a cache says how many tokens it has seen, and transformers' `generate` hands over the whole prompt
# whatever a given cache covers already (seen in 5.16 to 5.24).


class StateCache(DynamicCache):
    """A cache of states alone. Who feeds a model, or puts states there, counts the tokens in `num_tokens`."""

    # transformers compiles decoding for every cache that could be, on a GPU, unless its type is DynamicCache itself
    is_compileable = False

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.num_tokens = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.num_tokens


def empty_cache_of(model: Any) -> Cache:
    """An empty cache as the configuration describes it: with windows, states, or nothing but states."""
    cache = DynamicCache(config=model.config)
    # layers of hybrids are both
    only_states = [
        isinstance(layer, LinearAttentionCacheLayerMixin) and not isinstance(layer, DynamicLayer)
        for layer in cache.layers
        if not keeps_nothing(layer)
    ]
    return StateCache(config=model.config) if only_states and all(only_states) else cache


def keeps_nothing(layer: Any) -> bool:
    """Whether a layer of a cache is the place of one that never puts anything there: an MLP, or one that reads another
    layer's keys. Up to transformers 5.22 an MLP has an empty layer of states there."""
    return not isinstance(layer, CacheLayerMixin | LinearAttentionCacheLayerMixin)


def count_in(cache: Cache | None, tokens: int) -> None:
    """Says that `cache` covers so many tokens more; caches with keys know that by themselves."""
    if isinstance(cache, StateCache):
        cache.num_tokens += tokens


@contextmanager
def generating_behind(model: Any, cache: Cache | None) -> Iterator[None]:
    """For one `generate` that goes on from `cache`: the first pass gets what isn't covered, and all are counted."""
    if not isinstance(cache, StateCache):
        yield
        return
    covered = cache.num_tokens

    def cut(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        nonlocal covered
        if cache_in(kwargs) is not cache:  # one of `generate`'s own, as with guidance_scale
            return args, kwargs
        ids = (args[0] if args else kwargs["input_ids"])[:, covered:]
        covered = 0
        mask = kwargs.get("attention_mask")
        count_in(cache, ids.shape[1])
        changed = {**kwargs, "attention_mask": None if mask is None else mask[:, -ids.shape[1] :]}
        return ((ids, *args[1:]), changed) if args else (args, {**changed, "input_ids": ids})

    # not on the model itself: what is wrapped around it (an encoder, peft) calls the one inside
    handle = decoder_of(model).register_forward_pre_hook(cut, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
    if covered:
        raise RuntimeError(
            f"{type(model).__name__} ran without this hook, and computed what the cache covers twice: torch.compile "
            "ignores hooks that come later unless torch._dynamo.config.skip_nnmodule_hook_guards = False"
        )


# --- how many tokens have passed, and where the time went ---------------------------------------------------


@dataclass
class PassCount:
    """Tokens that have passed through a backbone's decoder; through some of its layers, that share of one."""

    tokens: float = 0.0


_counted: ContextVar[PassCount | None] = ContextVar("where passes of this thread are counted", default=None)


@contextmanager
def counted_passes() -> Iterator[PassCount]:
    """Counts what `run_decoder` takes inside of the block, in this thread; a nested block counts for itself."""
    count = PassCount()
    token = _counted.set(count)
    try:
        yield count
    finally:
        _counted.reset(token)


def count_tokens(tokens: float) -> None:
    """Adds to the count that is being taken, if one is."""
    count = _counted.get()
    if count is not None:
        count.tokens += tokens


class StageTimes(Mapping[str, float]):
    """Seconds by the name of the stage, so far.

    On a GPU, a stage begins and ends with an event in the stream of its work; the host waits for one only where
    somebody reads the times. Elsewhere it is the host's clock.

    Args:
        device: which does the work. stages: that are there from the start, with zero seconds.
    """

    def __init__(self, device: torch.device, *stages: str) -> None:
        self.device = device
        self._seconds = dict.fromkeys(stages, 0.0)
        self._open: list[tuple[str, float, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def timed(self, stage: str, *, within: str | None = None) -> Iterator[None]:
        """Adds the time of the body to `stage`, and takes it from the stage `within` which it runs."""
        shares = [(stage, 1.0), *([] if within is None else [(within, -1.0)])]
        if self.device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            stream = torch.cuda.current_stream(self.device)
            begin.record(stream)
            try:
                yield
            finally:
                end.record(stream)
                self._open += [(name, sign, begin, end) for name, sign in shares]
            return
        begun = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - begun
            for name, sign in shares:
                self._seconds[name] = self._seconds.get(name, 0.0) + sign * seconds

    def _settled(self) -> dict[str, float]:
        for stage, sign, begin, end in self._open:
            end.synchronize()
            self._seconds[stage] = self._seconds.get(stage, 0.0) + sign * begin.elapsed_time(end) / 1000
        self._open.clear()
        return self._seconds

    def __getitem__(self, stage: str) -> float:
        return self._settled()[stage]

    def __iter__(self) -> Iterator[str]:
        return iter(self._settled())

    def __len__(self) -> int:
        return len(self._settled())

"""How it is noticed that a model has changed: by its settings, and by a sample of its weights' bytes.

Settings are what decides beside the weights what a model computes: plain attributes of its modules, its configuration,
hooks, and forwards that were put in place of a class's own. They are compared by identity first, all of a model in less
than 0.1 ms. What a pass itself writes (the length that a rotary embedding has in mind) says nothing about the model:
`Settings.learn` is told behind a pass.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from comb.backbones.names import NOTES, Names, counts, equal
from comb.backbones.torch_private import hook_dicts_of, volatile_buffers_of, writes

RUN_STATE = "_comb_run_state"
"""The attribute of a module that says what passes were seen to write, and what was there before."""
UNREAD = ("_name_or_path", "_commit_hash", "use_cache", "transformers_version", "output_attentions",
          "output_hidden_states", "pad_token_id")  # fmt: skip
"""What of a configuration says nothing of what is computed."""
# and what is set for a while to look into attention
_PASSING = (*UNREAD, "_attn_implementation", "_experts_implementation", "_output_attentions", "_output_hidden_states")
_ABSENT = object()
# where hooks are made that leave what is computed: comb's come and go, transformers' look at outputs and gradients
_WATCHING = ("comb.", "comb_training.", "comb_serving.", "transformers.utils.output_capturing",
             "transformers.modeling_utils")  # fmt: skip


class Settings:
    """What they are now, and whether they still are. It keeps no module alive."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self._ids = list(map(id, modules))
        self._kept = [dict(vars(module)) for module in modules]
        self._hooks = hook_dicts_of(modules)
        self._hooked = _hooked(self._hooks)
        kinds: list[Any] = list(dict.fromkeys(map(type, modules)))
        self._classes = [(kind, kind.forward) for kind in kinds]
        self._configs = _configs(modules)
        self._buffers = [
            (place, name, buffer, writes(buffer)) for place, module in enumerate(modules)
            for name, buffer in volatile_buffers_of(module).items() if name not in run_state(module)
        ]  # fmt: skip

    @property
    def buffers(self) -> list[Tensor]:
        """Those that a checkpoint doesn't hold, which are looked at with the weights."""
        return [buffer for _, _, buffer, _ in self._buffers]

    def holds(self, modules: list[nn.Module]) -> bool:
        """Whether a model's settings are still these, but for what its own passes write."""
        if list(map(id, modules)) != self._ids or any(kind.forward is not forward for kind, forward in self._classes):
            return False
        if (any(self._hooks) or self._hooked) and _hooked(self._hooks) != self._hooked:
            return False
        return not (any(_differs(vars(config), kept) for config, kept in self._configs) or self._changed(modules))

    def learn(self, modules: list[nn.Module]) -> bool:
        """Behind a pass, with nobody else's in between: values (no functions) that are others than in front of it are
        the pass's own. Returns whether there are fewer `buffers` to look at."""
        before, changed = len(self._buffers), self._changed(modules)
        names = Names(modules if changed else ())
        for module, name, value in changed:
            if not callable(value) and not callable(vars(module).get(name)):
                vars(module).setdefault(RUN_STATE, {})[name] = None if value is _ABSENT else names.of(value)
        self._buffers = [each for each in self._buffers if each[1] not in run_state(modules[each[0]])]
        return len(self._buffers) < before

    def _changed(self, modules: list[nn.Module]) -> list[tuple[nn.Module, str, Any]]:
        """Attributes and buffers that are others now, and what they were."""
        found: list[tuple[nn.Module, str, Any]] = [
            (modules[place], name, buffer) for place, name, buffer, count in self._buffers
            if modules[place]._buffers.get(name) is not buffer or writes(buffer) != count
        ]  # fmt: skip
        with suppress(Exception):  # tensors, arrays, whatever can't be compared
            if list(map(vars, modules)) == self._kept:  # identical objects aren't asked
                return found
        names = Names(modules)
        for module, kept in zip(modules, self._kept, strict=True):
            now, state = vars(module), run_state(module)
            for name in now | kept:
                before, behind = kept.get(name, _ABSENT), now.get(name, _ABSENT)
                if before is behind or not counts(name) or name in state:
                    continue
                if names.of(before) != names.of(behind):
                    found.append((module, name, before))
        if not found:  # values that say the same: next time nothing is to be looked into
            self._kept = [dict(vars(module)) for module in modules]
        return found


def described(module: nn.Module, names: Names) -> str:
    """One module's settings as text."""
    state = {name: value for name, value in vars(module).get(RUN_STATE, {}).items() if value is not None}
    own = {**vars(module), **volatile_buffers_of(module)}
    written = run_state(module)
    known = {name: names.of(value) for name, value in own.items() if name not in written and counts(name)}
    if isinstance(module, PreTrainedModel):  # which notes how it was loaded
        known = {name: value for name, value in known.items() if name[0] != "_" and not isinstance(own[name], NOTES)}
    hooks = [names.of(hook) for _, hook in _hooked(hook_dicts_of([module]))]
    return f"{names.of(type(module))} {names.of(type(module).forward)} {sorted({**known, **state}.items())} {hooks}"


def run_state(module: nn.Module) -> Set[str]:
    """Names of attributes and buffers that passes write: those seen to be, and those of transformers' embeddings that
    change with length."""
    own = vars(module)
    seen: Set[str] = own.get(RUN_STATE, {}).keys()
    kinds = str(own.get("rope_type"))
    if "dynamic" not in kinds and "longrope" not in kinds:
        return seen
    written = ("inv_freq", "max_seq_len_cached", *(("attention_scaling",) if "dynamic" in kinds else ()))
    names = (name for name in (*own, *module._buffers) if name.endswith(written) and "original_inv_freq" not in name)
    return seen | set(names)


def _hooked(hooks: list[Mapping[int, Callable[..., Any]]]) -> list[tuple[int, Any]]:
    """Hooks that may give something else to compute with, each with the place of its module."""
    every = ((place, hook) for place, each in enumerate(hooks) for hook in each.values())
    return [each for each in every if not str(getattr(each[1], "__module__", "")).startswith(_WATCHING)]


def _configs(modules: list[nn.Module]) -> list[tuple[Any, dict[str, Any]]]:
    """The configurations that modules read, and those inside of them, each with a copy of what it holds."""
    found: dict[int, tuple[Any, dict[str, Any]]] = {}
    ahead = [config for module in modules if (config := vars(module).get("config")) is not None]
    while ahead:
        config = ahead.pop()
        if id(config) in found or not hasattr(config, "to_dict") or not hasattr(config, "__dict__"):
            continue
        _, kept = found[id(config)] = config, dict(vars(config))
        for name, value in vars(config).items():
            with suppress(Exception):  # what can't be copied, or not told from its copy, goes by itself
                if not hasattr(value, "to_dict") and equal(value, copied := copy.deepcopy(value)):
                    kept[name] = copied
        ahead += vars(config).values()
    return list(found.values())


def _differs(now: dict[str, Any], kept: dict[str, Any]) -> bool:
    with suppress(Exception):
        if now == kept:
            return False
    return any(not equal(now.get(name), kept.get(name)) for name in now | kept if not name.startswith(_PASSING))


# --- a sample of the weights, by which writes are noticed that nobody counts --------------------------------
# Of each tensor, all where that is little, else runs of 64 bytes (what a CPU fetches at once), spread over its rows and
# columns. What writes a matrix through `.data` (an adapter exchanged in place, an average, weights sent by a trainer)
# changes some of them, even in 16 bits where most small updates round to nothing. Single elements may be missed.

_RUN = 64  # bytes
_RUNS = 2**12  # of a model, about
_LEAST, MOST = 8, 256  # of one tensor
_ODD = 0x1E3779B97F4A7C15
_SLICE = 4096  # bytes of an expert's matrix, which may be exchanged alone, or more


class Sample:
    """What some tensors hold at some places, and whether they still do.

    Args:
        tensors: strided ones; those without data (on the meta device) aren't looked at.
        closer: for some of them, by their index, how many runs at least.
    """

    def __init__(self, tensors: Sequence[Tensor], closer: Mapping[int, int]) -> None:
        runs = min(max(_RUNS // max(len(tensors), 1), _LEAST), MOST)
        places = {
            index: _places(tensor, max(runs, closer.get(index, 0)))
            for index, tensor in enumerate(tensors) if tensor.numel() and not tensor.is_meta
        }  # fmt: skip
        # what lies alike, and what is whole, is read by one operator, what is on one device compared by one
        groups: dict[tuple[Any, ...], list[int]] = defaultdict(list)
        for index, (size, stride) in places.items():
            alike = (size, stride) if len(size) > 1 else ()
            groups[tensors[index].device, tensors[index].dtype, *alike].append(index)
        self._groups = [(device, len(members)) for (device, *_), members in groups.items()]
        self._order = [index for members in groups.values() for index in members]
        self._sizes, self._strides = ([places[index][part] for index in self._order] for part in (0, 1))
        self._kept = self._read(tensors)

    def holds(self, tensors: Sequence[Tensor]) -> bool:
        """Whether the same tensors hold the same bytes. One wait for each GPU."""
        return all(map(torch.equal, self._read(tensors), self._kept))

    def _read(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        with torch.inference_mode(False), torch.no_grad():
            views = map(torch.as_strided, map(tensors.__getitem__, self._order), self._sizes, self._strides)
            found: dict[torch.device, list[Tensor]] = defaultdict(list)
            for device, members in self._groups:
                found[device].append(torch.cat(list(islice(views, members))).flatten().view(torch.uint8))
            joined = map(torch.cat, found.values())
            # bytes as numbers of eight, which are compared faster
            return [torch.nn.functional.pad(data, (0, -len(data) % 8)).view(torch.int64) for data in joined]


def _places(tensor: Tensor, runs: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Size and stride of a view [runs, elements of each], or [elements] for all."""
    # from the first to the last element: a view's others lie between
    length = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    run, row = max(_RUN // tensor.element_size(), 1), tensor.shape[-1] if tensor.ndim > 1 else 0
    slices = math.prod(tensor.shape[:-2])
    if tensor.nbytes >= slices * _SLICE:
        runs = max(runs, 2 * slices)
    if length <= runs * run:
        return (length,), (1,)
    step = (length - run) // (runs - 1)
    if 0 < row <= step:
        # a whole number of rows would look at the same columns again and again, the golden section at all of them
        golden = max(round(0.618 * row), 1)
        step = golden + (step - golden) // row * row
    return ((length - run) // step + 1, run), (step, 1)


def row_sums(rows: Tensor) -> Tensor:
    """Of a table [rows, width] of a plain dtype: each row's 64 bytes in the middle, put into a word [rows]."""
    run = min(_RUN // rows.element_size(), rows.shape[1])
    start = (rows.shape[1] - run) // 2
    with torch.inference_mode(False), torch.no_grad():
        data = rows[:, start : start + run].contiguous().view(torch.uint8)
        words = torch.nn.functional.pad(data, (0, -data.shape[1] % 8)).view(torch.int64)
        odd = torch.arange(1, 2 * words.shape[1], 2, device=words.device) * _ODD
        return (words * odd).sum(dim=1)

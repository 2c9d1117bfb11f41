"""What decides beside its weights what a model computes: plain attributes of its modules, its configuration, hooks, and
forwards that were put in place of a class's own.

Values are compared by identity first, all of a model in less than 0.1 ms. What a pass itself writes (the length that a
rotary embedding has in mind) says nothing about the model: `learn` is told behind a pass.
"""

from __future__ import annotations

import copy
import dis
import hashlib
import sys
import types
import uuid
from collections.abc import Callable, Iterator, Mapping, Set
from functools import cache, partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from comb.backbones.torch_private import hook_dicts_of, volatile_buffers_of, writes

_STATE = "_comb_run_state"
# torch's own parts, which are compared otherwise; and names that nothing is computed from
_ASIDE = {*vars(nn.Module()), "config", "generation_config", "name_or_path", "gradient_checkpointing", "hf_device_map",
          "warnings_issued", "_is_hf_initialized", "_is_stateful", "_compiled_call"}  # fmt: skip
# what is set for a while to look into attention, or says nothing of what is computed
_PASSING = ("_attn_implementation", "_experts_implementation", "_name_or_path", "_commit_hash", "use_cache",
            "transformers_version", "_output_attentions")  # fmt: skip
_NOTES = (list, tuple, set, dict)
_ABSENT = object()
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.Size)


class Settings:
    """What they are now, and whether they still are. It keeps no module alive."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self._ids = list(map(id, modules))
        self._kept, self._values = [dict(vars(module)) for module in modules], _values(modules)
        self._hooks = hook_dicts_of(modules)
        self._hooked = _hooked(self._hooks)
        kinds: list[Any] = list(dict.fromkeys(map(type, modules)))
        self._classes = [(kind, kind.forward) for kind in kinds]
        self._configs = [(config, _copied(vars(config))) for config in _configs(modules)]
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
        """Behind a pass, with nobody else's in between: what is other than in front of it is the pass's own.

        Returns:
            Whether there are fewer `buffers` to look at.
        """
        before = len(self._buffers)
        for module, name, value in self._changed(modules):
            vars(module).setdefault(_STATE, {})[name] = None if value is _ABSENT else named(value)
        self._buffers = [each for each in self._buffers if each[1] not in run_state(modules[each[0]])]
        return len(self._buffers) < before

    def _changed(self, modules: list[nn.Module]) -> list[tuple[nn.Module, str, Any]]:
        """Attributes and buffers that are others now, and what they were."""
        found: list[tuple[nn.Module, str, Any]] = [
            (modules[place], name, buffer) for place, name, buffer, count in self._buffers
            if modules[place]._buffers.get(name) is not buffer or writes(buffer) != count
        ]  # fmt: skip
        values = _values(modules)
        if _same(values, self._values):
            return found
        for module, kept in zip(modules, self._kept, strict=True):
            now, state = vars(module), run_state(module)
            for name in now | kept:
                before, behind = kept.get(name, _ABSENT), now.get(name, _ABSENT)
                if before is not behind and _counts(name) and name not in state and named(before) != named(behind):
                    found.append((module, name, before))
        if not found:  # values that say the same: next time nothing is to be looked into
            self._kept, self._values = [dict(vars(module)) for module in modules], values
        return found


def described(module: nn.Module) -> str:
    """One module's settings as text, the same in every process; for hooks that can't be told, never again the same."""
    state = {name: value for name, value in vars(module).get(_STATE, {}).items() if value is not None}
    own = {**vars(module), **volatile_buffers_of(module)}
    written = run_state(module)
    known = {name: named(value) for name, value in own.items() if name not in written and _counts(name)}
    if isinstance(module, PreTrainedModel):  # which notes how it was loaded
        known = {name: value for name, value in known.items() if name[0] != "_" and not isinstance(own[name], _NOTES)}
    hooks = [named(hook) for _, hook in _hooked(hook_dicts_of([module]))]
    return f"{named(type(module).forward)} {sorted({**known, **state}.items())} {hooks}"


def run_state(module: nn.Module) -> Set[str]:
    """Names of attributes and buffers that passes write: those seen to be, and those of transformers' embeddings that
    change with length."""
    own = vars(module)
    seen: Set[str] = own.get(_STATE, {}).keys()
    kinds = str(own.get("rope_type"))
    if "dynamic" not in kinds and "longrope" not in kinds:
        return seen
    written = ("inv_freq", "max_seq_len_cached", *(("attention_scaling",) if "dynamic" in kinds else ()))
    names = (name for name in (*own, *module._buffers) if name.endswith(written) and "original_inv_freq" not in name)
    return seen | set(names)


def _counts(name: str) -> bool:
    return name not in _ASIDE and not name.startswith("_comb")


def named(value: Any) -> str:
    """A value as text: plain ones and tensors by what they hold, functions by what they do, others by their types."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)}{value.dtype}" + ("" if value.is_meta else _bytes_of(value))
    if isinstance(value, tuple | list | Mapping):
        items = value.items() if isinstance(value, Mapping) else value
        return f"{type(value).__name__}({','.join(map(named, items))})"
    return _function(value) if _is_function(value) else _qualified(type(value))


def _is_function(value: Any) -> bool:
    return isinstance(value, types.FunctionType | types.BuiltinFunctionType | types.MethodType | partial)


def _function(function: Any) -> str:
    """A function by its name, where that leads to it; else by its code and all that it holds."""
    function = getattr(function, "_torchdynamo_orig_callable", function)  # what torch.compile has compiled
    if isinstance(function, partial):
        return f"partial({','.join(map(_held, (function.func, *function.args, *function.keywords.values())))})"
    if isinstance(function, types.MethodType):
        return f"{_function(function.__func__)} of {_held(function.__self__)}"
    name = _qualified(function)
    if not isinstance(function, types.FunctionType) or _leads_to(name, function):
        return name
    cells = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
    held = (*cells, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    return f"{name} {_code(function.__code__)} {','.join(map(_held, held))}"


def _held(value: Any) -> str:
    """What a function holds, which may be what it goes by: what isn't known is like nothing else."""
    if isinstance(value, type):
        return _qualified(value)
    if isinstance(value, (*_PLAIN, Tensor, nn.Module)) or _is_function(value):
        return named(value)
    return uuid.uuid4().hex


def _code(code: types.CodeType) -> str:
    constants = [_code(each) if isinstance(each, types.CodeType) else repr(each) for each in code.co_consts]
    return f"{code.co_code.hex()}{code.co_names}{constants}"


def _leads_to(name: str, function: Any) -> bool:
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    return found is function


def _qualified(value: Any) -> str:
    return f"{value.__module__}:{value.__qualname__}"


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _bytes_of(tensor: Tensor) -> str:
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()


def _values(modules: list[nn.Module]) -> list[Any]:
    return list(chain.from_iterable(map(dict.values, map(vars, modules))))


def _same(one: list[Any], other: list[Any]) -> bool:
    try:
        return one == other  # identical objects aren't asked
    except (RuntimeError, ValueError):  # tensors, arrays
        return False


def _copied(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value if hasattr(value, "to_dict") else copy.deepcopy(value) for name, value in config.items()}


def _differs(now: dict[str, Any], kept: dict[str, Any]) -> bool:
    if now == kept:
        return False
    return any(now.get(name) != kept.get(name) for name in now | kept if not name.startswith(_PASSING))


def _hooked(hooks: list[Mapping[int, Callable[..., Any]]]) -> list[tuple[int, Any]]:
    """Hooks that may give something else to compute with, each with the place of its module: neither comb's own, which
    come and go, nor those that only watch."""
    return [
        (place, hook) for place, each in enumerate(hooks) for hook in each.values()
        if not str(getattr(hook, "__module__", "")).startswith("comb") and not _watches(hook)
    ]  # fmt: skip


def _watches(hook: Any) -> bool:
    function = getattr(hook, "__func__", hook)
    function = function if isinstance(function, types.FunctionType) else getattr(type(hook).__call__, "__func__", None)
    return function is not None and _returns_nothing(function.__code__)


@cache
def _returns_nothing(code: types.CodeType) -> bool:
    before, nothing = None, True
    for each in dis.get_instructions(code):
        if each.opname == "RETURN_CONST":
            nothing &= each.argval is None
        elif each.opname == "RETURN_VALUE":
            constant = before is not None and before.opname.startswith("LOAD_CONST") and before.argval is None
            nothing &= constant and not each.is_jump_target
        before = each
    return nothing


def _configs(modules: list[nn.Module]) -> Iterator[Any]:
    """The configurations that modules read, and those inside of them."""
    found: dict[int, Any] = {}
    ahead = [config for module in modules if (config := vars(module).get("config")) is not None]
    while ahead:
        config = ahead.pop()
        if id(config) not in found and hasattr(config, "to_dict") and hasattr(config, "__dict__"):
            found[id(config)] = config
            ahead += vars(config).values()
    yield from found.values()

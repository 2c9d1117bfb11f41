"""What decides beside its weights what a model computes: plain attributes of its modules, its configuration, hooks, and
forwards that were put in place of a class's own.

Values are compared by identity first, all of a model in less than 0.1 ms. What a pass itself writes (the length that a
rotary embedding has in mind) says nothing about the model: `learn` is told behind a pass.
"""

from __future__ import annotations

import copy
import dis
import hashlib
import os
import sys
import sysconfig
import types
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from enum import Enum
from functools import cache, partial
from itertools import chain
from numbers import Number
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

from comb.backbones.torch_private import hook_dicts_of, volatile_buffers_of, writes

_STATE = "_comb_run_state"
# torch's own parts, which are compared otherwise; and names that nothing is computed from
_ASIDE = {*vars(nn.Module()), "config", "generation_config", "name_or_path", "gradient_checkpointing",
          "_gradient_checkpointing_func", "hf_device_map",
          "warnings_issued", "_is_hf_initialized", "_is_stateful", "_compiled_call"}  # fmt: skip
UNREAD = ("_name_or_path", "_commit_hash", "use_cache", "transformers_version", "output_attentions",
          "output_hidden_states", "pad_token_id")  # fmt: skip
"""What of a configuration says nothing of what is computed."""
# and what is set for a while to look into attention
_PASSING = (*UNREAD, "_attn_implementation", "_experts_implementation", "_output_attentions", "_output_hidden_states")
_NOTES = (list, tuple, set, dict)
_ABSENT = object()
_OWN = ("comb.", "comb_training.", "comb_serving.")
_VALUES = (Number, np.generic, str, bytes, type(None), torch.dtype, torch.Size)


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
        """Behind a pass, with nobody else's in between: what is other than in front of it, and what a module's forward
        or its hooks write by their code, is the pass's own. A user may have written the rest meanwhile.

        Returns:
            Whether there are fewer `buffers` to look at.
        """
        before, changed = len(self._buffers), self._changed(modules)
        names = Names(modules if changed else ())
        for module, name, value in changed:
            if name in _written_by(module):
                vars(module).setdefault(_STATE, {})[name] = None if value is _ABSENT else names.of(value)
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
        names = Names(modules)
        for module, kept in zip(modules, self._kept, strict=True):
            now, state = vars(module), run_state(module)
            for name in now | kept:
                before, behind = kept.get(name, _ABSENT), now.get(name, _ABSENT)
                if before is behind or not _counts(name) or name in state:
                    continue
                if names.of(before) != names.of(behind):
                    found.append((module, name, before))
        if not found:  # values that say the same: next time nothing is to be looked into
            self._kept, self._values = [dict(vars(module)) for module in modules], values
        return found


def described(module: nn.Module, names: Names) -> str:
    """One module's settings as text."""
    state = {name: value for name, value in vars(module).get(_STATE, {}).items() if value is not None}
    own = {**vars(module), **volatile_buffers_of(module)}
    written = run_state(module)
    known = {name: names.of(value) for name, value in own.items() if name not in written and _counts(name)}
    if isinstance(module, PreTrainedModel):  # which notes how it was loaded
        known = {name: value for name, value in known.items() if name[0] != "_" and not isinstance(own[name], _NOTES)}
    hooks = [names.of(hook) for _, hook in _hooked(hook_dicts_of([module]))]
    return f"{names.of(type(module))} {names.of(type(module).forward)} {sorted({**known, **state}.items())} {hooks}"


def forget_run_state(module: nn.Module) -> None:
    """What passes were seen to write."""
    vars(module).pop(_STATE, None)


def _written_by(module: nn.Module) -> set[str]:
    """Names that a module's forward and hooks may write: attributes that their code, and functions of the same class
    and file that it names, store to, and buffers that it registers."""
    ahead: list[Any] = [module.forward, *(hook for hooks in hook_dicts_of([module]) for hook in hooks.values())]
    written, seen = set[str](), set[int]()
    while ahead:
        function = ahead.pop()
        while isinstance(function, partial):
            function = function.func
        function = getattr(function, "__func__", function)
        if not isinstance(function, types.FunctionType):
            function = vars(type(function)).get("__call__")
        if not isinstance(function, types.FunctionType) or id(function) in seen:
            continue
        seen.add(id(function))
        ahead += [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
        for code in _codes(function.__code__):
            written |= {each.argval for each in dis.get_instructions(code) if each.opname == "STORE_ATTR"}
            if {"register_buffer", "setattr", "__setattr__"} & {*code.co_names}:
                written |= {each for each in code.co_consts if isinstance(each, str)}
            for name in code.co_names:
                found = function.__globals__.get(name)
                ahead += [getattr(type(module), name, None)]
                ahead += [found] if getattr(found, "__module__", None) == function.__module__ else []
    return written


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from _codes(each)


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


class Names:
    """Values as text, the same in every process: plain ones, tensors and arrays by what they hold, functions and
    objects by their code and by what they hold, installed packages' functions by their names. What can't be told so
    goes by itself: its name is another's in no process.

    Args:
        modules: of the model, which are named by their places.
    """

    def __init__(self, modules: Iterable[nn.Module] = ()) -> None:
        self._known = {id(module): f"module {place}" for place, module in enumerate(modules)}
        self._classes: dict[type, str] = {}
        self._holder: Any = None  # the hook, or replaced forward, that is looked into

    def of(self, value: Any) -> str:
        if isinstance(value, Enum):
            return f"{_qualified(type(value))}.{value.name}={self.of(value.value)}"
        if isinstance(value, _VALUES):
            return f"{type(value).__name__} {value!r}"
        if isinstance(value, torch.device):  # which moves
            return "device"
        if id(value) in self._known:
            return self._known[id(value)]
        if isinstance(value, type):
            return self._class(value)
        self._known[id(value)] = "above"  # where something holds itself
        try:
            return self._inside(value)
        except Exception:  # foreign code: properties, representations, memory that can't be read
            return _own_name(value)
        finally:
            del self._known[id(value)]

    def _inside(self, value: Any) -> str:
        if isinstance(value, Tensor):
            return f"{tuple(value.shape)}{value.dtype}" + ("" if value.is_meta else _bytes_of(value))
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            return f"{value.shape}{value.dtype}{hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()}"
        if isinstance(value, (*_NOTES, frozenset, Mapping)):
            if self._holder is not None and not _tells(value):  # what a hook fills
                return _own_name(value, self._holder)
            if isinstance(value, Mapping):
                items = [f"{self.of(key)}:{self.of(each)}" for key, each in value.items()]
            else:
                items = list(map(self.of, value))
            items = sorted(items) if isinstance(value, Set) else items
            return f"{type(value).__name__}({','.join(items)})"
        if isinstance(value, types.ModuleType):
            return value.__name__
        if isinstance(value, types.BuiltinFunctionType) and not isinstance(value.__self__, types.ModuleType | None):
            return f"{value.__qualname__} of {self._within(value.__self__, value.__self__)}"
        return self._function(value) if _is_function(value) else self._object(value)

    def _within(self, holder: Any, value: Any) -> str:
        outer, self._holder = self._holder, holder
        try:
            return self.of(value)
        finally:
            self._holder = outer

    def _function(self, function: Any) -> str:
        function = getattr(function, "_torchdynamo_orig_callable", function)  # what torch.compile has compiled
        if isinstance(function, partial):
            parts = (function.func, *function.args, *sorted(function.keywords), *_by_key(function.keywords))
            return f"partial({','.join(self._within(function, each) for each in parts)})"
        if isinstance(function, types.MethodType):
            own = function.__self__
            return f"{self._function(function.__func__)} of {self._within(own, own)}"
        name = _qualified(function)
        if not isinstance(function, types.FunctionType) or (_is_installed(function) and _leads_to(name, function)):
            return name
        cells = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
        held = (*cells, *(function.__defaults__ or ()), *_by_key(function.__kwdefaults__ or {}))
        read = [] if _is_installed(function) else _globals_of(function)
        code = self._code(function.__code__)
        return f"{name} {code} {','.join(self._within(function, each) for each in (*held, *read))}"

    def _code(self, code: types.CodeType) -> str:
        constants = [self._code(each) if isinstance(each, types.CodeType) else self.of(each) for each in code.co_consts]
        return f"{code.co_code.hex()}{code.co_names}{constants}"

    def _class(self, kind: type) -> str:
        """Of one that isn't installed, all that it can do."""
        if kind not in self._classes:
            self._classes[kind] = _qualified(kind)
            own = [
                each if isinstance(each, types.FunctionType | Number | str) else getattr(each, "__func__", None)
                for part in kind.__mro__ if not _is_package(part.__module__) for _, each in sorted(vars(part).items())
            ]  # fmt: skip
            self._classes[kind] += "".join(self.of(each) for each in own if each is not None)
        return self._classes[kind]

    def _object(self, value: Any) -> str:
        kind = type(value)
        if kind.__module__.partition(".")[0] in ("_thread", "threading", "weakref"):
            return _qualified(kind)
        held = getattr(value, "__dict__", None)
        if not isinstance(held, dict):
            return _own_name(value, self._holder)
        if isinstance(value, nn.Module):
            tensors = {**value._parameters, **value._buffers, **value._modules}
            held = {**{name: each for name, each in held.items() if _counts(name)}, **tensors}
        elif _is_package(kind.__module__):  # what it keeps of its runs isn't known: what is plain
            held = {name: each for name, each in held.items() if isinstance(each, (*_VALUES, Enum))}
        return f"{self._class(kind)} {[(name, self._within(value, held[name])) for name in sorted(held)]}"


def _is_function(value: Any) -> bool:
    return isinstance(value, types.FunctionType | types.BuiltinFunctionType | types.MethodType | partial)


_own_names: dict[int, tuple[weakref.ref[Any], str]] = {}


def _own_name(value: Any, holder: Any = None) -> str:
    """A name as long as an object lives, or for those that don't tell (lists) the one that holds them."""
    for each in (value, holder):
        place = id(each)
        kept = _own_names.get(place)
        if kept is not None and kept[0]() is each:
            return kept[1]
        try:
            gone = weakref.ref(each, partial(_forget_name, place))
        except TypeError:
            continue
        _own_names[place] = gone, uuid.uuid4().hex
        return _own_names[place][1]
    return uuid.uuid4().hex


def _forget_name(place: int, gone: weakref.ref[Any]) -> None:
    if (kept := _own_names.get(place)) is not None and kept[0] is gone:
        del _own_names[place]


def _tells(value: Any) -> bool:
    """Whether a list, set or mapping that a hook holds is what it goes by rather than what it fills."""
    items = value.values() if isinstance(value, Mapping) else value
    return isinstance(value, tuple | frozenset) or (
        bool(items) and all(isinstance(each, (*_VALUES, Enum)) for each in items)
    )


def _by_key(mapping: Mapping[str, Any]) -> list[Any]:
    return [mapping[key] for key in sorted(mapping)]


def _globals_of(function: types.FunctionType) -> list[Any]:
    """What a function reads of its file, as far as that is told by what it holds."""
    kinds = (*_VALUES, Enum, Tensor, np.ndarray, types.FunctionType)
    names = {name for code in _codes(function.__code__) for name in code.co_names}
    read = (function.__globals__.get(name) for name in sorted(names))
    return [value for value in read if value is not None and isinstance(value, kinds)]


@cache
def _installed() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    own = (str(Path(__file__).parents[1]), *(str(Path(each.__file__ or "").parent) for each in (torch, transformers)))
    return tuple(f"{each}{os.sep}" for each in (*(paths[key] for key in ("stdlib", "purelib", "platlib")), *own))


def _is_installed(function: Any) -> bool:
    """Whether a function is a package's, and what it wraps."""
    while function is not None:
        code = getattr(function, "__code__", None)
        if code is not None and not code.co_filename.startswith(_installed()):
            return False
        function = getattr(function, "__wrapped__", None)
    return True


def _is_package(module: str) -> bool:
    found = sys.modules.get(module)
    file = getattr(found, "__file__", None)
    return found is not None and module != "__main__" and (file is None or file.startswith(_installed()))


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
    tensor = tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach()
    data = tensor.cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()


def _values(modules: list[nn.Module]) -> list[Any]:
    return list(chain.from_iterable(map(dict.values, map(vars, modules))))


def _same(one: list[Any], other: list[Any]) -> bool:
    try:
        return one == other  # identical objects aren't asked
    except Exception:  # tensors, arrays, whatever can't be compared
        return False


def _equal(one: Any, other: Any) -> bool:
    if one is other:
        return True
    try:
        if not isinstance(one, Tensor) and bool(one == other):
            return True
    except Exception:
        pass
    return Names().of(one) == Names().of(other)


def _copied(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value if hasattr(value, "to_dict") else _copy(value) for name, value in config.items()}


def _copy(value: Any) -> Any:
    """What can't be copied, or not told from its copy, goes by itself."""
    try:
        copied = copy.deepcopy(value)
    except Exception:
        return value
    return copied if _equal(value, copied) else value


def _differs(now: dict[str, Any], kept: dict[str, Any]) -> bool:
    try:
        if now == kept:
            return False
    except Exception:
        pass
    return any(not _equal(now.get(name), kept.get(name)) for name in now | kept if not name.startswith(_PASSING))


def _hooked(hooks: list[Mapping[int, Callable[..., Any]]]) -> list[tuple[int, Any]]:
    """Hooks that may give something else to compute with, each with the place of its module: neither comb's own, which
    come and go, nor those that only watch."""
    return [
        (place, hook) for place, each in enumerate(hooks) for hook in each.values()
        if not str(getattr(hook, "__module__", "")).startswith(_OWN) and not _watches(hook)
    ]  # fmt: skip


def _watches(hook: Any) -> bool:
    while isinstance(hook, partial):
        hook = hook.func
    function = getattr(hook, "__func__", hook)
    function = function if isinstance(function, types.FunctionType) else type(hook).__call__
    return isinstance(function, types.FunctionType) and _returns_nothing(function.__code__)


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

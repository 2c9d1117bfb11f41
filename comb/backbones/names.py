"""Values as text, the same in every process: what is compared, and named, where a model's settings are."""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
import types
import uuid
import weakref
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import suppress
from enum import Enum
from functools import cache, partial
from numbers import Number
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn

NOTES = (list, tuple, set, dict)
_VALUES = (Number, np.generic, str, bytes, type(None), torch.dtype, torch.Size)
# torch's own parts, which are compared otherwise; and names that nothing is computed from
_ASIDE = {*vars(nn.Module()), "config", "generation_config", "name_or_path", "gradient_checkpointing",
          "_gradient_checkpointing_func", "hf_device_map",
          "warnings_issued", "_is_hf_initialized", "_is_stateful", "_compiled_call"}  # fmt: skip


def counts(name: str) -> bool:
    """Whether a module's attribute of this name is a setting."""
    return name not in _ASIDE and not name.startswith("_comb")


class Names:
    """Plain values, tensors and arrays by what they hold, functions and objects by their code and by what they hold,
    installed packages' functions by their names. What can't be told so goes by itself: its name is another's in no
    process.

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
            name = f"{tuple(value.shape)}{value.dtype}"
            if value.is_meta:
                return name
            dense = value.detach() if value.layout is torch.strided else value.detach().to_dense()
            data = dense.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            return f"{name}{hashlib.sha256(data.tobytes()).hexdigest()}"
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            return f"{value.shape}{value.dtype}{hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()}"
        if isinstance(value, (*NOTES, frozenset, Mapping)):
            if self._holder is not None and not isinstance(value, tuple | frozenset):
                held = list(value.values() if isinstance(value, Mapping) else value)
                if not held or not all(isinstance(each, (*_VALUES, Enum)) for each in held):
                    return _own_name(value, self._holder)  # what a hook fills, and doesn't go by
            if isinstance(value, Mapping):
                items = [f"{self.of(key)}:{self.of(each)}" for key, each in value.items()]
            else:
                items = list(map(self.of, value))
            return f"{type(value).__name__}({','.join(sorted(items) if isinstance(value, Set) else items)})"
        if isinstance(value, types.ModuleType):
            return value.__name__
        if isinstance(value, types.BuiltinFunctionType) and not isinstance(value.__self__, types.ModuleType | None):
            return f"{value.__qualname__} of {self._within(value.__self__, value.__self__)}"
        if isinstance(value, types.FunctionType | types.BuiltinFunctionType | types.MethodType | partial):
            return self._function(value)
        return self._object(value)

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
        if not isinstance(function, types.FunctionType):
            return name
        read: list[Any] = []
        if _is_installed(function):
            module, _, path = name.partition(":")
            found: Any = sys.modules.get(module)
            for part in path.split("."):
                found = getattr(found, part, None)
            if found is function:  # its name leads to it, so that it says all
                return name
        else:  # what it reads of its file, as far as that is told by what it holds
            kinds = (*_VALUES, Enum, Tensor, np.ndarray, types.FunctionType)
            words = {word for code in codes(function.__code__) for word in code.co_names}
            found_there = (function.__globals__.get(word) for word in sorted(words))
            read = [value for value in found_there if value is not None and isinstance(value, kinds)]
        held = (*filled(function), *(function.__defaults__ or ()), *_by_key(function.__kwdefaults__ or {}), *read)
        return f"{name} {self._code(function.__code__)} {','.join(self._within(function, each) for each in held)}"

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
            held = {**{name: each for name, each in held.items() if counts(name)}, **tensors}
        elif _is_package(kind.__module__):  # what it keeps of its runs isn't known: what is plain
            held = {name: each for name, each in held.items() if isinstance(each, (*_VALUES, Enum))}
        return f"{self._class(kind)} {[(name, self._within(value, held[name])) for name in sorted(held)]}"


def equal(one: Any, other: Any) -> bool:
    """Whether two values are, or say, the same."""
    if one is other:
        return True
    with suppress(Exception):  # arrays, whatever can't be compared
        if not isinstance(one, Tensor) and bool(one == other):
            return True
    return Names().of(one) == Names().of(other)


def codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """A function's code, and that of the functions inside of it."""
    yield code
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from codes(each)


def filled(function: types.FunctionType) -> list[Any]:
    """What a closure holds."""
    found = []
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # it is empty
            found.append(cell.cell_contents)
    return [value for value in found if value is not None]


_own_names: dict[int, tuple[weakref.ref[Any], str]] = {}


def _own_name(value: Any, holder: Any = None) -> str:
    """A name as long as an object lives, or for those that don't tell (lists) the one that holds them."""
    for each in (value, holder):
        place = id(each)
        kept = _own_names.get(place)
        if kept is not None and kept[0]() is each:
            return kept[1]

        def forget(gone: weakref.ref[Any], place: int = place) -> None:
            if (kept := _own_names.get(place)) is not None and kept[0] is gone:
                del _own_names[place]

        with suppress(TypeError):  # lists can't be referred to
            _own_names[place] = weakref.ref(each, forget), uuid.uuid4().hex
            return _own_names[place][1]
    return uuid.uuid4().hex


def _by_key(mapping: Mapping[str, Any]) -> list[Any]:
    return [mapping[key] for key in sorted(mapping)]


def _qualified(value: Any) -> str:
    return f"{value.__module__}:{value.__qualname__}"


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

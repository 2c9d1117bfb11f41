"""Values as text, the same in every process where that is safe: what is compared, and named, where a model's settings
are."""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
import types
import uuid
import weakref
from collections.abc import Iterable, Mapping, Set
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
from transformers.utils.hub import HF_MODULES_CACHE

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
    """Plain values, tensors and arrays go by what they hold, classes and functions of installed packages by where they
    are found, such classes' objects by both. All else (what a user has written, closures, lambdas) goes by itself: its
    name is another's in no process.

    Args:
        modules: of the model, which are named by their places.
    """

    def __init__(self, modules: Iterable[nn.Module] = ()) -> None:
        self._known = {id(module): f"module {place}" for place, module in enumerate(modules)}

    def of(self, value: Any) -> str:
        if isinstance(value, Enum):
            return f"{_qualified(type(value))}.{value.name}={self.of(value.value)}"
        if isinstance(value, _VALUES):
            return f"{type(value).__name__} {value!r}"
        if isinstance(value, torch.device):  # which moves
            return "device"
        if id(value) in self._known:
            return self._known[id(value)]
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
        if isinstance(value, Mapping):
            items = [f"{self.of(key)}:{self.of(each)}" for key, each in value.items()]
            return f"{type(value).__name__}({','.join(items)})"
        if isinstance(value, (*NOTES, frozenset)):
            items = list(map(self.of, value))
            return f"{type(value).__name__}({','.join(sorted(items) if isinstance(value, Set) else items)})"
        if isinstance(value, types.ModuleType):
            return value.__name__
        if isinstance(value, partial):
            named = sorted(value.keywords.items())
            parts = (value.func, *value.args, *(name for name, _ in named), *(each for _, each in named))
            return f"partial({','.join(map(self.of, parts))})"
        if isinstance(value, types.MethodType):
            return f"{self.of(value.__func__)} of {self.of(value.__self__)}"
        if isinstance(value, types.FunctionType | types.BuiltinFunctionType | type):
            return self._defined(value)
        if not _is_installed(type(value)):
            return _own_name(value)
        held = vars(value)
        if isinstance(value, nn.Module):
            tensors = {**value._parameters, **value._buffers, **value._modules}
            held = {**{name: each for name, each in held.items() if counts(name)}, **tensors}
        else:  # what it keeps of its runs isn't known: what is plain
            plain = {name: each for name, each in held.items() if isinstance(each, (*_VALUES, Enum))}
            # of what can be called, all has to be, and nothing of it in C
            if callable(value) and not (plain == held and isinstance(type(value).__call__, types.FunctionType)):
                return _own_name(value)
            held = plain
        return f"{self.of(type(value))} {[(name, self.of(held[name])) for name in sorted(held)]}"

    def _defined(self, value: Any) -> str:
        """A class or function."""
        if (compiled := getattr(value, "_torchdynamo_orig_callable", None)) is not None:  # by torch.compile
            return self.of(compiled)
        if isinstance(value, types.BuiltinFunctionType) and value.__module__ is not None:  # C has no other of its name
            return _qualified(value)
        if not _is_installed(value):
            return _own_name(value)
        found: Any = sys.modules[value.__module__]
        for part in value.__qualname__.split("."):
            found = getattr(found, part, None)
        if found is value:
            return _qualified(value)
        if isinstance(value, type):
            return _own_name(value)
        # made inside of another function, as accelerate makes forwards
        held = [cell.cell_contents for cell in value.__closure__ or ()], value.__defaults__, value.__kwdefaults__
        return f"{_qualified(value)} {value.__code__.co_firstlineno} {self.of(held)}"


def equal(one: Any, other: Any) -> bool:
    """Whether two values are, or say, the same."""
    if one is other:
        return True
    with suppress(Exception):  # arrays, whatever can't be compared
        if not isinstance(one, Tensor) and bool(one == other):
            return True
    return Names().of(one) == Names().of(other)


_own_names: dict[int, tuple[weakref.ref[Any], str]] = {}


def _own_name(value: Any) -> str:
    """A name until an object dies, or until `forget_own_names`; of what can't be referred to, another each time."""
    kept = _own_names.get(id(value))
    if kept is None or kept[0]() is not value:
        try:
            kept = weakref.ref(value), uuid.uuid4().hex
        except TypeError:
            return uuid.uuid4().hex
        _own_names[id(value)] = kept
    return kept[1]


def forget_own_names() -> None:
    """What goes by itself may hold something else now."""
    _own_names.clear()


def _qualified(value: Any) -> str:
    return f"{value.__module__}:{value.__qualname__}"


@cache
def _installed() -> tuple[str, ...]:
    """Folders of code that nobody edits: code of a model's own among it, whose folder is called after its text."""
    paths = sysconfig.get_paths()
    # where these two are installed, others are, too: a user's own site-packages, say
    beside = (str(Path(each.__file__ or "").parents[1]) for each in (torch, transformers))
    own = str(Path(__file__).parents[1])
    folders = (*(paths[key] for key in ("stdlib", "purelib", "platlib")), *beside, own, HF_MODULES_CACHE)
    return tuple(f"{each}{os.sep}" for each in folders)


def _is_installed(value: Any) -> bool:
    """Whether a class or function is a package's, and all that it wraps."""
    while value is not None:
        module = sys.modules.get(value.__module__)
        file = value.__code__.co_filename if hasattr(value, "__code__") else getattr(module, "__file__", None)
        if module is None or value.__module__ == "__main__" or not (file or _installed()[0]).startswith(_installed()):
            return False
        value = getattr(value, "__wrapped__", None)
    return True

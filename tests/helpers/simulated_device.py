"""A GPU that isn't there: tensors on it are computed by the CPU, and what would make the host wait is counted.

Inside `SimulatedDevice`, tensors "on" `DEVICE` are wrappers around tensors of the CPU. Each operator on them counts as
a launch (views don't), and each of these as a wait, as the host of a GPU waits there for all that was queued before: a
number or truth value that is read (``.item()``, ``int()``, ``torch.equal``), a result whose size depends on values
(``nonzero``, a mask as an index), ``.cpu()``, and a copy of ordinary memory to the device, which an index of the host
is, too. Tensors of host and device in one operator are an error, as they are on a GPU.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

import comb

PACKAGE = f"{Path(comb.__file__).parent}/"  # a clone's folder is called comb, too


class _Module(_DummyBackendModule):
    """What torch asks a device's module, ``torch.simulated``."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


# torch's own way to have a device in Python; for the whole process, so these tests have one of their own
_setup_privateuseone_for_python_backend("simulated", _Module())
DEVICE = torch.device("simulated", 0)
_SIZED_BY_VALUES = (
    "nonzero", "masked_select", "unique_consecutive", "unique_dim", "_unique2", "repeat_interleave.Tensor",
)  # fmt: skip
_INDEXING = ("index.Tensor", "index_put_", "index_put", "_index_put_impl_")
_FREE = ("detach", "alias", "lift_fresh", "sym_", "_reshape_alias", "empty", "_has_compatible")


class DeviceTensor(Tensor):
    """A tensor on `DEVICE`; `inner` holds its numbers on the CPU."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> DeviceTensor:
        made: DeviceTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device=DEVICE, requires_grad=False,
        )  # fmt: skip
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} on a tensor of the simulated device, outside of it")

    __torch_function__ = torch._C._disabled_torch_function_impl

    def __repr__(self, **_: Any) -> str:
        return f"DeviceTensor({self.inner!r})"

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.clone()

    def tolist(self) -> Any:
        return self.cpu().tolist()


class SimulatedDevice(TorchDispatchMode):
    """Inside it `DEVICE` exists.

    Attributes:
        launches: by operator. waits: by what the host waited for, and the line of the product that asked for it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()

    def __enter__(self) -> SimulatedDevice:
        # so that torch.tensor(..., device=DEVICE) comes by here, as it does with torch's fake tensors
        torch._C._set_only_lift_cpu_tensors(True)
        found: SimulatedDevice = super().__enter__()
        return found

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch._C._set_only_lift_cpu_tensors(False)

    @contextmanager
    def counted(self) -> Iterator[SimulatedDevice]:
        """Counts from here on."""
        self.launches.clear()
        self.waits.clear()
        yield self

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """What stands in for a kernel counts for nothing."""
        before = self.launches.copy(), self.waits.copy()
        yield
        self.launches, self.waits = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        flat, structure = tree_flatten((args, kwargs))
        name = str(func).removeprefix("aten.")
        here = [value for value in flat if isinstance(value, DeviceTensor)]
        asked = kwargs.get("device")
        onto = None if asked is None else torch.device(asked).type
        if not here and onto != DEVICE.type:
            return func(*args, **kwargs)
        self._check(name, flat, bool(here))
        inner_args, inner_kwargs = tree_unflatten(
            [value.inner if isinstance(value, DeviceTensor) else value for value in flat], structure
        )
        if onto is not None:
            inner_kwargs["device"] = torch.device("cpu")
        if "pin_memory" in inner_kwargs:
            inner_kwargs["pin_memory"] = None
        found = func(*inner_args, **inner_kwargs)
        if name.startswith("_to_copy"):
            self._count_copy(here, kwargs, name, found)
            if onto not in (None, DEVICE.type):
                return found
        elif not isinstance(found, (Tensor, list, tuple)):
            self._wait(name)
            return found
        elif name.startswith(_SIZED_BY_VALUES) or (name.startswith(_INDEXING) and self._by_mask(flat)):
            self._wait(name)
        elif name.startswith("copy_"):
            self._count_copy(here, {"device": args[0].device, "non_blocking": (*args, False)[2]}, name, found, args[1])
        if not self._is_view(func, name):
            self.launches[name] += 1
        if name.startswith("copy_") and not isinstance(args[0], DeviceTensor):
            return args[0]
        # what is written in place stays the tensor that it was
        known = {id(value.inner): value for value in here}
        return tree_map(partial(_on_device, known), found)

    def _count_copy(
        self, here: list[DeviceTensor], kwargs: dict[str, Any], name: str, found: Any, source: Any = None
    ) -> None:
        target = kwargs.get("device")
        onto = DEVICE.type if target is None else torch.device(target).type
        came = DEVICE.type if (isinstance(source, DeviceTensor) if source is not None else here) else "cpu"
        numbers = [value for value in (source, found) if isinstance(value, Tensor)]
        if came != onto and not kwargs.get("non_blocking") and all(value.numel() for value in numbers):
            self._wait(f"{name} {came} -> {onto}")

    @staticmethod
    def _by_mask(flat: list[Any]) -> bool:
        return any(isinstance(value, Tensor) and value.dtype in (torch.bool, torch.uint8) for value in flat[1:])

    @staticmethod
    def _is_view(func: Any, name: str) -> bool:
        returned = func._schema.returns
        aliases = bool(returned) and returned[0].alias_info is not None and not returned[0].alias_info.is_write
        return aliases or name.startswith(_FREE)

    def _check(self, name: str, flat: list[Any], some: bool) -> None:
        """Numbers of the host may stand beside tensors of a GPU, other tensors of it may not."""
        if not some or name.startswith(("_to_copy", "copy_")):
            return
        strangers = [v for v in flat if isinstance(v, Tensor) and not isinstance(v, DeviceTensor) and v.dim()]
        if strangers and name.startswith(_INDEXING):
            self._wait(f"{name} by an index of the host")
        elif strangers:
            shapes = [tuple(value.shape) for value in strangers]
            raise RuntimeError(f"{name}: tensors {shapes} of the host beside some of the device")

    def _wait(self, what: str) -> None:
        frames = [frame for frame in traceback.extract_stack() if "/torch/" not in frame.filename][:-2]
        own = [frame for frame in frames if frame.filename.startswith(PACKAGE)]
        last = (own or frames)[-1]
        self.waits[f"{what} at {'/'.join(last.filename.split('/')[-3:])}:{last.lineno}"] += 1


def _on_device(known: dict[int, DeviceTensor], value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    found = known.get(id(value))
    return DeviceTensor(value) if found is None else found


def move(module: nn.Module) -> nn.Module:
    """The module with all its parameters and buffers on `DEVICE`, as ``module.to(DEVICE)`` has them."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                part._parameters[name] = nn.Parameter(DeviceTensor(parameter.data), requires_grad=False)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = DeviceTensor(buffer)
    return module

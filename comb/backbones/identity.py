"""Which weights a model has now, and what was found out about them: walked once per call, not once per question.

Caches of what a model's own layers compute are only as good as the answer to "is it still the same model?". Nothing
tells us when that changes: an optimizer writes in place, `load_state_dict` and `.to()` replace memory, peft adds,
switches and merges adapters. So all tensors are looked at (address, torch's count of writes, dtype; no values are
read), and whatever was derived from them is kept on the model until one of these differs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

from comb.backbones.forward import counted_passes
from comb.backbones.torch_private import modules_of, tensors_of, writes

_CHUNK = 2**24
_VOLATILE = ("transformers_version", "_name_or_path", "_commit_hash", "architectures", "dtype", "use_cache")

_ATTRIBUTE = "_comb_identity"


class Identity:
    """A model between two changes of its weights, and the facts that hold that long."""

    def __init__(self, stamp: int) -> None:
        self.stamp = stamp
        self._facts: dict[Hashable, Any] = {}

    def fact(self, name: Hashable, find: Callable[[], Any]) -> Any:
        """What `find` returned when it was asked first. Tokens that it tries the model on are no prompt's."""
        if name not in self._facts:
            with counted_passes():
                self._facts[name] = find()
        return self._facts[name]


@dataclass(frozen=True)
class _Walk:
    """What one call has found out about each of its models, by their ids."""

    modules: dict[int, list[torch.nn.Module]] = field(default_factory=dict)
    identities: dict[int, Identity] = field(default_factory=dict)


_walk: ContextVar[_Walk | None] = ContextVar("the models of this call", default=None)


def identity_of(model: Any) -> Identity:
    """Who `model` is now: the same object until a weight is written (other than through ``.data``) or replaced, or an
    adapter is added, switched or merged. One walk over the model, or inside `one_walk` at most one for all questions.
    """
    walk = _walk.get()
    if walk is not None and id(model) in walk.identities:
        return walk.identities[id(model)]
    stamp = _stamp(model)
    identity: Identity | None = model.__dict__.get(_ATTRIBUTE)
    if identity is None or identity.stamp != stamp:
        identity = model.__dict__[_ATTRIBUTE] = Identity(stamp)
    if walk is not None:
        walk.identities[id(model)] = identity
    return identity


def modules_now(model: Any) -> list[torch.nn.Module]:
    """All modules of `model`, each once; inside `one_walk` those that it had when it was asked first."""
    walk = _walk.get()
    if walk is None:
        return modules_of(model)
    if id(model) not in walk.modules:
        walk.modules[id(model)] = modules_of(model)
    return walk.modules[id(model)]


def weights_fingerprint(model: Any) -> str:
    """A short name for configuration, dtype, all weights' bits and adapters in use, so that fine-tunes differ.

    `backbone_fingerprint` looks at the embedding only, which is all that COMB's encoder shares with a backbone; keys
    and values of decoder layers depend on every layer.
    """
    return str(identity_of(model).fact("fingerprint", lambda: _digest(model)))


def forget_identity(model: Any) -> None:
    """For weights that are about to be written where torch counts no writes (through ``.data``)."""
    model.__dict__.pop(_ATTRIBUTE, None)


@contextmanager
def one_walk() -> Iterator[None]:
    """For one call: inside, this thread walks each model once and takes its modules and weights to stay as they are.

    Nested, it walks anew: what is compiled is named after the weights that are there when compiling begins.
    """
    token = _walk.set(_Walk())
    try:
        yield
    finally:
        _walk.reset(token)


def _stamp(model: Any) -> int:
    """Changes when a weight is written (other than through ``.data``) or replaced, or an adapter is switched."""
    seen: list[Any] = []
    for module in modules_now(model):
        for _, tensor in tensors_of(module):
            seen.append((tensor.data_ptr(), writes(tensor), tensor.dtype))
        seen.append(_adapter(module))
    return hash(tuple(seen))


def _adapter(module: torch.nn.Module) -> tuple[Any, ...] | None:
    """Which of peft's adapters are in use in this layer, and how strongly; None for other layers."""
    if not hasattr(type(module), "active_adapters"):
        return None
    active, disabled = getattr(module, "active_adapters", None), getattr(module, "disable_adapters", None)
    if not isinstance(active, list | tuple) or not isinstance(disabled, bool):
        return None  # a transformers model has methods of these names
    scaling = getattr(module, "scaling", None)
    scales = tuple(sorted(scaling.items())) if isinstance(scaling, dict) else ()
    return tuple(active), disabled, tuple(getattr(module, "merged_adapters", ())), scales


def _digest(model: Any) -> str:
    config = {key: value for key, value in model.config.to_dict().items() if key not in _VOLATILE}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    counted: set[int] = set()
    for path, module in model.named_modules():
        for name, tensor in tensors_of(module):
            if id(tensor) not in counted:  # tied weights count once
                counted.add(id(tensor))
                digest.update(f"{path}.{name}:{tuple(tensor.shape)}:{tensor.dtype}:{_sums(tensor)};".encode())
        adapter = _adapter(module)
        if adapter is not None:
            digest.update(f"{path}:{adapter};".encode())
    return digest.hexdigest()[:16]


def _sums(tensor: torch.Tensor) -> list[int]:
    """Sums of the raw bits, exact on every device, and position-weighted so that swapped values are noticed too."""
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(tensor.element_size(), torch.int64)
    bits = tensor.detach().reshape(-1).view(words)
    sums = torch.zeros(2, dtype=torch.int64, device=bits.device)
    for start in range(0, len(bits), _CHUNK):
        wide = bits[start : start + _CHUNK].long()
        sums += torch.stack((wide.sum(), (wide * torch.arange(1, len(wide) + 1, device=wide.device)).sum()))
    return [int(value) for value in sums.tolist()]

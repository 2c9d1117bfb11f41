"""Who a model is until its weights change, and the right to compute on it: looked at once per call.

Nothing tells us when weights change: an optimizer writes in place, `load_state_dict` and `.to()` replace memory, peft
adds, switches, merges and exchanges adapters. So all tensors are looked at (address, layout, dtype, torch's count of
writes, and, as writes through ``.data`` aren't counted, a sample of the bytes), and what else decides (`Settings`).
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import count
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from comb.backbones.changes import MOST, RUN_STATE, UNREAD, Sample, Settings, described, row_sums
from comb.backbones.forward import counted_passes
from comb.backbones.names import Names, forget_own_names
from comb.backbones.torch_private import all_tensors_of, layouts_of, modules_of, tensors_of
from comb.locks import lock_of
from comb.waits import on_device

_CHUNK = 2**24  # elements whose sums are taken at a time
_MOST_ROWS = 2**14  # of a table that is looked at row by row: learned positions have fewer
_VOLATILE = (*UNREAD, "architectures", "dtype")
_ATTRIBUTE = "_comb_identity"

CHANGED = "the model's weights have changed while documents were compiled, or waited for the model: ask again"


class Identity:
    """A model between two changes of its weights, and the facts that hold that long. No other has its `number`."""

    _numbers = count()

    def __init__(self, modules: list[torch.nn.Module], stamp: Any, tensors: list[Tensor]) -> None:
        self.number = next(self._numbers)
        self._settings = Settings(modules)
        places = {id(tensor): place for place, tensor in enumerate(tensors)}
        found = (module.weight for module in modules if isinstance(module, torch.nn.Embedding))
        tables = {id(table): table for table in found if id(table) in places and not table.is_meta and table.numel()}
        # of embeddings too large to be looked at row by row, each row's sum, for the tokens of a prompt
        large = [table for table in tables.values() if len(table) > _MOST_ROWS]
        self._tables = [(ref(table), row_sums(table)) for table in large]
        self._closer = {places[id(table)]: len(table) for table in tables.values() if len(table) <= _MOST_ROWS}
        self._stamp, self._facts = stamp, dict[Hashable, Any]()
        self._sample = self._sampled(tensors)

    def _sampled(self, tensors: list[Tensor]) -> Sample:
        buffers = self._settings.buffers
        whole = dict.fromkeys(range(len(tensors), len(tensors) + len(buffers)), MOST)
        return Sample([*tensors, *buffers], self._closer | whole)

    def holds(self, modules: list[torch.nn.Module], stamp: Any, tensors: list[Tensor]) -> bool:
        """Whether a model is still this one."""
        if self._stamp != stamp or not self._settings.holds(modules):
            return False
        return self._sample.holds([*tensors, *self._settings.buffers])

    def reads(self, token_ids: Sequence[int]) -> bool:
        """Whether the rows of these tokens in its tables are still what they were."""
        ids = torch.tensor(token_ids)
        for reference, sums in self._tables:
            if (table := reference()) is None:
                return False
            own = on_device(ids[ids < len(table)], table.device)
            if not torch.equal(row_sums(table.index_select(0, own)), sums[own]):
                return False
        return True

    def learn_run_state(self, modules: list[torch.nn.Module]) -> None:
        """Behind a pass, before anybody else's: what the model's settings differ in is what its passes write."""
        if self._settings.learn(modules):
            self._sample = self._sampled(_stamp(modules)[1])

    def fact(self, name: Hashable, find: Callable[[], Any]) -> Any:
        """What `find` returned when it was asked first. Tokens that it tries the model on are no prompt's."""
        if name not in self._facts:
            with counted_passes():
                self._facts[name] = find()
        return self._facts[name]


class _Known:
    """Where a model keeps its identity, the same object among its attributes all the time; a copy has its own."""

    identity: Identity | None = None

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Known, ()


@dataclass(frozen=True)
class _Walk:
    """What one call has found out about each of its models, by their ids."""

    modules: dict[int, list[torch.nn.Module]] = field(default_factory=dict)
    identities: dict[int, tuple[Any, Identity]] = field(default_factory=dict)


_walk: ContextVar[_Walk | None] = ContextVar("the models of this call", default=None)


def identity_of(model: Any) -> Identity:
    """Who `model` is now: the same object until a weight is written or replaced, an adapter is added, switched,
    exchanged or merged, or its `Settings` change. One look at the model, or inside `one_walk` at most one for all
    questions.

    Not noticed are writes that bypass torch's count (through ``.data``, say) and change less than a sample of each
    tensor shows (`notice_rows` is for single embeddings), and those to weights that accelerate has offloaded:
    `forget_identity` is for them.
    """
    walk = _walk.get()
    if walk is not None and id(model) in walk.identities:
        return walk.identities[id(model)][1]
    identity = _look(model, modules_now(model))
    if walk is not None:
        walk.identities[id(model)] = model, identity
    return identity


def notice_rows(model: Any, token_ids: Iterable[int]) -> bool:
    """Before what `model` has computed from these tokens is looked up: whether their rows of its embeddings are others
    than they were, of which `identity_of` sees only some. Then the model is taken to be another one."""
    ids = sorted(set(token_ids))
    if not ids or identity_of(model).reads(ids):
        return False
    forget_identity(model)
    if (walk := _walk.get()) is not None:
        walk.identities.clear()
    return True


def modules_now(model: Any) -> list[torch.nn.Module]:
    """All modules of `model`, each once; inside `one_walk` those that it had when it was asked first."""
    walk = _walk.get()
    if walk is None:
        return modules_of(model)
    if id(model) not in walk.modules:
        walk.modules[id(model)] = modules_of(model)
    return walk.modules[id(model)]


def weights_fingerprint(model: Any, *, settings: bool = True) -> str:
    """A short name for configuration, dtype, all weights' bits and adapters in use, so that fine-tunes differ.

    Args:
        settings: attributes, hooks and buffers too; not for vLLM's modules, which hold what a start happens to leave.

    `backbone_fingerprint` looks at the embedding only, which is all that COMB's encoder shares with a backbone; keys
    and values of decoder layers depend on every layer.
    """
    return str(identity_of(model).fact(("fingerprint", settings), lambda: _digest(model, settings)))


def settings_of(module: torch.nn.Module) -> str:
    """What decides beside its weights what a part of a model computes, as text that is the same in every process."""
    modules = modules_of(module)
    names = Names(modules)
    return "".join(described(each, names) for each in modules)


def forget_identity(model: Any) -> None:
    """For weights that were written, or are about to be, in a way that `identity_of` may not notice."""
    for module in modules_of(model):
        module.__dict__.pop(_ATTRIBUTE, None)
        module.__dict__.pop(RUN_STATE, None)
    forget_own_names()  # a hook may hold something else now


@contextmanager
def one_walk() -> Iterator[None]:
    """For one call: inside, this thread walks each model once and takes its modules and weights to stay as they are.

    Nested, it walks anew: what is compiled is named after the weights that are there when compiling begins.
    """
    outer = _walk.get()
    token = _walk.set(_Walk())
    try:
        for model, _ in () if outer is None else outer.identities.values():
            identity_of(model)  # in front of any pass, for `learn_run_state`
        yield
    finally:
        _walk.reset(token)


def _look(model: Any, modules: list[torch.nn.Module], found: Identity | None = None) -> Identity:
    """Who a model is now: `found`, what a caller knows it as, as long as that holds. Who looks in the middle of a pass
    that writes attributes makes another one, which is no change to who has looked before."""
    known = _known(model)
    with known.lock:  # two threads that each make one would take the other's for a change
        stamp, tensors = _stamp(modules)
        held = (each for each in (found, known.identity) if each is not None and each.holds(modules, stamp, tensors))
        known.identity = next(held, None) or Identity(modules, stamp, tensors)
        return known.identity


def _known(model: Any) -> _Known:
    known: _Known = model.__dict__.setdefault(_ATTRIBUTE, _Known())
    return known


def _stamp(modules: list[torch.nn.Module]) -> tuple[Any, list[Tensor]]:
    """What changes when a weight is replaced or counted as written, or an adapter switched; and all tensors."""
    tensors, adapters = all_tensors_of(modules), []
    for *state, scales in _adapters(modules):
        # numbers, or tensors where peft has prepared a compiled model for exchanges
        tensors += [scale for scale in scales.values() if isinstance(scale, Tensor)]
        adapters.append((*state, {name: scale for name, scale in scales.items() if not isinstance(scale, Tensor)}))
    return (layouts_of(tensors), adapters), tensors


def _adapters(modules: Iterable[torch.nn.Module]) -> Iterator[tuple[Any, ...]]:
    """Of each layer with peft's adapters: those in use, whether they are off, those merged, how strong each is."""
    kinds = {kind for kind in set(map(type, modules)) if hasattr(kind, "active_adapters")}
    for module in modules:
        # a transformers model has methods of this name
        if type(module) in kinds and isinstance(active := getattr(module, "active_adapters", None), list | tuple):
            merged, scales = vars(module).get("merged_adapters", ()), vars(module).get("scaling")
            yield tuple(active), module.disable_adapters, tuple(merged), scales if isinstance(scales, dict) else {}


def _digest(model: Any, settings: bool) -> str:
    names = Names(modules_of(model))
    try:
        config = {key: value for key, value in model.config.to_dict().items() if key not in _VOLATILE}
        told = json.dumps(config, sort_keys=True, default=names.of)
    except Exception:  # it holds what can't be copied, or itself
        told = names.of({key: value for key, value in vars(model.config).items() if key not in _VOLATILE})
    digest = hashlib.sha256(told.encode())
    counted: set[int] = set()
    for path, module in model.named_modules():
        for name, tensor in tensors_of(module):
            if id(tensor) not in counted:  # tied weights count once
                counted.add(id(tensor))
                digest.update(f"{path}.{name}:{tuple(tensor.shape)}:{tensor.dtype}:{bit_sums(tensor)};".encode())
        if settings:
            digest.update(described(module, names).encode())
        for *state, scales in _adapters([module]):
            adapter = *state, tuple(sorted((name, float(scale)) for name, scale in scales.items()))
            digest.update(f"{path}:{adapter};".encode())
    return digest.hexdigest()[:16]


def bit_sums(tensor: Tensor) -> list[int]:
    """Sums of the raw bits, exact on every device, and position-weighted so that swapped values are noticed too.
    Raises ValueError for weights that aren't there."""
    if tensor.is_meta:
        raise ValueError(
            "some weights are on the meta device (offloaded by accelerate), so what is cached can't be named after "
            "them: load the model whole, or use method='full'"
        )
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(tensor.element_size(), torch.int64)
    bits = tensor.detach().reshape(-1).view(words)
    sums = torch.zeros(2, dtype=torch.int64, device=bits.device)
    for start in range(0, len(bits), _CHUNK):
        wide = bits[start : start + _CHUNK].long()
        sums += torch.stack(
            (wide.sum(), (wide * torch.arange(start + 1, start + len(wide) + 1, device=wide.device)).sum())
        )
    return [int(value) for value in sums.tolist()]


# --- one computation at a time on a backbone that many engines and methods share ----------------------------


def backbone_of(model: Any) -> Any:
    """The frozen backbone of a COMB model, or the model itself."""
    inner = getattr(model, "backbone", None)
    # Mamba's and xLSTM's own stack of layers is called so too, and is no model that generates
    return inner if hasattr(inner, "generate") else model


_entered: ContextVar[tuple[Any, ...]] = ContextVar("models that this thread computes on", default=())


@contextmanager
def exclusive(model: Any, *, streams: bool = False) -> Iterator[None]:
    """One computation at a time on a model, in eval mode, without gradients, and in the model's own dtype.

    Documents reach the cross blocks through hooks on the backbone, so a plain run of that backbone, or another
    request's, must not overlap: the lock belongs to the backbone, whichever engine or method uses it.

    Args:
        streams: the caller goes on meanwhile, so that what changes isn't taken for what passes write.

    Raises:
        ValueError: the weights have changed while this call waited for another's computation, so that what it has
            found for them (documents, a conversation) isn't theirs.
    """
    lock, walk = lock_of(backbone_of(model)), _walk.get()
    with ExitStack() as stack:
        waits = not lock.acquire(blocking=False)
        if waits:
            lock.acquire()
        stack.callback(lock.release)
        for known, identity in () if walk is None or not waits else walk.identities.values():
            if _look(known, modules_of(known), identity) is not identity:
                raise ValueError(CHANGED)
        # a caller's inference mode and autocast end here: what is cached must not depend on who asked for it first
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        outer = _entered.get()
        if any(model is entered or model is backbone_of(entered) for entered in outer):  # its modules have been seen to
            yield
            return
        training = [module for module in modules_now(model) if module.training]
        for module in training:
            module.training = False
        token = _entered.set((*outer, model))
        try:
            yield
        finally:
            walk = _walk.get()
            for known, identity in () if walk is None or streams else walk.identities.values():
                with _known(known).lock:  # nobody looks meanwhile
                    identity.learn_run_state(modules_now(known))
            _entered.reset(token)
            for module in training:
                module.training = True

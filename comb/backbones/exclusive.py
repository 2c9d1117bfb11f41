"""One computation at a time on a backbone that many engines and methods share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from comb.backbones.identity import check_unchanged, learn_run_state, modules_now
from comb.locks import lock_of


def backbone_of(model: Any) -> Any:
    """The frozen backbone of a COMB model, or the model itself.

    Mamba's and xLSTM's own stack of layers is called `backbone`, too; it is no model that generates.
    """
    inner = getattr(model, "backbone", None)
    return inner if hasattr(inner, "generate") else model


_entered: ContextVar[tuple[Any, ...]] = ContextVar("models that this thread computes on", default=())


@contextmanager
def _without_autocast() -> Iterator[None]:
    with ExitStack() as stack:
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


@contextmanager
def _locked(backbone: Any) -> Iterator[None]:
    lock = lock_of(backbone)
    waits = not lock.acquire(blocking=False)
    if waits:
        lock.acquire()
    try:
        if waits:  # time, in which the weights may have changed
            check_unchanged()
        yield
    finally:
        lock.release()


@contextmanager
def exclusive(model: Any) -> Iterator[None]:
    """One computation at a time on a model, in eval mode, without gradients, and in the model's own dtype.

    A caller's autocast and inference mode end here: what is cached must not depend on who asked for it first.

    Documents reach the cross blocks through hooks on the backbone, so a plain run of that backbone, or another
    request's, must not overlap: the lock belongs to the backbone, whichever engine or method uses it.

    Raises:
        ValueError: the weights have changed while this call waited for another's computation.
    """
    with _locked(backbone_of(model)), torch.inference_mode(False), torch.no_grad(), _without_autocast():
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
            learn_run_state()
            _entered.reset(token)
            for module in training:
                module.training = True

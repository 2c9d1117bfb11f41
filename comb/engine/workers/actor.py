"""What runs inside a worker, a Ray actor, and what it answers.

Ray pickles the call and the reply, but no tensor: a PICache lies in Ray's object store as the bytes of its file.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any

import numpy as np
import torch

from comb import methods
from comb.backbones.forward import counted_passes
from comb.cache.picache import serialize
from comb.methods.base import Method, MethodSpec
from comb.model.source import ModelSource

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Reply:
    """What a worker says to a segment."""

    data: Any = None  # [bytes] uint8 (numpy), the PICache as a file holds it, checksum included; None if there is none
    seconds: float = 0.0  # of compiling
    tokens: float = 0  # that the backbone computed, with what it found out on the way (a front)
    error: str = ""  # why there is no PICache
    counted_as: str = "damaged"  # if nothing can be made of it


class Compiler:
    """A model, and the methods made on it so far.

    Args:
        threads: that torch may use.
        imports: modules to import first, for methods that don't come with the package.

    Raises:
        Exception: whatever loading the model raises.
    """

    def __init__(self, source: ModelSource, threads: int, imports: Iterable[str]) -> None:
        torch.set_num_threads(threads)
        for module in imports:
            import_module(module)
        self._model = source.load()
        self._methods: dict[str, Method] = {}

    def loaded(self) -> None:
        """Answered when the model is there."""

    def compile(self, spec: MethodSpec, fingerprint: str, key: str, token_ids: Sequence[int]) -> Reply:
        """Compiles one segment. Never raises an Exception: the engine's own method will say it better.

        Args:
            spec: how the method is made.
            fingerprint: that it must have then, or the worker refuses.
            key: that the result is serialised under, so that it can't be taken for another segment's.
            token_ids: of the segment; empty: nothing is compiled, the worker only says whether it would.
        """
        try:
            name = json.dumps(asdict(spec), sort_keys=True)
            if name not in self._methods:
                self._methods[name] = methods.create(spec.name, self._model, **spec.parameters)
            method = self._methods[name]
            if method.fingerprint != fingerprint:
                why = f"this worker's method has the fingerprint {method.fingerprint}, not {fingerprint}"
                return Reply(error=why, counted_as="refused")
            if not token_ids:
                return Reply()
            start = time.perf_counter()
            with counted_passes() as passed:
                (picache,) = method.compile([token_ids])
            if any(tensor.is_cuda for tensor in picache.tensors().values()):
                torch.cuda.synchronize()
            seconds = time.perf_counter() - start
            # an array: Ray's object store shares it instead of copying
            return Reply(np.frombuffer(serialize(picache, key), np.uint8), seconds, passed.tokens)
        except Exception as error:
            logger.debug("could not compile", exc_info=True)
            return Reply(error=f"{type(error).__name__}: {error}", counted_as="failed")

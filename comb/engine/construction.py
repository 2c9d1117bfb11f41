"""What an engine is made of: the method by its name, the store where none is given, and who compiles."""

from __future__ import annotations

import logging
from typing import Any

from comb import methods
from comb.backbones.adapter import trained_method
from comb.backbones.identity import backbone_of
from comb.cache.store import PICacheStore
from comb.engine.workers import CompileExecutor
from comb.engine.workers.executor import spec_of
from comb.methods.base import Method
from comb.model.source import ModelSource

logger = logging.getLogger(__name__)

DEFAULT_STORE_BYTES = 4 * 2**30


def default_store(model: Any) -> PICacheStore:
    """At most `DEFAULT_STORE_BYTES` where the model is, and as many on the host if that is a GPU."""
    device = backbone_of(model).get_input_embeddings().weight.device
    host_bytes = 0 if device.type == "cpu" else DEFAULT_STORE_BYTES
    return PICacheStore(device=device, device_bytes=DEFAULT_STORE_BYTES, host_bytes=host_bytes)


def default_method(model: Any, tokenizer: Any, parameters: dict[str, Any]) -> Method:
    """What an adapter was trained for; of a plain model `primed`, or `full` where its documents can't be linked.

    Raises:
        ValueError: as `make_method` does, where parameters of `primed` were given.
    """
    trained = trained_method(model)
    if trained is not None:
        return make_method(trained, model, tokenizer, parameters)
    try:
        return make_method("primed", model, tokenizer, parameters)
    except ValueError as error:
        if parameters:
            raise
        logger.warning("no method was named, and primed can't be used, so documents stand in the prompt: %s", error)
        return make_method("full", model, tokenizer, parameters)


def make_method(method: str | Method, model: Any, tokenizer: Any, parameters: dict[str, Any]) -> Method:
    """The method from ``"name:parameters"`` and further `parameters`, or as it is.

    Raises:
        ValueError: unknown method or parameter, parameters beside an instance, or an instance for another model.
    """
    if isinstance(method, Method):
        if parameters:
            raise ValueError(f"parameters {', '.join(sorted(parameters))} belong into the Method instance")
        if method.backbone is not backbone_of(model):
            raise ValueError(f"the method {method.name!r} is for another model than this engine's: make one for it")
        return method
    if not isinstance(method, str):
        raise ValueError(f"method is a name, or a Method instance, not {method!r}")
    name, from_spec = methods.parse(method)
    cls = methods.get(name)
    return methods.create(name, model, **cls.tokenized({**from_spec, **parameters}, tokenizer, model))


def executor_of(
    method: Method, given: CompileExecutor | None, workers: int, source: ModelSource | None
) -> CompileExecutor | None:
    """The workers that were given, or so many new Ray actors; checked to compile as `method` does. None for none.

    Raises:
        ValueError: workers that compile something else, a negative number, both kinds at once, or no Ray.
        RuntimeError: a worker could not load the model.
    """
    if given is not None:
        if workers:
            raise ValueError("workers= starts Ray actors of its own: leave it out when giving an executor=")
        given.check(method)
        return given
    if workers < 0:
        raise ValueError(f"workers is a number of Ray actors, or 0 for none, got {workers}")
    if workers and method.keeps_tokens_only:
        logger.warning("method %r has nothing to compile: no workers are started", method.name)
        return None
    if not workers:
        return None
    from comb.engine.workers.ray_actors import ray_executor

    spec_of(method)
    executor = ray_executor(ModelSource.of(method.model) if source is None else source, workers)
    try:
        executor.check(method)
    except BaseException:
        executor.close()
        raise
    return executor

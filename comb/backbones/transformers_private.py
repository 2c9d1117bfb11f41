"""Every reach into names of transformers that it doesn't document, in one place; nothing stays changed.

Seen in transformers 5.16 to 5.24:

- ``config._attn_implementation``: the attention that is set has a setter (`set_attn_implementation`), but no getter
- ``model._can_set_attn_implementation()``: whether a model calls its attention through `AttentionInterface`
- ``model._supports_sdpa``: not with soft caps or attention sinks
- ``layer._gradient_checkpointing_func``, and what it is put around: a layer's call with its hooks, or its forward alone
- ``eager_attention_forward`` in a model's file: eager attention with what the model adds to it (soft caps, sinks)
- scan functions in a model's file: layers call them as globals of that file, and no hook sees what they are given
- the report that ends in an error without a name, when weights of a checkpoint can't be put together
- ``chat_template_utils._compile_jinja_template``: whether a template is one, before there is a chat
- the names that a GGUF file's tensors have in a model, and which of its two readers takes an architecture
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.llama.modeling_llama import eager_attention_forward

from comb.backbones.tracebacks import frames

_HOOKS_ARE_OUTSIDE = "__call__" not in vars(GradientCheckpointingLayer)
# names in a module are shared by all threads: one replacement at a time, and it acts in its own thread only
_replacing = threading.Lock()


def attention_name(model: Any) -> str:
    """The attention implementation that is set: "sdpa", "eager", "flash_attention_2", or a registered one's name."""
    name: str = model.config._attn_implementation
    return name


def recomputed_with(layer: Any, function: Callable[..., Any], *args: Any) -> Any:
    """``function(*args)`` of a hook on `layer`, recomputed in the backward pass whenever the layer is.

    From transformers 5.23 on only a layer's forward is: its hooks run outside of that, and are recomputed here.
    """
    checkpointed = getattr(layer, "gradient_checkpointing", False) and layer.training and torch.is_grad_enabled()
    if checkpointed and isinstance(layer, GradientCheckpointingLayer) and _HOOKS_ARE_OUTSIDE:
        return layer._gradient_checkpointing_func(function, *args)
    return function(*args)


def attention_with_masks(model: Any) -> str:
    """The faster attention of `model` that takes any mask as a tensor."""
    return "sdpa" if model._supports_sdpa else "eager"


def can_set_attention(model: Any) -> bool:
    """Whether `model` calls its attention through transformers' `AttentionInterface`."""
    return bool(model._can_set_attn_implementation())


def eager_attention(module: nn.Module) -> Callable[..., Any]:
    """The eager attention of the file that `module`'s class stands in; Llama's where it has none."""
    own: Callable[..., Any] = _file_of(module).get("eager_attention_forward", eager_attention_forward)
    return own


@contextmanager
def wrapped_functions(
    model: nn.Module, names: Iterable[str], wrap: Callable[[str, Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """For a while, ``wrap(name, function)`` stands for each function called so in the files of `model`'s modules.

    Calls from other threads go to the function itself.
    """
    thread = threading.get_ident()

    def call(function: Callable[..., Any], wrapped: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        return (wrapped if threading.get_ident() == thread else function)(*args, **kwargs)

    with _replacing:
        files = {type(module).__module__: _file_of(module) for module in model.modules()}
        places = [(file, name, file[name]) for file in files.values() for name in names if callable(file.get(name))]
        try:
            for file, name, function in places:
                file[name] = partial(call, function, wrap(name, function))
            yield
        finally:
            for file, name, function in places:
                file[name] = function


def _file_of(module: nn.Module) -> dict[str, Any]:
    """The globals of the file that `module`'s class was defined in."""
    return vars(sys.modules[type(module).__module__])


def conversion_errors(error: BaseException) -> dict[str, list[str]]:
    """By a model's weight, why a checkpoint's couldn't be put together to it, in lines, of which the last names it and
    the one before is what was raised: transformers raises without a name."""
    for frame in frames(error):
        report = frame.tb_frame.f_locals.get("loading_info")
        if found := getattr(report, "conversion_errors", None):
            return {name: str(text).strip().splitlines() for name, text in found.items()}
    return {}


def why_no_template(text: str) -> str | None:
    """What is wrong with the syntax of a chat template; None if nothing."""
    from jinja2.exceptions import TemplateError
    from transformers.utils import chat_template_utils

    try:
        chat_template_utils._compile_jinja_template(text)
    except TemplateError as error:
        return " ".join(str(error).split())
    return None


def unused_gguf_tensors(model: nn.Module, architecture: str, names: Iterable[str]) -> list[str]:
    """Of a GGUF file's tensors those that transformers has no place for in `model`, which it leaves out in silence.

    For architectures that it reads by conversions (from 5.19 on) they are in the loading report.
    """
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    try:
        from transformers.integrations.gguf import is_gguf_arch_supported
    except ImportError:
        pass
    else:
        if is_gguf_arch_supported(architecture):
            return []
    known = get_gguf_hf_weights_map(model, TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config={}))
    # experts are one tensor there, by names of another ending
    return [name for name in names if name not in known and name.removesuffix(".weight") not in known]

"""The weights of a run: those that train, what of them is published, and both under DeepSpeed, which has them in parts.

What reaches into DeepSpeed without being documented, seen in 0.19.8: `engine.module_state_dict` (replaced), and the
parameters' `ds_id` and `comm_dtype`.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from comb_training.models.lora import lora_layers, merged
from comb_training.trainer import distributed


def trained_weights(model: Any, *, sharded: bool) -> dict[str, Tensor]:
    """The trained parameters in full, on the CPU. Collective.

    Args:
        sharded: DeepSpeed may have them; its float32 master weights are taken.
    """
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not sharded:
        return {name: parameter.detach().cpu() for name, parameter in trained.items()}
    from deepspeed.utils import safe_get_full_fp32_param

    masters = {name: safe_get_full_fp32_param(parameter) for name, parameter in trained.items()}
    # there is none before an engine has taken the model
    return {name: (trained[name].detach() if master is None else master).cpu() for name, master in masters.items()}


def published_weights(model: Any, *, sharded: bool) -> dict[str, Tensor]:
    """The trained parameters, and with LoRA the rest of the encoder that it is merged into. Collective.

    With LoRA, other ranks than the first get the trained parameters only.
    """
    weights, layers = trained_weights(model, sharded=sharded), lora_layers(model)
    if not layers:
        return weights
    base = {}
    for name, parameter in model.encoder.named_parameters(prefix="encoder"):
        if not parameter.requires_grad:
            with _whole(parameter):
                if distributed.is_main():
                    base[name] = parameter.detach().cpu().clone()
    return merged(weights, base, layers) if distributed.is_main() else weights


def _whole(parameter: nn.Parameter) -> AbstractContextManager[Any]:
    """Inside, a parameter that ZeRO-3 keeps in parts is whole. Collective."""
    if not hasattr(parameter, "ds_id"):
        return nullcontext()
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters

    context: AbstractContextManager[Any] = GatheredParameters([parameter])
    return context


def settle_engine(engine: Any, model: Any) -> None:
    """Makes DeepSpeed's checkpoints leave out what is frozen, and its arithmetic the same after a resume."""
    engine.module_state_dict = functools.partial(_without_frozen, engine.module_state_dict, engine.module)
    # a matrix that is both embedding and head would be gathered in the autocast's dtype in some steps and in its
    # own in others, and a resumed run would not be the same run
    vars(model.get_input_embeddings().weight).pop("comm_dtype", None)


def _without_frozen(state_dict: Any, module: nn.Module, **kwargs: Any) -> dict[str, Any]:
    """DeepSpeed leaves out a frozen matrix under its first name only; a tied head would stay."""
    named = module.named_parameters(remove_duplicate=False)
    frozen = {name for name, parameter in named if not parameter.requires_grad}
    return {name: value for name, value in state_dict(**kwargs).items() if name not in frozen}


def load_engine(engine: Any, folder: Path) -> None:
    """What the engine's ``save_checkpoint`` wrote. Collective. Raises ValueError if it is not there."""
    loaded, _ = engine.load_checkpoint(str(folder), load_module_strict=False)  # the frozen weights are not in it
    if loaded is None:
        raise ValueError(f"{folder} holds no state of DeepSpeed; resume with the train.deepspeed it was made with")

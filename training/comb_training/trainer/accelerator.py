"""accelerate and DeepSpeed for one run: ranks, precision, trackers, and the weights that DeepSpeed has in parts.

What reaches into DeepSpeed without being documented, seen in 0.19.8: `engine.module_state_dict` (replaced), and the
parameters' `comm_dtype` and, in checkpoints.py, `ds_shape`.
"""

from __future__ import annotations

import json
import os
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DeepSpeedPlugin, PartialState
from accelerate.state import AcceleratorState
from accelerate.tracking import get_available_trackers
from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs
from torch import Tensor

from comb_training.config import TrainConfig
from comb_training.trainer import distributed
from comb_training.trainer.checkpoints import reading


def make_accelerator(config: TrainConfig, *, use_cpu: bool) -> Accelerator:
    """What wraps model and optimizer, and adds up gradients. One per process at a time. Raises ValueError as
    `check_tools` does."""
    # accelerate keeps one state per process: without this, a second run would have the precision of the first.
    # Private; seen in accelerate 1.15, and used by transformers' TrainingArguments for the same reason
    AcceleratorState._reset_state(reset_partial_state=True)
    plugin = None
    if config.deepspeed is not None:
        settings = _deepspeed_settings(config)
        if use_cpu:
            import deepspeed.ops

            # a shared-memory operator for CPU ranks that only its inference uses; building it needs a compiler and a
            # minute. Private; seen in DeepSpeed 0.19.8
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        plugin = DeepSpeedPlugin(hf_ds_config=settings)
    if use_cpu:
        PartialState(cpu=True)  # and not `Accelerator(cpu=True)`, which would leave DeepSpeed out
    return Accelerator(
        # DeepSpeed's own autocast keeps trained weights in float32; asking for both would be two of them
        mixed_precision="bf16" if config.bf16 and not _own_autocast(plugin) else "no",
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        deepspeed_plugin=plugin,
        log_with=list(config.report_to) or None,
        project_dir=config.output_dir,
        kwargs_handlers=[
            DistributedDataParallelKwargs(find_unused_parameters=False),
            InitProcessGroupKwargs(timeout=timedelta(minutes=30)),  # held-out answers may keep one rank busy
        ],
    )


def check_tools(config: TrainConfig) -> None:
    """Raises ValueError for a DeepSpeed configuration that can't be used, or a tracker not there or without a key."""
    installed = set(map(str, get_available_trackers()))
    if missing := sorted(set(config.report_to) - {"all", *installed}):
        raise ValueError(
            f"train.report_to: {missing[0]} is not installed (pip install {missing[0]}), or no tracker of accelerate; "
            f"there are: {', '.join(sorted(installed)) or 'none'}"
        )
    if "wandb" in installed and {"all", "wandb"} & {*config.report_to} and distributed.is_main():
        import wandb

        try:
            if wandb.setup().settings.mode in (None, "online"):
                wandb.login()  # asks for a key where there is a terminal
        except wandb.Error as error:
            raise ValueError(
                f"train.report_to: wandb has no key that it can use ({error}): give it one (wandb login), or set "
                "WANDB_MODE=offline"
            ) from error
    if config.deepspeed is not None:
        _deepspeed_settings(config)


def engine_autocast(accelerator: Accelerator) -> AbstractContextManager[Any]:
    """DeepSpeed's own autocast, for calls that pass its engine by; nothing without DeepSpeed."""
    settings = _own_autocast(accelerator.state.deepspeed_plugin)
    if not settings.get("enabled"):
        return nullcontext()
    dtype = getattr(torch, str(settings.get("dtype", "bfloat16")).removeprefix("torch."))
    return torch.autocast(accelerator.device.type, dtype)


def _own_autocast(plugin: DeepSpeedPlugin | None) -> dict[str, Any]:
    return {} if plugin is None else plugin.deepspeed_config.get("torch_autocast", {})


def read_deepspeed(config: TrainConfig) -> dict[str, Any]:
    """The file of `train.deepspeed` as it is. Raises ValueError if it is no JSON."""
    try:
        settings: dict[str, Any] = json.loads(Path(str(config.deepspeed)).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"train.deepspeed={config.deepspeed!r} is no DeepSpeed configuration: {error}") from error
    return settings


def _deepspeed_settings(config: TrainConfig) -> dict[str, Any]:
    """DeepSpeed's configuration as it is, but for its "auto" values; accelerate fills in those not named here."""
    if "LOCAL_RANK" not in os.environ:
        raise ValueError(
            "train.deepspeed needs a launcher, also for one process: torchrun --nproc_per_node 1 -m "
            "comb_training.train CONFIG ..."
        )
    if find_spec("deepspeed") is None:
        raise ValueError("train.deepspeed: DeepSpeed is not installed (pip install 'comb-pic[train]')")
    settings = read_deepspeed(config)
    if own := sorted({"optimizer", "scheduler"} & settings.keys()):
        raise ValueError(
            f"{config.deepspeed}: leave out {own[0]!r}: a run has its own, as train.learning_rate, weight_decay and "
            "warmup say"
        )
    for name, value in (
        ("train_batch_size", config.batch_size * config.gradient_accumulation_steps * distributed.world_size()),
        ("train_micro_batch_size_per_gpu", config.batch_size),
        ("gradient_accumulation_steps", config.gradient_accumulation_steps),
        ("gradient_clipping", config.max_grad_norm),
    ):
        if settings.setdefault(name, "auto") not in ("auto", value):
            raise ValueError(
                f'{config.deepspeed}: {name} is {settings[name]} and the run has {value}: write "auto" there'
            )
        settings[name] = value
    return settings


@distributed.noticing_ends()
def trained_weights(model: Any, *, sharded: bool) -> dict[str, Tensor]:
    """The trained parameters in full, on the CPU. Collective. `sharded`: DeepSpeed may have them; its float32 master
    weights are taken."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not sharded:
        return {name: parameter.detach().cpu() for name, parameter in trained.items()}
    from deepspeed.utils import safe_get_full_fp32_param

    masters = {name: safe_get_full_fp32_param(parameter) for name, parameter in trained.items()}
    # there is none before an engine has taken the model
    return {name: (trained[name].detach() if master is None else master).cpu() for name, master in masters.items()}


def settle_engine(engine: Any, model: Any) -> None:
    """Makes DeepSpeed's checkpoints leave out what is frozen, and its arithmetic the same after a resume."""

    def trained(**_: Any) -> dict[str, Tensor]:
        # DeepSpeed asks for all, where a quantiser may write into the backbone, and a tied head of it would stay
        return {name: each.detach() for name, each in engine.module.named_parameters() if each.requires_grad}

    engine.module_state_dict = trained
    # a matrix that is both embedding and head would be gathered in the autocast's dtype in some steps and in its
    # own in others, and a resumed run would not be the same run
    vars(model.get_input_embeddings().weight).pop("comm_dtype", None)


def load_engine(engine: Any, folder: Path) -> None:
    """What the engine's ``save_checkpoint`` wrote. Collective. Raises ValueError if it is not there."""
    with reading(folder):
        loaded, _ = engine.load_checkpoint(str(folder), load_module_strict=False)  # the frozen weights are not in it
    if loaded is None:
        raise ValueError(f"{folder} holds no state of DeepSpeed; resume with the train.deepspeed it was made with")

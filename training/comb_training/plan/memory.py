"""Bytes per GPU: what DeepSpeed's stages, or DDP, keep on each of them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from comb.model.modeling import CombForCausalLM
from comb_training.config import TrainConfig
from comb_training.plan.activations import BFLOAT16, FLOAT32, PassSize, activation_bytes
from comb_training.plan.counting import Parameters


@dataclass(frozen=True)
class Sharding:
    """How a run spreads weights, gradients and optimizer states over its GPUs.

    Args:
        stage: of ZeRO; 0: every GPU has everything.
        ranks: GPUs.
        autocast: whether trained layers compute in 16 bits.
        gathered: parameters at most that ZeRO-3 holds whole at one time.
        bucket: gradients, in elements, that ZeRO reduces at once; None: hidden size squared, as transformers sets it.
        offload_optimizer, offload_parameters: kept in CPU memory instead.
    """

    stage: int = 0
    ranks: int = 1
    autocast: bool = False
    gathered: int = 10**9
    bucket: int | None = None
    offload_optimizer: bool = False
    offload_parameters: bool = False

    @classmethod
    def of(cls, config: TrainConfig, ranks: int) -> Sharding:
        """What `config` and the DeepSpeed configuration it names say. Raises ValueError if that is none."""
        if config.deepspeed is None:
            return cls(ranks=ranks, autocast=config.bf16)
        try:
            settings = json.loads(Path(config.deepspeed).read_text(encoding="utf-8"))
        except (OSError, json.JSONDecodeError) as error:
            raise ValueError(f"train.deepspeed={config.deepspeed!r} is no DeepSpeed configuration: {error}") from error
        zero = settings.get("zero_optimization", {})
        bucket = zero.get("reduce_bucket_size", 5 * 10**8)
        gathered = zero.get("stage3_max_live_parameters", 10**9)
        return cls(
            stage=int(zero.get("stage", 0)),
            ranks=ranks,
            autocast=bool(settings.get("torch_autocast", {}).get("enabled", config.bf16)),
            gathered=10**9 if gathered == "auto" else int(gathered),
            bucket=None if bucket == "auto" else int(bucket),
            offload_optimizer=_offloaded(zero, "optimizer"),
            offload_parameters=_offloaded(zero, "param"),
        )

    @property
    def name(self) -> str:
        """As people say it."""
        if self.stage == 0:
            return "DDP" if self.ranks > 1 else "one process"
        offload = self.offload_optimizer or self.offload_parameters
        return f"ZeRO-{self.stage}{' + CPU' if offload else ''}"


def _offloaded(zero: dict[str, Any], what: str) -> bool:
    return bool((zero.get(f"offload_{what}") or {}).get("device", "none") != "none")


@dataclass(frozen=True)
class GpuMemory:
    """Bytes per GPU at the largest moment of a step.

    Args:
        states: by what they are for, there all the time.
        activations: during forward and backward; None where the size of a batch isn't known.
        temporaries: of the optimizer, when activations are gone.
        host: per rank in CPU memory.
        start: the whole model on every GPU, before DeepSpeed shards it.
    """

    sharding: Sharding
    states: dict[str, int]
    activations: int | None
    temporaries: int
    host: int
    start: int

    @property
    def total(self) -> int:
        """All of it at the largest moment."""
        return max(self.start, sum(self.states.values()) + max(self.activations or 0, self.temporaries))


def memory_of(
    model: CombForCausalLM,
    parameters: Parameters,
    sharding: Sharding,
    size: PassSize | None,
    *,
    checkpointing: bool,
) -> GpuMemory:
    """Bytes of one way of sharding, over R ranks.

    With F the bytes of frozen weights (bf16: 2 per parameter), W those of the trained ones (float32: 4), T how many
    are trained::

                          DDP    ZeRO-1     ZeRO-2     ZeRO-3
        frozen weights    F      F          F          F / R
        trained weights   W      W          W          W / R
        float32 copy      -      4T / R     4T / R     4T / R       CPU with offload_optimizer
        gradients         W      4T         4T / R     4T / R       CPU with offload_optimizer
        Adam's moments    2W     8T / R     8T / R     8T / R       CPU with offload_optimizer
        buffers           W      2 buckets  2 buckets  2 buckets + live weights

    DDP's buffers are its gradient buckets; one process has none. ZeRO-3's frozen and trained weights are in CPU memory
    with offload_param. The total is that and the larger of activations (`activation_bytes`) and AdamW's temporary, W
    over its ranks; or F + W at the start, if that is more.

    Args:
        model: on any device; for its widths.
        parameters: of it.
        size: of a batch; None leaves activations out.
        checkpointing: gradient checkpointing.
    """
    stage, ranks = sharding.stage, sharding.ranks
    weights, trained = parameters.trained_bytes, parameters.trained
    # ZeRO-1 shards the optimizer, 2 gradients too, 3 weights too
    optimizer_parts, gradient_parts, weight_parts = (ranks if stage >= least else 1 for least in (1, 2, 3))
    master = FLOAT32 * trained if stage else weights
    states = {
        "frozen weights": _part(parameters.frozen_bytes, weight_parts),
        "trained weights": _part(weights, weight_parts),
        "float32 copy of them": _part(master, optimizer_parts) if stage else 0,
        "gradients": _part(master, gradient_parts),
        "Adam's two moments": _part(2 * master, optimizer_parts),
        "buffers": _buffers(parameters, sharding, model.config.encoder_config.hidden_size),
    }
    host = 0
    if sharding.offload_optimizer and stage:
        host += sum(states.pop(name) for name in ("float32 copy of them", "gradients", "Adam's two moments"))
    if sharding.offload_parameters and stage == 3:
        host += sum(states.pop(name) for name in ("frozen weights", "trained weights"))
    activations = None
    if size is not None:
        # autocast keeps a 16-bit copy of every trained matrix; ZeRO-3 gathers them in 16 bits
        copies = BFLOAT16 * trained if sharding.autocast and stage < 3 else 0
        activations = activation_bytes(
            model, size, autocast=sharding.autocast, checkpointing=checkpointing, copies=copies
        )
    return GpuMemory(
        sharding=sharding,
        states=states,
        activations=activations,
        # AdamW works on all tensors at once and makes one temporary as large as what it updates
        temporaries=0 if sharding.offload_optimizer and stage else _part(weights, optimizer_parts),
        host=host,
        start=parameters.frozen_bytes + weights,
    )


def _part(value: int, parts: int) -> int:
    return -(-value // parts)


def _buffers(parameters: Parameters, sharding: Sharding, hidden: int) -> int:
    """What gradients and gathered weights pass through."""
    if sharding.stage == 0:
        return parameters.trained_bytes if sharding.ranks > 1 else 0
    bucket = hidden**2 if sharding.bucket is None else sharding.bucket
    reduced = 2 * FLOAT32 * min(bucket, parameters.trained)  # two, so that one travels while the other fills
    if sharding.stage < 3 or sharding.ranks == 1:
        return reduced
    share = min(1.0, sharding.gathered / parameters.total)
    trained_bytes = BFLOAT16 * parameters.trained if sharding.autocast else parameters.trained_bytes
    return reduced + int(share * (parameters.frozen_bytes + trained_bytes))

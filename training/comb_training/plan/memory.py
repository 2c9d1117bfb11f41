"""Bytes per GPU: what DeepSpeed's stages, or DDP, keep on each of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from comb.backbones.discovery import text_config
from comb_training.config import TrainConfig
from comb_training.plan.activations import BFLOAT16, FLOAT32, PassSize, activation_bytes
from comb_training.plan.counting import Parameters, Trained

LIVE_PARAMETERS = 10**9  # DeepSpeed's default of what ZeRO-3 holds whole at one time
OFFLOADED = {"device": "cpu"}


@dataclass(frozen=True)
class GpuMemory:
    """Bytes per GPU at the largest moment of a step.

    Args:
        way: of sharding, as people say it.
        states: by what they are for, there all the time.
        activations: during forward and backward; None where the size of a batch isn't known.
        temporaries: of the optimizer, when activations are gone.
        host: per rank in CPU memory.
        start: the whole model on every GPU, before DeepSpeed shards it.
    """

    way: str
    states: dict[str, int]
    activations: int | None
    temporaries: int
    host: int
    start: int

    @property
    def total(self) -> int:
        """All of it at the largest moment."""
        return max(self.start, sum(self.states.values()) + max(self.activations or 0, self.temporaries))


def deepspeed_settings(config: TrainConfig) -> dict[str, Any]:
    """The DeepSpeed configuration of a run; without one, DDP's. Raises ValueError if the file is none."""
    settings: dict[str, Any] = {"torch_autocast": {"enabled": config.bf16}, "zero_optimization": {}}
    if config.deepspeed is None:
        return settings
    try:
        return {**settings, **json.loads(Path(config.deepspeed).read_text(encoding="utf-8"))}
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"train.deepspeed={config.deepspeed!r} is no DeepSpeed configuration: {error}") from error


def other_ways(deepspeed: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The same settings with other stages of ZeRO, and with stage 3 in CPU memory, to compare with."""
    zero = {name: value for name, value in deepspeed["zero_optimization"].items() if not name.startswith("offload_")}
    ways = [zero | {"stage": stage} for stage in range(4)]
    ways.append(zero | {"stage": 3, "offload_optimizer": OFFLOADED, "offload_param": OFFLOADED})
    return (
        {**deepspeed, "zero_optimization": way} for way in ways if _name(way) != _name(deepspeed["zero_optimization"])
    )


def memory_of(
    model: Trained,
    parameters: Parameters,
    size: PassSize | None,
    deepspeed: Mapping[str, Any],
    *,
    ranks: int = 1,
    checkpointing: bool,
) -> GpuMemory:
    """Bytes of one way of sharding.

    DDP's buffers are its gradient buckets; one process has none. AdamW's temporary is as large as what a rank updates.

    Args:
        model: on any device; for its widths. size: of a batch; None leaves activations out.
        deepspeed: as `deepspeed_settings` gives them. checkpointing: gradient checkpointing.
    """
    zero, autocast = deepspeed["zero_optimization"], bool(deepspeed["torch_autocast"].get("enabled"))
    stage = int(zero.get("stage", 0))
    weights, trained = parameters.trained_bytes, parameters.trained
    # ZeRO-1 shards the optimizer, 2 gradients too, 3 weights too
    optimizer_parts, gradient_parts, weight_parts = (ranks if stage >= least else 1 for least in (1, 2, 3))
    master = FLOAT32 * trained if stage else weights
    states = {
        "frozen weights": _part(parameters.frozen_bytes, weight_parts),
        "trained weights": _part(weights, weight_parts),
        "float32 copy": _part(master, optimizer_parts) if stage else 0,
        "gradients": _part(master, gradient_parts),
        "moments": _part(2 * master, optimizer_parts),
        "buffers": _buffers(parameters, zero, text_config(model.backbone).hidden_size, ranks, autocast),
    }
    moved = ["float32 copy", "gradients", "moments"] if stage and _offloads(zero, "optimizer") else []
    moved += ["frozen weights", "trained weights"] if stage == 3 and _offloads(zero, "param") else []
    activations = None
    if size is not None:
        # autocast keeps a 16-bit copy of every trained matrix; ZeRO-3 gathers them in 16 bits
        copies = BFLOAT16 * trained if autocast and stage < 3 else 0
        activations = activation_bytes(model, size, autocast=autocast, checkpointing=checkpointing, copies=copies)
    return GpuMemory(
        way=_name(zero) if stage or ranks > 1 else "one process",
        host=sum(states.pop(name) for name in moved),
        states=states,
        activations=activations,
        # AdamW works on all tensors at once
        temporaries=0 if "moments" in moved else _part(weights, optimizer_parts),
        start=parameters.frozen_bytes + weights,
    )


def _name(zero: Mapping[str, Any]) -> str:
    stage = int(zero.get("stage", 0))
    return (
        f"ZeRO-{stage}{'+CPU' if _offloads(zero, 'optimizer') or _offloads(zero, 'param') else ''}" if stage else "DDP"
    )


def _offloads(zero: Mapping[str, Any], what: str) -> bool:
    return bool((zero.get(f"offload_{what}") or {}).get("device", "none") != "none")


def _part(value: int, parts: int) -> int:
    return -(-value // parts)


def _buffers(parameters: Parameters, zero: Mapping[str, Any], hidden: int, ranks: int, autocast: bool) -> int:
    """What gradients and gathered weights pass through; ``auto`` is what transformers makes of it."""
    stage, bucket = int(zero.get("stage", 0)), zero.get("reduce_bucket_size", 5 * 10**8)
    if stage == 0:
        return parameters.trained_bytes if ranks > 1 else 0
    bucket = hidden**2 if bucket == "auto" else int(bucket)
    reduced = 2 * FLOAT32 * min(bucket, parameters.trained)  # two, so that one travels while the other fills
    if stage < 3 or ranks == 1:
        return reduced
    live = zero.get("stage3_max_live_parameters", "auto")
    share = min(1.0, (LIVE_PARAMETERS if live == "auto" else int(live)) / parameters.total)
    trained_bytes = BFLOAT16 * parameters.trained if autocast else parameters.trained_bytes
    return reduced + int(share * (parameters.frozen_bytes + trained_bytes))

"""The two servers as processes: what they serve, and what they say of themselves."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from comb import CombForCausalLM
from comb.backbones.adapter import AdapterConfig
from comb.backbones.loading import backbone_beside, load_config, resolve_name
from comb.evaluation.random_prompts import random_model
from comb.model.config import CombConfig
from comb_serving.bench.workload import COMB, MODEL, PLAIN, ServeBenchOptions
from comb_serving.config.serve_options import parse_bytes
from comb_serving.encoding.protocol import MADE
from comb_serving.launch.launcher import SERVER
from comb_serving.launch.preflight import PLAIN_METHOD
from comb_serving.launch.server_process import COMMAND, ServerProcess

START_S, END_S = 900.0, 30.0  # for a server to start and to end by itself
OPEN_GATES = 0.5


@dataclass(frozen=True)
class Models:
    """Folders or Hub ids of what plain vLLM serves and what `comb serve` does; `name` for titles."""

    backbone: str
    adapter: str
    name: str


def models_of(options: ServeBenchOptions, folder: Path) -> Models:
    """The checkpoint that the options name and its backbone; or random ones, saved below `folder` with a tokenizer.

    Gates of random cross blocks are open: work is the same with closed ones, but answers would not depend on documents.

    Raises:
        ValueError: for sizes, or a checkpoint and a trace, that don't go together.
    """
    if options.checkpoint is not None:
        place = resolve_name(options.checkpoint)
        config, named = load_config(place), "" if options.method is None else f", {options.method}"
        if not isinstance(config, AdapterConfig):
            return Models(place, place, options.checkpoint + (named or f", {PLAIN_METHOD}"))
        if options.trace is not None and isinstance(config, CombConfig):
            raise ValueError(
                f"--trace is for a model whose segments are found, and {place} is an adapter with an encoder"
            )
        backbone = options.backbone or backbone_beside(config.backbone_name_or_path, place)
        return Models(resolve_name(backbone), place, options.checkpoint + named)
    if options.method is not None:
        raise ValueError("--method is for a plain model: name it with --checkpoint")
    if not 1 <= options.encoder_layers <= options.layers:
        raise ValueError(f"an encoder has 1 to {options.layers} layers, as its backbone, not {options.encoder_layers}")
    tokenizer: Any = AutoTokenizer.from_pretrained(resolve_name("nano"))  # in the package: nothing is downloaded
    tokenizer.model_max_length = options.positions
    made = random_model(
        layers=options.layers, hidden=options.hidden, heads=options.heads, kv_heads=options.kv_heads,
        vocab=len(tokenizer), positions=options.positions, seed=options.seed,
        dtype=getattr(torch, options.dtype),
    )  # fmt: skip
    place = str(folder / "backbone")
    made.save_pretrained(place)
    tokenizer.save_pretrained(place)
    torch.manual_seed(options.seed)
    model: Any = CombForCausalLM.from_backbone(place, num_encoder_layers=options.encoder_layers, dtype=made.dtype)
    with torch.no_grad():
        for block in model.cross_blocks:
            block.attention_gate.fill_(OPEN_GATES)
            block.mlp_gate.fill_(OPEN_GATES)
    model.save_pretrained(folder / "adapter", tokenizer=tokenizer)
    parameters = sum(parameter.numel() for parameter in made.parameters()) / 1e6
    size = f"{parameters:.0f} M parameters, {options.layers} layers, {options.encoder_layers} of encoder"
    return Models(place, str(folder / "adapter"), f"random Llama of {size}")


@dataclass(frozen=True)
class ServerPlan:
    """How a server is started."""

    name: str
    command: tuple[str, ...]
    kv_bytes: int  # of vLLM's own cache; with `pool_bytes` the same for both servers
    pool_bytes: int = 0  # of documents
    environment: Mapping[str, str] = field(default_factory=dict)  # beside this process's


def plans(
    options: ServeBenchOptions, model: str, served: Sequence[str], more: Sequence[str] = (), *, positions: int
) -> list[ServerPlan]:
    """Plain vLLM with its prefix cache, over `model`, and `comb serve` with the arguments `served`; `more`: of both.

    Both may keep as many bytes of keys and values, and answer in so many `positions`. Raises ValueError if the pool
    leaves nothing for the decoder.
    """
    cache_bytes, pool_bytes = parse_bytes(options.cache_bytes), parse_bytes(options.pool_bytes)
    if not 0 < pool_bytes < cache_bytes:
        raise ValueError(f"--pool-bytes is a part of --cache-bytes, {cache_bytes}: not {pool_bytes}")
    given = shlex.split(options.vllm)
    if options.vllm == "auto":
        # a CPU's attention wants blocks of a multiple of 32 tokens, and compiling takes minutes there
        given = [] if torch.cuda.is_available() else ["--enforce-eager", "--block-size", "32"]
    common = [
        "--served-model-name", MODEL, "--max-model-len", str(positions), "--enable-prefix-caching",
        "--enable-prompt-tokens-details", *more, *given,
    ]  # fmt: skip
    comb = [*COMMAND, *served, "--comb-pool-bytes", str(pool_bytes)]
    # an empty list of plug-ins: nothing of comb is loaded there
    return [
        ServerPlan(PLAIN, (*SERVER, "--model", model, *common), cache_bytes, 0, {"VLLM_PLUGINS": ""}),
        ServerPlan(COMB, (*comb, *common), cache_bytes - pool_bytes, pool_bytes),
    ]


class MeasuredServer(ServerProcess):
    """A running server, `ready_s` after its start; use it as a context manager, so that it always ends."""

    def __init__(self, plan: ServerPlan, log: Path) -> None:
        self.plan = plan
        command = [*plan.command, "--kv-cache-memory-bytes", str(plan.kv_bytes)]
        super().__init__(command, environment=plan.environment, log=log)
        self.wait_until_healthy(START_S)
        self.ready_s = time.monotonic() - self.started

    def __enter__(self) -> MeasuredServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop(END_S)

    def resident(self) -> dict[str, int]:
        """Proportional set size of each of its processes in bytes, by what it does: shared pages count once."""
        import psutil

        roles = {"comb_serving.encoding.process": "encoder", "api_server": "API server", "comb.cli": "launcher"}
        found: dict[str, int] = {}
        for process in self.tree():
            try:
                name, command, memory = process.name(), " ".join(process.cmdline()), process.memory_full_info()
            except psutil.Error:
                continue
            role = next((role for word, role in roles.items() if word in command), "others")
            if name.startswith("VLLM::"):
                role = name.removeprefix("VLLM::").lower()
            found[role] = found.get(role, 0) + getattr(memory, "pss", memory.rss)
        return found


def token_bytes(plan: ServerPlan, before: str, after: str, tokens: int) -> float | None:
    """Bytes of keys and values per document token, by two pages of /metrics and the document tokens between them.

    What the pool has filled by, blocks' empty places included; of vLLM's own cache its size over the tokens that fit.
    None if that isn't known, or the pool has evicted.
    """
    if plan.pool_bytes:
        used, gone = (_counted(after, name) - _counted(before, name) for name in ("pool_used_bytes", "evictions"))
        return used / tokens if tokens and not gone else None
    labels: dict[str, str] = next(
        (each.labels for each in _samples(after) if each.name == "vllm:cache_config_info"), {}
    )
    blocks, size = (labels.get(name, "None") for name in ("num_gpu_blocks", "block_size"))
    return plan.kv_bytes / (int(blocks) * int(size)) if blocks.isdecimal() and size.isdecimal() else None


def compiled_tokens(page: str) -> int:
    """Document tokens that passed through the model to be kept, by a page of /metrics."""
    named = (each for each in _samples(page) if each.name == "comb:document_tokens_total")
    return int(sum(each.value for each in named if each.labels["state"] in MADE))


def _counted(page: str, name: str) -> float:
    """The sum of comb's series with `name` in theirs; 0 where there is none."""
    return float(sum(each.value for each in _samples(page) if each.name.startswith("comb") and name in each.name))


def _samples(page: str) -> list[Any]:
    from prometheus_client.parser import text_string_to_metric_families

    return [sample for family in text_string_to_metric_families(page) for sample in family.samples]

"""What a run would be, before any weight is loaded: parameters, memory per GPU, data and batches (`--dry-run`).

A `Config` enters `plan`, a `Plan` leaves; `table.blocks` shows it.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from comb.backbones.discovery import inspect_backbone
from comb.backbones.loading import resolve_name
from comb.backbones.tracebacks import DamagedError
from comb.documents.datasets import Counts, MissingDataError
from comb.model.weights import check_checkpoint
from comb_training.config import Config
from comb_training.data.batches import join_questions
from comb_training.data.mixture import prompt_builder
from comb_training.data.sources import sources
from comb_training.data.token_statistics import TokenStatistics, statistics_by_set
from comb_training.models import training_method
from comb_training.models.loading import check_options, model_tokenizer, options_named
from comb_training.plan.activations import PassSize
from comb_training.plan.counting import Parameters, Trained, first_line, meta_model
from comb_training.plan.memory import GpuMemory, deepspeed_settings, memory_of, other_ways
from comb_training.trainer import distributed
from comb_training.trainer.optimizer import total_steps
from comb_training.trainer.prepare import tokenized
from comb_training.trainer.sampler import batch_sampler


@dataclass
class Plan:
    """What a run would be.

    Args:
        memory: this run's way of sharding first, then others for comparison.
        steps: optimizer steps at most.
        size: of the largest batch: the data's, or else what the budgets allow.
        notes: what is left out, and why.
    """

    config: Config
    ranks: int
    parameters: Parameters | None = None
    memory: list[GpuMemory] = field(default_factory=list)
    counts: Counts | None = None
    statistics: TokenStatistics | None = None
    sets: dict[str, TokenStatistics] = field(default_factory=dict)
    steps: int | None = None
    size: PassSize | None = None
    notes: list[str] = field(default_factory=list)


def plan(config: Config, *, ranks: int | None = None) -> Plan:
    """Plans a run without loading a weight or writing a file.

    Args:
        ranks: GPUs; those of ``WORLD_SIZE`` by default.

    Raises:
        ValueError: for options that make no sense, data that is damaged, an example over the budget of a batch, or a
            backbone that isn't supported. What is merely not here (data, tokenizer, the backbone's configuration) is
            said in `Plan.notes`.
    """
    name = config.model.init_from or config.model.backbone
    for named in filter(None, (name, config.train.teacher)):
        place = resolve_name(named)
        with suppress(OSError):  # what isn't here is a note
            check_checkpoint(place)  # damage is found now, not when it is loaded
    ranks = distributed.world_size() if ranks is None else ranks
    deepspeed = deepspeed_settings(config.train)
    result = Plan(config, ranks, size=PassSize.of_budget(config.train))
    try:
        adapter = training_method(config.train.method).adapter
        with options_named(adapter, config.model.options):
            model, note = meta_model(config)
    except OSError as error:
        result.notes.append(
            f"no parameters, memory and batches: the configuration of {name!r} is not here and can't be fetched "
            f"({first_line(error)})"
        )
        return result
    check_options(adapter, config.model.options, model.backbone.config)
    result.notes += [note] if note else []
    _add_data(result, model)
    _add_memory(result, model, deepspeed)
    return result


def _add_memory(result: Plan, model: Trained, deepspeed: dict[str, Any]) -> None:
    config = result.config
    parameters = result.parameters = Parameters.of(model)
    if {"linear", "both"} & set(inspect_backbone(model.backbone).layer_kinds):
        result.notes.append(
            "linear layers count as softmax attention in the activations; without the kernels of comb-pic[gpu] about "
            "twice as much was measured"
        )
    if result.size is None:
        result.notes.append(
            "no activations: neither train.batch_document_tokens and train.batch_query_tokens nor the data say how "
            "large a batch gets"
        )
    if "quantization_config" in config.model.options:
        result.notes.append("the backbone's bytes are those without model.options.quantization_config")
    if config.train.kl_weight or config.train.objective == "attention":
        result.notes.append("the activations are without the full prompts, which the backbone alone reads")
    checkpointing = config.train.gradient_checkpointing
    result.memory = [
        memory_of(model, parameters, result.size, way, ranks=result.ranks, checkpointing=checkpointing)
        for way in [deepspeed, *(other_ways(deepspeed) if result.ranks > 1 else ())]
    ]


def _add_data(result: Plan, model: Trained) -> None:
    """Reads and tokenises the data, if it and the tokenizer are here."""
    config = result.config
    name = config.model.init_from or config.model.backbone
    try:
        tokenizer = model_tokenizer(config, model)
    except (OSError, ValueError) as error:
        here = False
        with suppress(OSError):
            here = Path(resolve_name(name)).is_dir()
        if isinstance(error, DamagedError) or here:  # it won't come from anywhere
            raise
        result.notes.append(f"no data and batches: the backbone's tokenizer is not here ({first_line(error)})")
        for source in sources(config.data):
            try:
                source.read("train", 1)
            except MissingDataError as missing:
                result.notes.append(f"no data: {first_line(missing)}")
        return
    builder = prompt_builder(config.data, tokenizer)
    try:
        examples, result.counts = tokenized(config, builder, model, split="train", limit=config.data.limit)
    except MissingDataError as error:
        result.notes.append(f"no data and batches: {first_line(error)}")
        return
    result.statistics = TokenStatistics.of(examples)
    result.sets = statistics_by_set(examples) if config.data.mixture else {}
    if config.data.questions_per_row > 1:
        examples = join_questions(examples, config.data.questions_per_row, builder)
    sampler = batch_sampler(examples, config.train, ranks=result.ranks)
    result.steps = total_steps(config.train, sampler.steps_per_epoch)
    result.size = PassSize.of_data(sampler, examples, model)

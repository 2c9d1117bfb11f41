"""What a run would be, before any weight is loaded: parameters, memory per GPU, data and batches (`--dry-run`).

A `Config` enters `plan`, a `Plan` leaves; `blocks` shows it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from rich.markup import escape

from comb.backbones.discovery import inspect_backbone
from comb.backbones.loading import resolve_name
from comb.backbones.tracebacks import DamagedError
from comb.documents.datasets import Counts, MissingDataError
from comb.evaluation.table import FittedTable
from comb.model.weights import check_checkpoint
from comb_training.config import Config
from comb_training.data.batches import join_questions
from comb_training.data.mixture import prompt_builder
from comb_training.data.sources import sources
from comb_training.data.token_statistics import data_table
from comb_training.models import training_method
from comb_training.models.method import check_options, model_tokenizer, options_named
from comb_training.plan.counting import Parameters, Trained, first_line, meta_model
from comb_training.plan.memory import (
    FACTOR,
    GpuMemory,
    PassSize,
    ServedMemory,
    deepspeed_settings,
    memory_of,
    other_ways,
    served_memory,
)
from comb_training.trainer import distributed
from comb_training.trainer.optimizer import UNLIMITED_STEPS, total_steps
from comb_training.trainer.prepare import tokenized
from comb_training.trainer.sampler import BatchSampler

EXPLANATION = (
    "Weights and states are exact for one process. Activations are an estimate for softmax attention and gated MLPs, "
    f"within {FACTOR:g}x of what was measured on small models. The total is the largest moment: with activations; with "
    "AdamW's temporary, when these are gone; or the whole model where that is more, which is loaded before it is "
    "sharded. Not in it: CUDA's context (about 1 GiB), fragmentation, the communication library, eager attention's "
    "matrices, and the K/V cache while the backbone answers."
)
COLUMNS = {
    "weights": ("frozen weights", "trained weights"),
    "gradients": ("gradients",),
    "optimizer": ("float32 copy", "moments"),
    "buffers": ("buffers",),
}


@dataclass
class Plan:
    """What a run would be."""

    config: Config
    ranks: int
    parameters: Parameters | None = None
    # this run's way of sharding first, then others for comparison
    memory: list[GpuMemory] = field(default_factory=list)
    served: ServedMemory | None = None
    counts: Counts | None = None
    data: FittedTable | None = None
    steps: int | None = None  # optimizer steps at most
    size: PassSize | None = None  # of the largest batch: the data's, or else what the budgets allow
    notes: list[str] = field(default_factory=list)  # what is left out, and why


def plan(config: Config) -> Plan:
    """Plans a run on ``WORLD_SIZE`` GPUs without loading a weight or writing a file. Raises ValueError for options that
    make no sense, data that is damaged, an example over the budget of a batch, or a backbone that isn't supported. What
    is merely not here (data, tokenizer, the backbone's configuration) is said in `Plan.notes`."""
    name = config.model.init_from or config.model.backbone
    # an adapter goes on on `model.backbone`, wherever the one was that it names
    for named, backbone in ((name, config.model.init_from and config.model.backbone), (config.train.teacher, None)):
        if named:
            place = resolve_name(named)
            with suppress(OSError):  # what isn't here is a note
                check_checkpoint(place, backbone)  # damage is found now, not when it is loaded
    deepspeed = deepspeed_settings(config.train)
    result = Plan(config, distributed.world_size(), size=PassSize.of_budget(config.train))
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
    parameters, result.served = Parameters.of(model), served_memory(model)
    result.parameters = parameters
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
    if config.train.kl_weight:
        result.notes.append("the activations are without the full prompts, which the backbone alone reads")
    checkpointing = config.train.gradient_checkpointing
    result.memory = [
        memory_of(model, parameters, result.size, way, ranks=result.ranks, checkpointing=checkpointing)
        for way in [deepspeed, *(other_ways(deepspeed) if result.ranks > 1 else ())]
    ]
    return result


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
        examples, result.counts = tokenized(config, builder, model, split="train")
    except MissingDataError as error:
        result.notes.append(f"no data and batches: {first_line(error)}")
        return
    if not examples:
        raise ValueError(f"no example is left to train on: {result.counts}")
    result.data = data_table(examples, by_set=bool(config.data.mixture))
    if config.data.questions_per_row > 1:
        longest = training_method(config.train.method).longest_row(model, config)
        examples = join_questions(examples, config.data.questions_per_row, builder, longest=longest)
    sampler = BatchSampler(examples, config.train, ranks=result.ranks)
    result.steps = total_steps(config.train, sampler.steps_per_epoch)
    result.size = PassSize.of_data(sampler, examples, model)


def blocks(plan: Plan) -> Iterator[FittedTable | str]:
    """What there is to show of a plan, within 80 columns: tables, and text in rich's markup."""
    parameters, size = plan.parameters, plan.size
    if parameters is not None:
        counts = {"frozen": parameters.frozen, "trained": parameters.trained}
        short = {name: f"{n / 1e9:.2f} B" if n >= 10**8 else f"{n / 1e6:.2f} M" for name, n in counts.items()}
        parts = ", ".join(f"{count:,} ({short[name]}) {name}" for name, count in counts.items())
        yield f"Parameters: {parts}, {100 * parameters.trained / parameters.total:.1f}% of all.\n"
    if plan.memory:
        power, unit = (30, "GiB") if max(memory.total for memory in plan.memory) >= 2**28 else (20, "MiB")
        rows = []  # one per way of sharding, in one unit
        for memory in plan.memory:
            states = [sum(memory.states.get(name, 0) for name in names) for names in COLUMNS.values()]
            sizes = (*states, *(() if size is None else (memory.activations,)), memory.total, memory.host)
            rows.append((memory.way, *(f"{each / 2**power:.2f}" if each else "-" for each in sizes)))
        where = "one GPU" if plan.ranks == 1 else f"each of {plan.ranks} GPUs"
        title = f"memory on {where} in {unit}{'; this run first' if plan.ranks > 1 else ''}"
        heads = ("", *COLUMNS, *(() if size is None else ("activations",)), "total", "CPU")
        yield FittedTable(heads, rows, title, left=("",))
        about = []
        if size is not None:
            checkpointing = "on" if plan.config.train.gradient_checkpointing else "off"
            about.append(
                f"Largest batch of a GPU: {size.documents:,} document tokens, {size.queries:,} query tokens with "
                f"padding, {size.targets:,} of them answers; gradient checkpointing {checkpointing}."
            )
        if plan.ranks == 1:
            about.append("WORLD_SIZE=4 in front of the command plans for four GPUs.")
        yield escape(" ".join([*about, EXPLANATION]) + "\n")
    if (served := plan.served) is not None:
        power, unit = (30, "GiB") if served.decoder >= 2**28 else (20, "MiB")
        encoder = f", {served.encoder / 2**power:.2f} in each encoder process" if served.encoder else ""
        yield (
            f"Served: {served.decoder / 2**power:.2f} {unit} of weights in vLLM{encoder}; a document's token takes "
            f"{served.document_token:,} bytes of the pool. The adapter's file: {served.file / 2**power:.2f} {unit}.\n"
        )
    if plan.data is not None:
        steps = "until the clock ends" if plan.steps == UNLIMITED_STEPS else str(plan.steps)
        yield escape(f"Data: {plan.counts}. Optimizer steps: {steps}.\n")
        yield plan.data
    for note in plan.notes:
        yield escape(f"Note: {note}.")

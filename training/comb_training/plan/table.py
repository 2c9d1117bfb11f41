"""A plan as tables within 80 columns, and what has to be said about them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.markup import escape
from rich.table import Table

from comb.evaluation.table import text_table
from comb_training.data.token_statistics import data_table
from comb_training.plan import Plan
from comb_training.plan.activations import FACTOR
from comb_training.plan.counting import Parameters
from comb_training.trainer.schedule import UNLIMITED_STEPS

EXPLANATION = (
    "Weights and states are exact for one process. Activations are an estimate for softmax attention and gated MLPs, "
    f"within {FACTOR:g}x of what was measured on small models. The total has the larger of activations and AdamW's "
    "temporary, which come after each other, or the whole model where that is more: it is loaded before it is sharded. "
    "Not in it: CUDA's context (about 1 GiB), fragmentation, the communication library, eager attention's matrices, "
    "and the K/V cache while the backbone answers."
)


def blocks(plan: Plan) -> Iterator[Table | str]:
    """What there is to show of a plan: tables, and text in rich's markup."""
    if plan.parameters is not None:
        yield _parameter_table(plan.parameters)
        yield _sums(plan.parameters)
    if plan.memory:
        yield _memory_table(plan)
        yield _about_memory(plan)
    if plan.statistics is not None:
        steps = "until the clock ends" if plan.steps == UNLIMITED_STEPS else str(plan.steps)
        yield escape(f"Data: {plan.counts}. Optimizer steps: {steps}.\n")
        yield data_table(plan.statistics, plan.sets)
        yield _bucket_table(plan)
        yield "Rows, query tokens and padding are means per batch; with the data's own answers.\n"
    for note in plan.notes:
        yield escape(f"Note: {note}.")


def _parameter_table(parameters: Parameters) -> Table:
    lines = [(name, f"{total - trained:,}", f"{trained:,}") for name, (total, trained) in parameters.parts.items()]
    lines.append(("all", f"{parameters.frozen:,}", f"{parameters.trained:,}"))
    return text_table(("part", "frozen", "trained"), lines, "parameters", left=("part",))


def _sums(parameters: Parameters) -> str:
    share = 100 * parameters.trained / parameters.total
    return f"{_short(parameters.frozen)} frozen, {_short(parameters.trained)} trained ({share:.1f}% of all).\n"


def _short(count: int) -> str:
    return f"{count / 1e9:.2f} B" if count >= 10**8 else f"{count / 1e6:.2f} M"


def _memory_table(plan: Plan) -> Table:
    lines: list[tuple[str, ...]] = []

    def add(name: str, values: Iterable[int | None]) -> None:
        cells = [_size(value) if value else "-" for value in values]
        if set(cells) != {"-"}:
            lines.append((name, *cells))

    ways = plan.memory
    for name in dict.fromkeys(name for way in ways for name in way.states):
        add(name, (way.states.get(name) for way in ways))
    add("activations", (way.activations for way in ways))
    add("or AdamW's temporary", (way.temporaries for way in ways))
    add("or all, not yet sharded", (way.start if way.sharding.stage else None for way in ways))
    add("largest total" if plan.size is not None else "total, no activations", (way.total for way in ways))
    add("beside it, CPU per rank", (way.host for way in ways))
    title = "memory on one GPU" if plan.ranks == 1 else f"memory on each of {plan.ranks} GPUs; this run first"
    return text_table(("what", *(way.sharding.name for way in ways)), lines, title, left=("what",))


def _about_memory(plan: Plan) -> str:
    parts = []
    if plan.size is not None:
        parts.append(
            f"Largest batch of a GPU: {plan.size.documents:,} document tokens, {plan.size.queries:,} query tokens with "
            f"padding, {plan.size.targets:,} of them answers; gradient checkpointing "
            f"{'on' if plan.config.train.gradient_checkpointing else 'off'}."
        )
    if plan.ranks == 1:
        parts.append("WORLD_SIZE=4 in front of the command plans for four GPUs.")
    return escape(" ".join([*parts, EXPLANATION]) + "\n")


def _size(value: int) -> str:
    return f"{value / 2**30:.2f} GiB" if value >= 2**28 else f"{value / 2**20:.2f} MiB"


def _bucket_table(plan: Plan) -> Table:
    names = ("longest row", "batches", "rows", "document tokens", "query tokens", "padding")
    lines = [
        (
            "{} to {}".format(*bucket["longest_row"]),
            str(bucket["batches"]),
            f"{bucket['rows']:.1f}",
            "{} to {}".format(*bucket["document_tokens"]),
            f"{bucket['query_tokens']:.0f}",
            f"{100 * bucket['padding']:.1f}%",
        )
        for bucket in plan.buckets
    ]
    return text_table(names, lines, "the first epoch's batches, by their longest row", left=())

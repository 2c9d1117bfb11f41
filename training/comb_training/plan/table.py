"""A plan as a table of memory within 80 columns, and what has to be said about it."""

from __future__ import annotations

from collections.abc import Iterator

from rich.markup import escape

from comb.evaluation.table import FittedTable
from comb_training.data.token_statistics import data_table
from comb_training.plan import Plan
from comb_training.plan.activations import FACTOR
from comb_training.plan.counting import Parameters
from comb_training.plan.memory import GpuMemory
from comb_training.trainer.optimizer import UNLIMITED_STEPS

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


def blocks(plan: Plan) -> Iterator[FittedTable | str]:
    """What there is to show of a plan: tables, and text in rich's markup."""
    if plan.parameters is not None:
        yield _sums(plan.parameters)
    if plan.memory:
        yield _memory_table(plan)
        yield _about_memory(plan)
    if plan.statistics is not None:
        steps = "until the clock ends" if plan.steps == UNLIMITED_STEPS else str(plan.steps)
        yield escape(f"Data: {plan.counts}. Optimizer steps: {steps}.\n")
        yield data_table(plan.statistics, plan.sets)
    for note in plan.notes:
        yield escape(f"Note: {note}.")


def _sums(parameters: Parameters) -> str:
    share = 100 * parameters.trained / parameters.total
    counts = {"frozen": parameters.frozen, "trained": parameters.trained}
    short = {name: f"{n / 1e9:.2f} B" if n >= 10**8 else f"{n / 1e6:.2f} M" for name, n in counts.items()}
    parts = ", ".join(f"{count:,} ({short[name]}) {name}" for name, count in counts.items())
    return f"Parameters: {parts}, {share:.1f}% of all.\n"


def _memory_table(plan: Plan) -> FittedTable:
    """A row per way of sharding, in one unit."""
    power, unit = (30, "GiB") if max(memory.total for memory in plan.memory) >= 2**28 else (20, "MiB")

    def row(memory: GpuMemory) -> tuple[str, ...]:
        states = [sum(memory.states.get(name, 0) for name in names) for names in COLUMNS.values()]
        activations = () if plan.size is None else (memory.activations,)
        sizes = (*states, *activations, memory.total, memory.host)
        return memory.way, *(f"{size / 2**power:.2f}" if size else "-" for size in sizes)

    where = "one GPU" if plan.ranks == 1 else f"each of {plan.ranks} GPUs"
    title = f"memory on {where} in {unit}{'; this run first' if plan.ranks > 1 else ''}"
    heads = ("", *COLUMNS, *(() if plan.size is None else ("activations",)), "total", "CPU")
    return FittedTable(heads, list(map(row, plan.memory)), title, left=("",))


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

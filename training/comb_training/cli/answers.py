"""`comb answers`: the backbone's own answers, made before a run trains on them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

console = Console()


def answers(
    config: Annotated[Path, typer.Argument(help="YAML file; see configs/.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="section.key=value, for example data.limit=100", metavar="[KEY=VALUE]...")
    ] = None,
    engine: Annotated[str, typer.Option(help="transformers, vllm, or auto: vllm where it is installed.")] = "auto",
    vllm: Annotated[
        list[str] | None, typer.Option(help="key=value for vllm.LLM, for example tensor_parallel_size=4")
    ] = None,
    show: Annotated[int, typer.Option(help="Answers to print.")] = 2,
) -> None:
    """Let the backbone (or train.teacher) answer the training questions; `comb train` finds the answers.

    Can be stopped at any time and started again. Under torchrun each rank answers its share.
    """
    from comb_training.config import load_config, of_file, override

    settings = load_config(config, overrides or [])
    options = dict(engine_option(item) for item in vllm or [])

    # takes seconds, so behind what can be wrong with the options
    from comb_training.answers import answer_prepared, choose_engine
    from comb_training.trainer import distributed
    from comb_training.trainer.prepare import prepare

    chosen = choose_engine(engine)
    if vllm and chosen != "vllm":
        raise ValueError(f"--vllm is for vLLM, but the engine is {chosen}")
    if chosen == "vllm":  # the GPU is vLLM's; the weights are loaded here to tell what the answers belong to
        settings = override(settings, ["model.device=cpu"])
    if settings.train.answers == "gold":
        console.print("comb train with train.answers=gold takes the data's answers, and won't look for these")
    with of_file(config, overrides or []):
        run = prepare(settings)
    targets = answer_prepared(run, engine=chosen, engine_options=options, wait=False)
    answered, made = targets.answered, targets.answered.settings
    ranks = distributed.world_size()
    share = f" of rank {distributed.rank()} of {ranks}" if ranks > 1 else ""
    rate = f", {answered.generated / answered.seconds:.1f} answers/s" if answered.seconds else ""
    by = f" by {answered.engine}" if answered.engine else ""
    pending = f", {answered.pending} left to other ranks" if answered.pending else ""
    console.print(f"answers{share}: {answered.found} found, {answered.generated} generated{by}{rate}{pending}")
    if not distributed.is_main():  # the rest is the same on every rank
        return
    console.print(f"data: {run.counts}")
    stops, more = ", ".join(map(str, made.stop_token_ids[:8])), len(made.stop_token_ids) - 8
    console.print(
        f"settings: {escape(made.model)}, {made.dtype}, weights {made.weights}, greedy, at most {made.max_new_tokens} "
        f"tokens, stop tokens {stops}{f' and {more} more' if more > 0 else ''}"  # `data.stop` is in hundreds of them
    )
    if targets.scores is not None:
        console.print(f"agreement with the data's answers: {100 * targets.scores.em:.1f}% exact match")
    for example, text in list(zip(targets.examples, targets.texts, strict=True))[:show]:
        query = run.tokenizer.decode(example.prompt.query, skip_special_tokens=True).strip()
        console.print(f"  {escape(query)}\n    answer: {escape(text)}")
        if example.references:
            console.print(f"    data:   {escape(example.references[0])}")
    console.print(f"kept in {escape(str(targets.folder))}")


def engine_option(item: str) -> tuple[str, Any]:
    """Name and value of one ``--vllm``. Raises ValueError for what isn't one."""
    import yaml

    name, equals, value = item.partition("=")
    if not equals or not name:
        raise ValueError(f"expected --vllm key=value, got {item!r} (for example tensor_parallel_size=4)")
    return name.replace("-", "_"), yaml.safe_load(value)

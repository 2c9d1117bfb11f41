"""One training run from one configuration: backbone -> data -> answers -> train -> adapter folder.

The folder holds the adapter and the tokenizer (a normal Hugging Face checkpoint), ``training.json`` (how it was made:
argv, versions, commit, configuration, counts, losses) and ``loss.png``.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, set_seed

from comb.adapter import resolve_name
from comb.compatibility import load_tokenizer
from comb.documents import Example, PromptBuilder
from comb.evaluation.datasets import Counts, read_dataset
from comb.evaluation.metrics import Scores
from comb.evaluation.plot import plot_losses
from comb.evaluation.run import MethodResult, evaluate
from comb.evaluation.table import environment, write_json
from comb.hub import RESULTS, refresh_card
from comb.model import CombForCausalLM
from comb_training import distributed, plugin
from comb_training.answers import answer_prepared
from comb_training.batches import TokenStatistics, TrainingExample, fit_documents, tokenize
from comb_training.config import Config, config_from_dict
from comb_training.lora import add_lora, unload
from comb_training.schedule import total_steps
from comb_training.trainer import CombTrainer, batch_sampler

logger = logging.getLogger(__name__)

TRAINING_JSON = "training.json"
LOSS_PLOT = "loss.png"


@dataclass
class Prepared:
    """Everything a run needs, before anything is answered or trained."""

    config: Config
    model: Any
    tokenizer: Any
    builder: PromptBuilder
    examples: list[TrainingExample]
    counts: Counts
    statistics: TokenStatistics

    @property
    def parameters(self) -> dict[str, int]:
        """Parameter counts: trainable, and all."""
        trainable, total = self.model.num_trainable_parameters()
        return {"trainable": trainable, "all": total}

    @property
    def steps(self) -> int:
        """Optimizer steps at most."""
        return total_steps(self.config.train, batch_sampler(self.examples, self.config.train).steps_per_epoch)


@dataclass
class TrainResult:
    """What a run gave.

    Args:
        model: as it was trained; None when it is sharded (ZeRO-3) or this process isn't the first: load `output_dir`.
        losses: (step, mean loss per target token).
        heldout_losses: the same on held-out examples, where `eval_steps` asked for them.
        terminated: a signal ended the run before its time; the last checkpoint is where to go on.
        teacher: how the backbone's own answers score against the data's; None when trained on gold answers.
        seconds: of optimisation, and of answering before it.
    """

    output_dir: Path
    model: Any
    tokenizer: Any
    losses: list[tuple[int, float]]
    steps: int
    seconds: float
    answer_seconds: float
    counts: Counts
    statistics: TokenStatistics
    teacher: Scores | None = None
    parameters: dict[str, int] = field(default_factory=dict)
    heldout_losses: list[tuple[int, float]] = field(default_factory=list)
    terminated: bool = False
    bad_batches: int = 0


def prepare(config: Config) -> Prepared:
    """Loads backbone and data and tokenises them; nothing is trained.

    Raises:
        ValueError: for data that is missing, malformed or empty, or a backbone without a tokenizer it fits.
    """
    plugin.register()
    set_threads(config)
    set_seed(config.train.seed)
    model = load_model(config)
    tokenizer = load_tokenizer(config.model.init_from or config.model.backbone, model)
    builder = PromptBuilder(tokenizer, document_template=config.data.document_template)
    examples, counts = read_examples(config, builder, model.max_document_tokens, split="train", limit=config.data.limit)
    tokenized = tokenize(
        examples,
        builder,
        counts,
        query_template=config.data.query_template,
        max_query_tokens=config.data.max_query_tokens,
    )
    return Prepared(config, model, tokenizer, builder, tokenized, counts, TokenStatistics.of(tokenized))


def run_training(config: Config, *, resume: str | Path | None = None, progress: bool = True) -> TrainResult:
    """Trains as `config` says and writes the adapter folder.

    Args:
        resume: a ``checkpoint-N`` folder of an earlier run of the same configuration (see train.save_steps).

    Raises:
        ValueError: as `prepare` does.
        TrainingDivergedError: if the loss becomes NaN or infinite.
    """
    run = prepare(config)
    logger.info("data: %s", run.counts)
    start = time.monotonic()
    examples, teacher = _targets(run, progress)
    answer_seconds = time.monotonic() - start
    trainer = CombTrainer(
        run.model,
        config.train,
        examples,
        run.tokenizer,
        heldout=heldout_examples(run) if config.train.eval_steps is not None else (),
        use_cpu=device_of(config).type == "cpu",
        progress=progress,
    )
    parameters = run.parameters  # before ZeRO-3 takes them apart
    trainer.train_or_finish(resume)
    run.model.eval()
    result = TrainResult(
        output_dir=Path(config.train.output_dir),
        model=run.model if distributed.is_main() and not trainer.is_deepspeed_enabled else None,
        tokenizer=run.tokenizer,
        losses=trainer.losses,
        steps=trainer.state.global_step,
        seconds=trainer.schedule.used,
        answer_seconds=answer_seconds,
        counts=run.counts,
        statistics=TokenStatistics.of(examples),
        teacher=teacher,
        parameters=parameters,
        heldout_losses=[
            (int(row["step"]), row["eval_loss"]) for row in trainer.state.log_history if "eval_loss" in row
        ],
        terminated=trainer.terminated,
        bad_batches=trainer.bad_batches,
    )
    if not trainer.terminated:
        # scores of an adapter that was in this folder before don't hold for this one, and the card would show them
        if distributed.is_main():
            for results in result.output_dir.glob(RESULTS):
                results.unlink()
        trainer.save_model(config.train.output_dir)
        if result.model is not None:
            unload(result.model)
        if distributed.is_main():
            save(result, config)
            refresh_card(result.output_dir)  # it tells what training.json says
    distributed.leave()
    return result


def save(result: TrainResult, config: Config) -> None:
    """Writes training.json and the loss plot beside the adapter."""
    write_json(
        result.output_dir / TRAINING_JSON,
        {
            **environment(seed=config.train.seed),
            "config": config.to_dict(),
            "ranks": distributed.world_size(),
            "parameters": result.parameters,
            "data": result.counts.to_dict(),
            "tokens": asdict(result.statistics),
            "teacher": asdict(result.teacher) if result.teacher else None,
            "steps": result.steps,
            "seconds": round(result.seconds, 2),
            "answer_seconds": round(result.answer_seconds, 2),
            "bad_batches": result.bad_batches,
            "losses": result.losses,
            "heldout_losses": result.heldout_losses,
        },
    )
    try:
        title = f"{config.model.backbone}: {config.data.dataset}"
        plot_losses(result.losses, result.output_dir / LOSS_PLOT, title=title)
    except ImportError:
        logger.warning("no loss plot: matplotlib is not installed (pip install 'comb-pic[demo]')")


def heldout_examples(run: Prepared) -> list[TrainingExample]:
    """The held-out side of the data with its own answers, `eval.limit` examples of it, for the loss on it."""
    config = run.config
    examples, counts = read_examples(
        config, run.builder, run.model.max_document_tokens, split="heldout", limit=config.eval.limit
    )
    return tokenize(
        examples,
        run.builder,
        counts,
        query_template=config.data.query_template,
        max_query_tokens=config.data.max_query_tokens,
    )


def load_model(config: Config) -> CombForCausalLM:
    """A fresh encoder on the configured backbone, or the adapter of `model.init_from`, on the configured device."""
    options = dict(config.model.options)
    model: Any
    # trained weights stay in float32 whatever the backbone's: small updates, of gates above all, are not lost
    options.setdefault("adapter_dtype", torch.float32)
    if config.model.init_from is not None:
        shaping = sorted({"max_document_tokens", "initialization"} & options.keys())
        if shaping:
            raise ValueError(f"model.options {', '.join(shaping)} can't change the adapter of model.init_from")
        model = CombForCausalLM.from_pretrained(
            resolve_name(config.model.init_from), dtype=_dtype(config.model.dtype), **options
        )
        model.requires_grad_(True).backbone.requires_grad_(False)
    else:
        model = CombForCausalLM.from_backbone(
            config.model.backbone,
            num_encoder_layers=config.model.num_encoder_layers,
            cross_attention_layers=config.model.cross_attention_layers,
            encoder_causal=config.model.encoder_causal,
            dtype=_dtype(config.model.dtype),
            **options,
        )
    if config.train.lora_rank is not None:
        add_lora(
            model,
            rank=config.train.lora_rank,
            alpha=config.train.lora_alpha,
            dropout=config.train.lora_dropout,
        )
    loaded: CombForCausalLM = model.to(device_of(config))
    return loaded


def read_examples(
    config: Config, builder: PromptBuilder, max_document_tokens: int, *, split: str, limit: int | None
) -> tuple[list[Example], Counts]:
    """One side of the configured dataset, documents cut to what the encoder takes, and what happened to the rows."""
    data = config.data
    options: dict[str, Any] = {"seed": data.seed, "split": split, "limit": limit, **data.options}
    for name in ("num_documents", "heldout_share"):
        if getattr(data, name) is not None:
            options[name] = getattr(data, name)
    dataset = read_dataset(data.dataset, data.path, **options)
    if data.max_document_tokens is not None:
        max_document_tokens = min(max_document_tokens, data.max_document_tokens)
    return fit_documents(dataset, builder, max_document_tokens, dataset.counts), dataset.counts


def evaluate_heldout(
    model: Any, tokenizer: Any, config: Config, *, split: str = "heldout", progress: bool = True
) -> tuple[list[MethodResult], Counts]:
    """Compares `config.eval.methods` on one side of the configured data; the results and what happened to the rows."""
    plugin.register()
    builder = PromptBuilder(tokenizer, document_template=config.data.document_template)
    longest = getattr(model, "max_document_tokens", None) or sys.maxsize
    examples, counts = read_examples(config, builder, longest, split=split, limit=config.eval.limit)
    results = evaluate(
        (model, tokenizer),
        examples,
        config.eval.methods,
        max_new_tokens=config.eval.max_new_tokens,
        batch_size=config.eval.batch_size,
        timing_examples=config.eval.timing_examples,
        query_template=config.data.query_template,
        document_template=config.data.document_template,
        progress=progress,
    )
    return results, counts


def set_threads(config: Config) -> None:
    """Applies `model.cpu_threads` to this process. Raises ValueError if it is less than one."""
    threads = config.model.cpu_threads
    if threads is None:
        return
    if threads < 1:
        raise ValueError(f"model.cpu_threads must be at least 1, not {threads}")
    torch.set_num_threads(threads)


def load_checkpoint(name_or_path: str, config: Config) -> Any:
    """An adapter with its backbone, or a plain backbone, on the configured device."""
    plugin.register()
    set_threads(config)
    model: Any = AutoModelForCausalLM.from_pretrained(resolve_name(name_or_path), dtype=_dtype(config.model.dtype))
    return model.to(device_of(config)).eval()


def trained_config(folder: str | Path) -> Config | None:
    """The configuration an adapter was trained with, from its training.json; None if there is none."""
    path = Path(folder) / TRAINING_JSON
    if not path.is_file():
        return None
    try:
        return config_from_dict(json.loads(path.read_text(encoding="utf-8"))["config"], str(path))
    except (KeyError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is damaged ({error}): name the dataset on the command line") from error


def device_of(config: Config) -> torch.device:
    """Where to run. Raises ValueError if a GPU is asked for where there is none."""
    if config.model.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("model.device=cuda, but there is no GPU that torch can use; model.device=cpu runs anywhere")
    kind = config.model.device
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    # under torchrun each process drives the GPU of its number
    return torch.device(kind, int(os.environ.get("LOCAL_RANK", "0"))) if kind == "cuda" else torch.device(kind)


def _targets(run: Prepared, progress: bool) -> tuple[list[TrainingExample], Scores | None]:
    """The examples with what they shall answer; on policy, also how the backbone's answers score."""
    train = run.config.train
    if train.answers == "gold":
        return run.examples, None
    targets = answer_prepared(run, progress=progress)
    if not targets.examples:
        raise ValueError(f"no example is left after answering: {run.counts}")
    if targets.scores is not None:
        logger.info("the answers trained on: %.1f%% exact match with the data's", 100 * targets.scores.em)
    return targets.examples, targets.scores


def _dtype(name: str) -> Any:
    if name == "auto":
        return "auto"
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"model.dtype is float32, bfloat16, float16 or auto, not {name!r}")
    return dtype


def main(arguments: Sequence[str] | None = None) -> None:
    """``torchrun ... -m comb_training.train CONFIG [section.key=value ...]``: the same as ``comb train``."""
    from comb.cli import main as comb

    comb(["train", *(sys.argv[1:] if arguments is None else arguments)])


if __name__ == "__main__":
    main()

"""`comb bench train`: COMB's encoder against a plain LoRA fine-tune of the same backbone on the full prompts.

Both learn the same targets of the same questions over the same documents. COMB encodes each different document once per
batch and its decoder rows are the questions alone; the rival reads every prompt whole. One step is forward, backward
and AdamW. In every repeat all of them take their turn, so that a slow moment of the machine meets them all.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import typer
from torch import nn

from comb import CombForCausalLM, Prompt
from comb.bench.harness import BenchmarkReport, benchmark, in_turns, ratios
from comb.bench.memory import peak_memory
from comb.bench.options import OfRandomModel, QueryTokens, RandomModelOptions, Repeats
from comb.bench.work import synchronize
from comb.evaluation.table import Column, Row, TextTable, fixed, mebibytes, ms, spread
from comb_training.data.batches import Collator, TrainingExample
from comb_training.models.lora import add_lora
from comb_training.trainer.losses import target_logits_only, target_loss

RIVAL = "lora"


@dataclass(frozen=True)
class TrainOptions(RandomModelOptions):
    """Of `comb bench train`: one batch is `groups` sets of documents and `questions` about each."""

    groups: Annotated[int, typer.Option(min=1, help="sets of documents in a batch")] = 2
    questions: Annotated[int, typer.Option(min=1, help="questions about each set")] = 4
    documents: Annotated[int, typer.Option(min=1, help="documents in a set")] = 8
    document_tokens: Annotated[int, typer.Option(min=1, help="tokens of a document")] = 128
    query_tokens: QueryTokens = 32
    target_tokens: Annotated[int, typer.Option(min=1, help="tokens of an answer")] = 32
    encoder_layers: Annotated[int, typer.Option(min=1, help="layers of COMB's encoder")] = 4
    lora_rank: Annotated[int, typer.Option(min=1, help="rank of LoRA, the rival's and on the encoder")] = 16
    repeats: Repeats = 5
    hidden: OfRandomModel = 512
    heads: OfRandomModel = 8
    kv_heads: OfRandomModel = 8

    @property
    def prompt_tokens(self) -> int:
        """Of one question with its documents and its answer."""
        return self.documents * self.document_tokens + self.query_tokens + self.target_tokens

    def examples(self, vocabulary: int) -> list[TrainingExample]:
        """Random token ids in these sizes."""
        generator = torch.Generator().manual_seed(self.seed)

        def ids(count: int) -> tuple[int, ...]:
            return tuple(torch.randint(vocabulary, (count,), generator=generator).tolist())

        sets = [tuple(ids(self.document_tokens) for _ in range(self.documents)) for _ in range(self.groups)]
        return [
            TrainingExample(Prompt((), documents, ids(self.query_tokens)), ids(self.target_tokens))
            for documents in sets
            for _ in range(self.questions)
        ]


def tables(rows: Sequence[Row]) -> list[TextTable]:
    """One line per way of training."""
    columns = (
        Column("way", "name", names=True),
        Column("learns", "trainable", lambda count: f"{count / 1e6:.1f} M"),
        Column("step ms", "step_s", ms),
        Column("lora/it", "faster", spread, "its step time over this one's in the same repeat, median (quartiles)"),
        Column("tokens/s", "tokens_per_s", fixed(0), "of the full prompts, whoever reads them"),
        Column("computed", "computed_tokens", note="tokens through a stack of layers per step"),
        Column("MiB", "peak_bytes", mebibytes, "peak of what a step adds to weights and optimizer"),
    )
    remark = (
        "lora: the backbone fine-tuned with LoRA on the full prompts; comb: encoder and cross blocks; comb lora: LoRA "
        "on the encoder's layers."
    )
    return [TextTable("A training step", columns, rows, [remark])]


@benchmark("train", tables)
def train_step(options: TrainOptions, report: BenchmarkReport) -> None:
    """What a training step costs: COMB against a LoRA fine-tune of the same backbone on the full prompts."""
    report.heading = (
        f"training on {options.title}: {options.groups} x {options.questions} questions over {options.documents} "
        f"documents of {options.document_tokens} tokens, answers of {options.target_tokens}"
    )
    for row in measure_training(options.load(options.prompt_tokens), options):
        report.add(row)


def measure_training(backbone: Any, options: TrainOptions) -> list[Row]:
    """Costs of the rival, of COMB, and of COMB with LoRA on its encoder's layers.

    ``tokens_per_s`` counts the full prompts, the same unit for all, whoever reads them; ``computed_tokens`` those that
    go through a stack of layers per step (documents once, rows, or full prompts).

    Raises:
        ValueError: for sizes below 1, prompts longer than the backbone's positions, or a loss that isn't finite.
    """
    config = backbone.config.get_text_config()
    if options.prompt_tokens > config.max_position_embeddings:
        raise ValueError(
            f"a full prompt has {options.prompt_tokens} tokens, the backbone {config.max_position_embeddings} "
            "positions: fewer or shorter documents"
        )
    examples = options.examples(config.vocab_size)
    flat = [TrainingExample(Prompt(e.prompt.flat, (), ()), e.target) for e in examples]
    short = options.groups * options.documents * options.document_tokens
    short += len(examples) * (options.query_tokens + options.target_tokens)
    rank = options.lora_rank
    made = {RIVAL: _with_lora(backbone, rank), "comb": _with_encoder(backbone, options, None),
            "comb lora": _with_encoder(backbone, options, rank)}  # fmt: skip
    learners = {name: _Learner(model, flat if name == RIVAL else examples) for name, model in made.items()}
    peaks: dict[str, int] = {}
    for name, learner in learners.items():
        loss = learner.step()  # warm: the optimizer's states are there
        if not loss < float("inf"):
            raise ValueError(f"{name}: the loss is {loss}, so its time would mean nothing")
        peaks[name] = peak_memory(backbone.device, learner.step)
    seconds = in_turns({name: learner.timed for name, learner in learners.items()}, options.repeats)
    whole = len(examples) * options.prompt_tokens
    return [
        {
            "name": name, "trainable": sum(p.numel() for p in learner.trained),
            "step_s": statistics.median(seconds[name]), "faster": ratios(seconds[RIVAL], seconds[name]),
            "tokens_per_s": whole / statistics.median(seconds[name]),
            "computed_tokens": whole if name == RIVAL else short, "peak_bytes": peaks[name],
        }
        for name, learner in learners.items()
    ]  # fmt: skip


class _Learner:
    """A model, its batch, and one optimizer step on it."""

    def __init__(self, model: Any, examples: Sequence[TrainingExample]) -> None:
        self.model = model.train()
        batch = Collator(0)(examples)
        if not any(batch["documents"]):
            del batch["documents"], batch["behind"]  # a plain backbone has no such arguments
        self.batch = {k: v.to(model.device) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}
        self.labels = self.batch.pop("labels")
        self.trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=1e-4)

    def step(self) -> float:
        """Returns the loss."""
        with target_logits_only(self.model, self.labels):
            loss = target_loss(self.model(**self.batch), self.labels)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    def timed(self) -> float:
        """Seconds of one step."""
        synchronize(self.model.device)
        start = time.perf_counter()
        self.step()
        synchronize(self.model.device)
        return time.perf_counter() - start


def _with_lora(backbone: Any, rank: int) -> Any:
    """A copy of the backbone with LoRA beside the linear maps of all its layers."""
    from peft import LoraConfig, get_peft_model

    model = copy.deepcopy(backbone).requires_grad_(False)
    maps = {path.rpartition(".")[2] for path, module in model.named_modules() if isinstance(module, nn.Linear)}
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=sorted(maps - {"lm_head"}))
    lora = get_peft_model(model, config)
    lora.enable_input_require_grads()
    return lora


def _with_encoder(backbone: Any, options: TrainOptions, lora_rank: int | None) -> Any:
    torch.manual_seed(options.seed)
    model = CombForCausalLM.from_backbone(
        copy.deepcopy(backbone), num_encoder_layers=options.encoder_layers, adapter_dtype=torch.float32
    )
    if lora_rank is not None:
        add_lora(model.encoder.layers, rank=lora_rank, alpha=2.0 * lora_rank, dropout=0.0)
    return model

"""What training costs: COMB's encoder against a plain LoRA fine-tune of the same backbone on the full prompts.

Both learn the same targets of the same questions over the same documents. COMB encodes each different document once per
batch and its decoder rows are the questions alone; the rival reads every prompt whole. One step is forward, backward
and AdamW. In every repeat all of them take their turn, so that a slow moment of the machine meets them all.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.table import Table
from torch import nn

from comb import CombForCausalLM, Prompt
from comb.bench.memory import peak_memory
from comb.evaluation.table import text_table
from comb_training.data.batches import Collator, TrainingExample
from comb_training.models.lora import add_lora
from comb_training.trainer.losses import target_logits_only, target_loss

RIVAL = "lora"


@dataclass(frozen=True)
class Shape:
    """One batch: `groups` sets of documents, `questions` about each, in tokens."""

    groups: int = 2
    questions: int = 4
    documents: int = 8
    document_tokens: int = 128
    query_tokens: int = 32
    target_tokens: int = 32

    @property
    def prompt_tokens(self) -> int:
        """Of one question with its documents and its answer."""
        return self.documents * self.document_tokens + self.query_tokens + self.target_tokens

    def examples(self, vocabulary: int, seed: int) -> list[TrainingExample]:
        """Random token ids in this shape."""
        generator = torch.Generator().manual_seed(seed)

        def ids(count: int) -> tuple[int, ...]:
            return tuple(torch.randint(vocabulary, (count,), generator=generator).tolist())

        sets = [tuple(ids(self.document_tokens) for _ in range(self.documents)) for _ in range(self.groups)]
        return [
            TrainingExample(Prompt((), documents, ids(self.query_tokens)), ids(self.target_tokens))
            for documents in sets
            for _ in range(self.questions)
        ]


@dataclass(frozen=True)
class TrainingCost:
    """What one way of training took.

    Args:
        trainable: parameters that learn.
        step_s: seconds of one step, median.
        faster: step time of `RIVAL` over this one's in the same repeat: median, quartiles.
        examples_per_s: questions learned from per second.
        tokens_per_s: tokens of their full prompts per second, the same unit for all, whoever reads them.
        computed_tokens: tokens that go through a stack of layers per step (documents once, rows, or full prompts).
        peak_bytes: most bytes that one step adds to weights and optimizer; None: not measured.
    """

    name: str
    trainable: int
    step_s: float
    faster: tuple[float, float, float]
    examples_per_s: float
    tokens_per_s: float
    computed_tokens: int
    peak_bytes: int | None

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


class _Trainee:
    """A model, its batch, and one optimizer step on it."""

    def __init__(self, model: Any, batch: dict[str, Any], *, checkpointing: bool, computed_tokens: int) -> None:
        self.model = model.train()
        self.labels = batch.pop("labels")
        self.batch = batch
        self.computed_tokens = computed_tokens
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
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


def measure_training(
    backbone: Any,
    shape: Shape,
    *,
    num_encoder_layers: int = 4,
    lora_rank: int = 16,
    checkpointing: bool = False,
    repeats: int = 5,
    memory: bool = True,
    seed: int = 0,
) -> list[TrainingCost]:
    """Costs of the rival, of COMB, and of COMB with LoRA on its encoder's layers.

    Raises:
        ValueError: for sizes below 1, prompts longer than the backbone's positions, or a loss that isn't finite.
    """
    for name, value in (*asdict(shape).items(), ("repeats", repeats), ("num_encoder_layers", num_encoder_layers)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    config = backbone.config.get_text_config()
    if shape.prompt_tokens > config.max_position_embeddings:
        raise ValueError(
            f"a full prompt has {shape.prompt_tokens} tokens, the backbone {config.max_position_embeddings} positions: "
            "fewer or shorter documents"
        )
    examples = shape.examples(config.vocab_size, seed)
    documents = shape.groups * shape.documents * shape.document_tokens
    rows = shape.groups * shape.questions * (shape.query_tokens + shape.target_tokens)
    batch = _batch(examples, backbone.device)
    whole = _batch([TrainingExample(Prompt(e.prompt.flat, (), ()), e.target) for e in examples], backbone.device)
    whole.pop("documents")
    trainees: dict[str, Callable[[], _Trainee]] = {
        RIVAL: lambda: _Trainee(
            _with_lora(backbone, lora_rank), dict(whole), checkpointing=checkpointing,
            computed_tokens=len(examples) * shape.prompt_tokens,
        ),
        "comb": lambda: _Trainee(
            _with_encoder(backbone, num_encoder_layers, None, seed), dict(batch), checkpointing=checkpointing,
            computed_tokens=documents + rows,
        ),
        "comb lora": lambda: _Trainee(
            _with_encoder(backbone, num_encoder_layers, lora_rank, seed), dict(batch), checkpointing=checkpointing,
            computed_tokens=documents + rows,
        ),
    }  # fmt: skip
    made = {name: make() for name, make in trainees.items()}
    peaks: dict[str, int | None] = dict.fromkeys(made)
    for name, trainee in made.items():
        loss = trainee.step()  # warm: the optimizer's states are there
        if not loss < float("inf"):
            raise ValueError(f"{name}: the loss is {loss}, so its time would mean nothing")
        if memory:
            peaks[name] = peak_memory(backbone.device, trainee.step)
    seconds: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(repeats):
        for name, trainee in made.items():
            _wait(backbone.device)
            start = time.perf_counter()
            trainee.step()
            _wait(backbone.device)
            seconds[name].append(time.perf_counter() - start)
    costs = []
    for name, trainee in made.items():
        ratios = [rival / own for rival, own in zip(seconds[RIVAL], seconds[name], strict=True)]
        step = statistics.median(seconds[name])
        costs.append(
            TrainingCost(
                name, sum(parameter.numel() for parameter in trainee.trained), step, _quartiles(ratios),
                len(examples) / step, len(examples) * shape.prompt_tokens / step, trainee.computed_tokens, peaks[name],
            )
        )  # fmt: skip
    return costs


def cost_table(costs: Sequence[TrainingCost], shape: Shape, title: str) -> Table:
    """One row per way of training, within 80 columns."""
    names = ("way", "learns", "step ms", "lora/it", "ex/s", "tokens/s", "computed", "MiB")
    lines = [
        (
            cost.name, f"{cost.trainable / 1e6:.1f} M", f"{1000 * cost.step_s:.0f}",
            "{:.2f} ({:.2f}-{:.2f})".format(*cost.faster), f"{cost.examples_per_s:.1f}", f"{cost.tokens_per_s:.0f}",
            f"{cost.computed_tokens}", "-" if cost.peak_bytes is None else f"{cost.peak_bytes / 2**20:.0f}",
        )
        for cost in costs
    ]  # fmt: skip
    caption = (
        f"{shape.groups} x {shape.questions} questions over {shape.documents} documents of {shape.document_tokens} "
        f"tokens; answers of {shape.target_tokens}. lora: the backbone fine-tuned with LoRA on the full prompts; comb: "
        "encoder and cross blocks; comb lora: LoRA on the encoder's layers. lora/it: its step time over this one's in "
        "the same repeat, median (quartiles). tokens/s: of the full prompts, whoever reads them. computed: tokens "
        "through a stack of layers per step. MiB: peak of what a step adds to weights and optimizer."
    )
    return text_table(names, lines, title, caption, left=("way",))


def _batch(examples: Sequence[TrainingExample], device: Any) -> dict[str, Any]:
    batch = Collator(0)(examples)
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}


def _with_lora(backbone: Any, rank: int) -> Any:
    """A copy of the backbone with LoRA beside the linear maps of all its layers."""
    from peft import LoraConfig, get_peft_model

    model = copy.deepcopy(backbone).requires_grad_(False)
    maps = {path.rpartition(".")[2] for path, module in model.named_modules() if isinstance(module, nn.Linear)}
    maps -= {"lm_head"}
    lora = get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=sorted(maps)))
    lora.enable_input_require_grads()
    return lora


def _with_encoder(backbone: Any, layers: int, lora_rank: int | None, seed: int) -> Any:
    torch.manual_seed(seed)
    model = CombForCausalLM.from_backbone(
        copy.deepcopy(backbone), num_encoder_layers=layers, adapter_dtype=torch.float32
    )
    if lora_rank is not None:
        add_lora(model.encoder.layers, rank=lora_rank, alpha=2.0 * lora_rank, dropout=0.0)
    return model


def _quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    if len(values) == 1:
        return (values[0],) * 3
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return middle, low, high


def _wait(device: Any) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)

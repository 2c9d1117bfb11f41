"""Options that benchmarks share: a model, questions about documents, a model with random weights; and lists of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from comb.bench.harness import BenchmarkReport, OutOptions
from comb.documents.datasets import Counts, read_dataset
from comb.documents.document import Example, PromptBuilder
from comb.documents.rendering import template_arguments
from comb.evaluation.record import read_training
from comb.evaluation.setting import NO_DOCUMENTS, Setting, drop_too_long

LEAST_POSITIONS = 128  # of the random model: what is checked before anything is timed must fit

Methods = Annotated[str, typer.Option(help="separated by commas, parameters and all: full,legolink:16,comb")]
QueryTokens = Annotated[int, typer.Option(min=1, help="tokens behind the segments")]
Repeats = Annotated[int, typer.Option(min=1, help="measurements; in each, all take their turn")]
OfRandomModel = Annotated[int, typer.Option(help="of the random model")]
Seed = Annotated[int, typer.Option(help="of everything drawn at random")]


@dataclass(frozen=True)
class DeviceOptions(OutOptions):
    """Where to compute, and in which dtype."""

    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16, float16")] = "auto"
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1")] = "auto"


@dataclass(frozen=True)
class ModelOptions(DeviceOptions):
    """A model by its name."""

    model: Annotated[str, typer.Option(help="adapter folder, backbone folder, Hub id, or nano")] = "nano"
    backbone: Annotated[str | None, typer.Option(help="load the adapter's backbone from here instead")] = None
    seed: Seed = 0

    def load(self) -> Any:
        from comb.model.source import load_named

        return load_named(self.model, backbone=self.backbone, dtype=self.dtype, device=self.device)


@dataclass(frozen=True)
class RandomModelOptions(ModelOptions):
    """A model by its name, or one with random weights: `random`, a Llama, or `random-hybrid`, a Qwen3.5."""

    model: Annotated[
        str, typer.Option(help="as elsewhere, or `random`: a Llama with random weights, or `random-hybrid`: a Qwen3.5")
    ] = "random"
    layers: OfRandomModel = 12
    hidden: OfRandomModel = 768
    heads: OfRandomModel = 12
    kv_heads: OfRandomModel = 12
    vocab: OfRandomModel = 8192

    @property
    def is_random(self) -> bool:
        return self.model in ("random", "random-hybrid")

    @property
    def title(self) -> str:
        if not self.is_random:
            return self.model
        return f"{self.model.replace('-', ' ')} model, {self.layers} layers, hidden {self.hidden}"

    def load(self, positions: int = LEAST_POSITIONS) -> Any:
        """The model; a random one has at least so many positions, in the dtype and on the device asked for."""
        if not self.is_random:
            return super().load()
        import torch

        from comb.evaluation.random_prompts import random_model
        from comb.model.source import named_device, named_dtype

        return random_model(
            layers=self.layers, hidden=self.hidden, heads=self.heads, kv_heads=self.kv_heads, vocab=self.vocab,
            positions=max(positions, LEAST_POSITIONS), hybrid=self.model == "random-hybrid", seed=self.seed,
            dtype=named_dtype(self.dtype) or torch.float32, device=named_device(self.device),
        )  # fmt: skip


@dataclass(frozen=True)
class QuestionOptions(ModelOptions):
    """A model, and questions about documents."""

    dataset: Annotated[
        str, typer.Option(help="a file or folder of rows, hf://org/name, or a dataset's name: nano, squad, ...")
    ] = "nano"
    path: Annotated[str | None, typer.Option(help="the file or folder, where --dataset is a name")] = None
    split: Annotated[str, typer.Option(help="heldout, train or all")] = "heldout"
    num_documents: Annotated[int | None, typer.Option(help="documents per question, for datasets that choose them")] = (
        None
    )
    limit: Annotated[int, typer.Option(min=1, help="questions at most")] = 200
    query_template: Annotated[str | None, typer.Option(help="how a question is written; {query} is replaced")] = None
    document_template: Annotated[
        str | None, typer.Option(help="how a document is written, with {text} and {title}")
    ] = None
    splitter: Annotated[
        str | None, typer.Option(help="how long documents are split (KVSplit), for example fixed:512")
    ] = None
    chat_template_kwargs: Annotated[
        str, typer.Option(help='JSON: what the chat template is given, such as {"enable_thinking": false}')
    ] = "{}"

    def setting(self) -> Setting:
        """Model, tokenizer and templates; an adapter's own templates where none are given."""
        record = read_training(self.model)  # how text was written when an adapter was trained
        trained = {} if record is None else record["config"].get("data") or {}
        query = self.query_template or trained.get("query_template") or "{query}"
        if "{query}" not in query:
            raise ValueError(f"--query-template {query!r} has no {{query}}: every question would be the same")
        from comb.backbones.tokenizer import load_tokenizer

        model = self.load()
        arguments = template_arguments(self.chat_template_kwargs)
        tokenizer = load_tokenizer(self.model, model, chat_template_kwargs=arguments)
        document = self.document_template or trained.get("document_template")
        builder = PromptBuilder(
            tokenizer, document_template=document, prefix=trained.get("prefix"), stop=trained.get("stop") or ""
        )
        return Setting(model, tokenizer, builder, query, self.splitter)

    def read(self) -> tuple[list[Example], Counts]:
        """The questions, and what was read and dropped."""
        extra = {} if self.num_documents is None else {"num_documents": self.num_documents}
        found = read_dataset(self.dataset, self.path, split=self.split, seed=self.seed, limit=self.limit, **extra)
        return list(found), found.counts

    def load_questions(self, report: BenchmarkReport, max_new_tokens: int = 0) -> tuple[Setting, list[Example]]:
        """`setting`, and the questions with room for so long an answer; the report says what was dropped."""
        examples, counts = self.read()
        setting = self.setting()
        kept = drop_too_long(setting, examples, ["full"], max_new_tokens, counts)
        report.facts["data"] = counts.to_dict()
        report.heading = f"{self.model}, {self.dataset}, {self.split}: {counts}"
        return setting, kept


def split_methods(text: str, *, control: bool = True) -> list[str]:
    """``"full,legolink:16,quantize=int8,comb"`` -> ``["full", "legolink:16,quantize=int8", "comb"]``, all checked.

    Args:
        control: whether "none", questions without documents, may be among them.

    Raises:
        ValueError: for no method, an unknown one, or one given twice.
    """
    from comb import methods

    specs = methods.split_specs(text)
    if not specs:
        raise ValueError("--methods names no method: give at least one, for example full,legolink:16")
    for spec in specs:
        if specs.count(spec) > 1:
            raise ValueError(f"--methods names {spec} twice")
        if spec != NO_DOCUMENTS:
            methods.parse(spec.partition("@")[0])
        elif not control:
            raise ValueError(f"this benchmark measures work on documents: leave the control {NO_DOCUMENTS!r} out")
    return specs


def integers(text: str, option: str) -> list[int]:
    """``"512,1024"`` -> ``[512, 1024]``, sorted, each once. Raises ValueError for anything else."""
    values = numbers(text, option, least=1)
    if any(value != int(value) for value in values):
        raise ValueError(f"{option} takes whole numbers separated by commas, got {text!r}")
    return [int(value) for value in values]


def numbers(text: str, option: str, *, least: float) -> list[float]:
    """``"0.5,2"`` -> ``[0.5, 2.0]``, sorted, each once, from `least` to 1e12. Raises ValueError for anything else."""
    try:
        values = sorted({float(part) for part in text.split(",") if part.strip()})
    except ValueError:
        values = []
    if not values or not all(least <= value <= 1e12 for value in values):
        raise ValueError(f"{option} takes numbers from {least:g} to 1e+12 separated by commas, got {text!r}")
    return values

"""Backbone and data of a run, loaded and tokenised before anything is answered or trained."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from transformers import set_seed

from comb.backbones.adapter import check_no_model_in
from comb.backbones.attention_calls import choose_attention
from comb.backbones.discovery import inspect_backbone
from comb.backbones.tracebacks import named
from comb.documents.datasets import Counts
from comb.documents.document import PromptBuilder
from comb.evaluation.record import check_writable
from comb.hub.push import PUBLISHED, read_card
from comb_training.config import Config
from comb_training.data.batches import TrainingExample
from comb_training.data.mixture import ConfiguredSide, prompt_builder
from comb_training.data.sources import file_digests
from comb_training.models import training_method
from comb_training.models.method import device_of, model_tokenizer, options_named, set_threads
from comb_training.trainer.accelerator import check_tools
from comb_training.trainer.run_log import LOG


@dataclass
class PreparedRun:
    """Everything a run needs, before anything is answered or trained."""

    config: Config
    model: Any
    tokenizer: Any
    builder: PromptBuilder
    examples: Sequence[TrainingExample]
    counts: Counts
    files: Sequence[str]  # `file_digests` of what was read, which may change while it trains


def prepare(config: Config, *, resume: str | Path | None = None) -> PreparedRun:
    """Loads backbone and data and tokenises them; nothing is trained. `resume`: the checkpoint that the run goes on
    from; it has what was measured before. Raises ValueError for a tool that isn't installed, folders that can't be
    written to, options that make no sense, data that is missing, malformed or empty, or a backbone without a tokenizer
    it fits."""
    check_tools(config.train)  # before hours of answers
    train, out = config.train, Path(config.train.output_dir)
    with named("train.output_dir"):
        check_writable(out, *PUBLISHED, LOG)
        check_no_model_in(out)
        read_card(out)  # which the adapter's own is written into
    if train.answers == "on_policy":
        with named("train.answers_dir"):
            check_writable(train.answers_dir or out / "answers")
    set_threads(config)
    choose_attention(device_of(config))
    set_seed(train.seed)
    method = training_method(train.method)
    with options_named(method.adapter, config.model.options):
        model = method.load(config)
    tokenizer = model_tokenizer(config, model)
    builder = prompt_builder(config.data, tokenizer)
    digests = file_digests(config.data)
    examples, counts = tokenized(config, builder, model, split="train")
    if not examples:
        raise ValueError(f"no example is left to train on: {counts}")
    model = method.fitted(model, config, examples, resume)
    return PreparedRun(config, model, tokenizer, builder, examples, counts, digests)


def tokenized(
    config: Config, builder: PromptBuilder, model: Any, *, split: Literal["train", "heldout"]
) -> tuple[Sequence[TrainingExample], Counts]:
    """One side of the data, and what happened to the rows. What this run can't learn from is left out, before a
    mixture's shares are taken."""
    train, method, longest = config.train, training_method(config.train.method), sys.maxsize
    on_policy = train.answers == "on_policy"
    if split == "train" and on_policy and train.teacher is None:  # another one has other tokens, and limits
        longest = prompt_limit(model.backbone, train.answer_max_new_tokens, config.data.max_prompt_tokens)

    def fitting(examples: Sequence[TrainingExample], counts: Counts) -> Sequence[TrainingExample]:
        answered = [each for each in examples if each.references or on_policy or split != "train"]
        counts.drop("no answer in the data: train.answers=on_policy gives one", len(examples) - len(answered))
        short = [each for each in answered if len(each.prompt.flat) <= longest]
        counts.drop(f"prompt of more than {longest} tokens", len(answered) - len(short))
        return method.fitting(short, model, config, counts)

    limit = config.data.limit if split == "train" else config.eval.limit
    return ConfiguredSide(config.data, builder, model.max_document_tokens, split, limit, fitting).tokenized()


def prompt_limit(backbone: Any, max_new_tokens: int, max_prompt_tokens: int | None) -> int:
    """Tokens of the longest prompt that is answered: the backbone's positions have to hold the answer, too."""
    positions = inspect_backbone(backbone).max_position_embeddings
    if (limit := positions - max_new_tokens) < 1:
        raise ValueError(
            f"train.answer_max_new_tokens={max_new_tokens} must be below the backbone's {positions} positions"
        )
    return limit if max_prompt_tokens is None else min(limit, max_prompt_tokens)

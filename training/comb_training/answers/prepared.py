"""Answers for a prepared run: by its own backbone, or by the teacher that `train.teacher` names."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from comb.backbones.loading import load_model, resolve_name
from comb.backbones.tokenizer import load_tokenizer
from comb.documents.datasets import Counts
from comb.documents.document import Document, PromptBuilder
from comb.evaluation.metrics import Scores, score
from comb_training.answers.generate import (
    Answered,
    AnsweringEngine,
    Share,
    count_answers,
    generate_answers,
    prompt_limit,
    settings_of,
    stop_token_ids,
)
from comb_training.answers.greedy import TransformersEngine
from comb_training.answers.store import StoredAnswer
from comb_training.answers.vllm_engine import VllmEngine, vllm_installed
from comb_training.data.batches import TrainingExample, tokenize
from comb_training.data.mixture import prompt_builder, read_examples
from comb_training.models import training_method
from comb_training.trainer import distributed

if TYPE_CHECKING:
    from comb_training.trainer.prepare import PreparedRun

logger = logging.getLogger(__name__)

ENGINES = ("auto", "transformers", "vllm")


@dataclass(frozen=True)
class Targets:
    """Examples with their answers as targets.

    Args:
        examples: without those whose prompt was too long (counted in the run's counts), and without those whose
            answer another rank has not given yet, where ranks aren't waited for (`pending` of them).
        texts: of the answers, one per example.
        scores: the answers against the data's own; None when there is none yet.
        folder: where the answers are kept.
    """

    examples: list[TrainingExample]
    texts: list[str]
    scores: Scores | None
    answered: Answered
    folder: Path
    share: Share
    pending: int


@dataclass(frozen=True)
class _Asked:
    """A model that answers, and the run's examples as it reads them, in their order."""

    name: str
    revision: str | None
    model: Any
    tokenizer: Any
    examples: Sequence[TrainingExample]


def choose_engine(name: str) -> str:
    """``transformers`` or ``vllm``; ``auto`` is vLLM where it is installed.

    Raises:
        ValueError: for other names, or vLLM where it isn't installed.
    """
    if name not in ENGINES:
        raise ValueError(f"the engine is one of {', '.join(ENGINES)}, not {name!r}")
    if name == "auto":
        return "vllm" if vllm_installed() else "transformers"
    if name == "vllm" and not vllm_installed():
        raise ValueError("vLLM is not installed: pip install 'comb-pic[serve]', or use --engine transformers")
    return name


def answer_prepared(
    run: PreparedRun,
    *,
    engine: str = "transformers",
    engine_options: Mapping[str, Any] | None = None,
    wait: bool = True,
    progress: bool = True,
) -> Targets:
    """The run's examples with greedy answers as targets.

    Args:
        engine: transformers (on the run's device) or vllm.
        engine_options: more keyword arguments of `vllm.LLM`.
        wait: for the answers of other ranks.
    """
    train = run.config.train
    asked = _own(run) if train.teacher is None else _teacher(run, train.teacher)
    stops = stop_token_ids(asked.model, asked.tokenizer, run.config.data.stop)
    settings = settings_of(asked.model, stops, train.answer_max_new_tokens, asked.name)
    limit = prompt_limit(asked.model, train.answer_max_new_tokens, run.config.data.max_prompt_tokens)
    folder = Path(train.answers_dir) if train.answers_dir is not None else Path(train.output_dir) / "answers"

    def start() -> AnsweringEngine:
        if engine == "vllm":
            return VllmEngine(
                resolve_name(asked.name),
                stops,
                train.answer_max_new_tokens,
                dtype=settings.dtype,
                revision=asked.revision,
                # as long as it has to be: memory for the cache is what limits how many are answered at once
                max_model_len=min(limit, max(len(example.prompt.flat) for example in asked.examples))
                + train.answer_max_new_tokens,
                options=engine_options,
            )
        model = asked.model.to(run.model.device)
        pad = asked.tokenizer.pad_token_id
        pad = int(pad if pad is not None else asked.tokenizer.eos_token_id)
        return TransformersEngine(model, pad, stops, train.answer_max_new_tokens, batch_size=train.answer_batch_size)

    def decode(ids: Sequence[int]) -> str:
        text: str = asked.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    share = Share(distributed.rank(), distributed.world_size(), wait)
    answered = generate_answers(
        asked.examples,
        settings,
        start,
        decode=decode,
        max_prompt_tokens=limit,
        folder=folder,
        share=share,
        progress=progress,
    )
    return _targets(run, asked, answered, limit, folder, share)


def _targets(run: PreparedRun, asked: _Asked, answered: Answered, limit: int, folder: Path, share: Share) -> Targets:
    fits = [len(example.prompt.flat) <= limit for example in asked.examples]
    within = [answer for answer, fit in zip(answered.answers, fits, strict=True) if answer is not None or not fit]
    count_answers(within, run.counts, limit, run.config.train.answer_max_new_tokens)
    examples, texts = [], []
    for example, answer in zip(run.examples, answered.answers, strict=True):
        if answer is None:
            continue
        target = answer.token_ids if run.config.train.teacher is None else _retokenized(answer, run.builder)
        if not target:
            run.counts.drop("the teacher's answer has no text")
            continue
        examples.append(example.with_target(target))
        texts.append(answer.text)
    known = [(text, e.references) for text, e in zip(texts, examples, strict=True) if e.references]
    scores = score(*map(list, zip(*known, strict=True))) if known else None
    return Targets(examples, texts, scores, answered, folder, share, pending=len(answered.answers) - len(within))


def _own(run: PreparedRun) -> _Asked:
    config = run.model.config
    name = getattr(config, "backbone_name_or_path", "") or run.config.model.backbone
    return _Asked(name, getattr(config, "backbone_revision", None), run.model.backbone, run.tokenizer, run.examples)


def _teacher(run: PreparedRun, name: str) -> _Asked:
    """Another model, with the same questions and documents as its own tokenizer and template write them."""
    model = load_model(name, dtype=run.model.backbone.dtype).eval()
    data = run.config.data
    tokenizer = load_tokenizer(name, model, chat_template_kwargs=data.chat_template_kwargs)
    source, _ = read_examples(data, run.builder, run.model.max_document_tokens, split="train", limit=data.limit)
    # by number, so that what the student's side has dropped is left out here, too
    numbered = [replace(example, id=str(number)) for number, example in enumerate(source)]
    tokenized = tokenize(numbered, run.builder, Counts(), max_query_tokens=data.max_query_tokens)
    student = training_method(run.config.train.method).fitting(tokenized, run.model, run.config, Counts())
    if [example.prompt for example in student] != [example.prompt for example in run.examples]:
        raise ValueError("the data has changed while it was read: the teacher's questions are not the student's")
    builder = prompt_builder(data, tokenizer)
    written: dict[Document, Document] = {}

    def rewritten(document: Document) -> Document:
        """A document that was cut is the student's token ids: the teacher reads their text."""
        if document.token_ids is None:
            return document
        if document not in written:
            text = run.tokenizer.decode(document.token_ids, clean_up_tokenization_spaces=False)
            ids = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
            written[document] = Document(token_ids=tuple(ids), id=document.id, title=document.title)
        return written[document]

    kept = [numbered[int(example.id or 0)] for example in student]
    questions = [replace(example, documents=tuple(map(rewritten, example.documents))) for example in kept]
    examples = tokenize(questions, builder, Counts())
    if len(examples) != len(run.examples):
        raise ValueError(f"the teacher {name!r} reads {len(examples)} of {len(run.examples)} examples")
    return _Asked(name, None, model, tokenizer, examples)


def _retokenized(answer: StoredAnswer, builder: PromptBuilder) -> tuple[int, ...]:
    """The answer's text as the student writes it; its end token only where the teacher's answer ended."""
    ids = builder.answer(answer.text)
    return ids if answer.finished else ids[:-1]

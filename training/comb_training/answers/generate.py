"""Answers for examples: found on disk, or generated batch by batch, each rank its share, and kept.

What an answer is kept under (its key) is made from weights, settings and the token ids of the prompt, so an answer is
never taken for another's. Which engine gave it is written down, but no part of the key: greedy is greedy.
"""

from __future__ import annotations

import array
import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from tqdm import tqdm

from comb.backbones.adapter import backbone_fingerprint
from comb.backbones.discovery import inspect_backbone
from comb.backbones.loading import load_model, resolve_name
from comb.backbones.tokenizer import load_tokenizer
from comb.documents.datasets import Counts
from comb.documents.document import Document, PromptBuilder, stopping_tokens
from comb.evaluation.metrics import Scores, score
from comb_training.answers.engines import TransformersEngine, VllmEngine, vllm_installed
from comb_training.answers.store import AnswerSettings, AnswerStore, StoredAnswer
from comb_training.data.batches import TrainingExample, by_documents, tokenize
from comb_training.data.mixture import prompt_builder, read_examples
from comb_training.models import training_method
from comb_training.trainer import distributed

if TYPE_CHECKING:
    from comb_training.trainer.prepare import PreparedRun


logger = logging.getLogger(__name__)

PATIENCE = 600.0
"""Seconds without a new answer of other ranks after which a rank generates what is missing itself."""
POLL_SECONDS = 0.5

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class AnsweringEngine(Protocol):
    """Something that answers greedily."""

    name: str
    batch_size: int

    def __call__(self, examples: Sequence[TrainingExample]) -> list[StoredAnswer]:
        """The answers to one batch, in its order."""
        ...

    def close(self) -> None:
        """Gives back what the engine holds."""
        ...


@dataclass(frozen=True)
class Share:
    """Which part of the questions this process answers: number `rank` of `ranks`, by sets of documents.

    Args:
        wait: for the answers of the other ranks, which write to the same folder.
    """

    rank: int = 0
    ranks: int = 1
    wait: bool = True


@dataclass
class Answered:
    """Answers in the order of the examples; None for dropped ones, and for those of ranks that weren't waited for.

    Args:
        found: answers that were on disk before.
        generated: by this process, in `seconds` (starting the engine comes on top).
        engine: its name and version; None when it wasn't needed.
    """

    answers: list[StoredAnswer | None]
    settings: AnswerSettings
    found: int = 0
    generated: int = 0
    seconds: float = 0.0
    engine: str | None = None


def generate_answers(
    examples: Sequence[TrainingExample],
    settings: AnswerSettings,
    engine: Callable[[], AnsweringEngine],
    *,
    decode: Callable[[Sequence[int]], str],
    max_prompt_tokens: int,
    folder: str | Path,
    share: Share = Share(),
    progress: bool = True,
) -> Answered:
    """Answers every example whose prompt has at most `max_prompt_tokens`.

    Args:
        engine: makes what generates; called only when an answer is missing.
        decode: text of token ids, without special tokens.
        folder: where answers are kept (`AnswerStore`).
    """
    keys = [
        _key(settings.identity, example) if len(example.prompt.flat) <= max_prompt_tokens else None
        for example in examples
    ]
    asked = {key: example for key, example in zip(keys, examples, strict=True) if key is not None}
    store = AnswerStore(folder, settings, rank=share.rank)
    answered = Answered([], settings, found=sum(key in store for key in asked))
    if answered.found:
        logger.info("%d of %d answers found in %s", answered.found, len(asked), folder)
    started: AnsweringEngine | None = None

    def generate(wanted: Mapping[str, TrainingExample]) -> None:
        """What is missing of `wanted`, by the engine, which starts with the first."""
        nonlocal started
        missing = {key: example for key, example in wanted.items() if key not in store}
        if not missing:
            return
        started = started or engine()
        answered.engine = started.name
        bar = tqdm(total=len(missing), desc="greedy answers", unit="answer", disable=not progress, leave=False)
        with bar:
            for batch in _batches(missing, started.batch_size):
                begin = time.monotonic()
                said = started([missing[key] for key in batch])
                answered.seconds += time.monotonic() - begin
                answered.generated += len(batch)
                texts = [replace(answer, text=decode(answer.token_ids)) for answer in said]
                store.add(dict(zip(batch, texts, strict=True)), started.name)
                bar.update(len(batch))

    try:
        generate(_share(asked, share))
        if share.ranks > 1 and share.wait:
            _await_others(store, asked)
        if share.wait:
            generate(asked)
    finally:
        if started is not None:
            started.close()
    answered.answers = [store.get(key) if key is not None else None for key in keys]
    return answered


def count_answers(answers: Sequence[StoredAnswer | None], counts: Counts, limit: int, max_new_tokens: int) -> None:
    """Counts prompts that were too long and answers that were cut."""
    counts.drop(f"prompt of more than {limit} tokens", sum(answer is None for answer in answers))
    cut = sum(answer is not None and not answer.finished for answer in answers)
    counts.truncate(f"answer cut at {max_new_tokens} tokens", cut)


def prompt_limit(backbone: Any, max_new_tokens: int, max_prompt_tokens: int | None) -> int:
    """Tokens of the longest prompt that is answered: the backbone's positions have to hold the answer, too."""
    limit: int = inspect_backbone(backbone).max_position_embeddings - max_new_tokens
    return limit if max_prompt_tokens is None else min(limit, max_prompt_tokens)


def settings_of(backbone: Any, stops: Sequence[int], max_new_tokens: int, name: str = "") -> AnswerSettings:
    """The `AnswerSettings` of a loaded model."""
    dtype = str(backbone.dtype).removeprefix("torch.")
    return AnswerSettings(name, weights_name(backbone), dtype, max_new_tokens, tuple(sorted(stops)))


def stop_token_ids(backbone: Any, tokenizer: Any, stop: str = "") -> tuple[int, ...]:
    """Ids that end an answer: the tokenizer's end token, those of the backbone's generation settings, and every token
    whose text holds a character of `stop`."""
    configured = getattr(getattr(backbone, "generation_config", None), "eos_token_id", None)
    ids = [configured] if isinstance(configured, int) else list(configured or ())
    ids += stopping_tokens(tokenizer, stop)
    return tuple(dict.fromkeys([int(tokenizer.eos_token_id), *map(int, ids)]))


def weights_name(backbone: Any) -> str:
    """Names the weights that answer, the same on every device and for any number of threads.

    The fingerprint alone samples the embedding, which fine-tuning may leave alone. Sums of bit patterns are exact,
    whatever the order they are added in; sums of the values are not.
    """
    digest = hashlib.sha256()
    for parameter in backbone.parameters():
        bits = parameter.detach().view(INTEGERS[parameter.element_size()])
        digest.update(bits.sum(-1, dtype=torch.int64).cpu().numpy().tobytes())  # one sum per row
    return f"{backbone_fingerprint(backbone)}-{digest.hexdigest()[:16]}"


def _key(identity: str, example: TrainingExample) -> str:
    ids = array.array("q", example.prompt.flat).tobytes()
    return hashlib.sha256(identity.encode() + b"\x1f" + ids).hexdigest()


def _share(asked: Mapping[str, TrainingExample], share: Share) -> Mapping[str, TrainingExample]:
    """The questions of this rank: every `ranks`-th set of documents, so that no prefill is shared between ranks."""
    keys = list(asked)
    groups = by_documents(asked.values())[share.rank :: share.ranks]
    return {keys[place]: asked[keys[place]] for group in groups for place in group}


def _await_others(store: AnswerStore, wanted: Mapping[str, TrainingExample]) -> None:
    """Reads the other ranks' parts until nothing is missing, or nothing comes any more (which is said)."""
    heard = time.monotonic()
    while left := sum(key not in store for key in wanted):
        if store.refresh():
            heard = time.monotonic()
        elif time.monotonic() - heard > PATIENCE:
            logger.warning(
                "%d answers of other ranks have not come to %s in %.0f s: generating them here (do all ranks see this "
                "folder?)",
                left, store.folder, PATIENCE,
            )  # fmt: skip
            return
        else:
            time.sleep(POLL_SECONDS)


def _batches(examples: Mapping[str, TrainingExample], batch_size: int) -> Iterator[list[str]]:
    """Keys in batches: questions over the same documents together, prompts of like length together."""
    keys = list(examples)
    groups = sorted(by_documents(examples.values()), key=lambda group: len(examples[keys[group[0]]].prompt.flat))
    flat = [keys[place] for group in groups for place in group]
    for start in range(0, len(flat), batch_size):
        yield flat[start : start + batch_size]


# DOC """Answers for a prepared run: by its own backbone, or by the teacher that `train.teacher` names."""

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

"""Answers for examples: found on disk, or generated batch by batch, each rank its share, and kept."""

from __future__ import annotations

import array
import hashlib
import importlib.util
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from tqdm import tqdm

from comb.backbones.identity import weights_fingerprint
from comb.backbones.loading import load_model, resolve_name, trained_quantised
from comb.backbones.tokenizer import load_tokenizer
from comb.documents.datasets import Counts
from comb.documents.document import Document, stopping_tokens
from comb.documents.rendering import plain_ids
from comb.evaluation.metrics import Scores, score
from comb_training.answers.engines import TransformersEngine, VllmEngine
from comb_training.answers.store import AnswerSettings, AnswerStore, StoredAnswer
from comb_training.data.batches import TrainingExample, by_documents, tokenize
from comb_training.data.mixture import prompt_builder
from comb_training.models.method import padding_id
from comb_training.trainer import distributed
from comb_training.trainer.prepare import PreparedRun, prompt_limit

logger = logging.getLogger(__name__)

PATIENCE = 600.0
"""Seconds without a new answer of other ranks after which a rank generates what is missing itself."""
POLL_SECONDS = 0.5

ENGINES = ("auto", "transformers", "vllm")

AnsweringEngine = TransformersEngine | VllmEngine
"""What answers greedily: the answers to a batch of examples, in its order, until it is closed."""


@dataclass
class Answered:
    """Answers in the order of the examples; None for dropped ones, and for those of ranks that weren't waited for."""

    answers: list[StoredAnswer | None]
    settings: AnswerSettings
    found: int = 0  # answers that were on disk before
    generated: int = 0  # by this process, in `seconds` (starting the engine comes on top)
    seconds: float = 0.0
    engine: str | None = None  # its name and version; None when it wasn't needed
    pending: int = 0  # of other ranks, which weren't waited for


@dataclass(frozen=True)
class Targets:
    """Examples with their answers as targets."""

    examples: list[TrainingExample]  # without those that have no answer
    texts: list[str]  # of the answers, one per example
    scores: Scores | None  # the answers against the data's own; None when there is none yet
    answered: Answered
    folder: Path  # where the answers are kept


def choose_engine(name: str) -> str:
    """``transformers`` or ``vllm``; ``auto`` is vLLM where it is installed. Raises ValueError for other names, or vLLM
    where it isn't installed."""
    if name not in ENGINES:
        raise ValueError(f"the engine is one of {', '.join(ENGINES)}, not {name!r}")
    installed = importlib.util.find_spec("vllm") is not None
    if name == "auto":
        return "vllm" if installed else "transformers"
    if name == "vllm" and not installed:
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
    """The run's examples with greedy answers as targets, by its own backbone or the teacher of `train.teacher`.

    Args:
        engine: transformers (on the run's device) or vllm.
        engine_options: more keyword arguments of `vllm.LLM`.
        wait: for the answers of other ranks.

    Raises:
        ValueError: for vLLM where the run's backbone isn't what its checkpoint holds.
    """
    train, own, most = run.config.train, run.model.config, run.config.train.answer_max_new_tokens
    if train.teacher is None:
        name = getattr(own, "backbone_name_or_path", "") or run.config.model.backbone
        revision = getattr(own, "backbone_revision", None)
        model, tokenizer, asked = run.model.backbone, run.tokenizer, run.examples
        changed = [option for option in run.config.model.options if hasattr(model.config, option)]
        if engine == "vllm" and (changed or trained_quantised(own, resolve_name(run.config.model.backbone))):
            what = ", ".join(changed) or "quantization_config of model.init_from"
            raise ValueError(
                f"vLLM would answer with the backbone as it is stored, without {what}: --engine transformers"
            )
    else:
        name, revision = train.teacher, None
        model, tokenizer, asked = _teacher(run, name)
    stops = stop_token_ids(model, tokenizer, run.config.data.stop)
    settings = settings_of(model, stops, most, name)
    limit = prompt_limit(model, most, run.config.data.max_prompt_tokens)
    folder = Path(train.answers_dir) if train.answers_dir is not None else Path(train.output_dir) / "answers"

    def start() -> AnsweringEngine:
        if engine == "vllm":
            # as long as it has to be: memory for the cache is what limits how many are answered at once
            longest = min(limit, max(len(example.prompt.flat) for example in asked)) + most
            place = resolve_name(train.teacher or run.config.model.backbone)
            return VllmEngine(
                place, stops, most, dtype=settings.dtype, max_model_len=longest, revision=revision,
                options=engine_options,
            )  # fmt: skip
        pad = padding_id(tokenizer, model)
        return TransformersEngine(model.to(run.model.device), pad, stops, most, batch_size=train.answer_batch_size)

    def decode(ids: Sequence[int]) -> str:
        text: str = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    answered = generate_answers(
        asked, settings, start, decode=decode, max_prompt_tokens=limit, folder=folder, counts=run.counts,
        rank=distributed.rank(), ranks=distributed.world_size(), wait=wait, progress=progress,
    )  # fmt: skip
    examples, texts = [], []
    for example, answer in zip(run.examples, answered.answers, strict=True):
        if answer is None:
            continue
        ends = (answer.text.partition(character)[0] for character in run.config.data.stop)
        target, text = answer.token_ids, min(ends, key=len, default=answer.text)
        if train.teacher is not None:  # its text as the student writes it, with stop and end token only where it ended
            target = run.builder.answer(text) if answer.finished else plain_ids(run.tokenizer, text)
        if not target:
            run.counts.drop("the teacher's answer has no text")
            continue
        examples.append(replace(example, target=target))
        texts.append(text)
    known = [(text, e.references) for text, e in zip(texts, examples, strict=True) if e.references]
    scores = score(*map(list, zip(*known, strict=True))) if known else None
    return Targets(examples, texts, scores, answered, folder)


def _teacher(run: PreparedRun, name: str) -> tuple[Any, Any, Sequence[TrainingExample]]:
    """Another model, its tokenizer, and the same questions and documents as that and its template write them."""
    model = load_model(name, dtype=run.model.backbone.dtype).eval()
    data = run.config.data
    tokenizer = load_tokenizer(name, model, chat_template_kwargs=data.chat_template_kwargs)

    @cache
    def rewritten(document: Document) -> Document:
        if document.token_ids is None:
            return document
        # a document that was cut is the student's token ids: the teacher reads their text
        text = run.tokenizer.decode(document.token_ids, clean_up_tokenization_spaces=False)
        ids = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        return Document(token_ids=tuple(ids), id=document.id, title=document.title)

    texts = (example.source for example in run.examples)
    questions = [replace(text, documents=tuple(map(rewritten, text.documents))) for text in texts]
    return model, tokenizer, tokenize(questions, prompt_builder(data, tokenizer), Counts())


def generate_answers(
    examples: Sequence[TrainingExample],
    settings: AnswerSettings,
    engine: Callable[[], AnsweringEngine],
    *,
    decode: Callable[[Sequence[int]], str],
    max_prompt_tokens: int,
    folder: str | Path,
    counts: Counts,
    rank: int = 0,
    ranks: int = 1,
    wait: bool = True,
    progress: bool = True,
) -> Answered:
    """Answers every example whose prompt has at most `max_prompt_tokens`.

    Args:
        engine: makes what generates; called only when an answer is missing.
        decode: text of token ids, without special tokens.
        folder: where answers are kept (`AnswerStore`), those of all ranks.
        counts: where prompts that are too long, and answers that were cut, are counted.
        rank, ranks: this process answers every `ranks`-th set of documents, from number `rank` on.
        wait: for the answers of the other ranks.
    """
    # of weights, settings and the prompt's token ids, so that no answer is taken for another's; which engine gave it is
    # no part of the key: greedy is greedy
    keys: list[str | None] = []
    for example in examples:
        ids = array.array("q", example.prompt.flat)
        digest = hashlib.sha256(settings.identity.encode() + b"\x1f" + ids.tobytes())
        keys.append(digest.hexdigest() if len(ids) <= max_prompt_tokens else None)
    asked = {key: example for key, example in zip(keys, examples, strict=True) if key is not None}
    store = AnswerStore(folder, settings, rank=rank)
    answered = Answered([], settings, found=sum(key in store.answers for key in asked))
    if answered.found:
        logger.info("%d of %d answers found in %s", answered.found, len(asked), folder)
    started: AnsweringEngine | None = None

    def generate(wanted: Iterable[str]) -> None:
        """What is missing of `wanted`, by the engine, which starts with the first."""
        nonlocal started
        missing = [key for key in wanted if key not in store.answers]
        if not missing:
            return
        started = started or engine()
        answered.engine = started.name
        # questions over the same documents together, prompts of like length together
        groups = by_documents(asked[key] for key in missing)
        groups.sort(key=lambda group: len(asked[missing[group[0]]].prompt.flat))
        ordered = [missing[place] for group in groups for place in group]
        with tqdm(total=len(ordered), desc="greedy answers", unit="answer", disable=not progress, leave=False) as bar:
            for first in range(0, len(ordered), started.batch_size):
                batch = ordered[first : first + started.batch_size]
                begin = time.monotonic()
                said = started([asked[key] for key in batch])
                answered.seconds += time.monotonic() - begin
                answered.generated += len(batch)
                texts = [replace(answer, text=decode(answer.token_ids)) for answer in said]
                store.add(dict(zip(batch, texts, strict=True)), started.name)
                bar.update(len(batch))

    try:
        every = list(asked)
        mine = by_documents(asked.values())[rank::ranks]  # by sets, so that no prefill is shared between ranks
        generate(every[place] for group in mine for place in group)
        if ranks > 1 and wait:
            heard = time.monotonic()
            while left := sum(key not in store.answers for key in asked):
                if store.refresh():
                    heard = time.monotonic()
                elif time.monotonic() - heard > PATIENCE:
                    logger.warning(
                        "%d answers of other ranks have not come to %s in %.0f s: generating them here (do all ranks "
                        "see this folder?)",
                        left, store.folder, PATIENCE,
                    )  # fmt: skip
                    break
                else:
                    time.sleep(POLL_SECONDS)
        if wait:
            generate(asked)
    finally:
        if started is not None:
            started.close()
    answered.answers = [None if key is None else store.answers.get(key) for key in keys]
    answered.pending = answered.answers.count(None) - keys.count(None)
    counts.drop(f"prompt of more than {max_prompt_tokens} tokens", keys.count(None))
    cut = sum(answer is not None and not answer.finished for answer in answered.answers)
    counts.truncate(f"answer cut at {settings.max_new_tokens} tokens", cut)
    return answered


def settings_of(backbone: Any, stops: Sequence[int], max_new_tokens: int, name: str = "") -> AnswerSettings:
    """The `AnswerSettings` of a loaded model."""
    dtype = str(backbone.dtype).removeprefix("torch.")
    weights = weights_fingerprint(backbone, settings=False)
    return AnswerSettings(name, weights, dtype, max_new_tokens, tuple(sorted(stops)))


def stop_token_ids(backbone: Any, tokenizer: Any, stop: str = "") -> tuple[int, ...]:
    """Ids that end an answer: the tokenizer's end token, those of the backbone's generation settings, and every token
    whose text holds a character of `stop`."""
    configured = getattr(getattr(backbone, "generation_config", None), "eos_token_id", None)
    ids = [configured] if isinstance(configured, int) else list(configured or ())
    ids += stopping_tokens(tokenizer, stop)
    return tuple(dict.fromkeys([int(tokenizer.eos_token_id), *map(int, ids)]))

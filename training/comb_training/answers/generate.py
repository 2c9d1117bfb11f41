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
from typing import Any, Protocol

import torch
from tqdm import tqdm

from comb.backbones.discovery import inspect_backbone
from comb.backbones.fingerprint import backbone_fingerprint
from comb.documents.datasets import Counts
from comb.documents.document import stopping_tokens
from comb_training.answers.store import AnswerSettings, AnswerStore, StoredAnswer
from comb_training.data.batches import TrainingExample, by_documents

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

"""On-policy answers: what the backbone itself says, greedily, with the documents and the question in its prompt.

Training on them teaches the encoder to make the backbone say what it would have said, rather than new facts (COMB
sec. 5). Questions over the same documents share one prefill of them. The dataset's answer serves as a draft: one
forward pass tells whether greedy decoding would have given just that (as in speculative decoding), and only the other
questions are decoded token by token. Answers are kept on disk, so that a run that was stopped goes on where it was.
"""

from __future__ import annotations

import array
import hashlib
import json
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from comb.backbone import inspect_backbone
from comb.evaluation.datasets import Counts
from comb.fingerprint import backbone_fingerprint
from comb_training.batches import TrainingExample

logger = logging.getLogger(__name__)

# drafts are given up when, after so many, fewer than this share was what the backbone says
DRAFTS_TRIED, DRAFTS_HELD = 256, 0.1
DRAFT_LOGITS = 2**28  # values of one batch of drafts at most: a gigabyte in float32


@dataclass(frozen=True)
class Answer:
    """Token ids as generated, the stop token included if there was one."""

    token_ids: tuple[int, ...]
    finished: bool


class AnswerFile:
    """Answers on disk, one JSON object per line, found again by the content of prompt, backbone and settings.

    Lines are appended batch by batch; a half-written last line (the process was killed) is left out and said.
    """

    def __init__(self, path: str | Path | None) -> None:
        self.path = Path(path) if path is not None else None
        self._answers: dict[str, Answer] = {}
        if self.path is not None and self.path.exists():
            self._read(self.path)

    def __len__(self) -> int:
        return len(self._answers)

    def get(self, key: str) -> Answer | None:
        """The answer kept under `key`, if any."""
        return self._answers.get(key)

    def add(self, answers: dict[str, Answer]) -> None:
        """Keeps answers; they are on disk when this returns."""
        self._answers.update(answers)
        if self.path is None or not answers:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write("".join(_line(key, answer) for key, answer in answers.items()))
            file.flush()
            os.fsync(file.fileno())

    def _read(self, path: Path) -> None:
        damaged = 0
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                row = json.loads(line)
                self._answers[row["key"]] = Answer(tuple(map(int, row["token_ids"])), bool(row["finished"]))
            except (ValueError, KeyError, TypeError):
                damaged += 1
        if damaged:
            logger.warning("%s: %d damaged line(s) left out; those answers are generated again", path, damaged)
            # written anew, or the next line would be appended to the half of one
            temporary = path.with_suffix(f"{path.suffix}.tmp{os.getpid()}")
            temporary.write_text("".join(_line(*item) for item in self._answers.items()), encoding="utf-8")
            temporary.replace(path)


def _line(key: str, answer: Answer) -> str:
    return json.dumps({"key": key, "token_ids": list(answer.token_ids), "finished": answer.finished}) + "\n"


def answer_on_policy(
    backbone: Any,
    examples: Sequence[TrainingExample],
    counts: Counts,
    *,
    pad_token_id: int,
    eos_token_ids: Sequence[int],
    max_new_tokens: int = 48,
    max_prompt_tokens: int | None = None,
    batch_size: int = 64,
    file: str | Path | None = None,
    progress: bool = True,
) -> list[TrainingExample]:
    """The examples with the backbone's own answers as targets, in the same order.

    Args:
        backbone: a plain Hugging Face causal LM.
        counts: examples whose prompt is too long are dropped here (never shortened or replaced), and answers that
            were cut at `max_new_tokens` counted; those have no end token to learn.
        max_prompt_tokens: default: what the backbone's positions allow.
        file: where answers are kept (`AnswerFile`); None keeps none.
    """
    info = inspect_backbone(backbone)
    limit = info.max_position_embeddings - max_new_tokens
    if max_prompt_tokens is not None:
        limit = min(limit, max_prompt_tokens)
    short = [example for example in examples if len(example.prompt.flat) <= limit]
    counts.drop(f"prompt of more than {limit} tokens", len(examples) - len(short))
    settings = f"{_weights(backbone)}/{max_new_tokens}/{','.join(map(str, sorted(eos_token_ids)))}"
    keys = [_key(settings, example) for example in short]
    kept = AnswerFile(file)
    missing = {key: example for key, example in zip(keys, short, strict=True) if kept.get(key) is None}
    if len(missing) < len(set(keys)):
        logger.info("%d of %d answers found in %s", len(set(keys)) - len(missing), len(set(keys)), kept.path)

    # a repeated cache stays right only where every layer keeps plain keys and values of all positions
    share_prefix = set(info.layer_kinds) == {"full"}
    greedy = _Greedy(backbone, pad_token_id, tuple(eos_token_ids), max_new_tokens, share_prefix)
    bar = tqdm(total=len(missing), desc="backbone's own answers", unit="answer", disable=not progress, leave=False)
    with bar:
        for batch in _batches(missing, batch_size):
            answers = greedy([missing[key] for key in batch])
            kept.add(dict(zip(batch, answers, strict=True)))
            bar.update(len(batch))
    found = [kept.get(key) for key in keys]
    answers = [answer for answer in found if answer is not None]
    counts.truncate(f"answer cut at {max_new_tokens} tokens", sum(not answer.finished for answer in answers))
    return [example.with_target(answer.token_ids) for example, answer in zip(short, answers, strict=True)]


def stop_token_ids(backbone: Any, tokenizer: Any) -> tuple[int, ...]:
    """Ids that end an answer: the tokenizer's end token and those of the backbone's generation settings."""
    configured = getattr(getattr(backbone, "generation_config", None), "eos_token_id", None)
    ids = [configured] if isinstance(configured, int) else list(configured or ())
    return tuple(dict.fromkeys([int(tokenizer.eos_token_id), *map(int, ids)]))


def _weights(backbone: Any) -> str:
    """Names the weights that answer. The fingerprint alone samples the embedding, which fine-tuning may leave alone."""
    sums = torch.stack([parameter.detach().abs().sum(dtype=torch.float64) for parameter in backbone.parameters()])
    digest = hashlib.sha256(sums.cpu().numpy().tobytes()).hexdigest()[:16]
    return f"{backbone_fingerprint(backbone)}-{digest}"


def _key(settings: str, example: TrainingExample) -> str:
    ids = array.array("q", example.prompt.flat).tobytes()
    return hashlib.sha256(settings.encode() + b"\x1f" + ids).hexdigest()


def _batches(examples: dict[str, TrainingExample], batch_size: int) -> Iterator[list[str]]:
    """Keys in batches: questions over the same documents together, prompts of like length together."""
    groups: dict[tuple[tuple[int, ...], ...], list[str]] = {}
    for key, example in examples.items():
        groups.setdefault(example.segments, []).append(key)
    ordered = sorted(groups.values(), key=lambda keys: len(examples[keys[0]].prompt.flat))
    flat = [key for keys in ordered for key in keys]
    for start in range(0, len(flat), batch_size):
        yield flat[start : start + batch_size]


class _Greedy:
    """Greedy generation on the plain backbone, documents prefilled once per group where its cache allows that."""

    def __init__(
        self, backbone: Any, pad: int, stops: tuple[int, ...], max_new_tokens: int, share_prefix: bool
    ) -> None:
        self.backbone = backbone
        self.pad = pad
        self.stops = stops
        self.max_new_tokens = max_new_tokens
        self.share_prefix = share_prefix
        self.drafted = 0
        self.held = 0

    @torch.no_grad()
    def __call__(self, examples: Sequence[TrainingExample]) -> list[Answer]:
        was_training = self.backbone.training
        self.backbone.eval()
        try:
            right = self._drafts_hold(examples)
            rest = [example for example, holds in zip(examples, right, strict=True) if not holds]
            decoded = iter(self._decode(rest) if rest else ())
        finally:
            self.backbone.train(was_training)
        return [
            Answer(example.target, finished=True) if holds else next(decoded)
            for example, holds in zip(examples, right, strict=True)
        ]

    def _decode(self, examples: Sequence[TrainingExample]) -> list[Answer]:
        ids = self._shared(examples) if self.share_prefix else self._plain(examples)
        return [self._answer(row) for row in ids.tolist()]

    def _drafts_hold(self, examples: Sequence[TrainingExample]) -> list[bool]:
        """Per example, whether its target is what greedy decoding gives, token for token."""
        none = [False] * len(examples)
        if not self.share_prefix or (self.drafted >= DRAFTS_TRIED and self.held < DRAFTS_HELD * self.drafted):
            return none
        # a target that decoding can't give is drafted by its first token alone: it might not fit the positions
        drafts = [example.target if self._is_whole(example.target) else example.target[:1] for example in examples]
        longest = max(map(len, drafts))
        if len(examples) * longest * self.backbone.config.get_text_config().vocab_size > DRAFT_LOGITS:
            return none
        prefix = self._prefix(examples)
        if prefix is None:
            return none
        prefix_ids, prefix_mask, cache = prefix
        # drafts end at the right edge, so that the last columns of logits are all that is needed
        ids, mask = self._left_padded([(*e.prompt.tail, *draft) for e, draft in zip(examples, drafts, strict=True)])
        mask = torch.cat([prefix_mask, mask], dim=1)
        logits = self.backbone(
            input_ids=ids,
            attention_mask=mask,
            position_ids=(mask.cumsum(-1) - 1).clamp(min=0)[:, prefix_ids.shape[1] :],
            past_key_values=cache,
            logits_to_keep=longest + 1,
        ).logits
        said = logits.argmax(-1).tolist()
        held = [
            draft == example.target and tuple(row[-len(draft) - 1 : -1]) == draft and self._is_whole(draft)
            for row, draft, example in zip(said, drafts, examples, strict=True)
        ]
        self.drafted += len(held)
        self.held += sum(held)
        return held

    def _is_whole(self, target: Sequence[int]) -> bool:
        """Whether decoding would have stopped at the end of `target`, and not before."""
        stops = [token in self.stops for token in target]
        return len(target) <= self.max_new_tokens and stops[-1] and not any(stops[:-1])

    def _plain(self, examples: Sequence[TrainingExample]) -> Tensor:
        input_ids, mask = self._left_padded([example.prompt.flat for example in examples])
        return self._generate(input_ids, mask)

    def _shared(self, examples: Sequence[TrainingExample]) -> Tensor:
        prefix = self._prefix(examples)
        if prefix is None:
            return self._plain(examples)
        prefix_ids, prefix_mask, cache = prefix
        query_ids, query_mask = self._left_padded([example.prompt.tail for example in examples])
        return self._generate(
            torch.cat([prefix_ids, query_ids], dim=1),
            torch.cat([prefix_mask, query_mask], dim=1),
            past_key_values=cache,
        )

    def _prefix(self, examples: Sequence[TrainingExample]) -> tuple[Tensor, Tensor, Any] | None:
        """Ids, mask [examples, tokens] and cache of head and documents, each different one computed once.

        None where there is neither head nor document, so nothing to share.
        """

        def prefix(example: TrainingExample) -> tuple[int, ...]:
            return example.prompt.head + tuple(token for segment in example.segments for token in segment)

        different = list(dict.fromkeys(map(prefix, examples)))
        if not all(different):
            return None
        prefix_ids, prefix_mask = self._left_padded(different)
        cache = self.backbone(
            input_ids=prefix_ids,
            attention_mask=prefix_mask,
            position_ids=(prefix_mask.cumsum(-1) - 1).clamp(min=0),
            use_cache=True,
            logits_to_keep=1,
        ).past_key_values
        own = torch.tensor([different.index(prefix(example)) for example in examples], device=prefix_ids.device)
        cache.batch_select_indices(own)
        return prefix_ids[own], prefix_mask[own], cache

    def _generate(self, input_ids: Tensor, attention_mask: Tensor, **kwargs: Any) -> Tensor:
        output: Tensor = self.backbone.generate(
            input_ids=input_ids,
            attention_mask=attention_mask,
            max_new_tokens=self.max_new_tokens,
            do_sample=False,
            num_beams=1,
            temperature=None,
            top_p=None,
            top_k=None,
            repetition_penalty=1.0,
            eos_token_id=list(self.stops),
            pad_token_id=self.pad,
            **kwargs,
        )
        return output[:, input_ids.shape[1] :]

    def _left_padded(self, rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        longest = max(map(len, rows))
        ids = [[self.pad] * (longest - len(row)) + list(row) for row in rows]
        mask = [[0] * (longest - len(row)) + [1] * len(row) for row in rows]
        device = self.backbone.get_input_embeddings().weight.device
        return torch.tensor(ids, dtype=torch.long, device=device), torch.tensor(mask, dtype=torch.long, device=device)

    def _answer(self, ids: list[int]) -> Answer:
        for place, token in enumerate(ids):
            if token in self.stops:
                return Answer(tuple(ids[: place + 1]), finished=True)
        return Answer(tuple(ids), finished=False)

"""Greedy answers by transformers, in batches.

Questions over the same documents share one prefill of them. The dataset's answer serves as a draft: one forward pass
tells whether greedy decoding would have given just that (as in speculative decoding), and only the other questions
are decoded token by token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transformers
from torch import Tensor

from comb.backbones.discovery import inspect_backbone
from comb_training.answers.store import StoredAnswer
from comb_training.data.batches import TrainingExample

# drafts are given up when, after so many, fewer than this share was what the backbone says
DRAFTS_TRIED, DRAFTS_HELD = 256, 0.1
DRAFT_LOGITS = 2**28  # values of one batch of drafts at most: a gigabyte in float32


class TransformersEngine:
    """Greedy generation on the plain backbone, documents prefilled once per group where its cache allows that.

    Args:
        backbone: a plain Hugging Face causal LM, where it shall run.
        pad: any token id; what it is makes no difference.
        stops: ids that end an answer.
        batch_size: questions answered at once.
    """

    def __init__(
        self, backbone: Any, pad: int, stops: Sequence[int], max_new_tokens: int, *, batch_size: int = 64
    ) -> None:
        self.name = f"transformers {transformers.__version__}"
        self.backbone = backbone
        self.pad = pad
        self.stops = tuple(stops)
        self.max_new_tokens = max_new_tokens
        self.batch_size = batch_size
        # a repeated cache stays right only where every layer keeps plain keys and values of all positions
        self.share_prefix = set(inspect_backbone(backbone).layer_kinds) == {"full"}
        self.drafted = 0
        self.held = 0

    @torch.no_grad()
    def __call__(self, examples: Sequence[TrainingExample]) -> list[StoredAnswer]:
        """The answers to one batch; an example's target is the draft of its answer."""
        was_training = self.backbone.training
        self.backbone.eval()
        try:
            right = self._drafts_hold(examples)
            rest = [example for example, holds in zip(examples, right, strict=True) if not holds]
            decoded = iter(self._decode(rest) if rest else ())
        finally:
            self.backbone.train(was_training)
        return [
            StoredAnswer(tuple(example.target), finished=True) if holds else next(decoded)
            for example, holds in zip(examples, right, strict=True)
        ]

    def close(self) -> None:
        """Nothing to give back: the backbone belongs to the caller."""

    def _decode(self, examples: Sequence[TrainingExample]) -> list[StoredAnswer]:
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

    def _answer(self, ids: list[int]) -> StoredAnswer:
        for place, token in enumerate(ids):
            if token in self.stops:
                return StoredAnswer(tuple(ids[: place + 1]), finished=True)
        return StoredAnswer(tuple(ids), finished=False)

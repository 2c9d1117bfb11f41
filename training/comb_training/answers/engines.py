"""Greedy answers in batches, by transformers and by vLLM (which is imported when its engine is made, not before)."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import LogitsProcessorList

from comb.backbones.discovery import inspect_backbone
from comb.backbones.forward import cache_argument, cache_in
from comb.backbones.whole import CheckedLogits
from comb_training.answers.store import StoredAnswer
from comb_training.data.batches import TrainingExample

# drafts are given up when, after so many, fewer than this share was what the backbone says
DRAFTS_TRIED, DRAFTS_HELD = 256, 0.1
DRAFT_LOGITS = 2**28  # values of one batch of drafts at most: a gigabyte in float32


class TransformersEngine:
    """Greedy generation on the plain backbone, documents prefilled once per group where its cache allows that.

    The dataset's answer serves as a draft: one pass tells whether greedy decoding would give just that (as in
    speculative decoding), and only other questions are decoded token by token. On the nano backbone, most of whose
    answers are the data's, that halves the time.

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
        self.drafted = self.held = 0

    @torch.no_grad()
    def __call__(self, examples: Sequence[TrainingExample]) -> list[StoredAnswer]:
        """The answers to one batch, in its order; an example's target is the draft of its answer."""
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

    def _drafts_hold(self, examples: Sequence[TrainingExample]) -> list[bool]:
        """Per example, whether its target is what greedy decoding gives, token for token."""
        drafts = [example.target[: self.max_new_tokens] for example in examples]
        longest = max(map(len, drafts))
        logits = len(drafts) * longest * self.backbone.config.get_text_config().vocab_size
        given_up = self.drafted >= DRAFTS_TRIED and self.held < DRAFTS_HELD * self.drafted
        if given_up or logits > DRAFT_LOGITS or not self.share_prefix:
            return [False] * len(examples)
        # drafts end at the right edge, so that the last columns of logits are all that is needed
        ids, mask, cache = self._inputs(examples, drafts)
        cached = cache.get_seq_length() if cache is not None else 0
        said = self.backbone(
            input_ids=ids[:, cached:],
            attention_mask=mask,
            position_ids=(mask.cumsum(-1) - 1).clamp(min=0)[:, cached:],
            logits_to_keep=longest + 1,
            **{cache_argument(self.backbone): cache},
        ).logits.argmax(-1)
        held = [
            tuple(row[-len(draft) - 1 : -1]) == draft
            and self._answer(draft) == StoredAnswer(example.target, finished=True)
            for row, draft, example in zip(said.tolist(), drafts, examples, strict=True)
        ]
        self.drafted += len(held)
        self.held += sum(held)
        return held

    def _decode(self, examples: Sequence[TrainingExample]) -> list[StoredAnswer]:
        ids, mask, cache = self._inputs(examples)
        output: Tensor = self.backbone.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=self.max_new_tokens,
            do_sample=False,
            num_beams=1,
            temperature=None,
            top_p=None,
            top_k=None,
            repetition_penalty=1.0,
            logits_processor=LogitsProcessorList([CheckedLogits()]),
            eos_token_id=list(self.stops),
            pad_token_id=self.pad,
            **{cache_argument(self.backbone): cache},
        )
        return [self._answer(row) for row in output[:, ids.shape[1] :].tolist()]

    def _inputs(
        self, examples: Sequence[TrainingExample], drafts: Sequence[tuple[int, ...]] | None = None
    ) -> tuple[Tensor, Tensor, Any]:
        """Ids and mask [examples, tokens] of prompts and drafts, and the cache of what they share, if they may."""
        queries = [(*e.prompt.query, *draft) for e, draft in zip(examples, drafts or [()] * len(examples), strict=True)]
        prefixes = [example.prompt.flat[: -len(example.prompt.query)] for example in examples]
        if not (self.share_prefix and all(prefixes)):
            return *self._left_padded([prefix + query for prefix, query in zip(prefixes, queries, strict=True)]), None
        different = list(dict.fromkeys(prefixes))  # each is computed once
        ids, mask = self._left_padded(different)
        output = self.backbone(
            input_ids=ids,
            attention_mask=mask,
            position_ids=(mask.cumsum(-1) - 1).clamp(min=0),
            use_cache=True,
            logits_to_keep=1,
        )
        cache = cache_in(output)
        own = torch.tensor([different.index(prefix) for prefix in prefixes], device=ids.device)
        cache.batch_select_indices(own)
        query_ids, query_mask = self._left_padded(queries)
        return torch.cat([ids[own], query_ids], dim=1), torch.cat([mask[own], query_mask], dim=1), cache

    def _left_padded(self, rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        longest = max(map(len, rows))
        ids = [[self.pad] * (longest - len(row)) + list(row) for row in rows]
        mask = [[0] * (longest - len(row)) + [1] * len(row) for row in rows]
        device = self.backbone.get_input_embeddings().weight.device
        return torch.tensor(ids, dtype=torch.long, device=device), torch.tensor(mask, dtype=torch.long, device=device)

    def _answer(self, ids: Sequence[int]) -> StoredAnswer:
        """Up to the first stop token."""
        end = next((place + 1 for place, token in enumerate(ids) if token in self.stops), None)
        return StoredAnswer(tuple(ids[:end]), finished=end is not None)


BATCH_SIZE = 1024
"""Questions handed over at once, and kept on disk together: vLLM batches among them as it sees fit."""
TORCHRUN = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "ROLE_WORLD_SIZE",
    "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE",
)  # fmt: skip


class VllmEngine:
    """An engine of vLLM on one model: token ids go in and come out, its prefix cache shares documents.

    Args:
        model: folder or Hub id.
        dtype: torch's name of it (float32, bfloat16, ...).
        max_model_len: tokens of the longest prompt and its answer.
        options: more keyword arguments of `vllm.LLM` (`tensor_parallel_size`, `gpu_memory_utilization`, ...).
    """

    def __init__(
        self,
        model: str,
        stops: Sequence[int],
        max_new_tokens: int,
        *,
        dtype: str,
        max_model_len: int,
        revision: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        import vllm

        self.name = f"vllm {vllm.__version__}"
        self.batch_size = BATCH_SIZE
        arguments: dict[str, Any] = {
            "dtype": dtype,
            "revision": revision,
            "max_model_len": max_model_len,
            "enable_prefix_caching": True,
            "skip_tokenizer_init": True,
            "generation_config": "vllm",  # greedy is greedy, whatever the checkpoint would sample with
            "seed": 0,
        }
        # vLLM tries out the chat template, and prints a traceback where it has no tokenizer; here it needs neither
        renderers = logging.getLogger("vllm.renderers.base")
        renderers.addFilter(lambda record: "Chat template warmup failed" not in str(record.msg))
        with alone():
            self._llm = vllm.LLM(model=model, **{**arguments, **(options or {})})
        self._parameters = vllm.SamplingParams(
            temperature=0.0,
            max_tokens=max_new_tokens,
            stop_token_ids=list(stops),
            ignore_eos=True,  # `stops` is all there is
            detokenize=False,
        )
        self._stops = frozenset(stops)

    def __call__(self, examples: Sequence[TrainingExample]) -> list[StoredAnswer]:
        """The answers to one batch, in its order."""
        prompts: Any = [{"prompt_token_ids": list(example.prompt.flat)} for example in examples]
        outputs = self._llm.generate(prompts, self._parameters, use_tqdm=False)
        ids = [tuple(map(int, output.outputs[0].token_ids)) for output in outputs]
        return [StoredAnswer(tokens, finished=bool(tokens) and tokens[-1] in self._stops) for tokens in ids]

    def close(self) -> None:
        """Ends the engine's processes and gives its memory back."""
        core = getattr(getattr(self._llm, "llm_engine", None), "engine_core", None)
        if core is not None:
            core.shutdown()


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Hides torchrun from an engine: each rank has one of its own, on its own GPU."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield
        return
    hidden = {name: os.environ.pop(name) for name in TORCHRUN if name in os.environ}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count()))))
    if gpus := [name for name in visible.split(",") if name.strip()]:  # stays: the engine may make workers later
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[int(hidden.get("LOCAL_RANK", "0")) % len(gpus)]
    try:
        yield
    finally:
        os.environ.update(hidden)

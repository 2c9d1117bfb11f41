"""comb's methods in lm-evaluation-harness (``lm-eval``), whose tasks are one string each.

    python -m comb.evaluation.lm_eval --model comb --model_args pretrained=smollm2-135m,method=primed --tasks ...

is its own command line with one more model. Passages are found in a task's string as `comb serve --comb-segments` finds
them in prompts, compiled once, and linked where they stand. All else is the harness's model for transformers (`HFLM`):
batches, truncation, chat templates, stop strings, caches of requests and answers; a request in which nothing is linked
is answered by it, so that the plain model's scores are its own to the last digit.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils_hf import stop_sequences_criteria
from torch import Tensor

from comb import methods
from comb.documents.document import Document, Prompt
from comb.documents.found import SegmentFinder, with_segments
from comb.engine.engine import PICEngine
from comb.methods.decode_state import DecodeState

Scored = tuple[tuple[str, str] | None, list[int], list[int]]
"""Of the harness: a request's texts (None for a piece of a whole text), and tokens of its context and continuation."""


@register_model("comb")
class CombLM(HFLM):
    """A model that links the passages of a task.

    Args:
        pretrained: a plain model or an adapter: folder, Hub id or registered name.
        method: as `PICEngine`'s, its parameters behind it; ``full`` links nothing.
        segment_tokens: the least of a passage.
        dtype, device: of the model, as everywhere in comb.
        more: of `HFLM`: ``batch_size``, ``max_length``, ``add_bos_token``, ...

    Attributes:
        prompt_tokens: of all prompts so far; linked_tokens: of those, in passages; computed_tokens: that passed through
            the backbone for them, without compiling, which a passage is once. A context is counted once for all
            continuations that follow each other.
    """

    def __init__(
        self,
        pretrained: str,
        method: str | None = None,
        *,
        segment_tokens: int = 64,
        dtype: str = "auto",
        device: str | None = None,
        **more: Any,
    ) -> None:
        # the harness reads method=focus:0.1,front=prose as two arguments
        known = methods.get(methods.parse(method)[0]).parameter_names() if method else ()
        own = {name: more.pop(name) for name in known if name in more}
        if device is None or (device.startswith("cuda") and not torch.cuda.is_available()):
            device = "auto"  # the harness names cuda:0 where nobody names anything
        self.engine = PICEngine.from_pretrained(pretrained, dtype=dtype, device=device, method=method, **own)
        backbone, tokenizer = self.engine.method.backbone, self.engine.tokenizer
        super().__init__(pretrained=backbone, tokenizer=tokenizer, **more)
        backbone.generation_config.max_new_tokens = None  # it would overrule how long a task's answers may be
        self.named = pretrained
        self.spec = ",".join([method or self.engine.method.name, *(f"{name}={value}" for name, value in own.items())])
        self._finder = SegmentFinder(tokenizer, least=int(segment_tokens))
        self._links = not self.engine.method.keeps_tokens_only  # as full and prefix
        self.prompt_tokens = self.linked_tokens = self.computed_tokens = 0

    def get_model_info(self) -> dict[str, Any]:
        """What results say of the model; a local one has no revision to ask the Hub for."""
        return {
            "model_num_parameters": self.model.num_parameters(), "model_dtype": self.model.dtype,
            "model_revision": "", "model_sha": "", "comb_model": self.named, "comb_method": self.spec,
            "comb_prompt_tokens": self.prompt_tokens, "comb_linked_tokens": self.linked_tokens,
            "comb_computed_tokens": self.computed_tokens,
        }  # fmt: skip

    def cut(self, token_ids: Sequence[int]) -> Prompt | None:
        """A prompt as passages and what is fresh; None if nothing in it is linked."""
        method = self.engine.method
        # who links leaves a position to answer in, and the harness scores a word behind a context that leaves none
        full = not method.uses_encoder and len(token_ids) >= (method.max_prompt_tokens or sys.maxsize)
        spans = self._finder.find(token_ids) if self._links and not full else []
        if spans:
            behind = (token for token in token_ids[sum(spans[-1]) :] if self.tokenizer.decode([token]).strip())
            if next(behind, None) in (None, *self.tokenizer.all_special_ids):
                spans.pop()  # the last passage ends a message: the question is in it, which has to read the others
        self.prompt_tokens += len(token_ids)
        self.linked_tokens += sum(tokens for _, tokens in spans)
        if not spans:
            self.computed_tokens += len(token_ids)
            return None
        return with_segments(token_ids, spans)

    @contextmanager
    def _linked(self, prompt: Prompt) -> Iterator[DecodeState]:
        engine = self.engine
        segments = engine.segments_of([Document(token_ids=ids) for ids in prompt.segments])
        with (
            engine.acquired(segments) as (references, _),
            engine.linked([(segments, prompt)], references, encoder=True) as (state, _),
        ):
            yield state
            self.computed_tokens += state.computed[0]

    def _loglikelihood_tokens(self, requests: list[Scored], **options: Any) -> list[tuple[float, bool]]:
        """Log-probability of each continuation, and whether it is the greedy one."""
        linked: dict[int, tuple[float, bool]] = {}
        for context, group in groupby(enumerate(requests), lambda each: self._kept(each[1])):
            prompt = self.cut(context) if context else None
            if prompt is None:
                continue
            with torch.inference_mode(), self._linked(prompt) as state:
                for number, (texts, _, continuation) in group:
                    logs = state.answer_logits(continuation).log_softmax(-1)
                    chosen = logs.gather(1, torch.tensor(continuation, device=logs.device)[:, None])
                    linked[number] = float(chosen.sum()), logs.argmax(-1).tolist() == continuation
                    self.cache_hook.add_partial("loglikelihood", texts, linked[number])
        rest = [request for number, request in enumerate(requests) if number not in linked]
        plain = iter(super()._loglikelihood_tokens(rest, **options) if rest else [])
        return [linked[number] if number in linked else next(plain) for number in range(len(requests))]

    def _kept(self, request: Scored) -> list[int]:
        """As much of a context as the harness leaves in front of a continuation; none of a whole text's pieces."""
        texts, context, continuation = request
        return [] if texts is None else context[max(0, len(context) + len(continuation) - self.max_length - 1) :]

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **options: Any) -> Tensor:
        """Prompts [B, N], padded on the left, and their answers; greedy unless a task says otherwise, as `HFLM`."""
        mask = options.pop("attention_mask", torch.ones_like(context))
        settings = {**options, "do_sample": options.get("do_sample", options.get("temperature", 0.0) != 0.0)}
        if not settings["do_sample"]:
            settings.pop("temperature", None)
        prompts = [self.cut(row[kept.bool()].tolist()) for row, kept in zip(context, mask, strict=True)]
        plain = [number for number, prompt in enumerate(prompts) if prompt is None]
        made = {}
        if plain:
            rows = super()._model_generate(context[plain], max_length, stop, attention_mask=mask[plain], **options)
            made = dict(zip(plain, rows, strict=True))
        for number, prompt in enumerate(prompts):
            if prompt is not None:
                with self._linked(prompt) as state:
                    length = state.input_ids.shape[1]
                    answer = state.generate(
                        max_new_tokens=max_length - context.shape[1], pad_token_id=self.tokenizer.pad_token_id,
                        stopping_criteria=stop_sequences_criteria(self.tokenizer, stop, length, 1), **settings,
                    )[0, length:]  # fmt: skip
                made[number] = torch.cat([context[number], answer.to(context.device)])
        longest = max(map(len, made.values()))
        out = context.new_full((len(context), longest), self.tokenizer.pad_token_id)
        for number, row in made.items():
            out[number, : len(row)] = row
        return out


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    sys.exit(cli_evaluate())

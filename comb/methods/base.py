"""What every method is: `compile` a segment once, `link` PICaches and a query into a state to decode from."""

from __future__ import annotations

import copy
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from transformers.cache_utils import Cache, DynamicLayer

from comb.picache import PICache

SegmentState = Literal["hit", "compiled", "inlined"]


@dataclass(frozen=True)
class SegmentUse:
    """How one segment entered a prompt, when the method knows better than the store.

    `inlined`: its tokens were prefilled by the backbone like any others, nothing was reused.
    """

    state: SegmentState
    tier: str | None = None
    nbytes: int = 0


@dataclass(frozen=True)
class LinkRow:
    """One row of a batch to link: its PICaches in order, the query behind them, and what stands in front."""

    picaches: Sequence[PICache]
    query_ids: Sequence[int]
    head_ids: Sequence[int] = ()


@dataclass
class DecodeState:
    """A prompt that is ready to decode, as `link` returns it. `generate` and `logits` don't change it.

    Attributes:
        model: the model whose ``generate`` decodes.
        input_ids: [rows, prompt tokens], left-padded.
        attention_mask: [rows, prompt tokens], 0 at padding.
        past_key_values: covers a strict prefix of `input_ids`, or None.
        documents: per row, the PICaches that the cross blocks read; None when there are none in any row.
        recomputed: per row, document tokens that the backbone prefilled again.
        uses: per row and segment, what the method did with it; None where the store's word stands.
    """

    model: Any
    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    past_key_values: Cache | None = None
    documents: list[list[PICache]] | None = None
    recomputed: tuple[int, ...] = (0,)
    uses: list[list[SegmentUse]] | None = None
    on_release: list[Callable[[], None]] = field(default_factory=list)

    @property
    def recomputed_tokens(self) -> int:
        """Document tokens that the backbone prefilled again, over all rows."""
        return sum(self.recomputed)

    @property
    def prompt_tokens(self) -> list[int]:
        """Per row, the tokens of the decoder's prompt without padding."""
        return [int(count) for count in self.attention_mask.sum(dim=-1)]

    @property
    def logits(self) -> torch.Tensor:
        """Next-token logits [rows, vocabulary] in float32, by the same path that generation takes."""
        output = self._generate(
            max_new_tokens=1, do_sample=False, temperature=None, top_p=None, top_k=None, num_beams=1,
            return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        logits: torch.Tensor = output.logits[0]
        return logits

    def generate(self, **generate_kwargs: Any) -> torch.Tensor:
        """Hugging Face ``generate`` from here: [rows, prompt + new tokens]. `streamer=` and the like work.

        Raises:
            ValueError: for an argument that ``generate`` doesn't know.
        """
        output = self._generate(**generate_kwargs)
        sequences: torch.Tensor = output if isinstance(output, torch.Tensor) else output.sequences
        return sequences

    def release(self) -> None:
        """Gives back what `link` borrowed from a store; harmless when called again."""
        while self.on_release:
            self.on_release.pop()()

    def _generate(self, **generate_kwargs: Any) -> Any:
        if self.past_key_values is not None:
            generate_kwargs["past_key_values"] = fork_cache(self.past_key_values)
        if self.documents is not None:
            generate_kwargs["documents"] = self.documents
        with exclusive(self.model):
            return self.model.generate(self.input_ids, attention_mask=self.attention_mask, **generate_kwargs)


class Method(ABC):
    """A named compile/link pair on one model with fixed parameters.

    Class attributes:
        name: registered name.
        positional: parameters that may be written without their name, as in ``legolink:16``.
        needs_store: the constructor takes ``store=`` and ``salt=`` (it keeps more than one PICache per segment).
        uses_encoder: COMB's encoder takes part.

    Subclasses overriding `link_batch` get real batches from the engine; the others go row by row.
    """

    name: ClassVar[str] = ""
    positional: ClassVar[tuple[str, ...]] = ()
    needs_store: ClassVar[bool] = False
    uses_encoder: ClassVar[bool] = False

    def __init__(self, model: Any, **parameters: Any) -> None:
        if parameters:
            raise ValueError(
                f"method {self.name!r} has no parameter {', '.join(sorted(parameters))}; "
                f"it takes: {', '.join(self.positional) or 'none'}"
            )
        self.model = model

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Everything that changes what `compile` gives: model and adapter, parameters, dtype."""

    @abstractmethod
    def compile(self, segments: Sequence[Sequence[int]]) -> list[PICache]:
        """One PICache per segment of token ids, each a pure function of that segment alone."""

    @abstractmethod
    def link(
        self, picaches: Sequence[PICache], query_ids: Sequence[int], *, head_ids: Sequence[int] = ()
    ) -> DecodeState:
        """The state for head + segments + query.

        Raises:
            ValueError: when the prompt is empty or longer than the model's positions.
        """

    def link_batch(self, rows: Sequence[LinkRow]) -> DecodeState:
        """Several prompts in one left-padded batch. Raises NotImplementedError where a method has none."""
        raise NotImplementedError(f"method {self.name!r} links one row at a time")

    @property
    def batches(self) -> bool:
        """Whether `link_batch` is there."""
        return type(self).link_batch is not Method.link_batch

    @property
    def backbone(self) -> Any:
        """The plain Hugging Face model, without COMB's cross blocks."""
        return backbone_of(self.model)

    @property
    def dtype(self) -> str:
        """Name of the dtype in which the model computes, a part of every key."""
        return str(self.backbone.dtype).removeprefix("torch.")

    @property
    def max_segment_tokens(self) -> int | None:
        """Longest segment that `compile` takes; None when there is no limit."""
        return None

    @property
    def max_prompt_tokens(self) -> int | None:
        """Positions of the backbone; None when its configuration names no limit."""
        config = self.backbone.config.get_text_config()
        limit = getattr(config, "max_position_embeddings", None)
        return None if limit is None else int(limit)

    def check_prompt(self, document_tokens: int, query_tokens: int) -> None:
        """Raises ValueError when a decoder prompt of these parts is empty or leaves no position to answer in."""
        total, limit = document_tokens + query_tokens, self.max_prompt_tokens
        if total == 0:
            raise ValueError("the prompt is empty: there is no token to decode from")
        if limit is not None and total >= limit:
            raise ValueError(
                f"the prompt has {total} tokens ({document_tokens} of documents, {query_tokens} of query), but the "
                f"backbone has {limit} positions and the answer needs at least one: use fewer or shorter documents"
                + ("" if self.uses_encoder else ", or method='comb', which keeps documents out of the prompt")
            )

    def tensors(self, rows: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids and attention mask, both [rows, longest row], left-padded, on the model's device."""
        width = max(len(row) for row in rows)
        ids = torch.zeros(len(rows), width, dtype=torch.long)
        mask = torch.zeros(len(rows), width, dtype=torch.long)
        for index, row in enumerate(rows):
            ids[index, width - len(row) :] = torch.tensor(list(row), dtype=torch.long)
            mask[index, width - len(row) :] = 1
        device = self.backbone.get_input_embeddings().weight.device
        return ids.to(device), mask.to(device)


def backbone_of(model: Any) -> Any:
    """The frozen backbone of a COMB model, or the model itself."""
    return getattr(model, "backbone", model)


def fork_cache(cache: Cache) -> Cache:
    """A cache that can grow without changing `cache`.

    Dynamic layers replace their tensors when they grow, so they share them; other kinds write in place and are
    copied whole.
    """
    if all(type(layer) is DynamicLayer for layer in cache.layers):
        fork = copy.copy(cache)
        fork.layers = [copy.copy(layer) for layer in cache.layers]
        return fork
    return copy.deepcopy(cache)


class _ModelLock:
    """A lock that lives on a model; copies of the model get their own, and it is left out of pickles."""

    def __init__(self) -> None:
        self.lock = threading.RLock()

    def __deepcopy__(self, memo: dict[int, Any]) -> _ModelLock:
        return _ModelLock()

    def __reduce__(self) -> tuple[type[_ModelLock], tuple[()]]:
        return (_ModelLock, ())


_creating = threading.Lock()


@contextmanager
def exclusive(model: Any) -> Iterator[None]:
    """One computation at a time on a model, in eval mode and without gradients.

    Documents reach the cross blocks through hooks on the backbone, so a plain run of that backbone, or another
    request's, must not overlap: the lock belongs to the backbone, whichever engine or method uses it.
    """
    backbone = backbone_of(model)
    with _creating:
        holder = backbone.__dict__.get("_comb_lock")
        if holder is None:
            holder = backbone.__dict__["_comb_lock"] = _ModelLock()
    with holder.lock, torch.no_grad():
        training = [module for module in model.modules() if module.training]
        for module in training:
            module.training = False
        try:
            yield
        finally:
            for module in training:
                module.training = True

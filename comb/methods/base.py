"""What every method is: `compile` a segment once, `link` PICaches and a query into a state to decode from."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar

import torch
from torch.nn.utils.rnn import pad_sequence

from comb.backbones.attention_calls import choose_attention
from comb.backbones.forward import counted_passes
from comb.backbones.identity import backbone_of, exclusive, notice_rows
from comb.backbones.rotary import prompt_limit
from comb.cache.picache import PICache, content_key
from comb.hybrid.caches import run
from comb.linking.cache import fork_cache
from comb.methods.decode_state import DecodeState, PastState, decodes_padded, pass_size
from comb.waits import on_device


@dataclass(frozen=True)
class MethodSpec:
    """How another process makes the same method: a registered name, and parameters as plain values."""

    name: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True)
class LinkRequest:
    """One row of a batch to link: ``prefix + PICache 1 + gap 1 + PICache 2 + ... + query``.

    `gaps` holds the fresh tokens behind each PICache but the last; empty when PICaches follow each other directly.
    `salt` separates tenants that must not share a cached prefix.
    """

    picaches: Sequence[PICache]
    query_ids: Sequence[int]
    prefix_ids: Sequence[int] = ()
    gaps: Sequence[Sequence[int]] = ()
    salt: str = ""

    def __post_init__(self) -> None:
        if self.gaps and len(self.gaps) != len(self.picaches) - 1:
            raise ValueError(
                f"gaps has {len(self.gaps)} lists of tokens for {len(self.picaches)} PICaches: give one for each place "
                "between two of them, or none"
            )

    @property
    def fresh(self) -> list[list[int]]:
        """The fresh tokens in front of each PICache (prefix, then gaps), and last those behind all: the query."""
        if not self.picaches:
            return [[*self.prefix_ids, *self.query_ids]]
        gaps = self.gaps or [()] * (len(self.picaches) - 1)
        return [list(ids) for ids in (self.prefix_ids, *gaps, self.query_ids)]


class Method(ABC):
    """A named compile/link pair on one model with fixed parameters.

    Class attributes:
        name: registered name.
        positional: parameters that may be written without their name, as in ``legolink:16``.
        uses_encoder: COMB's encoder takes part.
        compile_name: what `compile` makes, for methods that share it; the method's own name by default.
        unquantizable: why its PICaches can't be kept in eight bits; empty where they can.
        keeps_tokens_only: `compile` computes nothing, so there is nothing to do in parallel.
        on_hybrids: the method that stands for it on hybrid models, behind the same front; empty where none does.
        spec: how the instance was made, if by `comb.methods.create`.

    A subclass implements `compile`, `fingerprint`, and either `link_row` or `link_batch`; with the latter the engine
    hands over real batches, otherwise it goes row by row.
    """

    name: ClassVar[str] = ""
    positional: ClassVar[tuple[str, ...]] = ()
    uses_encoder: ClassVar[bool] = False
    compile_name: ClassVar[str] = ""
    unquantizable: ClassVar[str] = ""
    keeps_tokens_only: ClassVar[bool] = False
    on_hybrids: ClassVar[str] = ""
    spec: MethodSpec | None = None

    def __init__(self, model: Any, **parameters: Any) -> None:
        if parameters:
            raise ValueError(
                f"method {self.name!r} has no parameter {', '.join(sorted(parameters))}; "
                f"it takes: {', '.join(self.parameter_names()) or 'none'}"
            )
        self.model = model
        choose_attention(backbone_of(model).device)

    @classmethod
    def parameter_names(cls) -> list[str]:
        """What may be written behind the method's name, `quantize` aside; those that need no name first."""
        own = (inspect.signature(vars(each)["__init__"]).parameters for each in cls.__mro__ if "__init__" in vars(each))
        given_by_others = {"self", "args", "kwargs", "model", "parameters"}
        others = {name for parameters in own for name in parameters} - given_by_others
        return [*cls.positional, *sorted(others - set(cls.positional))]

    @classmethod
    def tokenized(cls, parameters: Mapping[str, Any], tokenizer: Any, model: Any) -> dict[str, Any]:
        """`parameters` with text among them as token ids, so that other processes need no tokenizer for them."""
        return dict(parameters)

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """Everything that changes what `compile` gives: model and adapter, parameters, dtype."""

    @property
    def sink_tokens(self) -> int:
        """Tokens that a PICache has beside those of its segment."""
        return 0

    @property
    def compiled_behind(self) -> Sequence[int]:
        """Tokens in front of a segment while it is compiled."""
        return ()

    def notice_rows(self, token_ids: Iterable[int]) -> bool:
        """Whether the embeddings of these tokens have changed in silence; from then on the model is another one."""
        return notice_rows(self.model if self.uses_encoder else self.backbone, token_ids)

    def keys_of(self, segments: Sequence[Sequence[int]], salt: str = "") -> list[str]:
        """The `content_key` of each segment's PICache; other methods that compile alike have the same."""
        if not segments:  # a question without documents needs no identity
            return []
        self.notice_rows(chain(self.compiled_behind, *segments))
        made_by = self.compile_name or self.name
        fields = {"fingerprint": self.fingerprint, "method": made_by, "dtype": self.dtype, "salt": salt}
        return [content_key(ids, **fields) for ids in segments]

    @abstractmethod
    def compile(self, segments: Sequence[Sequence[int]]) -> list[PICache]:
        """One PICache per segment of token ids, each a pure function of that segment alone.

        Raises:
            ValueError: for an empty or over-long segment, or when the model computes NaN or infinity, so that no such
                PICache is ever stored.
        """

    def link(
        self,
        picaches: Sequence[PICache],
        query_ids: Sequence[int],
        *,
        prefix_ids: Sequence[int] = (),
        gaps: Sequence[Sequence[int]] = (),
    ) -> DecodeState:
        """The state for prefix + segments + query; `gaps` are fresh tokens between the segments (`LinkRequest`).

        Raises:
            ValueError: when the prompt is empty or longer than the model's positions, a PICache was made by another
                model or method, or `gaps` are others than there are places for.
        """
        return self.link_row(LinkRequest(picaches, query_ids, prefix_ids, gaps))

    def link_row(self, row: LinkRequest) -> DecodeState:
        """`link` for one row; a method implements this or `link_batch`."""
        if type(self).link_batch is Method.link_batch:
            raise NotImplementedError(f"method {self.name!r} implements neither link_row nor link_batch")
        return self.link_batch([row])

    def link_batch(self, rows: Sequence[LinkRequest]) -> DecodeState:
        """Several prompts in one left-padded batch. Raises NotImplementedError where a method takes one row only."""
        if len(rows) != 1:
            raise NotImplementedError(f"method {self.name!r} links one row at a time")
        return self.link_row(rows[0])

    def why_not_continue(self) -> str:
        """Why a conversation's next turn can't go on from the cache of the last one; empty if it can."""
        return f"method {self.name!r} has no way to go on from a cache"

    def continue_row(self, past: PastState, row: LinkRequest) -> DecodeState:
        """`link_row` behind a cache: `row` is what follows the tokens in `past`, which stays as it is.

        Called if `why_not_continue` has no reason. Methods whose documents aren't part of the decoder's prompt get all
        of a conversation's PICaches, the others those that `past` doesn't contain.
        """
        raise NotImplementedError(self.why_not_continue())

    def continue_tokens(self, past: PastState, token_ids: Sequence[int]) -> DecodeState:
        """The state behind `past` and `token_ids`, all of which the backbone computes as in any prompt."""
        input_ids, attention_mask = self.tensors([[*past.token_ids, *token_ids]])
        step = pass_size(self.backbone)
        state = DecodeState(self.backbone, input_ids, attention_mask, past_key_values=past.cache, step=step)
        # `generate` would take the rest of the prompt at once; and what can't be cut is wanted in front of the answer
        if step is not None or not (past.can_be_cut or self.uses_encoder):
            state.past_key_values = fork_cache(past.cache)
            with exclusive(self.backbone), counted_passes() as passed:
                run(self.backbone, list(token_ids[:-1]), state.past_key_values, len(past.token_ids), step=step)
            state.passed = passed.tokens
        return state

    @property
    def batches(self) -> bool:
        """Whether `link_batch` takes several rows; they are padded, which not every model takes."""
        return type(self).link_batch is not Method.link_batch and decodes_padded(self.backbone)

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
        return prompt_limit(self.backbone)

    def check_prompt(self, document_tokens: int, query_tokens: int) -> None:
        """Raises ValueError when a decoder prompt of these parts is empty or leaves no position to answer in."""
        total, limit = document_tokens + query_tokens, self.max_prompt_tokens
        if total == 0:
            raise ValueError("the prompt is empty: there is no token to decode from")
        if limit is not None and total >= limit:
            raise ValueError(
                f"the prompt has {total} tokens ({document_tokens} of documents, {query_tokens} of query), but the "
                f"backbone has {limit} positions and the answer needs at least one: use fewer or shorter documents"
                + ("" if self.uses_encoder else ", or an adapter with cross blocks, which keeps them out of it")
            )

    def check_ids(self, token_ids: Sequence[int]) -> None:
        """Raises ValueError for ids that the model has no embedding for."""
        vocabulary = self.backbone.get_input_embeddings().weight.shape[0]
        least, most = min(token_ids, default=0), max(token_ids, default=0)
        if least < 0 or most >= vocabulary:
            raise ValueError(
                f"token id {min(least, 0) or most} is outside of the model's 0..{vocabulary - 1}: leave the token out, "
                "the model has no embedding for it"
            )

    def check_segments(self, segments: Sequence[Sequence[int]]) -> None:
        """Raises ValueError for a segment that can't be compiled: empty, too long, or ids outside the vocabulary."""
        limit = self.max_segment_tokens
        for segment in segments:
            self.check_ids(segment)
            if not segment:
                raise ValueError("an empty segment can't be compiled: leave empty documents out")
            if limit is not None and len(segment) > limit:
                raise ValueError(
                    f"a segment has {len(segment)} tokens, but this model compiles at most {limit} at once: "
                    "split it, for example with splitter='paragraphs:512'"
                )

    def tensors(self, rows: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids and attention mask, both [rows, longest row], left-padded, on the model's device.

        Raises NotImplementedError for several rows of a model that doesn't take them padded.
        """
        if len(rows) > 1 and not self.batches:
            name = type(self.backbone).__name__
            raise NotImplementedError(f"rows of {name} change each other in a padded batch: link one row")
        tensors = [torch.tensor(list(row)) for row in rows]
        ids = pad_sequence(tensors, batch_first=True, padding_side="left")
        mask = pad_sequence([torch.ones_like(row) for row in tensors], batch_first=True, padding_side="left")
        device = self.backbone.get_input_embeddings().weight.device
        return on_device(ids, device), on_device(mask, device)

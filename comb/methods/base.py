"""What every method is: `compile` a segment once, `link` PICaches and a query into a state to decode from."""

from __future__ import annotations

import copy
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import Any, ClassVar, Literal

import torch
from transformers import LogitsProcessorList
from transformers.cache_utils import Cache, DynamicCache

from comb.backbones.attention_calls import choose_attention
from comb.backbones.forward import StateCache, cache_argument, generating_behind, takes_positions
from comb.backbones.identity import backbone_of, exclusive, notice_rows
from comb.backbones.rotary import drops_cache, length_limit, prompt_limit, settle
from comb.backbones.whole import CheckedLogits, check_logits
from comb.cache.picache import PICache, content_key
from comb.linking.cache import fork_cache, repeat_rows
from comb.methods.past_state import PastState
from comb.waits import on_device

DocumentState = Literal["hit", "compiled", "inlined", "continued"]


@dataclass(frozen=True)
class SegmentUse:
    """How one segment entered a prompt, when the method knows better than the store.

    `inlined`: its tokens were prefilled by the backbone like any others, nothing was reused. `continued`: it is part
    of the cache that a conversation's turn went on from.
    """

    state: DocumentState
    tier: str | None = None
    nbytes: int = 0


@dataclass(frozen=True)
class MethodSpec:
    """How another process makes the same method: a registered name, and parameters as plain values."""

    name: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True)
class LinkRequest:
    """One row of a batch to link: ``head + PICache 1 + gap 1 + PICache 2 + ... + query``.

    `gaps` holds the fresh tokens behind each PICache but the last; empty when PICaches follow each other directly.
    `salt` separates tenants that must not share a cached head.
    """

    picaches: Sequence[PICache]
    query_ids: Sequence[int]
    head_ids: Sequence[int] = ()
    gaps: Sequence[Sequence[int]] = ()
    salt: str = ""

    def __post_init__(self) -> None:
        assert not self.gaps or len(self.gaps) == len(self.picaches) - 1

    @property
    def fresh(self) -> list[list[int]]:
        """The fresh tokens in front of each PICache (the head, then the gaps), and last those behind all: the query."""
        if not self.picaches:
            return [[*self.head_ids, *self.query_ids]]
        gaps = self.gaps or [()] * (len(self.picaches) - 1)
        return [list(ids) for ids in (self.head_ids, *gaps, self.query_ids)]


@dataclass
class DecodeState:
    """A prompt that is ready to decode, as `link` returns it. `generate` and `logits` don't change it.

    Attributes:
        model: the model whose ``generate`` decodes.
        input_ids: [rows, prompt tokens], left-padded.
        attention_mask: [rows, prompt tokens], 0 at padding.
        past_key_values: covers a strict prefix of `input_ids`, or None.
        documents: per row, the PICaches that COMB's decoder reads; None when there are none in any row.
        prefix_tokens: per row, how many of its first tokens read none of them; None is none.
        recomputed: per row, document tokens that the backbone prefilled again.
        passed: tokens that have passed through the backbone while the state was made, as `counted_passes` counts them.
        head_tokens: of the prompt's head, that were cached.
        uses: per row and segment, what the method did with it; None where the store's word stands.
        seconds: that stages of `link` took, where the method measures them.
        step: tokens that the model may take at once behind its cache, for scans that can't start from a state; None
            is any number.
    """

    model: Any
    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    past_key_values: Cache | None = None
    documents: list[list[PICache]] | None = None
    prefix_tokens: list[int] | None = None
    recomputed: tuple[int, ...] = (0,)
    passed: float = 0.0
    head_tokens: int = 0
    uses: list[list[SegmentUse]] | None = None
    on_release: list[Callable[[], None]] = field(default_factory=list)
    seconds: Mapping[str, float] = field(default_factory=dict)
    step: int | None = None

    @property
    def recomputed_tokens(self) -> int:
        """Document tokens that the backbone prefilled again, over all rows."""
        return sum(self.recomputed)

    @property
    def computed(self) -> tuple[int, ...]:
        """Per row, all tokens of the prompt that the backbone computes: what is done, and what is left to do."""
        covered = 0 if self.past_key_values is None else int(self.past_key_values.get_seq_length())
        done = math.ceil(self.passed - 1e-6)  # shares of layers may add up to a hair more than they are
        return tuple(done + tokens - covered for tokens in self.prompt_tokens)

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
            ValueError: for an argument that ``generate`` doesn't know, and a model that computes NaN.
        """
        output = self._decode(**generate_kwargs)
        sequences: torch.Tensor = output if isinstance(output, torch.Tensor) else output.sequences
        return sequences

    def generate_with_cache(self, **generate_kwargs: Any) -> tuple[torch.Tensor, Cache | None]:
        """`generate`, and the cache that it leaves: of all tokens but the last, unless there is none, or of beams."""
        output = self._decode(**{**generate_kwargs, "return_dict_in_generate": True})
        return output.sequences, output.past_key_values

    def generate_with_logits(self, **generate_kwargs: Any) -> tuple[list[int], torch.Tensor]:
        """The new tokens of `generate`, and the logits [new tokens, vocabulary] in float32 that each was chosen from.

        Raises:
            ValueError: for a state of several rows.
        """
        if len(self.input_ids) != 1:
            raise ValueError(f"expected one row, got {len(self.input_ids)}")
        output = self._decode(**{**generate_kwargs, "return_dict_in_generate": True, "output_logits": True})
        return output.sequences[0, self.input_ids.shape[1] :].tolist(), torch.cat(output.logits).float()

    def answer_logits(self, answer_ids: Sequence[int]) -> torch.Tensor:
        """Logits [answer tokens, vocabulary] in float32 at every token of a given answer (one row only).

        Row i is what the state predicts for ``answer_ids[i]`` behind the prompt and the answer up to there, so that
        methods can be compared on the same answer.

        Raises:
            ValueError: for a state of several rows, or an empty answer.
        """
        if len(self.input_ids) != 1 or not answer_ids:
            raise ValueError(
                f"expected one row and an answer, got {len(self.input_ids)} rows, {len(answer_ids)} tokens"
            )
        answer = torch.tensor([list(answer_ids)], device=self.input_ids.device)
        past = None if self.past_key_values is None else fork_cache(self.past_key_values)
        start = 0 if past is None else past.get_seq_length()
        ids = torch.cat([self.input_ids[:, start:], answer[:, :-1]], dim=1)
        mask = torch.cat([self.attention_mask, torch.ones_like(answer[:, :-1])], dim=1)
        extra: dict[str, Any] = {} if self.documents is None else {"documents": self.documents}
        outputs = []
        size = ids.shape[1] if past is None or self.step is None else self.step
        starts = list(range(0, ids.shape[1], size))
        limit = length_limit(backbone_of(self.model))
        if limit is not None and start + ids.shape[1] > limit:
            # token by token, as generation goes on: a longer pass would turn the prompt's last tokens otherwise
            past = past or DynamicCache(config=self.model.config)
            starts = [0, *range(self.input_ids.shape[1] - start, ids.shape[1])]
        with exclusive(self.model):
            settle(backbone_of(self.model), self.input_ids.shape[1])
            for first, last in pairwise([*starts, ids.shape[1]]):
                part, end = ids[:, first:last], start + last
                if past is not None and takes_positions(self.model):
                    # Bamba counts from zero in every call unless it is told the positions
                    extra["position_ids"] = torch.arange(start + first, end, device=ids.device)[None]
                if past is not None:
                    extra[cache_argument(self.model, past)] = past
                # a cache of states takes the mask of its new tokens only
                seen = mask[:, start + first : end] if isinstance(past, StateCache) else mask[:, :end]
                if first == 0 and self.prefix_tokens is not None:
                    outputs.append(self.model(part, seen, prefix_tokens=self.prefix_tokens, **extra))
                else:
                    outputs.append(self.model(input_ids=part, attention_mask=seen, **extra))
        logits = torch.cat([output.logits[0].float() for output in outputs])
        check_logits(logits)
        return logits[-len(answer_ids) :]

    def release(self) -> None:
        """Gives back what `link` borrowed from a store; harmless when called again."""
        while self.on_release:
            self.on_release.pop()()

    def _decode(self, **generate_kwargs: Any) -> Any:
        # no answer is made from NaN
        checked = [CheckedLogits(), *(generate_kwargs.pop("logits_processor", None) or ())]
        return self._generate(**generate_kwargs, logits_processor=LogitsProcessorList(checked))

    def _generate(self, **generate_kwargs: Any) -> Any:
        past = None
        if self.past_key_values is not None:
            past = fork_cache(self.past_key_values)
            generate_kwargs[cache_argument(self.model, past)] = past
            self._check_generation(generate_kwargs)
            # without it, or with a kind of cache of its own, `generate` would not go on from the one it is given
            generate_kwargs |= {"use_cache": True, "cache_implementation": None}
            # `generate` copies the prompt's tokens for every beam, but not a cache that it was given
            names = ("num_beams", "num_return_sequences")
            copies = max(int(self._setting(name, generate_kwargs) or 1) for name in names)
            if copies > 1:
                repeat_rows(past, copies)
        if self.documents is not None:
            generate_kwargs |= {"documents": self.documents, "prefix_tokens": self.prefix_tokens}
        self._check_crossing(generate_kwargs)
        with exclusive(self.model), generating_behind(self.model, past):
            settle(backbone_of(self.model), self.input_ids.shape[1])
            arguments = _with_configuration(self.model, generate_kwargs)
            return self.model.generate(self.input_ids, attention_mask=self.attention_mask, **arguments)

    def _setting(self, name: str, generate_kwargs: dict[str, Any]) -> Any:
        """What `generate` will take for a setting: its argument, the configuration given, or the model's own."""
        own = getattr(self.model, "generation_config", None)
        for source in (generate_kwargs, vars(generate_kwargs.get("generation_config") or own or object)):
            if source.get(name) is not None:
                return source[name]
        return None

    def _check_crossing(self, generate_kwargs: dict[str, Any]) -> None:
        """Raises ValueError where `generate` would forget the prompt.

        Phi-3 gives up its cache at the limit of its rotary embedding, and transformers then goes on from the last token
        alone (seen in 5.19).
        """
        limit, tokens = length_limit(backbone_of(self.model)), self.input_ids.shape[1]
        if limit is None:
            return
        covered = 0 if self.past_key_values is None else int(self.past_key_values.get_seq_length())
        new = self._setting("max_new_tokens", generate_kwargs)
        end = tokens + new - 1 if new is not None else self._setting("max_length", generate_kwargs) or limit + 2
        if covered and drops_cache(self.model, tokens, covered):
            raise ValueError(
                f"{type(self.model).__name__} drops a cache of {covered} tokens in a prompt of {tokens}, since its "
                f"rotary embedding changes beyond {limit}: make the prompt longer or shorter, or use method='full'"
            )
        if tokens <= limit < end and drops_cache(self.model, limit + 1, limit):
            raise ValueError(
                f"a prompt of {tokens} tokens and an answer of up to {end - tokens + 1} may go beyond {limit}, where "
                f"{type(self.model).__name__} forgets the prompt (its rotary embedding changes): ask for at most "
                f"{limit - tokens + 1} new tokens, or make the prompt longer than {limit}"
            )

    def _check_generation(self, generate_kwargs: dict[str, Any]) -> None:
        for name in ("assistant_model", "prompt_lookup_num_tokens", "custom_generate"):
            if self._setting(name, generate_kwargs) is not None:
                raise ValueError(
                    f"generate({name}=...) doesn't go on from a linked cache as plain decoding does, so the answer "
                    "would be another one: leave it out, or use method='full'"
                )


def _with_configuration(model: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """`arguments` of ``generate``, its settings among them as a configuration based on the model's own.

    Without a configuration, ``generate`` first makes the model's default one anew, to see whether anybody has changed
    settings there: a third of what it costs besides the model's passes (transformers 5.16).
    """
    own = getattr(model, "generation_config", None)
    # in a configuration None means the model's own value, in an argument none at all
    taken_off = any(value is None and getattr(own, name, None) is not None for name, value in arguments.items())
    if own is None or taken_off or arguments.get("generation_config") is not None:
        return arguments
    configuration = copy.copy(own)
    return {**configuration.update(**arguments), "generation_config": configuration}


class Method(ABC):
    """A named compile/link pair on one model with fixed parameters.

    Class attributes:
        name: registered name.
        positional: parameters that may be written without their name, as in ``legolink:16``.
        uses_encoder: COMB's encoder takes part.
        compile_name: what `compile` makes, for methods that share it; the method's own name by default.
        unquantizable: why its PICaches can't be kept in eight bits; empty where they can.
        keeps_tokens_only: `compile` computes nothing, so there is nothing to do in parallel.
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
        given_by_others = {"self", "args", "kwargs", "model", "parameters", "store", "salt"}
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
        """One PICache per segment of token ids, each a pure function of that segment alone."""

    def link(
        self,
        picaches: Sequence[PICache],
        query_ids: Sequence[int],
        *,
        head_ids: Sequence[int] = (),
        gaps: Sequence[Sequence[int]] = (),
    ) -> DecodeState:
        """The state for head + segments + query; `gaps` are fresh tokens between the segments (`LinkRequest`).

        Raises:
            ValueError: when the prompt is empty or longer than the model's positions, or a PICache was made by
                another model or method.
        """
        return self.link_row(LinkRequest(picaches, query_ids, head_ids, gaps))

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

    @property
    def batches(self) -> bool:
        """Whether `link_batch` takes several rows."""
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

    def check_segments(self, segments: Sequence[Sequence[int]]) -> None:
        """Raises ValueError for a segment that can't be compiled: empty, too long, or ids outside the vocabulary."""
        limit = self.max_segment_tokens
        vocabulary = self.backbone.get_input_embeddings().weight.shape[0]
        for segment in segments:
            if any(not 0 <= token < vocabulary for token in segment):
                raise ValueError(f"a segment holds token ids outside of the model's 0..{vocabulary - 1}")
            if not segment:
                raise ValueError("an empty segment can't be compiled: leave empty documents out")
            if limit is not None and len(segment) > limit:
                raise ValueError(
                    f"a segment has {len(segment)} tokens, but this model compiles at most {limit} at once: "
                    "split it, for example with splitter='paragraphs:512'"
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
        return on_device(ids, device), on_device(mask, device)

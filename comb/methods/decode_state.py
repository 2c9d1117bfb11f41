"""What `link` returns and a turn leaves for the next one: a prompt that is ready to decode, and the cache behind it.

Nothing here changes a cache that it is given: who goes on takes a fork, so that a turn that fails leaves no trace.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import Any, Literal

import torch
from transformers import LogitsProcessorList
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, LinearAttentionCacheLayerMixin

from comb.backbones.forward import (
    StateCache,
    cache_argument,
    cache_in,
    generating_behind,
    keeps_nothing,
    takes_positions,
)
from comb.backbones.identity import backbone_of, exclusive
from comb.backbones.rotary import drops_cache, length_limit, settle, why_length_dependent
from comb.backbones.whole import CheckedLogits, check_logits
from comb.cache.picache import PICache
from comb.hybrid.caches import attention_layers, is_hybrid, states_of
from comb.hybrid.support import find_hybrid_support
from comb.linking.cache import RoomyLayer, fork_cache, plain_layer, repeat_rows
from comb.linking.positions import UnmovableError
from comb.linking.support import check_keys_cached, takes_padded_rows

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


@dataclass
class DecodeState:
    """A prompt that is ready to decode, as `link` returns it. `generate` and `logits` don't change it.

    Attributes:
        model: the model whose ``generate`` decodes.
        input_ids: [rows, prompt tokens], left-padded.
        attention_mask: [rows, prompt tokens], 0 at padding.
        past_key_values: covers a strict prefix of `input_ids`, or None.
        documents: per row, the PICaches that COMB's decoder reads; None when there are none in any row.
        prefixes: per row, how many of its first tokens read none of them; None is none.
        recomputed: per row, document tokens that the backbone prefilled again.
        passed: tokens that have passed through the backbone while the state was made, as `counted_passes` counts them.
        prefix_tokens: of the prompt's prefix, that were cached.
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
    prefixes: list[int] | None = None
    recomputed: tuple[int, ...] = (0,)
    passed: float = 0.0
    prefix_tokens: int = 0
    uses: list[list[SegmentUse]] | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    step: int | None = None

    @property
    def recomputed_tokens(self) -> int:
        """Document tokens that the backbone prefilled again, over all rows."""
        return sum(self.recomputed)

    @property
    def computed(self) -> tuple[int, ...]:
        """Per row, all tokens of the prompt that the backbone computes: what is done, and what is left to do."""
        done = math.ceil(self.passed - 1e-6)  # shares of layers may add up to a hair more than they are
        return tuple(done + tokens - self.covered for tokens in self.prompt_tokens)

    @property
    def covered(self) -> int:
        """Tokens that `past_key_values` holds."""
        return 0 if self.past_key_values is None else int(self.past_key_values.get_seq_length())

    @property
    def prompt_tokens(self) -> list[int]:
        """Per row, the tokens of the decoder's prompt without padding."""
        return [int(count) for count in self.attention_mask.sum(dim=-1)]

    @property
    def logits(self) -> torch.Tensor:
        """Next-token logits [rows, vocabulary] in float32, by the same path that generation takes."""
        output = self._generate(
            False, max_new_tokens=1, do_sample=False, temperature=None, top_p=None, top_k=None, num_beams=1,
            return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        logits: torch.Tensor = output.logits[0]
        return logits

    def generate(self, **generate_kwargs: Any) -> torch.Tensor:
        """Hugging Face ``generate`` from here: [rows, prompt + new tokens]. `streamer=` and the like work.

        Raises:
            ValueError: for an argument that ``generate`` doesn't know, and a model that computes NaN.
        """
        output = self._generate(True, **generate_kwargs)
        sequences: torch.Tensor = output if isinstance(output, torch.Tensor) else output.sequences
        return sequences

    def generate_with_cache(self, **generate_kwargs: Any) -> tuple[torch.Tensor, Cache | None]:
        """`generate`, and the cache that it leaves: of all tokens but the last, unless there is none, or of beams."""
        output = self._generate(True, **{**generate_kwargs, "return_dict_in_generate": True})
        return output.sequences, cache_in(output)

    def generate_with_logits(self, **generate_kwargs: Any) -> tuple[list[int], torch.Tensor]:
        """The new tokens of `generate`, and the logits [new tokens, vocabulary] in float32 that each was chosen from.

        Raises:
            ValueError: for a state of several rows.
        """
        if len(self.input_ids) != 1:
            raise ValueError(f"expected one row, got {len(self.input_ids)}")
        output = self._generate(True, **{**generate_kwargs, "return_dict_in_generate": True, "output_logits": True})
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
        start = self.covered
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
                    extra[cache_argument(self.model)] = past
                # a cache of states takes the mask of its new tokens only
                seen = mask[:, start + first : end] if isinstance(past, StateCache) else mask[:, :end]
                prefix = {} if first or self.prefixes is None else {"prefix_tokens": self.prefixes}
                outputs.append(self.model(input_ids=part, attention_mask=seen, **prefix, **extra))
        logits = torch.cat([output.logits[0].float() for output in outputs])
        check_logits(logits)
        return logits[-len(answer_ids) :]

    def _generate(self, checked: bool, /, **generate_kwargs: Any) -> Any:
        if checked:  # no answer is made from NaN
            processors = [CheckedLogits(), *(generate_kwargs.pop("logits_processor", None) or ())]
            generate_kwargs["logits_processor"] = LogitsProcessorList(processors)
        past = self._past_for(generate_kwargs)
        if past is not None:  # with a kind of cache of its own `generate` would not go on from the one it is given
            generate_kwargs |= {cache_argument(self.model): past, "cache_implementation": None}
        if self.documents is not None:
            generate_kwargs |= {"documents": self.documents, "prefix_tokens": self.prefixes}
        chunks = _setting(self.model, "prefill_chunk_size", generate_kwargs) is not None
        if past is not None or self.prefixes is not None or (chunks and pass_size(backbone_of(self.model)) is not None):
            # `generate` takes chunks of the whole prompt, also behind a cache that holds it (transformers 5.19); and
            # some scans begin anew with each
            generate_kwargs |= {"use_cache": True, "prefill_chunk_size": None}
        self._check_crossing(generate_kwargs)
        streams = generate_kwargs.get("streamer") is not None
        with exclusive(self.model, streams=streams), generating_behind(self.model, past):
            settle(backbone_of(self.model), self.input_ids.shape[1])
            arguments = _with_configuration(self.model, generate_kwargs)
            return self.model.generate(self.input_ids, attention_mask=self.attention_mask, **arguments)

    def _past_for(self, generate_kwargs: Mapping[str, Any]) -> Cache | None:
        """A fork of the cache with a row for each beam. Raises ValueError for settings that don't go on from one."""
        if self.past_key_values is None:
            return None
        if reason := why_not_behind(self.model, generate_kwargs):
            raise ValueError(f"{reason}, so the answer would be another one: leave it out, or use method='full'")
        past = fork_cache(self.past_key_values)
        # `generate` copies the prompt's tokens for every beam, but not a cache that it was given
        rows = (_setting(self.model, name, generate_kwargs) or 1 for name in ("num_beams", "num_return_sequences"))
        if (copies := max(map(int, rows))) > 1:
            repeat_rows(past, copies)
        return past

    def _check_crossing(self, generate_kwargs: dict[str, Any]) -> None:
        """Raises ValueError where `generate` would forget the prompt."""
        # Phi-3 gives up its cache at the limit of its rotary embedding, and transformers then goes on from the last
        # token alone (seen in 5.19)
        limit, tokens = length_limit(backbone_of(self.model)), self.input_ids.shape[1]
        if limit is None:
            return
        covered = self.covered
        new = _setting(self.model, "max_new_tokens", generate_kwargs)
        end = tokens + new - 1 if new is not None else _setting(self.model, "max_length", generate_kwargs) or limit + 2
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


@dataclass(frozen=True, eq=False)
class PastState:
    """A cache of one row, and the tokens of the decoder's prompt that it covers."""

    token_ids: tuple[int, ...]
    cache: Cache

    @property
    def can_be_cut(self) -> bool:
        """Whether the cache of an earlier token is a part of it: not with states, nor with sliding windows."""
        return type(self.cache) is DynamicCache and all(
            type(layer) in (DynamicLayer, RoomyLayer) or keeps_nothing(layer) for layer in self.cache.layers
        )

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and states, with the room behind them."""
        tensors = list[Any]()
        for layer in self.cache.layers:
            tensors += [getattr(layer, "keys", None), getattr(layer, "values", None)]
            if isinstance(layer, LinearAttentionCacheLayerMixin):
                tensors += [*layer.conv_states.values(), *layer.recurrent_states.values()]
        return sum(tensor.untyped_storage().nbytes() for tensor in tensors if isinstance(tensor, torch.Tensor))

    def cut(self, length: int) -> PastState:
        """Its first `length` tokens, in the same memory; what is appended there never reaches it."""
        assert self.can_be_cut
        if length == len(self.token_ids):
            return self
        cache = DynamicCache()
        for layer in self.cache.layers:
            if keeps_nothing(layer):
                cache.layers.append(layer)
                continue
            assert layer.keys is not None
            assert layer.values is not None
            cache.layers.append(plain_layer(layer.keys[:, :, :length], layer.values[:, :, :length]))
        return PastState(self.token_ids[:length], cache)


def common_length(left: Sequence[int], right: Sequence[int]) -> int:
    """With how many equal tokens both begin."""
    left, right = tuple(left), tuple(right)
    low, high = 0, min(len(left), len(right))
    while low < high:  # by halves, which are compared without a step for each token
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def past_state_behind(token_ids: Sequence[int], cache: Cache | None) -> PastState | None:
    """What `cache` holds of a sequence [tokens] that it covers a strict prefix of; None if it can't be gone on from.

    That is: no cache, one of a fixed size, or one of several beams, of which nobody knows which was the best.
    """
    if not isinstance(cache, DynamicCache):
        return None
    rows = {len(layer.keys) for layer in attention_layers(cache).values()}
    if isinstance(cache, StateCache):
        held = chain.from_iterable(states_of(cache, number) for number in range(len(cache)))
        rows = {len(tensor) for tensor in held if tensor is not None}
    length = int(cache.get_seq_length()) if rows == {1} else 0
    return PastState(tuple(token_ids[:length]), cache) if 0 < length < len(token_ids) else None


def _setting(model: Any, name: str, generate_kwargs: Mapping[str, Any]) -> Any:
    """What `generate` will take for a setting: its argument, the configuration given, or the model's own."""
    own = getattr(model, "generation_config", None)
    for source in (generate_kwargs, vars(generate_kwargs.get("generation_config") or own or object)):
        if source.get(name) is not None:
            return source[name]
    return None


def _with_configuration(model: Any, generate_kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """The same settings, in a configuration where that says the same."""
    # Without one `generate` first makes the model's default one anew, to see whether anybody has changed settings
    # there: a third of what it costs besides the model's passes (transformers 5.16)
    own = getattr(model, "generation_config", None)
    # in a configuration None means the model's own value, in an argument none at all
    taken_off = any(value is None and getattr(own, name, None) is not None for name, value in generate_kwargs.items())
    if own is None or taken_off or generate_kwargs.get("generation_config") is not None:
        return generate_kwargs
    configuration = copy.copy(own)
    return {**configuration.update(**generate_kwargs), "generation_config": configuration}


def why_not_behind(model: Any, generate_kwargs: Mapping[str, Any]) -> str:
    """Why ``generate`` doesn't go on from a cache as from the tokens in it; empty if it does."""
    unlike = ["assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp", "custom_generate"]
    unlike += ["adapter_names", "alora_offsets"]  # of peft: they would hold for the tokens from here on alone
    for name in unlike:
        if _setting(model, name, generate_kwargs) not in (None, False):
            return f"generate({name}=...) doesn't go on from a linked cache as plain decoding does"
    return ""


def why_not_continue(model: Any) -> str:
    """Why a model's own forward pass doesn't go on from its cache as from the tokens in it; empty if it does."""
    try:
        if is_hybrid(model):
            find_hybrid_support(model)
        else:
            check_keys_cached(model)
    except UnmovableError as reason:
        return str(reason)
    return why_length_dependent(model)


def decodes_padded(model: Any) -> bool:
    """Whether rows decode in a padded batch; MiniMax, which takes a cache of its own, masks them wrongly there."""
    return takes_padded_rows(model) and not (is_hybrid(model) and why_not_continue(model))


def pass_size(model: Any) -> int | None:
    """Tokens that the model takes at once behind its cache, for scans that can't start from a state; None is any."""
    return find_hybrid_support(model).step if is_hybrid(model) else None

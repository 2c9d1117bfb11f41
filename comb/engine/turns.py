"""Where a conversation's turn begins: behind the cache that the turn before has left, or at its first token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache

from comb.backbones.identity import identity_of
from comb.documents.catalog import KeyedSegment
from comb.documents.document import Prompt
from comb.methods.base import DecodeState, Method
from comb.methods.past_state import PastState, past_state_behind


@dataclass(frozen=True)
class Left:
    """What a turn leaves for the next one.

    Args:
        past: what to go on from; None if its cache can't be.
        stamp: of the method and the weights that computed it.
        keys: of all documents' segments so far.
    """

    past: PastState | None
    stamp: tuple[Any, ...]
    keys: tuple[str, ...]


@dataclass(frozen=True)
class Start:
    """Where the linking of a turn begins.

    Args:
        past: what it goes on from; None when it is linked from its first token.
        segments: documents' segments that `past` contains.
        prompt: what is to be linked behind it.
        reason: why nothing is gone on from; empty for a first turn.
    """

    past: PastState | None
    segments: int
    prompt: Prompt
    reason: str = ""

    @property
    def tokens(self) -> int:
        """Of the decoder's prompt, that needn't be computed."""
        return 0 if self.past is None else len(self.past.token_ids)


class Turn:
    """One turn while it is being answered.

    Args:
        before: what the turn before left; None for the first one.

    Attributes:
        answer_ids: the answer without its end token; set by `keep`.
    """

    def __init__(self, before: Left | None) -> None:
        self.before = before
        self.answer_ids: tuple[int, ...] = ()
        self._answered: PastState | None = None
        self._linked: PastState | None = None
        self._stamp: tuple[Any, ...] = ()
        self._keys: tuple[str, ...] = ()

    def plan(self, method: Method, segments: Sequence[KeyedSegment], prompt: Prompt) -> Start:
        """Where to begin with `prompt`, the whole conversation's, and the segments in it."""
        self._stamp = (id(method), method.fingerprint, identity_of(method.backbone).stamp)
        self._keys = tuple(segment.key for segment in segments)
        reason = self._why_not(method)
        if reason or self.before is None or self.before.past is None:
            return Start(None, 0, prompt, reason)
        return _behind(self.before.past, prompt, documents_inside=not method.uses_encoder)

    def keep(self, state: DecodeState, sequence: Tensor, cache: Cache | None, end_tokens: int | list[int]) -> None:
        """Takes note of what generation left: the sequence [tokens], and its cache."""
        token_ids = sequence.tolist()
        self._answered = past_state_behind(token_ids, cache)
        self._linked = past_state_behind(token_ids, state.past_key_values)
        ends = token_ids[-1] in (end_tokens if isinstance(end_tokens, list | tuple) else [end_tokens])
        self.answer_ids = tuple(token_ids[state.input_ids.shape[1] : -1 if ends else None])

    def leave(self, *, rewritten: bool) -> Left:
        """What the next turn goes on from; an answer that stays in the history as another text is cut off."""
        past = self._answered
        if past is None or (rewritten and not past.can_be_cut):
            past = self._linked
        return Left(past, self._stamp, self._keys)

    def _why_not(self, method: Method) -> str:
        before = self.before
        if before is None:
            return ""
        if before.past is None:
            return (
                "the last answer left no cache to go on from (beams, use_cache=False or the like), or it was released"
            )
        if before.stamp != self._stamp:
            return "the model's weights have changed, or another method answers than before"
        if method.uses_encoder and before.keys != self._keys:
            # the past was computed without them
            return "there are new documents, and every token of the conversation reads all documents"
        return method.why_not_continue()


def _behind(past: PastState, prompt: Prompt, *, documents_inside: bool) -> Start:
    """As much of `past` as `prompt` begins with, and the rest of `prompt`."""
    token_ids = prompt.flat if documents_inside else prompt.query
    pairs = zip(past.token_ids, token_ids, strict=False)
    same = next((index for index, (earlier, now) in enumerate(pairs) if earlier != now), len(past.token_ids))
    # one token at least is left to compute: its logits are what decoding starts from
    cut = min(same, len(token_ids) - 1)
    segments, rest = 0, Prompt((), (), token_ids[cut:])
    if documents_inside:
        cut, segments, rest = prompt.behind(cut)
    if cut == len(past.token_ids):
        return Start(past, segments, rest)
    changed = f"the chat is rendered with other tokens than before from token {same} of {len(past.token_ids)} on"
    if not past.can_be_cut:
        return Start(None, 0, prompt, f"{changed}, and states or sliding windows can't be cut there")
    return Start(past.cut(cut), segments, rest) if cut else Start(None, 0, prompt, changed)

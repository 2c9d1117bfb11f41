"""Where a conversation's turn begins: behind the cache that the turn before has left, or at its first token."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from comb.backbones.identity import identity_of
from comb.documents.catalog import KeyedSegment
from comb.documents.document import Prompt
from comb.engine.steps import DecodedBatch, PreparedQuestion
from comb.methods.base import Method
from comb.methods.past_state import PastState, common_length, past_state_behind


@dataclass(frozen=True)
class TurnEnd:
    """What a turn leaves for the next one.

    Args:
        past: what to go on from; None if its cache can't be.
        stamp: of the method and the weights that computed it.
        keys: of all documents' segments so far.
    """

    past: PastState | None
    stamp: Hashable
    keys: tuple[str, ...]

    @classmethod
    def of(cls, start: TurnStart, decoded: DecodedBatch, *, rewritten: bool) -> TurnEnd:
        """Behind the answer; behind the question if the answer stays as another text and can't be cut off."""
        token_ids = decoded.sequences[0].tolist()
        past = past_state_behind(token_ids, decoded.cache)
        if past is None or (rewritten and not past.can_be_cut):
            past = past_state_behind(token_ids, decoded.state.past_key_values)
        return cls(past, start.stamp, start.keys)


@dataclass(frozen=True)
class TurnStart:
    """Where the linking of a turn begins.

    Args:
        past: what it goes on from; None when it is linked from its first token.
        continued: documents' segments that `past` contains.
        question: what is to be linked behind it.
        stamp, keys: as in `TurnEnd`, for the whole turn.
        reason: why nothing is gone on from; empty for a first turn.
    """

    past: PastState | None
    continued: Sequence[KeyedSegment]
    question: PreparedQuestion
    stamp: Hashable
    keys: tuple[str, ...]
    reason: str = ""

    @property
    def tokens(self) -> int:
        """Of the decoder's prompt, that needn't be computed."""
        return 0 if self.past is None else len(self.past.token_ids)

    @classmethod
    def plan(cls, before: TurnEnd | None, method: Method, question: PreparedQuestion) -> TurnStart:
        """Where to begin with `question`, the whole conversation's."""
        stamp = id(method), method.fingerprint, identity_of(method.model).number
        keys = tuple(segment.key for segment in question.segments)
        reason = "" if before is None else _why_not(before, method, stamp, keys)
        past, segments, rest = None, 0, question.prompt
        if before is not None and before.past is not None and not reason:
            past, segments, rest, reason = _behind(before.past, rest, documents_inside=not method.uses_encoder)
        left = PreparedQuestion(question.segments[segments:], rest)
        return cls(past, question.segments[:segments], left, stamp, keys, reason)


def _why_not(before: TurnEnd, method: Method, stamp: Hashable, keys: tuple[str, ...]) -> str:
    if before.past is None:
        return "the last answer left no cache to go on from (beams, use_cache=False or the like), or it was released"
    if before.stamp != stamp:
        return "the model's weights have changed, or another method answers than before"
    if method.uses_encoder and before.keys != keys:
        # the past was computed without them
        return "there are new documents, and every token of the conversation reads all documents"
    return method.why_not_continue()


def _behind(past: PastState, prompt: Prompt, *, documents_inside: bool) -> tuple[PastState | None, int, Prompt, str]:
    """As much of `past` as `prompt` begins with, the segments in there, the rest of `prompt`; or why there is none.

    Where documents aren't inside, they and the prompt stay whole: how much of it is there is for `past` to say.
    """
    token_ids = prompt.flat if documents_inside else prompt.query
    same = common_length(past.token_ids, token_ids)
    # one token at least is left to compute: its logits are what decoding starts from
    cut = min(same, len(token_ids) - 1)
    segments, rest = 0, prompt
    if documents_inside:
        cut, segments, rest = prompt.behind(cut)
    if cut == len(past.token_ids):
        return past, segments, rest, ""
    changed = f"the chat is rendered with other tokens than before from token {same} of {len(past.token_ids)} on"
    if not past.can_be_cut:
        return None, 0, prompt, f"{changed}, and states or sliding windows can't be cut there"
    return (past.cut(cut), segments, rest, "") if cut else (None, 0, prompt, changed)

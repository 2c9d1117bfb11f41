"""Conversations: each turn goes on from the cache of the turn before, documents are linked only where they are new."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from comb.backbones.identity import identity_of, one_walk
from comb.documents.catalog import KeyedSegment
from comb.documents.document import DocumentLike, Prompt
from comb.documents.messages import Generated, Message, referenced_documents
from comb.documents.rendering import renders_chats
from comb.engine.decoding import AnswerStream, answer_text, check_stream, check_wanted
from comb.engine.report import Answer, document_reports
from comb.engine.steps import AnswerSteps
from comb.methods.base import Method
from comb.methods.decode_state import PastState, SegmentUse, common_length, past_state_behind, why_not_behind

RunTurn = Callable[[Any, threading.Event | None], Answer]
"""Makes the answer, given a streamer (or None) and the event that tells it to stop (or None)."""


@dataclass(frozen=True)
class _History:
    """What is known after so many turns; replaced as a whole once a turn has succeeded."""

    messages: tuple[Message, ...]
    texts: tuple[dict[str, Any], ...]  # the messages as others see them
    segments: Mapping[str, Sequence[KeyedSegment]]  # of the documents that messages name
    first: Sequence[KeyedSegment] = ()  # of those that the first question brings
    stamp: Hashable = None  # of the method and the weights that computed the last turn; None before the first one
    keys: tuple[str, ...] = ()  # of all documents' segments in it
    past: PastState | None = None  # what the next turn goes on from
    relinked: int = 0  # turns that were linked from their start although there was one before


class Conversation:
    """Questions that follow each other, each with documents of its own; made by `PICEngine.conversation`.

    A turn goes on from the cache behind the last answer, and links only the documents that it brings. Where that
    can't be done, it is linked from its start: `relinked` in its report says why, and `relinked` here counts. A turn
    that fails, or whose stream is closed before its answer is whole, leaves everything as it was. Safe under threads:
    turns wait for each other.

    Args:
        documents, document_ids: the first question brings them.
        messages: what came before the first question, such as a system message.
        encoder: as in `PICEngine.ask`, for all turns.
        remember: what later turns see of an answer's text, for example without its thinking; by default what the chat
            template shows of it, token by token where that is all of it. Behind a changed answer a hybrid goes on from
            the question in front of it.
    """

    def __init__(
        self,
        engine: AnswerSteps,
        documents: Sequence[DocumentLike] = (),
        *,
        document_ids: Sequence[str] = (),
        messages: Sequence[Message] = (),
        encoder: bool | None = None,
        remember: Callable[[str], str] | None = None,
    ) -> None:
        if not renders_chats(engine.tokenizer):
            raise ValueError(
                "a conversation needs a tokenizer with a chat_template, and this one has none: set one, or use ask() "
                "with the text so far in the question"
            )
        self._engine, self._encoder, self._remember = engine, encoder, remember
        first = engine.segments_of(documents, document_ids)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None  # that is inside a turn
        given = tuple(dict(message) for message in messages)
        named = referenced_documents(given)
        segments = {name: engine.segments_of((), [name]) for name in (*named.before, *named.after)}
        self._history = _History(given, given, segments, first)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation so far as chat messages of text, without the documents that questions brought."""
        return [dict(message) for message in self._history.texts]

    @property
    def relinked(self) -> int:
        """Turns that were linked from their start although there was one before."""
        return self._history.relinked

    @property
    def nbytes(self) -> int:
        """Bytes of the cache that the next turn goes on from."""
        return 0 if self._history.past is None else self._history.past.nbytes

    def release(self) -> None:
        """Gives the cache's memory back; the next turn is linked from its start."""
        self._wait()
        with self._turn():
            self._history = replace(self._history, past=None)

    def ask(
        self,
        question: str,
        documents: Sequence[DocumentLike] = (),
        *,
        document_ids: Sequence[str] = (),
        **generate_kwargs: Any,
    ) -> Answer:
        """The next turn's answer; arguments and errors as in `PICEngine.ask`.

        Args:
            documents, document_ids: new ones, in front of this question; those of earlier turns stay.
        """
        self._wait()
        with self._turn():
            return self._next(question, documents, document_ids, generate_kwargs)(None, None)

    def stream(
        self,
        question: str,
        documents: Sequence[DocumentLike] = (),
        *,
        document_ids: Sequence[str] = (),
        **generate_kwargs: Any,
    ) -> AnswerStream:
        """Like `ask`, as pieces of text. The turn belongs to the conversation once the answer is whole.

        Closing the stream before that drops the turn; behind it, `stream.answer` is there whether or not it was read.
        """
        check_stream(generate_kwargs, self._engine.method.backbone)
        self._wait()
        try:
            answer = self._next(question, documents, document_ids, generate_kwargs)

            def work(streamer: Any, stop: threading.Event) -> Answer:
                with self._turn():
                    return answer(streamer, stop)

            return AnswerStream(work, self._engine.tokenizer)
        except BaseException:  # the worker hasn't started
            self._lock.release()
            raise

    def _wait(self) -> None:
        """Takes the lock once the turn before has ended. Raises RuntimeError within that turn."""
        if self._thread is threading.current_thread():
            raise RuntimeError(
                "this thread is inside a turn of this conversation, and would wait for itself: ask, stream or release "
                "when that turn has ended, not from its streamer, its logits processors or remember="
            )
        self._lock.acquire()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """What this thread does with the lock, which is given back at the end."""
        self._thread = threading.current_thread()
        try:
            with one_walk():
                yield
        finally:
            self._thread = None
            self._lock.release()

    def _next(
        self,
        question: str,
        documents: Sequence[DocumentLike],
        document_ids: Sequence[str],
        generate_kwargs: Mapping[str, Any],
    ) -> RunTurn:
        """Checks the next turn; what it returns answers it and takes it into the history. The lock is held for both."""
        start, engine, now = time.perf_counter(), self._engine, self._history
        new = [*now.first, *engine.segments_of(documents, document_ids)]
        content: Any = question
        known = dict(now.segments)
        if new:
            # a name that no document of the messages can have by chance
            name = f"turn-{secrets.token_hex(8)}"
            known[name] = new
            content = [{"type": "document", "id": name}, {"type": "text", "text": question}]
        messages = (*now.messages, {"role": "user", "content": content})
        on = engine.with_encoder(self._encoder)
        settings = engine.settings(generate_kwargs)
        segments, prompt = engine.prepare(messages, named=lambda name: engine.keyed_anew(known[name]), encoder=on)

        def answer(streamer: Any, stop: threading.Event | None) -> Answer:
            check_wanted(stop)
            method = engine.method_of(on)
            stamp = id(method), method.fingerprint, identity_of(method.model).number
            keys = tuple(segment.key for segment in segments)
            past, inside, rest, reason = _beginning(now, method, stamp, keys, prompt, settings)
            given = settings if streamer is None else {**settings, "streamer": streamer}
            ((found, state, sequences, cache),) = engine.answers(
                [(segments[inside:], rest)], given, start, stop, encoder=on, past=past
            )
            check_wanted(stop)
            continued = document_reports(segments[:inside], [SegmentUse("continued")] * inside, {})
            report = replace(
                found.report,
                documents=(*continued, *found.report.documents),
                continued_tokens=0 if past is None else len(past.token_ids),
                relinked=reason,
            )
            text = found.text if self._remember is None else self._remember(found.text)
            last, tags = found.token_ids[-1:], getattr(engine.tokenizer, "added_tokens_decoder", {})
            # a tag behind the answer is the template's business; a word that ends it is a part of it
            word = last[0] not in tags and answer_text(engine.tokenizer, last)
            ended = last[0] in (settings["eos_token_id"] or ()) and not word
            ids = found.token_ids[:-1] if ended else found.token_ids
            # special tokens included: thinking may stand between some, and a template drops it by them
            whole = engine.tokenizer.decode(ids, clean_up_tokenization_spaces=False)
            left = past_state_behind(sequences[0].tolist(), cache)
            if left is None or (text != found.text and not left.can_be_cut):
                # what stays isn't what was generated, and can't be cut off: behind the question
                left = past_state_behind(sequences[0].tolist(), state.past_key_values)
            said: Any = [Generated(ids, whole)] if text == found.text else text
            self._history = _History(
                (*messages, {"role": "assistant", "content": said}),
                (*now.texts, {"role": "user", "content": question}, {"role": "assistant", "content": text}),
                known, (), stamp, keys, left, now.relinked + bool(reason),
            )  # fmt: skip
            return replace(found, report=report)

        return answer


def _beginning(
    now: _History, method: Method, stamp: Hashable, keys: tuple[str, ...], prompt: Prompt, settings: Mapping[str, Any]
) -> tuple[PastState | None, int, Prompt, str]:
    """Where a turn begins: the past that `prompt` goes on from, the segments in there, what is left to be linked.

    Or no past, and why, which is empty for a first turn.
    """
    past, reason, inside = now.past, "", not method.uses_encoder
    if now.stamp is None:
        return None, 0, prompt, ""
    if past is None:
        reason = (
            "the last answer left no cache to go on from (beams, use_cache=False, or remembered otherwise where a "
            "cache can't be cut), or it was released"
        )
    elif now.stamp != stamp:
        reason = "the model's weights have changed, or another method answers than before"
    elif method.uses_encoder and now.keys != keys:
        # the past was computed without them
        reason = "there are new documents, and every token of the conversation reads all documents"
    else:
        reason = method.why_not_continue() or why_not_behind(method.model, settings)
    if past is None or reason:
        return None, 0, prompt, reason
    token_ids = prompt.flat if inside else prompt.bare
    same = common_length(past.token_ids, token_ids)
    # one token at least is left to compute: its logits are what decoding starts from
    cut, segments, rest = min(same, len(token_ids) - 1), 0, prompt
    if inside:  # else documents and prompt stay whole: how much of it is there is for `past` to say
        cut, segments, rest = prompt.behind(cut)
    if cut == len(past.token_ids):
        return past, segments, rest, ""
    reason = f"the chat is rendered with other tokens than before from token {same} of {len(past.token_ids)} on"
    if not past.can_be_cut:
        return None, 0, prompt, f"{reason}, and states or sliding windows can't be cut there"
    return (past.cut(cut), segments, rest, "") if cut else (None, 0, prompt, reason)

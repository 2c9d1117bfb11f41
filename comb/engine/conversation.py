"""Conversations: each turn goes on from the cache of the turn before, documents are linked only where they are new."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from comb.backbones.identity import one_walk
from comb.documents.catalog import KeyedSegment
from comb.documents.document import DocumentLike
from comb.documents.messages import Generated, Message, referenced_documents
from comb.documents.rendering import renders_chats
from comb.engine.decoding import AnswerStream, FirstTokenTimer, check_no_streamer, check_wanted
from comb.engine.report import Answer, continued_reports
from comb.engine.steps import AnswerSteps, PreparedQuestion
from comb.engine.turns import TurnEnd, TurnStart

RunTurn = Callable[[Any, threading.Event | None], Answer]
"""Makes the answer, given a streamer (or None) and the event that tells it to stop (or None)."""


@dataclass(frozen=True)
class _History:
    """What is known after so many turns; replaced as a whole once a turn has succeeded.

    `texts` is `messages` as others see them, `first` the documents that the first question brings.
    """

    messages: tuple[Message, ...]
    texts: tuple[dict[str, Any], ...]
    segments: Mapping[str, Sequence[KeyedSegment]]
    first: Sequence[KeyedSegment] = ()
    end: TurnEnd | None = None
    relinked: int = 0


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
        end = self._history.end
        return 0 if end is None or end.past is None else end.past.nbytes

    def release(self) -> None:
        """Gives the cache's memory back; the next turn is linked from its start."""
        with self._lock:
            end = self._history.end
            if end is not None:
                self._history = replace(self._history, end=replace(end, past=None))

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
        with self._lock, one_walk():
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
        check_no_streamer(generate_kwargs)
        self._lock.acquire()
        try:
            answer = self._next(question, documents, document_ids, generate_kwargs)

            def work(streamer: Any, stop: threading.Event) -> Answer:
                try:
                    with one_walk():
                        return answer(streamer, stop)
                finally:
                    self._lock.release()

            return AnswerStream(work, self._engine.tokenizer)
        except BaseException:  # the worker hasn't started
            self._lock.release()
            raise

    def _next(
        self,
        question: str,
        documents: Sequence[DocumentLike],
        document_ids: Sequence[str],
        generate_kwargs: Mapping[str, Any],
    ) -> RunTurn:
        """Checks the next turn; what it returns answers it and takes it into the history. The lock is held for both."""
        start, engine = time.perf_counter(), self._engine
        asked, on = self._asked(question, documents, document_ids), engine.with_encoder(self._encoder)
        settings = engine.settings(generate_kwargs)
        prepared = engine.prepare(
            asked.messages, named=lambda name: engine.segmenter.keyed_anew(asked.segments[name]), encoder=on
        )

        def answer(streamer: Any, stop: threading.Event | None) -> Answer:
            check_wanted(stop)
            given = settings if streamer is None else {**settings, "streamer": streamer}
            found, self._history = self._turn(asked, prepared, given, FirstTokenTimer(start, stop), on)
            return found

        return answer

    def _turn(
        self,
        asked: _History,
        question: PreparedQuestion,
        settings: Mapping[str, Any],
        timer: FirstTokenTimer,
        encoder: bool,
    ) -> tuple[Answer, _History]:
        """The answer, and the history with both in it."""
        engine, method = self._engine, self._engine.method_of(encoder)
        begin = TurnStart.plan(asked.end, method, question)
        past, rest = begin.past, begin.question
        with engine.acquired(rest.segments, encoder=encoder) as acquired:
            check_wanted(timer.stop)
            with engine.linked([rest], acquired, encoder=encoder, past=past) as (state, session):
                decoded = engine.decode(state, session, settings, timer, encoder=encoder)
            answer = engine.answer(rest, decoded, 0, acquired, encoder=encoder)
        check_wanted(timer.stop)
        report = replace(
            answer.report,
            documents=(*continued_reports(begin.continued), *answer.report.documents),
            continued_tokens=begin.tokens,
            relinked=begin.reason,
        )
        text = answer.text if self._remember is None else self._remember(answer.text)
        rewritten = text != answer.text
        ids = _without_end(answer.token_ids, settings["eos_token_id"])
        # special tokens included: thinking may stand between some, and a template drops it by them
        whole = engine.tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        content: Any = text if rewritten else [Generated(ids, whole)]
        return replace(answer, report=report), replace(
            asked,
            messages=(*asked.messages, {"role": "assistant", "content": content}),
            texts=(*asked.texts, {"role": "assistant", "content": text}),
            end=TurnEnd.of(begin, decoded, rewritten=rewritten),
            relinked=asked.relinked + bool(begin.reason),
        )

    def _asked(self, question: str, documents: Sequence[DocumentLike], document_ids: Sequence[str]) -> _History:
        """The history with the question in it."""
        now = self._history
        new = [*now.first, *self._engine.segments_of(documents, document_ids)]
        # a name that no document of the messages can have by chance
        name = f"turn-{secrets.token_hex(8)}"
        content = [{"type": "document", "id": name}, {"type": "text", "text": question}]
        return replace(
            now,
            messages=(*now.messages, {"role": "user", "content": content if new else question}),
            texts=(*now.texts, {"role": "user", "content": question}),
            segments={**now.segments, name: new} if new else now.segments,
            first=(),
        )


def _without_end(token_ids: tuple[int, ...], end_tokens: int | list[int]) -> tuple[int, ...]:
    ends = end_tokens if isinstance(end_tokens, list | tuple) else [end_tokens]
    return token_ids[:-1] if token_ids[-1] in ends else token_ids

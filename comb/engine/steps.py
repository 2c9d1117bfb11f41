"""The steps of every answer: prepare, acquire, link, decode, report.

`PICEngine` composes them for questions and batches, `Conversation` for turns that go on from one another. A step calls
one floor below (documents, store, methods, model) and hands what it got to the next; none calls back.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache

from comb import methods
from comb.backbones.forward import counted_passes
from comb.backbones.identity import CHANGED, one_walk
from comb.backbones.rotary import rotary_embeddings
from comb.backbones.tokenizer import check_tokenizer
from comb.cache.picache import PICache
from comb.cache.store import PICacheRef, PICacheStore
from comb.documents.catalog import DocumentCatalog, KeyedSegment
from comb.documents.document import DocumentLike, Prompt, PromptBuilder
from comb.documents.messages import Message, referenced_documents
from comb.documents.splitting import Splitter
from comb.engine.decoding import FirstTokenTimer, answer_text, check_wanted, decoding_settings, trim, with_length
from comb.engine.report import Answer, Report, cache_bytes, document_reports
from comb.engine.segmenter import REMEMBERED, Segmenter, cut_document
from comb.engine.workers import CompileExecutor
from comb.mac import MacConfig, MacSession
from comb.mac.accounting import MacReport
from comb.methods.base import DecodeState, LinkRequest, Method
from comb.methods.full import token_picache
from comb.methods.past_state import PastState
from comb.methods.prefixes import PrefixCache, prefixes_of

Question = str | Sequence[Message]


@dataclass(frozen=True)
class Request:
    """One question for `PICEngine.ask_batch`; a plain ``(question, documents)`` does as well."""

    question: Question
    documents: Sequence[DocumentLike] = ()
    document_ids: Sequence[str] = ()


@dataclass(frozen=True)
class PreparedQuestion:
    """A checked question: the segments of its documents, and the prompt that they stand in."""

    segments: Sequence[KeyedSegment]
    prompt: Prompt


@dataclass(frozen=True)
class DecodedBatch:
    """What linking and decoding gave.

    Args:
        state: that decoding began from.
        sequences: prompt and answer, left-padded. [rows, prompt + new tokens]
        cache: that generation leaves behind all tokens but the last; None where it leaves none.
        answers: per row the new tokens, the end token included, without padding.
        total_s, ttft_s: seconds from the start of the call to the last and the first token.
        mac: what MAC attention reused; None without it.
    """

    state: DecodeState
    sequences: Tensor
    cache: Cache | None
    answers: list[tuple[int, ...]]
    total_s: float
    ttft_s: float
    mac: MacReport | None


@dataclass(frozen=True)
class AcquiredDocuments:
    """Documents that a call holds.

    Args:
        references: to their PICaches, by key.
        compiled: tokens that the backbone computed for those that were compiled now, by key. Who asks first takes them.
    """

    references: Mapping[str, PICacheRef]
    compiled: dict[str, int]

    def take_compiled(self, segments: Sequence[KeyedSegment]) -> int:
        """Tokens that the backbone computed to compile these; each document counts once, also in a batch."""
        return sum(self.compiled.pop(segment.key, 0) for segment in segments)


class AnswerSteps:
    """A model with its method, store and settings, and the steps that answers are made of.

    The settings are attributes that anybody may set; a call takes them as it finds them.
    """

    executor: CompileExecutor | None = None

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        method: Method,
        *,
        store: PICacheStore,
        salt: str,
        prompt_builder: PromptBuilder,
        splitter: Splitter,
        mac: MacConfig | None,
        encoder_enabled: bool,
    ) -> None:
        check_tokenizer(model, tokenizer)
        self.model, self.tokenizer, self.method = model, tokenizer, method
        self.store, self.salt = store, salt
        self.prompt_builder, self.splitter = prompt_builder, splitter
        self.mac = mac
        self.encoder_enabled = encoder_enabled
        self.catalog = DocumentCatalog(store)
        self._cut = functools.lru_cache(REMEMBERED)(cut_document)
        self._plain = methods.create("full", model)
        rotary_embeddings(method.backbone)  # which costs a pass that belongs to no question

    @property
    def heads(self) -> PrefixCache:
        """The cached prefixes of this backbone, which all engines on it share; outside of the store's budget."""
        return prefixes_of(self.method.backbone)

    # ---- prepare: everything that can be refused before something is computed ----

    @property
    def segmenter(self) -> Segmenter:
        """How documents are cut and keyed at this moment."""
        return Segmenter(self.method, self.tokenizer, self.prompt_builder, self.splitter, self._cut, self.salt)

    def segments_of(
        self, documents: Sequence[DocumentLike] = (), document_ids: Sequence[str] = ()
    ) -> list[KeyedSegment]:
        """The segments that documents, and behind them added ones, are compiled as."""
        return self.segmenter.segments(documents) + self.segmenter.keyed_anew(self.catalog.find(document_ids))

    def with_encoder(self, wanted: bool | None) -> bool:
        """Whether a call links its documents; False puts them into the prompt as text."""
        if not getattr(self.model, "encoder_enabled", True):  # inside `with model.encoder_disabled():`
            return False
        return self.encoder_enabled if wanted is None else wanted

    def method_of(self, encoder: bool) -> Method:
        """What links: the engine's method, or with the encoder off the plain backbone."""
        return self.method if encoder else self._plain

    def settings(self, generate_kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments for ``generate``; see `decoding_settings`."""
        return decoding_settings(generate_kwargs, self._plain.backbone, self.tokenizer)

    def prepare(
        self,
        question: Question,
        segments: Sequence[KeyedSegment] = (),
        named: Callable[[str], Sequence[KeyedSegment]] | None = None,
        *,
        encoder: bool,
    ) -> PreparedQuestion:
        """The prompt of a question, with `segments` at the start of its first user message.

        Args:
            named: the segments of a document that messages name; by default the catalog's.
        """
        found = referenced_documents(question)
        look_up = named or (lambda name: self.segments_of(document_ids=[name]))
        inside = {name: look_up(name) for name in (*found.before, *found.after)}
        before = [segment for name in found.before for segment in inside[name]]
        after = [segment for name in found.after for segment in inside[name]]
        every = [*before, *segments, *after]
        if encoder:
            self.segmenter.check_lengths(every)
        prompt = self.prompt_builder.build(
            question,
            [segment.token_ids for segment in segments],
            {name: [segment.token_ids for segment in parts] for name, parts in inside.items()},
        )
        if not (encoder and self.method.uses_encoder):  # else documents are no tokens of the prompt
            own = len(prompt.head) + sum(map(len, prompt.gaps)) + len(prompt.tail)
            self.method.check_prompt(sum(len(segment.token_ids) for segment in every), own)
        if encoder and self.method.notice_rows(prompt.query):
            every = self.segmenter.keyed_anew(every)
        return PreparedQuestion(every, prompt)

    # ---- acquire: PICaches from the store, compiled where it has none ----

    @contextmanager
    def acquired(
        self, segments: Sequence[KeyedSegment], *, encoder: bool = True, ttl: float | None = None
    ) -> Iterator[AcquiredDocuments]:
        """References, dropped at the end of the block; all that are missing are compiled in one call.

        None with the encoder off, when documents are tokens of the prompt.
        """
        unique = {segment.key: segment for segment in segments} if encoder else {}
        compiled: dict[str, int] = {}
        with self.store.acquire(list(unique), ttl_s=ttl) as held:
            while missing := held.missing():
                held.add(self._compile([unique[key] for key in missing], compiled))
            yield AcquiredDocuments(held, compiled)

    def _compile(self, segments: Sequence[KeyedSegment], compiled: dict[str, int]) -> list[PICache]:
        """PICaches of `segments`; notes in `compiled` what of the backbone's work is each one's, by its tokens."""
        token_ids = [segment.token_ids for segment in segments]
        lengths = [len(ids) for ids in token_ids]
        with one_walk(), counted_passes() as passed:
            if self.executor is None:
                picaches = self.method.compile(token_ids)
            else:
                picaches = self.executor.compile(self.method, token_ids)
                # other processes' passes aren't counted here, and an encoder's are none of the backbone's
                passed.tokens = 0 if self.method.keeps_tokens_only or self.method.uses_encoder else sum(lengths)
        # the weights may have changed since the keys were made, or in between: nothing is filed under another's name
        with one_walk():
            if self.segmenter.keyed_anew(segments) != list(segments):
                raise ValueError(CHANGED)
        ends = [round(passed.tokens * end / sum(lengths)) for end in accumulate(lengths)]
        compiled |= {each.key: end - start for each, start, end in zip(segments, [0, *ends], ends, strict=False)}
        return picaches

    def link_request(self, question: PreparedQuestion, documents: AcquiredDocuments, *, encoder: bool) -> LinkRequest:
        """What is handed to the method."""
        prompt, segments = question.prompt, question.segments
        if encoder:
            picaches = [documents.references[segment.key].picache for segment in segments]
        else:
            picaches = [token_picache(self._plain.fingerprint, segment.token_ids) for segment in segments]
        return LinkRequest(picaches, prompt.tail, prompt.head, prompt.gaps, self.salt)

    # ---- link and decode ----

    @contextmanager
    def linked(
        self,
        questions: Sequence[PreparedQuestion],
        documents: AcquiredDocuments,
        *,
        encoder: bool,
        past: PastState | None = None,
    ) -> Iterator[tuple[DecodeState, MacSession | None]]:
        """The state that their answers are decoded from, and what reuses attention meanwhile; given back at the end.

        Args:
            past: what a conversation's turn goes on from.
        """
        method = self.method_of(encoder)
        rows = [self.link_request(question, documents, encoder=encoder) for question in questions]
        with ExitStack() as stack:
            session = None if self.mac is None else stack.enter_context(MacSession(method.model, self.mac))
            state = method.link_batch(rows) if past is None else method.continue_row(past, rows[0])
            stack.callback(state.release)
            yield state, session

    def decode(
        self,
        state: DecodeState,
        session: MacSession | None,
        settings: Mapping[str, Any],
        timer: FirstTokenTimer,
        *,
        encoder: bool,
    ) -> DecodedBatch:
        """Decodes from what `linked` gave.

        Raises:
            Abandoned: nobody waits any more (the timer's event).
            ValueError: as `with_length`.
        """
        check_wanted(timer.stop)
        prompt = state.input_ids.shape[1]
        arguments = with_length(settings, self.method.backbone, prompt, self.method_of(encoder).max_prompt_tokens)
        arguments["stopping_criteria"] = [*(arguments.get("stopping_criteria") or ()), timer]
        sequences, cache = state.generate_with_cache(**arguments)
        answers = [trim(row[prompt:].tolist(), arguments, len(sequences)) for row in sequences]
        total_s = time.perf_counter() - timer.start
        mac = None if session is None else session.report()
        return DecodedBatch(state, sequences, cache, answers, total_s, timer.ttft_s or total_s, mac)

    # ---- report ----

    def answer(
        self,
        question: PreparedQuestion,
        decoded: DecodedBatch,
        row: int,
        documents: AcquiredDocuments,
        *,
        encoder: bool,
    ) -> Answer:
        """The text and the report of one row."""
        state, token_ids, references = decoded.state, decoded.answers[row], documents.references
        uses = None if state.uses is None else state.uses[row]
        compiled = documents.take_compiled(question.segments)
        report = Report(
            method=self.method.name,
            encoder=encoder and self.method.uses_encoder,
            documents=document_reports(question.segments, uses, references),
            prompt_tokens=state.prompt_tokens[row],
            computed_tokens=state.computed[row] + compiled,
            compiled_tokens=compiled,
            head_tokens=state.head_tokens,
            recomputed_tokens=state.recomputed[row],
            answer_tokens=len(token_ids),
            cache_bytes=cache_bytes(question.segments, uses, references),
            ttft_s=decoded.ttft_s,
            total_s=decoded.total_s,
            mac=decoded.mac,
        )
        return Answer(answer_text(self.tokenizer, token_ids), token_ids, report)

    # ---- all of them ----

    def answers(
        self,
        questions: Sequence[PreparedQuestion],
        settings: Mapping[str, Any],
        start: float,
        stop: threading.Event | None = None,
        *,
        encoder: bool,
    ) -> list[Answer]:
        """Answers in order, in one batch where the method links batches, else one by one.

        Args:
            settings: for ``generate``, as `settings` makes them.
            start: of the call, by `time.perf_counter`.
            stop: set when nobody waits any more.

        Raises:
            Abandoned: `stop` was set.
        """
        check_wanted(stop)
        # what a batch takes is asked of the model only where there is one: the answer is a walk over its weights
        size = len(questions) if len(questions) > 1 and self.method_of(encoder).batches else 1
        found: list[Answer] = []
        with self.acquired([part for each in questions for part in each.segments], encoder=encoder) as documents:
            for first in range(0, len(questions), size):
                batch, timer = questions[first : first + size], FirstTokenTimer(start, stop)
                check_wanted(stop)
                with self.linked(batch, documents, encoder=encoder) as (state, session):
                    decoded = self.decode(state, session, settings, timer, encoder=encoder)
                found += [self.answer(one, decoded, row, documents, encoder=encoder) for row, one in enumerate(batch)]
        return found

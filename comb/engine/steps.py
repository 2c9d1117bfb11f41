"""What every answer is made of: `prepare` refuses what can't be answered, `answers` acquires, links, decodes, reports.

`PICEngine` calls the two for questions and batches, `Conversation` for turns that go on from one another.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import accumulate, groupby
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache

from comb.backbones.forward import counted_passes
from comb.backbones.identity import CHANGED, one_walk
from comb.cache.store import PICacheRef, PICacheStore
from comb.documents.catalog import DocumentCatalog, KeyedSegment
from comb.documents.document import Document, DocumentLike, Prompt, PromptBuilder, as_document
from comb.documents.messages import Message, referenced_documents
from comb.documents.splitting import Splitter, split_document
from comb.engine.decoding import FirstTokenTimer, answer_text, check_wanted, decoding_settings, trim, with_length
from comb.engine.report import Answer, Report, cache_bytes, document_reports
from comb.engine.workers import CompileExecutor
from comb.mac import MacConfig, MacSession
from comb.methods.base import LinkRequest, Method
from comb.methods.decode_state import DecodeState, PastState
from comb.methods.full import token_picache
from comb.methods.prefix import PrefixCache, prefixes_of

Question = str | Sequence[Message]

_REMEMBERED = 256  # documents' tokens: to make them again would take a cached question more than linking


@dataclass(frozen=True)
class Request:
    """One question for `PICEngine.ask_batch`; a plain ``(question, documents)`` does as well."""

    question: Question
    documents: Sequence[DocumentLike] = ()
    document_ids: Sequence[str] = ()


def _cut(
    tokenizer: Any, vocabulary: int, builder: PromptBuilder, splitter: Splitter, document: Document
) -> tuple[tuple[int, ...], ...]:
    """Token ids of a document's segments; `vocabulary` is there for the memory: a tokenizer may be given new tokens."""
    return tuple(split_document(tokenizer, builder.segment(document), splitter))


class AnswerSteps:
    """The steps that answers are made of, on what `PICEngine` holds.

    The settings are attributes that anybody may set; a call takes them as it finds them.
    """

    model: Any
    tokenizer: Any
    method: Method
    store: PICacheStore
    catalog: DocumentCatalog
    salt: str
    prompt_builder: PromptBuilder
    splitter: Splitter
    mac: MacConfig | None
    encoder_enabled: bool
    executor: CompileExecutor | None
    _plain: Method  # what answers with the encoder off

    def __init__(self) -> None:
        self._cut = functools.lru_cache(_REMEMBERED)(_cut)

    @property
    def prefixes(self) -> PrefixCache:
        """The cached prefixes of this backbone, which all engines on it share; outside of the store's budget."""
        return prefixes_of(self.method.backbone)

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

    # ---- documents as the segments that a method compiles, each under its content key ----

    def segments_of(
        self, documents: Sequence[DocumentLike] = (), document_ids: Sequence[str] = ()
    ) -> list[KeyedSegment]:
        """The segments of documents, and behind them of added ones. Raises ValueError for an empty document."""
        if isinstance(documents, str | Document | bytes | Mapping) or not isinstance(documents, Iterable):
            raise ValueError(
                f"documents is a list, not {type(documents).__name__}: write documents=[...] around a single one"
            )
        checked = [as_document(document) for document in documents]
        how = self.tokenizer, len(self.tokenizer), self.prompt_builder, self.splitter
        split = [self._cut(*how, document) for document in checked]
        keys = iter(self.method.keys_of([part for parts in split for part in parts], self.salt))
        segments = []
        for document, parts in zip(checked, split, strict=True):
            own = [next(keys) for _ in parts]
            # a document in one part is called after its key; more parts are called after all of them
            name = document.name(own[0] if len(own) == 1 else sha256("".join(own).encode()).hexdigest())
            segments += [
                KeyedSegment(name, ids, key, part) for part, (ids, key) in enumerate(zip(parts, own, strict=True))
            ]
        return segments + self.keyed_anew(self.catalog.find(document_ids))

    def keyed_anew(self, segments: Sequence[KeyedSegment]) -> list[KeyedSegment]:
        """The same segments under today's keys: an adapter may have been trained since they were made."""
        keys = self.method.keys_of([segment.token_ids for segment in segments], self.salt)
        return [replace(segment, key=key) for segment, key in zip(segments, keys, strict=True)]

    def check_lengths(self, segments: Sequence[KeyedSegment]) -> None:
        """Raises ValueError for a segment that is longer than the method compiles."""
        limit, compiler = self.method.max_segment_tokens, "encoder" if self.method.uses_encoder else "backbone"
        for segment in segments:
            if limit is not None and len(segment.token_ids) > limit:
                raise ValueError(
                    f"document {segment.id!r} has {len(segment.token_ids)} tokens, but this model's {compiler} takes "
                    f"at most {limit} at once: split it into parts of at most {limit} tokens, for example with "
                    f"splitter='paragraphs:{min(limit, 512)}'"
                )

    # ---- the steps ----

    def prepare(
        self,
        question: Question,
        segments: Sequence[KeyedSegment] = (),
        named: Callable[[str], Sequence[KeyedSegment]] | None = None,
        *,
        encoder: bool,
    ) -> tuple[list[KeyedSegment], Prompt]:
        """A question's documents and its prompt; what can be refused before something is computed is refused here.

        Args:
            segments: of documents at the start of the first user message.
            named: the segments of a document that messages name; by default the catalog's.
        """
        found = referenced_documents(question)
        look_up = named or (lambda name: self.segments_of(document_ids=[name]))
        inside = {name: look_up(name) for name in (*found.before, *found.after)}
        before = [segment for name in found.before for segment in inside[name]]
        after = [segment for name in found.after for segment in inside[name]]
        every = [*before, *segments, *after]
        if encoder:
            self.check_lengths(every)
        prompt = self.prompt_builder.build(
            question,
            [segment.token_ids for segment in segments],
            {name: [segment.token_ids for segment in parts] for name, parts in inside.items()},
        )
        self.method.check_ids(prompt.flat)
        if not (encoder and self.method.uses_encoder):  # else documents are no tokens of the prompt
            own = len(prompt.prefix) + sum(map(len, prompt.gaps)) + len(prompt.query)
            self.method.check_prompt(sum(len(segment.token_ids) for segment in every), own)
        # an embedding of the query that has changed in silence makes it another model, with other keys
        if encoder and self.method.notice_rows(prompt.bare):
            every = self.keyed_anew(every)
        return every, prompt

    @contextmanager
    def acquired(
        self, segments: Sequence[KeyedSegment], *, encoder: bool = True, ttl: float | None = None
    ) -> Iterator[tuple[Mapping[str, PICacheRef], dict[str, int]]]:
        """References to PICaches, dropped at the end of the block; what the store lacks is compiled in one call.

        Yields:
            By key the references, and of those compiled now the tokens that the backbone computed. None with the
            encoder off, when documents are tokens of the prompt.
        """
        unique = {segment.key: segment for segment in segments} if encoder else {}
        compiled: dict[str, int] = {}
        with self.store.acquire(list(unique), ttl_s=ttl) as held:
            while missing := held.missing():
                new = [unique[key] for key in missing]
                token_ids = [segment.token_ids for segment in new]
                ends = list(accumulate(map(len, token_ids)))
                with one_walk(), counted_passes() as passed:
                    if self.executor is None:
                        picaches = self.method.compile(token_ids)
                    else:
                        picaches = self.executor.compile(self.method, token_ids)
                # the weights may have changed since the keys were made, or in between: nothing is filed under
                # another's name
                with one_walk():
                    if self.keyed_anew(new) != new:
                        raise ValueError(CHANGED)
                done = 0
                for key, end in zip(missing, ends, strict=True):
                    share = round(passed.tokens * end / ends[-1])
                    compiled[key], done = share - done, share
                held.add(picaches)
                self.catalog.follow(new)
            yield held, compiled

    @contextmanager
    def linked(
        self,
        questions: Sequence[tuple[Sequence[KeyedSegment], Prompt]],
        references: Mapping[str, PICacheRef],
        *,
        encoder: bool,
        past: PastState | None = None,
    ) -> Iterator[tuple[DecodeState, MacSession | None]]:
        """The state that answers are decoded from, and what reuses attention meanwhile.

        Args:
            past: what a conversation's turn goes on from.
        """
        method, rows = self.method_of(encoder), []
        for segments, prompt in questions:
            if encoder:
                picaches = [references[segment.key].picache for segment in segments]
            else:  # tokens of the prompt like all others
                picaches = [token_picache(method.fingerprint, segment.token_ids) for segment in segments]
            rows.append(LinkRequest(picaches, prompt.query, prompt.prefix, prompt.gaps, self.salt))
        with nullcontext() if self.mac is None else MacSession(method.model, self.mac) as session:
            yield method.link_batch(rows) if past is None else method.continue_row(past, rows[0]), session

    def answers(
        self,
        questions: Sequence[tuple[Sequence[KeyedSegment], Prompt]],
        settings: Mapping[str, Any],
        start: float,
        stop: threading.Event | None = None,
        *,
        encoder: bool,
        past: PastState | None = None,
    ) -> Iterator[tuple[Answer, DecodeState, Tensor, Cache | None]]:
        """Answers in order, in batches where each row's is what it would be alone, else one by one.

        Args:
            questions: as `prepare` makes them.
            settings: for ``generate``, as `settings` makes them.
            start: of the call, by `time.perf_counter`.
            stop: set when nobody waits any more.
            past: as for `linked`.

        Yields:
            Per question its answer, and of its batch the state that decoding began from, prompts and answers
            (left-padded) [rows, prompt + new tokens], and the cache that generation leaves behind all tokens but the
            last; None where it leaves none.

        Raises:
            Abandoned: `stop` was set.
            ValueError: there is no room for the answer.
        """
        check_wanted(stop)
        method = self.method_of(encoder)

        def most(question: tuple[Sequence[KeyedSegment], Prompt]) -> int:
            tokens = len(question[1].bare if method.uses_encoder else question[1].flat)
            return int(with_length(settings, method.backbone, tokens, method.max_prompt_tokens)["max_new_tokens"])

        batches = [[question] for question in questions]
        # of a row that something else ends than a token, nobody can tell the last tokens from padding
        stops = settings.get("stop_strings") or method.backbone.generation_config.stop_strings
        # what a batch takes is asked of the model only where there is one: the answer is a walk over its weights
        if len(questions) > 1 and not (stops or settings.get("stopping_criteria")) and method.batches:
            # of a batch, the longest prompt would say how many tokens there are for all
            batches = [list(rows) for _, rows in groupby(questions, most)]
        every = [segment for segments, _ in questions for segment in segments]
        with self.acquired(every, encoder=encoder) as (references, compiled):
            for batch in batches:
                timer = FirstTokenTimer(start, stop)
                check_wanted(stop)
                with self.linked(batch, references, encoder=encoder, past=past) as (state, session):
                    check_wanted(stop)
                    length = state.input_ids.shape[1]
                    arguments = with_length(settings, method.backbone, length, method.max_prompt_tokens)
                    arguments["stopping_criteria"] = [*(arguments.get("stopping_criteria") or ()), timer]
                    sequences, cache = state.generate_with_cache(**arguments)
                    new = [trim(row[length:].tolist(), arguments) for row in sequences]
                    total_s = time.perf_counter() - start
                    mac = None if session is None else session.report()
                for row, (segments, _) in enumerate(batch):
                    uses = None if state.uses is None else state.uses[row]
                    # each document counts once, for the first question that has it
                    spent = sum(compiled.pop(segment.key, 0) for segment in segments)
                    report = Report(
                        method=self.method.name,
                        encoder=encoder and self.method.uses_encoder,
                        documents=document_reports(segments, uses, references),
                        prompt_tokens=state.prompt_tokens[row],
                        computed_tokens=state.computed[row] + spent,
                        compiled_tokens=spent,
                        prefix_tokens=state.prefix_tokens,
                        recomputed_tokens=state.recomputed[row],
                        answer_tokens=len(new[row]),
                        cache_bytes=cache_bytes(segments, uses, references),
                        ttft_s=timer.ttft_s or total_s,
                        total_s=total_s,
                        mac=mac,
                    )
                    yield Answer(answer_text(self.tokenizer, new[row]), new[row], report), state, sequences, cache

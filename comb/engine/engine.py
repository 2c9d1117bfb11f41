"""PICEngine: the embedded engine. Questions over documents in this process, each document compiled once."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM

from comb import methods
from comb.backbones.exclusive import backbone_of
from comb.backbones.identity import one_walk
from comb.backbones.loading import HUB_ARGUMENTS, resolve_name
from comb.backbones.tokenizer import check_tokenizer, load_tokenizer
from comb.cache.picache import PICache
from comb.cache.store import PICacheRef, PICacheStore
from comb.documents import splitting
from comb.documents.catalog import DocumentCatalog, KeyedSegment, UnknownDocumentError, by_document
from comb.documents.document import Document, Message, Prompt, PromptBuilder, referenced_documents
from comb.documents.splitting import Boundaries, Splitter
from comb.engine.conversation import Conversation, RunTurn
from comb.engine.decoding import AnswerStream, FirstTokenTimer, check_wanted, decoding_settings, trim, with_length
from comb.engine.report import Answer, DocumentReport, Report, cache_bytes, continued_reports, document_reports
from comb.engine.segmenter import Segmenter
from comb.engine.turns import Start, Turn
from comb.engine.workers import CompileExecutor
from comb.engine.workers.executor import spec_of
from comb.mac import MacConfig, MacSession
from comb.methods.base import DecodeState, LinkRequest, Method
from comb.methods.full import token_picache
from comb.model.source import ModelSource

__all__ = ["Answer", "DocumentReport", "PICEngine", "Report", "Request", "UnknownDocumentError"]

logger = logging.getLogger(__name__)

DEFAULT_STORE_BYTES = 4 * 2**30
_ADD_CHUNK = 16

Question = str | Sequence[Message]


@dataclass(frozen=True)
class Request:
    """One question for `PICEngine.ask_batch`; a plain ``(question, documents)`` does as well."""

    question: Question
    documents: Sequence[str | Document] = ()
    document_ids: Sequence[str] = ()


@dataclass(frozen=True)
class _Call:
    """A checked call: per row the segments and the prompt, and what holds for all rows; one row in a conversation."""

    segments: list[list[KeyedSegment]]
    prompts: list[Prompt]
    settings: dict[str, Any]
    encoder: bool
    turn: Turn | None = None


class PICEngine:
    """Answers questions over documents with one model and one method, keeping what documents compile to.

    Safe under threads: documents belong to a call, never to the engine or the model, and runs on one backbone take
    turns.

    Args:
        model: `CombForCausalLM`, or any Hugging Face causal LM for methods that need no encoder.
        tokenizer: the model's tokenizer.
        method: a name from ``comb.methods.names()``, ``"name:parameters"``, or a `Method` instance.
        store: where PICaches are kept; by default in memory, at most 4 GiB (and 4 GiB on the host for a GPU model).
        splitter: KVSplit, how long documents are cut into segments that are compiled each on its own: a name with its
            budget (``"paragraphs:512"``), a `Splitter`, or a function from text to character offsets; whole by default.
        salt: separates tenants; documents are never shared between engines with different salts.
        prompt_builder: how documents and question become tokens.
        mac: decode with Match-Amend-Complete attention (docs/mac.md): a `MacConfig`, or its text ("generation"). None
            is exact attention.
        encoder_enabled: False answers from the plain backbone with the documents in the prompt; may be changed at any
            time, and per call.
        workers: processes that compile the documents of one request side by side (docs/segment-parallel.md); 0: none.
            They load the model again. `close`, or a ``with`` block around the engine, ends them.
        source: where they load it from; by default the place that the model names as its own.
        executor: workers of another kind, number or source instead; the caller closes it.
        parameters: of the method.

    Raises:
        ValueError: unknown method or parameter, a model without what the method needs, a tokenizer that isn't
            the model's, or workers that compile something else.
        RuntimeError: a worker could not load the model.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        method: str | Method = "comb",
        store: PICacheStore | None = None,
        salt: str = "",
        prompt_builder: PromptBuilder | None = None,
        encoder_enabled: bool = True,
        splitter: str | Splitter | Boundaries = "whole",
        mac: MacConfig | str | None = None,
        workers: int = 0,
        source: ModelSource | None = None,
        executor: CompileExecutor | None = None,
        **parameters: Any,
    ) -> None:
        check_tokenizer(model, tokenizer)
        self.model = model
        self.tokenizer = tokenizer
        self.prompt_builder = PromptBuilder(tokenizer) if prompt_builder is None else prompt_builder
        self.store = _default_store(model) if store is None else store
        self.salt = salt
        self.encoder_enabled = encoder_enabled
        self.splitter = splitting.create(splitter)
        self.mac = MacConfig.parse(mac) if isinstance(mac, str) else mac
        self.catalog = DocumentCatalog(self.store)
        self.method = self._make_method(method, parameters)
        self._plain = methods.create("full", model)
        self._owns_executor = executor is None
        self.executor = self._start_workers(workers, source) if executor is None else executor
        if executor is not None and workers:
            raise ValueError("workers= starts processes of its own: leave it out when giving an executor=")
        if self.executor is not None:
            try:
                self.executor.check(self.method)
            except BaseException:
                self.close()
                raise

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path,
        *,
        method: str = "comb",
        store: PICacheStore | None = None,
        salt: str = "",
        splitter: str | Splitter | Boundaries = "whole",
        mac: MacConfig | str | None = None,
        workers: int = 0,
        tokenizer: Any = None,
        **model_kwargs: Any,
    ) -> PICEngine:
        """An engine from an adapter or a plain model: a folder, Hub id or registered name.

        `model_kwargs` go to ``AutoModelForCausalLM.from_pretrained``; method parameters are written as
        ``method="name:parameters"``.
        """
        model = AutoModelForCausalLM.from_pretrained(resolve_name(name_or_path), **model_kwargs)
        if tokenizer is None:
            places = ("revision", "subfolder", *HUB_ARGUMENTS)
            hub = {key: value for key, value in model_kwargs.items() if key in places}
            tokenizer = load_tokenizer(name_or_path, model, **hub)
        source = ModelSource(str(name_or_path), model_kwargs) if workers else None
        return cls(
            model, tokenizer, method=method, store=store, salt=salt, splitter=splitter, mac=mac, workers=workers,
            source=source,
        )  # fmt: skip

    def close(self) -> None:
        """Ends the workers that this engine has started; without them it still answers."""
        if self.executor is not None and self._owns_executor:
            self.executor.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # ---- questions ----

    def ask(
        self,
        question: str,
        documents: Sequence[str | Document] = (),
        *,
        document_ids: Sequence[str] = (),
        encoder: bool | None = None,
        **generate_kwargs: Any,
    ) -> Answer:
        """The answer to one question over documents.

        Args:
            documents: text or `Document`s; compiled now unless the store has them.
            document_ids: ids from `add_documents`, appended behind `documents`.
            encoder: overrides `encoder_enabled` for this call; False puts the documents into the prompt as text.
            generate_kwargs: of Hugging Face ``generate``; greedy and 256 new tokens by default.

        Raises:
            UnknownDocumentError: an id that isn't there.
            ValueError: empty or over-long documents, a prompt that doesn't fit, bad generation settings.
            PICacheTooLargeError, StoreFullError: the store has no room for these documents.
        """
        return self._ask_all([Request(question, documents, document_ids)], encoder, generate_kwargs)[0]

    def chat(
        self,
        messages: Sequence[Message],
        documents: Sequence[str | Document] = (),
        *,
        document_ids: Sequence[str] = (),
        encoder: bool | None = None,
        **generate_kwargs: Any,
    ) -> Answer:
        """Like `ask`, with chat messages (role and content) for a tokenizer that has a chat template."""
        return self._ask_all([Request(messages, documents, document_ids)], encoder, generate_kwargs)[0]

    def ask_batch(
        self,
        requests: Iterable[Request | tuple[Question, Sequence[str | Document]]],
        *,
        encoder: bool | None = None,
        **generate_kwargs: Any,
    ) -> list[Answer]:
        """Answers in the order of `requests`, which may have different numbers of documents, or none.

        All documents that are not in the store are compiled in one call. Methods with `link_batch` (``comb``, ``full``)
        decode all rows in one left-padded batch, the others row by row.
        """
        rows = [request if isinstance(request, Request) else Request(*request) for request in requests]
        return self._ask_all(rows, encoder, generate_kwargs) if rows else []

    def stream(
        self,
        question: Question,
        documents: Sequence[str | Document] = (),
        *,
        document_ids: Sequence[str] = (),
        encoder: bool | None = None,
        **generate_kwargs: Any,
    ) -> AnswerStream:
        """An iterator over pieces of the answer's text, with ``.answer`` and ``.report`` at its end.

        Bad input is raised here, what goes wrong later by the iterator. Leaving the iterator stops generation and
        gives back the documents.
        """
        start = time.perf_counter()
        if "streamer" in generate_kwargs:
            raise ValueError("stream() brings its own streamer; use ask(..., streamer=...) for another one")
        call = self._prepare([Request(question, documents, document_ids)], encoder, generate_kwargs)

        def run(streamer: Any, stop: threading.Event) -> Answer:
            with one_walk():
                return self._answer(call, start, stop, streamer)[0]

        return AnswerStream(run, self.tokenizer)

    # ---- conversations ----

    def conversation(
        self,
        documents: Sequence[str | Document] = (),
        *,
        document_ids: Sequence[str] = (),
        messages: Sequence[Message] = (),
        encoder: bool | None = None,
        remember: Callable[[str], str] | None = None,
    ) -> Conversation:
        """Questions that follow each other, each going on from the cache of the one before: see `Conversation`.

        Raises:
            ValueError: for a tokenizer without a chat template.
            UnknownDocumentError: an id that isn't there.
        """
        return Conversation(
            self, documents, document_ids=document_ids, messages=messages, encoder=encoder, remember=remember
        )

    def segments_of(
        self, documents: Sequence[str | Document] = (), document_ids: Sequence[str] = ()
    ) -> list[KeyedSegment]:
        """The segments that documents, and behind them added ones, are compiled as."""
        return self._segmenter.segments(documents) + self._find(document_ids)

    def prepare_turn(
        self,
        messages: Sequence[Message],
        segments: Mapping[str, Sequence[KeyedSegment]],
        turn: Turn,
        encoder: bool | None,
        generate_kwargs: Mapping[str, Any],
    ) -> RunTurn:
        """Checks a conversation's turn; returns what answers it. `segments` are those that messages name."""
        start = time.perf_counter()
        current = {name: self._segmenter.keyed_anew(parts) for name, parts in segments.items()}
        call = self._prepare([Request(messages)], encoder, generate_kwargs, current)
        call = replace(call, turn=turn)
        return lambda streamer, stop: self._answer(call, start, stop, streamer)[0]

    # ---- documents ----

    def add_documents(
        self, documents: Sequence[str | Document], *, pin: bool = False, ttl: float | None = None
    ) -> list[str]:
        """Compiles documents now; returns their ids for ``document_ids=``.

        An id is the document's own or ``doc-`` and the start of its content key. Adding the same content again renews
        pin and ttl. With method ``prefix`` only token ids are kept here: prefixes are stored when first asked about.

        Args:
            pin: keeps their PICaches from being evicted.
            ttl: seconds after which the ids are unknown and the PICaches gone; None is for ever.

        Raises:
            ValueError: empty or over-long documents, a ttl that isn't positive, or an id that
                stands for another text.
        """
        if ttl is not None and not ttl > 0:
            raise ValueError(f"ttl must be a positive number of seconds or None, got {ttl!r}")
        segments = self._segmenter.segments(documents)
        self._segmenter.check_lengths(segments)
        split = by_document(segments)
        self.catalog.check(split)
        # in chunks, so that a store smaller than the whole collection can make room
        starts = range(0, len(split), _ADD_CHUNK)
        for start in tqdm(starts, "compiling documents", disable=True if len(starts) < 2 else None):
            chunk = split[start : start + _ADD_CHUNK]
            with ExitStack() as stack:
                self._acquire([segment for parts in chunk for segment in parts], stack, ttl=ttl)
                for parts in chunk:
                    self.catalog.add(parts, pin=pin, ttl=ttl)
        return [parts[0].id for parts in split]

    def remove_documents(self, ids: Iterable[str]) -> None:
        """Forgets documents; answers under way keep theirs to the end.

        Raises:
            UnknownDocumentError: an unknown id; then none is removed.
        """
        self.catalog.remove(ids)

    # ---- the same in the papers' words (EPIC sec. 5: Implementation) ----

    def generate_context_cache(
        self, chunks: Sequence[str | Document], *, pin: bool = False, ttl: float | None = None
    ) -> list[str]:
        """Compiles static chunks; returns their cache ids. `add_documents` under the papers' name."""
        return self.add_documents(chunks, pin=pin, ttl=ttl)

    def chat_completion(self, messages: Sequence[Message], **generate_kwargs: Any) -> Answer:
        """Chat whose messages hold cache ids and new text in any order. `chat` under the papers' name.

        A message's content is a text, or a list of parts: ``{"type": "text", "text": ...}`` and
        ``{"type": "document", "id": cache_id}``.
        """
        return self.chat(messages, **generate_kwargs)

    def expire_cache(self, cache_id: str) -> None:
        """Forgets one cache id. Raises UnknownDocumentError if there is none of that name."""
        self.remove_documents([cache_id])

    # ---- one call, from documents to answers ----

    def _ask_all(
        self, requests: Sequence[Request], encoder: bool | None, generate_kwargs: Mapping[str, Any]
    ) -> list[Answer]:
        start = time.perf_counter()
        with one_walk():
            call = self._prepare(requests, encoder, generate_kwargs)
            return self._answer(call, start)

    def _prepare(
        self,
        requests: Sequence[Request],
        encoder: bool | None,
        generate_kwargs: Mapping[str, Any],
        named_segments: Mapping[str, list[KeyedSegment]] | None = None,
    ) -> _Call:
        """Everything that can be refused before something is computed.

        Messages name documents of the catalog, or else of `named_segments`.
        """
        with_encoder = self.encoder_enabled if encoder is None else encoder
        if not getattr(self.model, "encoder_enabled", True):  # inside `with model.encoder_disabled():`
            with_encoder = False
        settings = decoding_settings(generate_kwargs, self._plain.backbone, self.tokenizer)
        segments, prompts = [], []
        for request in requests:
            named = referenced_documents(request.question)
            in_front = self.segments_of(request.documents, request.document_ids)
            names = (*named.before, *named.after)
            inside = {name: self._find([name]) if named_segments is None else named_segments[name] for name in names}
            row = [segment for name in named.before for segment in inside[name]]
            row += in_front
            row += [segment for name in named.after for segment in inside[name]]
            if with_encoder:
                self._segmenter.check_lengths(row)
            segments.append(row)
            prompts.append(
                self.prompt_builder.build(
                    request.question,
                    [segment.token_ids for segment in in_front],
                    {name: [segment.token_ids for segment in parts] for name, parts in inside.items()},
                )
            )
        return _Call(segments, prompts, settings, with_encoder)

    def _answer(
        self, call: _Call, start: float, stop: threading.Event | None = None, streamer: Any = None
    ) -> list[Answer]:
        """Compile or find, link, decode, report; whatever happens, all references are dropped at the end."""
        method = self.method if call.encoder else self._plain
        settings = call.settings if streamer is None else {**call.settings, "streamer": streamer}
        answers: list[Answer] = []
        with ExitStack() as stack:
            check_wanted(stop)
            begin = None if call.turn is None else call.turn.plan(method, call.segments[0], call.prompts[0])
            given = call.segments if begin is None else [call.segments[0][begin.segments :]]
            prompts = call.prompts if begin is None else [begin.prompt]
            handles: dict[str, PICacheRef] = {}
            if call.encoder:
                handles = self._acquire([segment for row in given for segment in row], stack)
            pairs = zip(given, prompts, strict=True)
            rows = [self._row(segments, prompt, handles) for segments, prompt in pairs]
            size = len(rows) if method.batches else 1
            for first in range(0, len(rows), size):
                check_wanted(stop)
                clock = FirstTokenTimer(start, stop)
                with ExitStack() as decoding:
                    session = None if self.mac is None else decoding.enter_context(MacSession(method.model, self.mac))
                    state = _link(method, rows[first : first + size], begin)
                    stack.callback(state.release)
                    check_wanted(stop)
                    token_ids = _decode(state, method, settings, clock, call.turn)
                total_s = time.perf_counter() - start
                for index, ids in enumerate(token_ids):
                    row = given[first + index]
                    uses = None if state.uses is None else state.uses[index]
                    documents = document_reports(row, uses, handles)
                    if begin is not None:
                        documents = (*continued_reports(call.segments[0][: begin.segments]), *documents)
                    report = Report(
                        method=self.method.name,
                        encoder=call.encoder and self.method.uses_encoder,
                        documents=documents,
                        prompt_tokens=state.prompt_tokens[index],
                        recomputed_tokens=state.recomputed[index],
                        answer_tokens=len(ids),
                        cache_bytes=cache_bytes(row, uses, handles),
                        ttft_s=total_s if clock.ttft_s is None else clock.ttft_s,
                        total_s=total_s,
                        mac=None if session is None else session.report(),
                        continued_tokens=0 if begin is None else begin.tokens,
                        relinked="" if begin is None else begin.reason,
                    )
                    answers.append(Answer(self.tokenizer.decode(ids, skip_special_tokens=True), ids, report))
        return answers

    def _row(self, segments: Sequence[KeyedSegment], prompt: Prompt, handles: Mapping[str, PICacheRef]) -> LinkRequest:
        picaches: list[PICache] = [
            handles[segment.key].picache if handles else token_picache(self._plain.fingerprint, segment.token_ids)
            for segment in segments
        ]
        return LinkRequest(picaches, prompt.tail, prompt.head, prompt.gaps)

    def _find(self, ids: Sequence[str]) -> list[KeyedSegment]:
        """Segments of added documents."""
        return self._segmenter.keyed_anew(self.catalog.find(ids))

    def _acquire(
        self, segments: Sequence[KeyedSegment], stack: ExitStack, *, ttl: float | None = None
    ) -> dict[str, PICacheRef]:
        """References by key, released by `stack`; all that are missing are compiled in one call."""
        unique = list({segment.key: segment for segment in segments}.values())
        handles = self.store.acquire(
            [segment.key for segment in unique],
            lambda missing: self._compile([unique[index].token_ids for index in missing]),
            ttl_s=ttl,
        )
        stack.callback(handles.release)
        return {handle.key: handle for handle in handles}

    def _compile(self, token_ids: Sequence[tuple[int, ...]]) -> list[PICache]:
        with one_walk():
            if self.executor is None:
                return self.method.compile(token_ids)
            return self.executor.compile(self.method, token_ids)

    @property
    def _segmenter(self) -> Segmenter:
        # of this moment: method, splitter and salt are attributes that anybody may set
        return Segmenter(self.method, self.tokenizer, self.prompt_builder, self.splitter, self.salt)

    def _start_workers(self, workers: int, source: ModelSource | None) -> CompileExecutor | None:
        if workers < 0:
            raise ValueError(f"workers is a number of processes, or 0 for none, got {workers}")
        if workers and self.method.keeps_tokens_only:
            logger.warning("method %r has nothing to compile: no workers are started", self.method.name)
            return None
        if not workers:
            return None
        from comb.engine.workers.processes import process_executor

        spec_of(self.method)
        return process_executor(ModelSource.of(self.model) if source is None else source, workers)

    def _make_method(self, method: str | Method, parameters: dict[str, Any]) -> Method:
        if isinstance(method, Method):
            if parameters:
                raise ValueError(f"parameters {', '.join(sorted(parameters))} belong into the Method instance")
            return method
        name, from_spec = methods.parse(method)
        extra = {"store": self.store, "salt": self.salt} if methods.get(name).needs_store else {}
        return methods.create(name, self.model, **{**from_spec, **parameters}, **extra)


def _link(method: Method, rows: Sequence[LinkRequest], begin: Start | None) -> DecodeState:
    if begin is not None and begin.past is not None:
        return method.continue_row(begin.past, rows[0])
    if method.batches:
        return method.link_batch(rows)
    (row,) = rows
    return method.link_row(row)


def _decode(
    state: DecodeState, method: Method, settings: Mapping[str, Any], clock: FirstTokenTimer, turn: Turn | None
) -> list[tuple[int, ...]]:
    """New token ids per row."""
    prompt = state.input_ids.shape[1]
    arguments = with_length(settings, method.backbone, prompt, method.max_prompt_tokens)
    arguments["stopping_criteria"] = [*(arguments.get("stopping_criteria") or ()), clock]
    if turn is None:
        sequences = state.generate(**arguments)
    else:
        sequences, cache = state.generate_with_cache(**arguments)
        turn.keep(state, sequences[0], cache, arguments["eos_token_id"])
    return [trim(row[prompt:].tolist(), arguments, len(sequences)) for row in sequences]


def _default_store(model: Any) -> PICacheStore:
    device = backbone_of(model).get_input_embeddings().weight.device
    host_bytes = 0 if device.type == "cpu" else DEFAULT_STORE_BYTES
    return PICacheStore(device=device, device_bytes=DEFAULT_STORE_BYTES, host_bytes=host_bytes)

"""PICEngine: the embedded engine. Questions over documents in this process, each document compiled once."""

from __future__ import annotations

import inspect
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from torch import nn
from tqdm.auto import tqdm

from comb import methods
from comb.backbones.adapter import trained_method
from comb.backbones.identity import backbone_of, forget_identity, one_walk
from comb.backbones.loading import HUB_ARGUMENTS, load_model
from comb.backbones.rotary import rotary_embeddings
from comb.backbones.tokenizer import check_tokenizer, load_tokenizer
from comb.cache.store import PICacheStore, StoreFullError
from comb.documents import splitting
from comb.documents.catalog import DocumentCatalog, KeyedSegment, UnknownDocumentError, by_document
from comb.documents.document import DocumentLike, PromptBuilder
from comb.documents.messages import Message
from comb.documents.splitting import DEFAULT_SPLITTER, Boundaries, Splitter
from comb.engine.conversation import Conversation
from comb.engine.decoding import AnswerStream, check_stream
from comb.engine.report import Answer, DocumentReport, Report
from comb.engine.steps import AnswerSteps, Question, Request
from comb.engine.workers import CompileExecutor
from comb.engine.workers.executor import spec_of
from comb.mac import MacConfig
from comb.methods.base import Method
from comb.model.source import ModelSource, named_device

__all__ = ["Answer", "DocumentReport", "PICEngine", "Report", "Request", "UnknownDocumentError"]

logger = logging.getLogger(__name__)

_ADD_CHUNK = 16
_STORE_BYTES = 4 * 2**30


class PICEngine(AnswerSteps):
    """Answers questions over documents with one model and one method, keeping what documents compile to.

    Safe under threads: documents belong to a call, never to the engine or the model, and runs on one backbone take
    turns. What an answer is made of, step by step, is in `AnswerSteps`.

    Args:
        model: `CombForCausalLM`, or any Hugging Face causal LM for methods that need no encoder.
        tokenizer: the model's tokenizer.
        method: a name from ``comb.methods.names()``, ``"name:parameters"``, or a `Method` instance; by default the one
            that the model's adapter was trained for, of a plain model ``primed``, or ``full`` where that can't be.
        store: where PICaches are kept; by default in memory, at most 4 GiB (and 4 GiB on the host for a GPU model).
            What stands in front of documents is cached with the model (`prefixes`, at most 4 GiB), for all engines on
            it; what method ``prefix`` reuses, too.
        splitter: KVSplit, how long documents are cut into segments that are compiled each on its own: a name with its
            budget (``"paragraphs:512"``), a `Splitter`, or a function from text to character offsets; whole by default.
        salt: separates tenants; documents are never shared between engines with different salts.
        prompt_builder: how documents and question become tokens.
        mac: decode with Match-Amend-Complete attention (docs/mac.md): a `MacConfig`, or its text ("generation"). None
            is exact attention.
        encoder_enabled: False answers from the plain backbone with the documents in the prompt; may be changed at any
            time, and per call.
        workers: Ray actors that compile the documents of one request side by side (docs/segment-parallel.md); 0: none.
            They load the model again. `close`, or a ``with`` block around the engine, ends them.
        source: where they load it from; by default the place that the model names as its own.
        executor: workers with other resources or another source instead; the caller closes it.
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
        method: str | Method | None = None,
        store: PICacheStore | None = None,
        salt: str = "",
        prompt_builder: PromptBuilder | None = None,
        encoder_enabled: bool = True,
        splitter: str | Splitter | Boundaries = DEFAULT_SPLITTER,
        mac: MacConfig | str | None = None,
        workers: int = 0,
        source: ModelSource | None = None,
        executor: CompileExecutor | None = None,
        **parameters: Any,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise ValueError(f"model is a loaded one: PICEngine.from_pretrained({model!r}, ...) loads it by its name")
        check_tokenizer(model, tokenizer)
        if not isinstance(store, PICacheStore | None):
            raise ValueError(f"store is a PICacheStore, not {store!r}: a folder goes into PICacheStore(disk_path=...)")
        self.store = default_store(model) if store is None else store  # in front, as it says why nothing is pickled
        super().__init__()
        self.model, self.tokenizer, self.salt, self.encoder_enabled = model, tokenizer, salt, encoder_enabled
        self.method = make_method(method, model, tokenizer, parameters)
        self.prompt_builder = PromptBuilder(tokenizer) if prompt_builder is None else prompt_builder
        self.splitter = splitting.create(splitter)
        self.mac = MacConfig.parse(mac) if isinstance(mac, str) else mac
        self.catalog = DocumentCatalog(self.store)
        self._plain = methods.create("full", model)
        rotary_embeddings(self.method.backbone)  # which costs a pass that belongs to no question
        self._owns_executor = executor is None
        self.executor = executor
        if executor is not None:
            if workers:
                raise ValueError("workers= starts Ray actors of its own: leave it out when giving an executor=")
            executor.check(self.method)
        elif workers < 0:
            raise ValueError(f"workers is a number of Ray actors, or 0 for none, got {workers}")
        elif workers and self.method.keeps_tokens_only:
            logger.warning("method %r has nothing to compile: no workers are started", self.method.name)
        elif workers:
            spec_of(self.method)  # before actors are started for nothing
            self.executor = CompileExecutor(ModelSource.of(self.method.model) if source is None else source, workers)
            try:
                self.executor.check(self.method)
            except BaseException:
                self.executor.close()
                raise

    def __setattr__(self, name: str, value: Any) -> None:
        """Settings are set at any time, as they are given; not what the prompt builder or the catalog is made with."""
        if name in ("model", "tokenizer", "store") and name in vars(self):
            raise AttributeError(f"an engine's {name} can't be set anew: make another PICEngine")
        if name == "method":
            value = make_method(value, self.model, self.tokenizer, {})
        elif name == "splitter":
            value = splitting.create(value)
        elif name == "mac" and isinstance(value, str):
            value = MacConfig.parse(value)
        elif name == "salt" and not isinstance(value, str):
            raise ValueError(f"salt is a text, '' for none, not {value!r}")
        super().__setattr__(name, value)

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path,
        *,
        tokenizer: Any = None,
        device: str = "auto",
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **arguments: Any,
    ) -> PICEngine:
        """An engine from an adapter or a plain model: a folder, Hub id or registered name.

        The model goes to `device`: "auto" is a GPU if there is one, as on the command line; with ``device_map``, or
        quantised, it stays where it was loaded.
        `arguments` are the engine's, parameters of its method among them, and all others those of
        ``AutoModelForCausalLM.from_pretrained`` (what both know, as ``token`` of the Hub, is the latter's; of a method
        it is written as ``method="name:parameters"``).

        Args:
            tokenizer: instead of the model's own.
            chat_template_kwargs: of its chat template, ``{"enable_thinking": False}`` say.
        """
        names = set(inspect.signature(cls.__init__).parameters) - {"self", "model", "tokenizer", "parameters"}
        if isinstance(method := arguments.get("method"), str):
            chosen = methods.get(methods.parse(method)[0])
            names |= {"quantize", *chosen.parameter_names()} - set(HUB_ARGUMENTS)
        options = {name: arguments.pop(name) for name in names & arguments.keys()}
        placed = named_device(device, "device")
        if "device_map" in arguments and device != "auto":
            raise ValueError(f"device={device!r} and device_map both say where the model goes: give one of them")
        model = load_model(name_or_path, **arguments)
        if "device_map" not in arguments and getattr(backbone_of(model), "hf_quantizer", None) is None:
            model = model.to(placed)
        if tokenizer is None:
            places = ("revision", "subfolder", *HUB_ARGUMENTS)
            hub = {key: value for key, value in arguments.items() if key in places}
            tokenizer = load_tokenizer(name_or_path, model, chat_template_kwargs=chat_template_kwargs, **hub)
        elif chat_template_kwargs:
            raise ValueError("chat_template_kwargs are of the model's own tokenizer: give one of both")
        if options.get("workers"):
            options.setdefault("source", ModelSource(str(name_or_path), arguments, str(model.device)))
        return cls(model, tokenizer, **options)

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
        question: Question,
        documents: Sequence[DocumentLike] = (),
        *,
        document_ids: Sequence[str] = (),
        encoder: bool | None = None,
        **generate_kwargs: Any,
    ) -> Answer:
        """The answer to one question over documents. `chat`, `ask_batch`, `stream` and conversations take the same.

        Args:
            question: text, or chat messages (role and content) for a tokenizer that has a chat template.
            documents: text or `Document`s; compiled now unless the store has them.
            document_ids: ids from `add_documents`, appended behind `documents`.
            encoder: overrides `encoder_enabled` for this call; False puts the documents into the prompt as text.
            generate_kwargs: of Hugging Face ``generate``; greedy and at most 256 new tokens by default.

        Raises:
            UnknownDocumentError: an id that isn't there.
            ValueError: empty or over-long documents, a prompt that doesn't fit, bad generation settings.
            PICacheTooLargeError, StoreFullError: the store has no room for these documents.
        """
        start, on = time.perf_counter(), self.with_encoder(encoder)
        with one_walk():
            settings = self.settings(generate_kwargs)
            prepared = self.prepare(question, self.segments_of(documents, document_ids), encoder=on)
            ((answer, *_),) = self.answers([prepared], settings, start, encoder=on)
            return answer

    def chat(self, messages: Sequence[Message], documents: Sequence[DocumentLike] = (), **options: Any) -> Answer:
        """`ask` with chat messages."""
        return self.ask(messages, documents, **options)

    def ask_batch(
        self,
        requests: Iterable[Request | tuple[Question, Sequence[DocumentLike]]],
        *,
        encoder: bool | None = None,
        **generate_kwargs: Any,
    ) -> list[Answer]:
        """Answers in the order of `requests`, which may have different numbers of documents, or none.

        All documents that are not in the store are compiled in one call. Methods with `link_batch` (``comb``, ``full``)
        decode rows behind each other that have equal room for answers in one left-padded batch; the others, and where
        `stop_strings` or `stopping_criteria` may end rows, go row by row.
        """
        start, on = time.perf_counter(), self.with_encoder(encoder)
        with one_walk():
            settings, questions = self.settings(generate_kwargs), []
            for request in requests:
                if isinstance(request, str | Mapping):
                    raise ValueError(f"a request is a Request or a tuple (question, documents), not {request!r:.80}")
                row = request if isinstance(request, Request) else Request(*request)
                segments = self.segments_of(row.documents, row.document_ids)
                questions.append(self.prepare(row.question, segments, encoder=on))
            return [answer for answer, *_ in self.answers(questions, settings, start, encoder=on)]

    def stream(
        self,
        question: Question,
        documents: Sequence[DocumentLike] = (),
        *,
        document_ids: Sequence[str] = (),
        encoder: bool | None = None,
        **generate_kwargs: Any,
    ) -> AnswerStream:
        """An iterator over pieces of the answer's text, with ``.answer`` and ``.report`` at its end.

        Bad input is raised here, what goes wrong later by the iterator. Leaving the iterator stops generation and
        gives back the documents.
        """
        start, on = time.perf_counter(), self.with_encoder(encoder)
        check_stream(generate_kwargs, self.method.backbone)
        with one_walk():
            settings = self.settings(generate_kwargs)
            prepared = self.prepare(question, self.segments_of(documents, document_ids), encoder=on)

        def run(streamer: Any, stop: threading.Event) -> Answer:
            with one_walk():
                given = {**settings, "streamer": streamer}
                ((answer, *_),) = self.answers([prepared], given, start, stop, encoder=on)
                return answer

        return AnswerStream(run, self.tokenizer)

    def conversation(
        self,
        documents: Sequence[DocumentLike] = (),
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

    # ---- documents ----

    def add_documents(
        self, documents: Sequence[DocumentLike], *, pin: bool = False, ttl: float | None = None
    ) -> list[str]:
        """Compiles documents now; returns their ids for ``document_ids=``.

        An id is the document's own or ``doc-`` and the start of its content key. Adding the same content again renews
        pin and ttl. With method ``prefix`` only token ids are kept here: prefixes are computed when first asked about.

        Args:
            pin: keeps their PICaches from being evicted.
            ttl: seconds after which the ids are unknown and the PICaches gone; None is for ever.

        Raises:
            ValueError: empty or over-long documents, a ttl that isn't positive, or an id that
                stands for another text.
            StoreFullError: no room for a document, beside those that are in use or pinned.
        """
        if ttl is not None and not (isinstance(ttl, int | float) and 0 < ttl <= sys.float_info.max):
            raise ValueError(f"ttl must be a positive number of seconds or None, got {ttl!r}")
        segments = self.segments_of(documents)
        self.check_lengths(segments)
        split = by_document(segments)
        self.catalog.check(split)
        # in chunks, so that a store smaller than the whole collection can make room
        starts = range(0, len(split), _ADD_CHUNK)
        for start in tqdm(starts, "compiling documents", disable=True if len(starts) < 2 else None):
            self._add(split[start : start + _ADD_CHUNK], pin, ttl)
        return [parts[0].id for parts in split]

    def _add(self, documents: Sequence[Sequence[KeyedSegment]], pin: bool, ttl: float | None) -> None:
        """Compiles documents in one call, or by halves where the store has no room for all of them at once."""
        try:
            with self.acquired([segment for parts in documents for segment in parts], ttl=ttl):
                for parts in documents:
                    self.catalog.add(parts, pin=pin, ttl=ttl)
        except StoreFullError:
            half = len(documents) // 2
            if not half:
                raise
            self._add(documents[:half], pin, ttl)
            self._add(documents[half:], pin, ttl)

    def remove_documents(self, ids: Iterable[str]) -> None:
        """Forgets documents; answers under way keep theirs to the end.

        Raises:
            UnknownDocumentError: an unknown id; then none is removed.
        """
        self.catalog.remove(ids)

    # ---- weights ----

    def model_changed(self) -> None:
        """To be called when weights were written in a way that nothing shows: a few elements through ``.data``, weights
        that accelerate has offloaded, or tensors that are no parameter and no buffer.

        All other changes are noticed at the next call (docs/python.md). Documents compiled before count as hits only
        if all weights turn out to be what they were, and no hook or forward is your own; conversations are linked from
        their start. For all engines on this model.
        """
        forget_identity(self.model)


def default_store(model: Any) -> PICacheStore:
    """At most 4 GiB where the model is, and as many on the host if that is a GPU."""
    device = backbone_of(model).get_input_embeddings().weight.device
    return PICacheStore(
        device=device, device_bytes=_STORE_BYTES, host_bytes=0 if device.type == "cpu" else _STORE_BYTES
    )


def make_method(method: str | Method | None, model: Any, tokenizer: Any, parameters: dict[str, Any]) -> Method:
    """The method from ``"name:parameters"`` and further `parameters`, or as it is.

    None is what an adapter was trained for; of a plain model `primed`, or `full` where its documents can't be linked.

    Raises:
        ValueError: unknown method or parameter, parameters beside an instance, or an instance for another model.
    """
    if method is None and (method := trained_method(model)) is None:
        try:
            return make_method("primed", model, tokenizer, parameters)
        except ValueError as error:
            if parameters:
                raise
            logger.warning("no method was named, and primed can't be used, so documents stand in the prompt: %s", error)
            method = "full"
    if isinstance(method, Method):
        if parameters:
            raise ValueError(f"parameters {', '.join(sorted(parameters))} belong into the Method instance")
        if method.backbone is not backbone_of(model):
            raise ValueError(f"the method {method.name!r} is for another model than this engine's: make one for it")
        return method
    if not isinstance(method, str):
        raise ValueError(f"method is a name, or a Method instance, not {method!r}")
    name, from_spec = methods.parse(method)
    cls = methods.get(name)
    return methods.create(name, model, **cls.tokenized({**from_spec, **parameters}, tokenizer, model))

"""`comb_serving.LLM`: vLLM's offline engine over an adapter or a plain model, with documents, in one process.

The same preprocessor, manager, pool and encoder as behind `comb serve`, without HTTP and without encoder processes.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from comb.backbones.loading import resolve_name
from comb.documents.document import Document, PromptBuilder
from comb_serving.api import documents as documents_api
from comb_serving.api.choice import MethodChoice
from comb_serving.api.errors import RequestError
from comb_serving.api.preprocessor import NO_PLACE, PreprocessedRequest, Preprocessor, placing_of, tokenizer_of
from comb_serving.api.response import report
from comb_serving.api.routes import CHAT, COMPLETIONS, DOCUMENTS
from comb_serving.config.instance import instance_folder, read_secret
from comb_serving.config.options import INSTANCE_DIR, ServeOptions
from comb_serving.encoding.compiler import DocumentPrompt, LocalCompiler
from comb_serving.encoding.local import LocalEncoders
from comb_serving.encoding.worker import load
from comb_serving.launch.preflight import check_plain_options, check_start
from comb_serving.linking.layout import LinkingLayout
from comb_serving.linking.methods import LinkMethod
from comb_serving.linking.reports import ReportReceiver, name_of
from comb_serving.manager.leases import Lease, PoolFullError
from comb_serving.manager.manager import PICManager
from comb_serving.pool.capability import KEY
from comb_serving.pool.pool import SharedPool
from comb_serving.vllm.linking.setup import linking_options

Result = TypeVar("Result")
Given: TypeAlias = str | Mapping[str, Any] | Document
Prompt: TypeAlias = str | list[int]
Messages: TypeAlias = list[dict[str, Any]]


class LLM:
    """``LLM("out/adapter", dtype="float32").chat(messages, documents=[...])``: one at a time in a process.

    Args:
        checkpoint: adapter folder or Hub id; with `method` any plain model, also by a registered name.
        method: that a plain model links documents with: ``primed``, ``legolink:16``, ``naive``, ``full``;
            a hybrid: ``hypic:8``. An adapter of link tokens has its own.
        encoder: False makes no pool and no encoder; documents go into the prompt.
        pool_bytes: of all tensor-parallel ranks together: bytes, ``8GiB``, or a share of memory such as ``25%``.
        pool_block: tokens per block.
        pool_dtype: "auto", documents as they are computed, or "fp8", in about half the bytes.
        backbone, encoder_device, host_bytes, disk_path, disk_bytes: as `ServeOptions`.
        engine: options of `vllm.LLM`.

    Raises:
        RuntimeError: if this process has such an engine already.
        ValueError: for sizes and dtypes that no pool can have, options of an encoder where there is none, and
            checkpoints that don't fit `method`.
    """

    _compiler: LocalCompiler | None = None
    _reports: ReportReceiver | None = None

    def __init__(
        self,
        checkpoint: str | Path,
        *,
        method: str | None = None,
        encoder: bool = True,
        pool_bytes: int | str = 2**30,
        pool_block: int = 16,
        pool_dtype: str = "auto",
        backbone: str | None = None,
        encoder_device: str = "auto",
        host_bytes: int = 0,
        disk_path: str | None = None,
        disk_bytes: int | None = None,
        **engine: Any,
    ) -> None:
        import vllm

        asked = None if method is None else LinkMethod.parse(method).name
        start = check_start(str(checkpoint), asked, backbone)
        method = start.method
        if method is not None:
            check_plain_options(
                {
                    "encoder": not encoder,
                    "encoder_device": encoder_device != "auto",
                    "pool_dtype": pool_dtype != "auto",
                }
            )
        self.options = ServeOptions(
            str(checkpoint),
            method=method,
            backbone=start.backbone,
            encoder=encoder,
            encoder_device=encoder_device,
            ranks=int(engine.get("tensor_parallel_size", 1)),
            pool_bytes=str(pool_bytes),
            pool_block=pool_block,
            pool_dtype=pool_dtype,
            host_bytes=host_bytes,
            disk_path=disk_path,
            disk_bytes=disk_bytes,
        )
        if INSTANCE_DIR in os.environ:
            raise RuntimeError(f"{INSTANCE_DIR} is set: close() the other engine of this process first")
        with ExitStack() as stack:
            manager = None
            folder = stack.enter_context(instance_folder())
            self._secret = read_secret(folder)
            if self.options.has_pool and method is not None:
                ours = linking_options(method, str(checkpoint), start.link_tokens)
                for name in engine.keys() & ours.keys():
                    raise ValueError(f"{name} can't be given with method: linking documents needs its own")
                engine |= ours
            variables = self.options.pool_environment(folder)
            os.environ.update(variables)  # vLLM's worker, here or in a process of its own, looks for them
            stack.callback(lambda: [os.environ.pop(name, None) for name in variables])
            self.llm = vllm.LLM(resolve_name(self.options.model), **engine)
            stack.callback(self._end_engine)
            if self.options.has_pool and method is not None:
                layout = LinkingLayout.read(folder)
                ask = self._ask_workers if self.options.has_tiers else None
                self._compiler = LocalCompiler(layout, LinkMethod.parse(method), self._secret, self._compile, ask)
                manager = PICManager(layout, self._compiler)
                self._reports = ReportReceiver(folder)
                stack.callback(self._reports.close)
            elif self.options.has_pool:
                worker = load(self.options, folder, self._own_pools())
                if worker.store is not None:
                    stack.callback(worker.store.flush)  # to the disk tier, if there is one
                manager = PICManager(worker.pools[0].layout, LocalEncoders(worker))
            builder = PromptBuilder(tokenizer_of(self.options))
            self.preprocessor = Preprocessor(
                builder, manager, MethodChoice(self.options), placing=placing_of(self.options)
            )
            # a loop of its own: the caller may be inside of one (notebooks)
            self._loop = asyncio.new_event_loop()
            thread = threading.Thread(target=self._loop.run_forever, name="comb-documents", daemon=True)
            thread.start()
            stack.callback(thread.join)
            stack.callback(self._loop.call_soon_threadsafe, self._loop.stop)
            self._stack = stack.pop_all()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Any = None,
        *,
        documents: Sequence[Given] | Sequence[Sequence[Given]] | None = None,
        method: str | None = None,
        encoder: bool = True,
        **options: Any,
    ) -> list[Any]:
        """vLLM's `generate` over documents.

        Args:
            prompts: a text or token ids, or several of them.
            documents: those of the prompt; for several prompts one list each.
            method: of this call, for a plain model: another one that shares its compiled documents, or ``full``.
            encoder: False puts documents into the prompts of this call, for an adapter: its plain backbone answers.
            options: of vLLM's `generate`.

        Returns:
            vLLM's request outputs; `comb` of each says what became of its documents.

        Raises:
            ValueError: for prompts or documents that can't be served, saying which field.
            PoolFullError, PoolPinnedError: if one prompt's documents don't fit beside those that are kept.
            EncoderError: a document could not be encoded. Of a plain model, neither: the prompt is computed whole.
        """
        single = isinstance(prompts, str) or (bool(prompts) and isinstance(prompts[0], int))
        rows = [{"prompt": prompt} for prompt in ([prompts] if single else prompts)]
        given = _per_row(documents, len(rows), single)
        return self._answer(COMPLETIONS, rows, given, sampling_params, _comb(method, encoder), options)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Any = None,
        *,
        documents: Sequence[Given] | Sequence[Sequence[Given]] | None = None,
        method: str | None = None,
        encoder: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> list[Any]:
        """As `generate`, for one conversation or several."""
        single = bool(messages) and isinstance(messages[0], Mapping)
        more = {"chat_template_kwargs": dict(chat_template_kwargs)} if chat_template_kwargs else {}
        rows = [{"messages": list(each), **more} for each in ([messages] if single else messages)]
        given = _per_row(documents, len(rows), single)
        return self._answer(CHAT, rows, given, sampling_params, _comb(method, encoder), options)

    def add_document(self, document: Given, *, pin: bool = False, ttl_s: float | None = None) -> dict[str, Any]:
        """Encodes a document, to be named as ``{"id": ...}`` from now on; what `POST /v1/documents` answers.

        Args:
            pin: keep it in the pool. ttl_s: seconds after which it may go from there.

        Raises:
            ValueError: for a document that can't be taken.
            PoolFullError, PoolPinnedError, EncoderError: as `generate`.
        """
        given = _as_body(document)
        body = {"text": given} if isinstance(given, str) else dict(given)
        return self._document("POST", DOCUMENTS, {**body, "pin": pin, "ttl_s": ttl_s})

    def remove_document(self, document_id: str) -> None:
        """Forgets a document that was added. Raises ValueError if it wasn't."""
        self._document("DELETE", f"{DOCUMENTS}/{document_id}", {})

    def _document(self, method: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        try:
            return self._run(documents_api.answer(self.preprocessor, method, path, body, ""))[1]
        except RequestError as error:
            raise ValueError(error.message) from error

    def close(self) -> None:
        """Ends the engine, its processes and its pool; a second call does nothing."""
        self._stack.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _own_pools(self) -> list[SharedPool]:
        """The engine's pools if its worker runs in this process; none otherwise, as they can be attached then."""
        from vllm.v1.executor.uniproc_executor import UniProcExecutor

        if not isinstance(getattr(self.llm.llm_engine, "model_executor", None), UniProcExecutor):
            return []
        found: list[SharedPool] = self.llm.apply_model(lambda model: model.comb.pool)
        return found

    def _end_engine(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()

    def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        return future.result() if self._compiler is None else self._compiler.run(future)

    def _ask_workers(self, name: str, arguments: tuple[Any, ...]) -> list[Any]:
        found: list[Any] = self.llm.collective_rpc(name, args=arguments)
        return found

    def _compile(self, requests: list[DocumentPrompt]) -> list[Any]:
        from vllm import SamplingParams

        prompts = [{"prompt_token_ids": request.prompt, "cache_salt": request.salt} for request in requests]
        parameters = [SamplingParams(temperature=0, **request.parameters) for request in requests]
        outputs: list[Any] = self.llm.generate(prompts, parameters, use_tqdm=False)
        return outputs

    def _answer(
        self,
        path: str,
        rows: list[dict[str, Any]],
        documents: list[Sequence[Given]],
        sampling_params: Any,
        comb: dict[str, Any],
        options: dict[str, Any],
    ) -> list[Any]:
        if sampling_params is None:
            sampling_params = self.llm.get_default_sampling_params()
        parameters = list(sampling_params) if isinstance(sampling_params, Sequence) else [sampling_params] * len(rows)
        if len(parameters) != len(rows):
            raise ValueError(f"{len(rows)} prompts and {len(parameters)} sampling_params: give one, or one each")
        bodies = [
            {**row, "documents": [_as_body(one) for one in given], "comb": comb}
            # what keeps vLLM from reading its prefix cache, however it was asked for
            | ({"prompt_logprobs": 0} if chosen.skip_reading_prefix_cache else {})
            for row, given, chosen in zip(rows, documents, parameters, strict=True)
        ]
        try:
            prepared = self._run(_in_order(self.preprocessor.preprocess(path, body, "") for body in bodies))
            prompts = [self._prompt(path, one) for one in prepared]
        except RequestError as error:
            raise ValueError(error.message) from error
        answers: dict[int, Any] = {}
        while len(answers) < len(rows):  # as many at once as the pool has room for
            left = [index for index in range(len(rows)) if index not in answers]
            leases = self._run(self._leases(prepared, left))
            tokens = {
                index: prepared[index].signed(lease, "", self._secret)
                for index, lease in leases.items()
                if prepared[index].needs_capability
            }
            try:
                given = [_allowed(parameters[index], tokens.get(index)) for index in leases]
                outputs = self.llm.generate([prompts[index] for index in leases], given, **options)
            finally:
                for held in filter(None, leases.values()):
                    self._loop.call_soon_threadsafe(held.release)
            for (index, lease), output in zip(leases.items(), outputs, strict=True):
                output.comb = {**report(prepared[index], lease), **self._said(tokens.get(index))}
                answers[index] = output
        return [answers[index] for index in range(len(rows))]

    def _said(self, token: str | None) -> dict[str, int]:
        """What the engine says of a prompt with linked documents."""
        link = None if self._reports is None or token is None else self._reports.take(name_of(token))
        return {} if link is None else asdict(link)

    def _prompt(self, path: str, prepared: PreprocessedRequest) -> Any:
        body = prepared.body
        if path == COMPLETIONS and not prepared.segments:
            return body["prompt"]  # vLLM's own tokenisation
        if prepared.segments:
            if not prepared.prompts:
                raise ValueError("messages with tool calls can't be combined with documents here")
            (ids,) = prepared.prompts
        else:
            ids = list(self.preprocessor.builder_for(body).build(body["messages"]).query)
        salt = {"cache_salt": body["cache_salt"]} if "cache_salt" in body else {}
        return {"prompt_token_ids": ids, **salt}

    async def _leases(self, prepared: list[PreprocessedRequest], rows: list[int]) -> dict[int, Lease | None]:
        """Leases of those rows that there is room for now, None where no documents are linked."""
        linked = {index: prepared[index] for index in rows if prepared[index].linked}
        found = await asyncio.gather(
            *(self.preprocessor.acquire(row.segments, "") for row in linked.values()), return_exceptions=True
        )
        leases: dict[int, Lease | None] = {index: None for index in rows if index not in linked}
        leases |= {index: lease for index, lease in zip(linked, found, strict=True) if isinstance(lease, Lease)}
        errors = {i: error for i, error in zip(linked, found, strict=True) if isinstance(error, BaseException)}
        grave = {index: error for index, error in errors.items() if not isinstance(error, PoolFullError)}
        for index, error in (grave or ({} if leases else errors)).items():
            if not (self.preprocessor.choice.plain and isinstance(error, NO_PLACE)):
                for lease in filter(None, leases.values()):
                    lease.release()
                raise error
            prepared[index], leases[index] = self.preprocessor.inlined(prepared[index]), None
        return dict(sorted(leases.items()))


def _comb(method: str | None, encoder: bool) -> dict[str, Any]:
    """The `comb` of a body."""
    return {**({} if method is None else {"method": method}), **({} if encoder else {"encoder": False})}


def _allowed(parameters: Any, token: str | None) -> Any:
    """Sampling parameters with the capability of a request, if it has one."""
    if token is None:
        return parameters
    found = parameters.clone()
    found.extra_args = {**(found.extra_args or {}), KEY: token}
    return found


async def _in_order(work: Any) -> list[PreprocessedRequest]:
    return [await one for one in work]


def _per_row(documents: Any, count: int, single: bool) -> list[Sequence[Given]]:
    """The documents of each prompt."""
    if documents is None:
        return [()] * count
    if isinstance(documents, str | Mapping) or not isinstance(documents, Sequence):
        raise ValueError(f"documents is a list of documents, not {type(documents).__name__}")
    if single:
        return [documents]
    nested = all(isinstance(each, Sequence) and not isinstance(each, str) for each in documents)
    if not nested or len(documents) != count:
        raise ValueError(f"for {count} prompts documents is a list of {count} lists, one per prompt")
    return list(documents)


def _as_body(given: Given) -> Any:
    if not isinstance(given, Document):
        return given
    fields = {name: value for name, value in asdict(given).items() if value is not None}
    return {**fields, "token_ids": list(given.token_ids)} if given.token_ids is not None else fields

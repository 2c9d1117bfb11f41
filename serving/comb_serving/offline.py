"""`comb_serving.LLM`: vLLM's offline engine over a comb checkpoint, with documents, in one process.

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
from comb_serving.api.errors import RequestError
from comb_serving.api.preprocessor import PreprocessedRequest, Preprocessor, tokenizer_of
from comb_serving.api.response import report
from comb_serving.api.routes import CHAT, COMPLETIONS, DOCUMENTS
from comb_serving.config.instance import instance_folder, read_secret
from comb_serving.config.options import INSTANCE_DIR, POOL_BLOCK, POOL_BYTES, POOL_DTYPE, POOL_DTYPES, ServeOptions
from comb_serving.config.sizes import parse_pool_size
from comb_serving.encoding.local import LocalEncoders
from comb_serving.encoding.worker import load
from comb_serving.manager.leases import Lease, PoolFullError
from comb_serving.manager.manager import PICManager
from comb_serving.pool.capability import KEY

Result = TypeVar("Result")
Given: TypeAlias = str | Mapping[str, Any] | Document
Prompt: TypeAlias = str | list[int]
Messages: TypeAlias = list[dict[str, Any]]


class LLM:
    """``LLM("out/adapter", dtype="float32").chat(messages, documents=[...])``: one at a time in a process.

    Args:
        checkpoint: adapter folder or Hub id.
        encoder: False makes no pool and no encoder; documents go into the prompt.
        pool_bytes: of all tensor-parallel ranks together: bytes, ``8GiB``, or a share of memory such as ``25%``.
        pool_block: tokens per block.
        pool_dtype: "auto", documents as they are computed, or "fp8", in about half the bytes.
        backbone, encoder_device, host_bytes, disk_path, disk_bytes: as `ServeOptions`.
        root: where the pool's folder is made; shared memory by default.
        engine: options of `vllm.LLM`.

    Raises:
        RuntimeError: if this process has such an engine already.
        ValueError: for sizes and dtypes that no pool can have.
    """

    def __init__(
        self,
        checkpoint: str | Path,
        *,
        encoder: bool = True,
        pool_bytes: int | str = 2**30,
        pool_block: int = 16,
        pool_dtype: str = "auto",
        backbone: str | None = None,
        encoder_device: str = "auto",
        host_bytes: int = 0,
        disk_path: str | None = None,
        disk_bytes: int | None = None,
        root: Path | None = None,
        **engine: Any,
    ) -> None:
        import vllm

        self.options = ServeOptions(
            str(checkpoint),
            backbone=backbone,
            encoder=encoder,
            encoder_device=encoder_device,
            ranks=int(engine.get("tensor_parallel_size", 1)),
            host_bytes=host_bytes,
            disk_path=disk_path,
            disk_bytes=disk_bytes,
        )
        if pool_dtype not in POOL_DTYPES:
            raise ValueError(f"pool_dtype is {' or '.join(POOL_DTYPES)}, not {pool_dtype!r}")
        if INSTANCE_DIR in os.environ:
            raise RuntimeError(f"{INSTANCE_DIR} is set: close() the other engine of this process first")
        with ExitStack() as stack:
            manager = None
            folder = stack.enter_context(instance_folder(root))
            self._secret = read_secret(folder)
            variables = {INSTANCE_DIR: str(folder)}
            if encoder:
                variables[POOL_BYTES] = parse_pool_size(str(pool_bytes))
                variables |= {POOL_BLOCK: str(pool_block), POOL_DTYPE: pool_dtype}
            os.environ.update(variables)  # vLLM's worker, here or in a process of its own, looks for them
            stack.callback(lambda: [os.environ.pop(name, None) for name in variables])
            self.llm = vllm.LLM(resolve_name(str(checkpoint)), **engine)
            stack.callback(self._end_engine)
            if encoder:
                worker = load(self.options, folder)
                if worker.store is not None:
                    stack.callback(worker.store.flush)  # to the disk tier, if there is one
                manager = PICManager(worker.pools[0].layout, LocalEncoders(worker))
            self.preprocessor = Preprocessor(PromptBuilder(tokenizer_of(self.options)), manager)
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
        encoder: bool = True,
        **options: Any,
    ) -> list[Any]:
        """vLLM's `generate` over documents.

        Args:
            prompts: a text or token ids, or several of them.
            documents: those of the prompt; for several prompts one list each.
            encoder: False puts documents into the prompts of this call: the plain backbone answers.
            options: of vLLM's `generate`.

        Returns:
            vLLM's request outputs; `comb` of each says what became of its documents.

        Raises:
            ValueError: for prompts or documents that can't be served, saying which field.
            PoolFullError, PoolPinnedError: if one prompt's documents don't fit beside those that are kept.
            EncoderError: a document could not be encoded.
        """
        single = isinstance(prompts, str) or (bool(prompts) and isinstance(prompts[0], int))
        rows = [{"prompt": prompt} for prompt in ([prompts] if single else prompts)]
        return self._answer(
            COMPLETIONS, rows, _per_row(documents, len(rows), single), sampling_params, encoder, options
        )

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Any = None,
        *,
        documents: Sequence[Given] | Sequence[Sequence[Given]] | None = None,
        encoder: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> list[Any]:
        """As `generate`, for one conversation or several."""
        single = bool(messages) and isinstance(messages[0], Mapping)
        more = {"chat_template_kwargs": dict(chat_template_kwargs)} if chat_template_kwargs else {}
        rows = [{"messages": list(each), **more} for each in ([messages] if single else messages)]
        given = _per_row(documents, len(rows), single)
        return self._answer(CHAT, rows, given, sampling_params, encoder, options)

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

    def _end_engine(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()

    def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _answer(
        self,
        path: str,
        rows: list[dict[str, Any]],
        documents: list[Sequence[Given]],
        sampling_params: Any,
        encoder: bool,
        options: dict[str, Any],
    ) -> list[Any]:
        if sampling_params is None:
            sampling_params = self.llm.get_default_sampling_params()
        parameters = list(sampling_params) if isinstance(sampling_params, Sequence) else [sampling_params] * len(rows)
        if len(parameters) != len(rows):
            raise ValueError(f"{len(rows)} prompts and {len(parameters)} sampling_params: give one, or one each")
        bodies = [
            {**row, "documents": [_as_body(one) for one in given], "comb": {"encoder": encoder}}
            for row, given in zip(rows, documents, strict=True)
        ]
        try:
            prepared = self._run(_in_order(self.preprocessor.preprocess(path, body, "") for body in bodies))
            prompts = [self._prompt(path, one) for one in prepared]
        except RequestError as error:
            raise ValueError(error.message) from error
        answers: dict[int, Any] = {}
        while len(answers) < len(rows):  # as many at once as the pool has room for
            left = [index for index in range(len(rows)) if index not in answers]
            leases = self._run(self._leases({index: prepared[index] for index in left}))
            try:
                given = [self._allowed(parameters[index], prepared[index], lease) for index, lease in leases.items()]
                outputs = self.llm.generate([prompts[index] for index in leases], given, **options)
            finally:
                for held in filter(None, leases.values()):
                    self._loop.call_soon_threadsafe(held.release)
            for (index, lease), output in zip(leases.items(), outputs, strict=True):
                output.comb = report(prepared[index], lease)
                answers[index] = output
        return [answers[index] for index in range(len(rows))]

    def _allowed(self, parameters: Any, prepared: PreprocessedRequest, lease: Lease | None) -> Any:
        """Sampling parameters with the capability of a request, if it has documents."""
        if not prepared.segments:
            return parameters
        found = parameters.clone()
        found.extra_args = {**(found.extra_args or {}), KEY: prepared.signed(lease, "", self._secret)}
        return found

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

    async def _leases(self, rows: dict[int, PreprocessedRequest]) -> dict[int, Lease | None]:
        """Leases of those rows that there is room for now, None where no documents are linked."""
        linked = {index: row for index, row in rows.items() if row.segments and row.encoder}
        found = await asyncio.gather(
            *(self.preprocessor.acquire(row.segments, "") for row in linked.values()), return_exceptions=True
        )
        leases: dict[int, Lease | None] = {index: None for index in rows if index not in linked}
        leases |= {index: lease for index, lease in zip(linked, found, strict=True) if isinstance(lease, Lease)}
        errors = [error for error in found if isinstance(error, BaseException)]
        grave = [error for error in errors if not isinstance(error, PoolFullError)] or ([] if leases else errors)
        if grave:
            for lease in filter(None, leases.values()):
                lease.release()
            raise grave[0]
        return dict(sorted(leases.items()))


async def _in_order(work: Any) -> list[PreprocessedRequest]:
    return [await one for one in work]


def _per_row(documents: Any, count: int, single: bool) -> list[Sequence[Given]]:
    """The documents of each prompt."""
    if documents is None:
        return [()] * count
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

"""vLLM itself as what compiles documents of plain models: a request of its own for each, whose prompt is the document.

Its answer, one token that nobody reads, says that keys and values are in the pool (`comb_serving.vllm.linking`). What
the workers have kept beyond the pool comes back from there instead, if all of them still have it. Under each of vLLM's
LoRAs a document has other keys and values, and another name.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import queue
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from comb.cache.picache import compiled_key
from comb.documents.catalog import KeyedSegment
from comb_serving.encoding.protocol import Encoded, EncoderError, EncoderIdentity
from comb_serving.linking.layout import LinkingLayout
from comb_serving.linking.methods import LinkMethod
from comb_serving.pool.capability import COMPILE, KEY, Capability, PoolHandle, digest, pack

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

FIRST = -(2**63)  # priority of who is served before all others
FILES = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")  # that vLLM reads


@dataclass(eq=False)
class Loras:
    """The LoRAs of an engine: vLLM's `LoRARequest`s by the name that requests have for them; `known` may grow.

    vLLM loads a LoRA's files when it needs them, again after others have taken its place, and keeps what it has loaded
    by number: so a path stands for the files that it held when it was seen first, and a number for one path.
    """

    known: dict[str, Any] = field(default_factory=dict)
    _seen: dict[str, tuple[Path, Any, str]] = field(default_factory=dict)  # by path: folder, its files' times, digest
    _paths: dict[int, str] = field(default_factory=dict)

    def add(self, requests: Sequence[Any]) -> None:
        """Takes those of one call. Raises ValueError for one that would be mistaken for another."""
        for request in requests:
            if (path := self._paths.setdefault(request.lora_int_id, request.lora_path)) != request.lora_path:
                number = f"LoRA {request.lora_name!r}: lora_int_id {request.lora_int_id}"
                raise ValueError(f"{number} is that of {path}, which vLLM would answer with: give it another")
            self.digest(request)
            if (before := self.known.get(request.lora_name)) is None or before.lora_path != request.lora_path:
                self.known[request.lora_name] = request
        if any(self.known[request.lora_name].lora_path != request.lora_path for request in requests):
            raise ValueError("two LoRAs of one name in one call: give each its own name, and its own lora_int_id")

    def name_of(self, body: Mapping[str, Any]) -> str:
        """The LoRA that a request asks for by its `model`; empty for none."""
        model = body.get("model")
        return model if isinstance(model, str) and model in self.known else ""

    async def compiled_with(self, name: str, segments: Sequence[KeyedSegment]) -> tuple[KeyedSegment, ...]:
        """Documents under the names that they have with a LoRA, which say what its files hold.

        Raises ValueError for one whose files can't be read, or are others than at first.
        """
        if not name or not segments:
            return tuple(segments)
        digest = await asyncio.to_thread(self.digest, self.known[name])
        return tuple(replace(segment, key=compiled_key(segment.key, digest)) for segment in segments)

    def digest(self, request: Any) -> str:
        """Of the files of a LoRA, which are read again if they were written. Raises ValueError as `compiled_with`."""
        from vllm.lora.utils import get_adapter_absolute_path  # as vLLM itself finds them, on the Hub too

        path, name = request.lora_path, request.lora_name
        folder, times, digest = self._seen.get(path) or (Path(get_adapter_absolute_path(path)), None, "")
        try:
            there = [file for each in FILES if (file := folder / each).is_file()]
            now = [(file.name, stat.st_mtime_ns, stat.st_size) for file in there for stat in [file.stat()]]
            found = digest if now == times else _digest(there)
        except OSError as error:
            raise ValueError(f"LoRA {name!r} can't be read: {error}") from error
        if not there:
            raise ValueError(f"LoRA {name!r}: {folder} holds none of {', '.join(FILES)}")
        if digest not in ("", found):
            raise ValueError(
                f"LoRA {name!r}: its files have changed since they were read first: save other weights in another "
                "folder, or start anew"
            )
        self._seen[path] = folder, now, found
        return found


def _digest(files: Iterable[Path]) -> str:
    found = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            found.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return found.hexdigest()


@dataclass(frozen=True)
class DocumentPrompt:
    """A document as vLLM gets it.

    Args:
        salt: of the prefix cache: the document's key, which names its tenant too, so that only the same tenant's same
            document ever finds what is left of an earlier one there.
    """

    prompt: list[int]
    salt: str
    token: str  # the signed `Capability`
    handle: PoolHandle  # where it goes
    lora: Any = None  # vLLM's `LoRARequest` that it is compiled with; None for none

    @property
    def parameters(self) -> dict[str, Any]:
        """Of vLLM's `SamplingParams`, greedy."""
        return {"max_tokens": 1, "ignore_eos": True, "detokenize": False, "extra_args": {KEY: self.token}}


class DocumentCompiler:
    """What asking over HTTP and in process have in common: requests that compile for one engine's pool and method.

    Raises ValueError for a front that leaves no room for documents.
    """

    def __init__(self, layout: LinkingLayout, method: LinkMethod, secret: bytes) -> None:
        self.layout, self.method, self._secret, self.front = layout, method, secret, layout.front
        if len(self.front) >= layout.max_document_tokens:
            raise ValueError(
                f"{method.name} compiles documents behind {len(self.front)} tokens, and prompts have at most "
                f"{layout.max_document_tokens + 1}: raise --max-model-len, or choose --method legolink:16"
            )
        self.loras = Loras()

    async def identity(self) -> EncoderIdentity:
        """Of vLLM's model and its pool."""
        layout, compiled = self.layout, self.method.compiled
        if self.front:  # lower tiers outlive the server, and the next one may have another front
            compiled += f":{hashlib.sha256(str(self.front).encode()).hexdigest()[:12]}"
        longest = layout.max_document_tokens - len(self.front)
        return EncoderIdentity(layout.fingerprint, layout.dtype, longest, layout.vocab_size, compiled)

    def request(
        self, key: str, token_ids: Sequence[int], handle: PoolHandle, request_id: str, lora: str, *, exact: bool
    ) -> DocumentPrompt:
        """One document; `request_id` is empty where the engine alone chooses it."""
        front = () if exact else self.front
        prompt = [*front, *token_ids]
        said = Capability(
            request_id, key, tuple(pack([handle])), (digest(prompt),), COMPILE, (((len(front), len(token_ids)),),),
            lora=lora, snapshot=len(prompt) if exact else 0,
        )  # fmt: skip
        return DocumentPrompt(prompt, key, said.sign(self._secret), handle, self.loras.known.get(lora))


class EngineCompiler(DocumentCompiler):
    """Beside vLLM's server: what is asked for at one time is in one batch of the engine's.

    Attributes:
        client: vLLM's of its engine; None until the server has it.
        kept_bytes: that the workers keep beyond the pool, by tier, as they last said (`kept.kept_bytes`).
    """

    def __init__(self, layout: LinkingLayout, method: LinkMethod, secret: bytes, *, keeps: bool = False) -> None:
        super().__init__(layout, method, secret)
        self.client: Any = None
        self.kept_bytes: dict[str, int] = {}
        self._keeps, self._forgetting = keeps, set[asyncio.Task[None]]()

    def fault(self) -> str | None:
        """None: as long as vLLM answers at all, it compiles."""
        return None

    async def stop(self) -> None:
        """Nothing of its own runs."""

    def spare(self) -> bool:
        """Whether nothing in the engine waits for its first token."""
        states = self.client.output_processor.request_states.values()
        return not any(state.is_prefilling for state in states)

    def forget(self, key: str) -> None:
        """Has the workers delete what they keep of a document."""

        async def forget() -> None:
            try:
                await self.client.collective_rpc("comb_forget", args=(key,))
            except Exception as error:  # of vLLM's own; what is left on the disk is private still
                logger.warning("document %s may be on the disk still: %s", key[:12], error)

        if self._keeps and self.client is not None:
            self._forgetting.add(task := asyncio.get_running_loop().create_task(forget()))
            task.add_done_callback(self._forgetting.discard)

    def submit(
        self, key: str, token_ids: Sequence[int], handle: PoolHandle, lora: str = "", *, exact: bool = False
    ) -> asyncio.Future[Encoded]:
        """Asks for one document; a request that no longer wants it changes nothing for others that do."""
        name = f"comb-document-{key}"
        request = self.request(key, token_ids, handle, name, lora, exact=exact)
        return asyncio.get_running_loop().create_task(self._compile(request, name))

    async def _compile(self, request: DocumentPrompt, name: str) -> Encoded:
        start, tier, wrong = time.monotonic(), None, None
        try:
            if self._keeps:
                where = request.salt, request.handle.tokens, list(request.handle.blocks)
                of_ranks = await self.client.collective_rpc("comb_fetch", args=where)
                tier = None if None in of_ranks else min(of_ranks)  # "disk" before "host"
                ranks = await self.client.collective_rpc("comb_kept")
                self.kept_bytes = dict(sum(map(Counter, ranks), Counter()))
            if tier is None:
                # those who wait for it may be first themselves; under other policies vLLM refuses a priority
                priority = FIRST if self.client.vllm_config.scheduler_config.policy == "priority" else 0
                options = {"priority": priority, **request.parameters}
                asked = greedy(self.client, request.prompt, request.salt, name, request.lora, **options)
                wrong = not_compiled(await asked)
        except Exception as error:
            raise _failure(error) from error
        if wrong is not None:
            raise wrong
        return Encoded(tier or "compiled", time.monotonic() - start)


class LocalCompiler(DocumentCompiler):
    """For an engine in the hands of one thread: documents wait until that thread, in `run`, has time for them.

    Args:
        generate: a batch of requests -> vLLM's outputs, in order.
    """

    def __init__(
        self,
        layout: LinkingLayout,
        method: LinkMethod,
        secret: bytes,
        generate: Callable[[list[DocumentPrompt]], Sequence[Any]],
    ) -> None:
        super().__init__(layout, method, secret)
        self._generate = generate
        self._waiting: queue.SimpleQueue[tuple[DocumentPrompt, asyncio.Future[Encoded]] | None] = queue.SimpleQueue()

    def submit(
        self, key: str, token_ids: Sequence[int], handle: PoolHandle, lora: str = "", *, exact: bool = False
    ) -> asyncio.Future[Encoded]:
        """Asks for one document, from the manager's loop."""
        future: asyncio.Future[Encoded] = asyncio.get_running_loop().create_future()
        self._waiting.put((self.request(key, token_ids, handle, "", lora, exact=exact), future))
        return future

    def forget(self, key: str) -> None:
        """Nothing: no document has a name or a time to live here."""

    def run(self, work: Future[Result]) -> Result:
        """The result of what runs in the manager's loop; compiles here what it asks for meanwhile."""
        work.add_done_callback(lambda _: self._waiting.put(None))
        try:
            while not work.done():
                first = self._waiting.get()
                if first is not None:
                    self._compile([first])
            return work.result()
        finally:
            work.cancel()  # of who is interrupted (Ctrl-C): nobody would release its lease

    def _compile(self, batch: list[tuple[DocumentPrompt, asyncio.Future[Encoded]]]) -> None:
        """One document, and all that wait behind it; each gets an answer, even where this is interrupted."""
        start = time.monotonic()
        failure: EncoderError | None = EncoderError("vLLM did not compile it: it was interrupted")
        outputs: Iterator[Any] = iter(())
        try:
            # what is asked for together comes together
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0), batch[0][1].get_loop()).result()
            batch += filter(None, [self._waiting.get() for _ in range(self._waiting.qsize())])
            outputs, failure = iter(self._generate([request for request, _ in batch])), None
        except Exception as error:
            failure = _failure(error)
        finally:
            seconds = (time.monotonic() - start) / len(batch)
            for _, future in batch:
                wrong = failure or not_compiled(next(iter(next(outputs).outputs), None))
                if wrong is None:
                    future.get_loop().call_soon_threadsafe(future.set_result, Encoded("compiled", seconds))
                else:
                    future.get_loop().call_soon_threadsafe(future.set_exception, wrong)


def not_compiled(answer: Any) -> EncoderError | None:
    """Why a document that vLLM has answered for isn't in the pool; None if it is."""
    reason = None if answer is None else answer.finish_reason
    return None if reason == "length" else EncoderError(f"vLLM did not compile it: the request ended with {reason!r}")


def _failure(error: Exception) -> EncoderError:
    return EncoderError(f"vLLM did not compile it: {type(error).__name__}: {error}"[:1000])


async def greedy(
    client: Any, prompt: list[int], salt: str, name: str, lora: Any = None, /, *, priority: int = 0, **parameters: Any
) -> Any:
    """The likeliest answer (vLLM's `CompletionOutput`), when it has ended, to a request `name` of the server's own.

    `salt`: of the prefix cache, or empty; `lora`: vLLM's `LoRARequest`; `parameters`: of its `SamplingParams`.
    """
    from vllm import SamplingParams
    from vllm.inputs import tokens_input

    asked = tokens_input(prompt, cache_salt=salt or None)
    sampling = SamplingParams(temperature=0, **parameters)
    answers = client.generate(asked, sampling, name, lora_request=lora, priority=priority)
    outputs = [output async for output in answers]
    return outputs[-1].outputs[0]

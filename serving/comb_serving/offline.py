"""`comb_serving.LLM`: vLLM's offline engine over a plain model, or an adapter of link tokens, with documents.

The same preprocessor, manager and pool as behind `comb serve`, without HTTP.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import Any

import vllm
from vllm import SamplingParams

from comb.backbones.loading import resolve_name
from comb.documents.document import Document, PromptBuilder
from comb_serving.api.choice import MethodChoice
from comb_serving.api.conversation import renders_alike
from comb_serving.api.http import RequestError
from comb_serving.api.preprocessor import PreprocessedRequest, Preprocessor, tokenizer_of
from comb_serving.api.response import report
from comb_serving.api.routes import CHAT, COMPLETIONS
from comb_serving.config.instance import instance_folder, read_secret
from comb_serving.config.serve_options import INSTANCE_DIR, ServeOptions, parse_bytes
from comb_serving.encoding.compiler import DocumentPrompt, LocalCompiler
from comb_serving.launch.launcher import REFUSED, REFUSED_PLAIN
from comb_serving.launch.preflight import check_start
from comb_serving.linking.layout import LinkingLayout
from comb_serving.linking.methods import LinkMethod
from comb_serving.manager.leases import Lease
from comb_serving.manager.manager import NO_PLACE, PICManager
from comb_serving.pool.capability import KEY, ReportReceiver, name_of
from comb_serving.vllm.linking.setup import linking_options

# of vLLM's `chat`, what a request's body may hold too; refused there is what can't be beside documents
RENDERING = ("tools", "chat_template_kwargs", "chat_template", "add_generation_prompt", "continue_final_message")
OURS = ("backbone", "pool_bytes", "pool_block", "lora_documents")


class LLM(vllm.LLM):
    """``LLM("smollm2-135m").chat(messages, documents=[...])``: one at a time in a process.

    Args:
        model: folder, Hub id or registered name. method: that links documents; an adapter of link tokens has its own.
        options: `OURS`, which are `ServeOptions`'; all others are those of `vllm.LLM`.

    Raises:
        RuntimeError: if this process has such an engine already.
        ValueError: for sizes that no pool can have, and a model that doesn't fit `method`.
    """

    def __init__(self, model: str | os.PathLike[str], *, method: str | None = None, **options: Any) -> None:
        own: dict[str, Any] = {name: options.pop(name) for name in OURS if name in options}
        own |= {"ranks": int(options.get("tensor_parallel_size", 1))}
        own |= {"pool_bytes": parse_bytes(str(own.get("pool_bytes", "1GiB")))}
        served = check_start(ServeOptions(str(model), method=method, **own))
        if served.method is None or LinkMethod.parse(served.method).full:
            raise ValueError(f"{model}: LLM links documents in plain models (method=...); `comb serve` has adapters")
        linking = linking_options(served)
        refused = {name.replace("-", "_"): why for name, why in (REFUSED | REFUSED_PLAIN).items()}
        for name, why in (refused | dict.fromkeys(linking, "linking documents needs its own")).items():
            if options.pop(name, None) is not None:
                raise ValueError(f"{name} can't be given: {why}")
        if INSTANCE_DIR in os.environ:
            raise RuntimeError(
                f"{INSTANCE_DIR} is set: close() the other engine of this process first; in a script, make an LLM "
                "behind if __name__ == '__main__', which vLLM's own processes don't run"
            )
        with ExitStack() as stack:
            folder = stack.enter_context(instance_folder())
            self._secret = read_secret(folder)
            variables = served.environment(folder)
            os.environ.update(variables)  # vLLM's worker, here or in a process of its own, looks for them
            stack.callback(lambda: [os.environ.pop(name, None) for name in variables])
            super().__init__(resolve_name(served.model), **options, **linking)
            stack.callback(self.llm_engine.engine_core.shutdown)
            layout = LinkingLayout.read(folder)
            self._compiler = LocalCompiler(layout, LinkMethod.parse(served.method), self._secret, self._compile)
            self._reports = ReportReceiver(folder)
            stack.callback(self._reports.close)
            manager, builder = PICManager(layout, self._compiler), PromptBuilder(tokenizer_of(served))
            self.preprocessor = Preprocessor(
                builder, manager, MethodChoice(served), chats=renders_alike(self.model_config, builder.tokenizer),
                share_loras=served.lora_documents == "shared", loras=self._compiler.loras,
            )  # fmt: skip
            self._turn = threading.RLock()  # documents are compiled in the thread that asks for them
            # a loop of its own: the caller may be inside of one (notebooks)
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="comb-documents", daemon=True)
            self._thread.start()
            stack.callback(self._thread.join)
            stack.callback(self._loop.call_soon_threadsafe, self._loop.stop)
            self.close = stack.pop_all().close  # ends the engine, its processes and its pool

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _whole(self, loras: Any) -> Iterator[None]:
        """Who is interrupted (Ctrl-C) leaves nothing in the engine, where its documents' places are given to others.

        `loras` are known from now on, with documents or without.
        """
        with self._turn:
            if not self._thread.is_alive():  # nobody would answer it
                raise RuntimeError("this LLM is closed: make another")
            self._compiler.loras.add([*filter(None, loras if isinstance(loras, Sequence) else [loras])])
            requests = self.llm_engine.output_processor.request_states
            before = set(requests)
            try:
                yield
            except BaseException:
                self.llm_engine.abort_request([name for name in requests if name not in before], internal=True)
                raise

    def generate(
        self, prompts: Any, sampling_params: Any = None, *,
        documents: Any = None, method: str | None = None, **more: Any,
    ) -> Any:  # fmt: skip
        """vLLM's `generate` over documents: those of the prompt, or a list for each of several prompts.

        `method` of this call may be another one that shares its compiled documents, or ``full``. `comb` of each output
        says what became of its documents: those without room in the pool are computed with the prompt. Raises
        ValueError for what can't be served, saying which field.
        """
        with self._whole(more.get("lora_request")):
            if documents is None:
                return super().generate(prompts, sampling_params, **more)
            single = isinstance(prompts, str | Mapping) or isinstance(next(iter(prompts), None), int)
            rows = [{"prompt": prompt} for prompt in ([prompts] if single else prompts)]
            return self._answer(COMPLETIONS, rows, [documents] if single else documents, method, sampling_params, more)

    def chat(
        self, messages: Any, sampling_params: Any = None, use_tqdm: Any = True, lora_request: Any = None, *,
        documents: Any = None, method: str | None = None, **more: Any,
    ) -> Any:  # fmt: skip
        """As `generate`, for one conversation or several."""
        more |= {"use_tqdm": use_tqdm, "lora_request": lora_request}
        with self._whole(lora_request):
            if documents is None:
                return super().chat(messages, sampling_params, **more)
            single = isinstance(next(iter(messages), None), Mapping)
            template = {name: value for name in RENDERING if (value := more.pop(name, None)) is not None}
            rows = [{"messages": list(each), **template} for each in ([messages] if single else messages)]
            return self._answer(CHAT, rows, [documents] if single else documents, method, sampling_params, more)

    def _compile(self, requests: list[DocumentPrompt]) -> list[Any]:
        prompts = [{"prompt_token_ids": request.prompt, "cache_salt": request.salt} for request in requests]
        parameters = [SamplingParams(temperature=0, **request.parameters) for request in requests]
        loras = [request.lora for request in requests]
        return list(super().generate(prompts, parameters, use_tqdm=False, lora_request=loras))

    def _answer(self, path: str, rows: list[Any], documents: Any, method: str | None, asked: Any, more: Any) -> Any:
        if self.llm_engine.has_unfinished_requests():  # vLLM gives all answers to who waits first
            raise ValueError("requests are enqueued: wait_for_completion() first, then ask with documents")
        if more.get("tokenization_kwargs"):
            raise ValueError("tokenization_kwargs can't be beside documents: their prompt is made and kept whole")
        self.collective_rpc("comb_check_weights")
        asked = asked or self.get_default_sampling_params()
        asked = [one.clone() for one in (asked if isinstance(asked, Sequence) else [asked] * len(rows))]
        lists = [list(each) for each in documents if isinstance(each, Sequence) and not isinstance(each, str)]
        if not len(lists) == len(documents) == len(asked) == len(rows):
            said = "documents is a list for each of them, sampling_params one for all or one each"
            raise ValueError(f"{len(rows)} prompts: {said}")
        loras = more.pop("lora_request", None)
        loras = list(loras) if isinstance(loras, Sequence) else [loras] * len(rows)
        comb, prompts, tokens = ({} if method is None else {"method": method}), [], list[str | None]()
        bodies = [
            {**row, "documents": list(map(_body, own)), "comb": comb, "model": lora and lora.lora_name}
            # what keeps vLLM from reading its prefix cache, however it was asked for
            | ({"prompt_logprobs": 0} if chosen.skip_reading_prefix_cache else {})
            for row, own, chosen, lora in zip(rows, lists, asked, loras, strict=True)
        ]
        held: list[Lease | None] = []
        try:
            found = []
            for body in bodies:
                work = asyncio.run_coroutine_threadsafe(self._linked(path, body, held), self._loop)
                found.append(self._compiler.run(work))  # documents are compiled here, between the loop's steps
            for one, lease, parameters in zip(found, held, asked, strict=True):
                (ids,) = one.prompts or self.preprocessor.rendered(path, one).prompts
                salt = {"cache_salt": one.salt} if one.salt else {}
                prompts.append({"prompt_token_ids": ids, **salt})
                tokens.append(one.signed(lease, "", self._secret) if one.segments else None)
                if tokens[-1] is not None:
                    parameters.extra_args = {**(parameters.extra_args or {}), KEY: tokens[-1]}
            outputs = super().generate(prompts, asked, lora_request=loras, **more)
        except RequestError as error:
            raise ValueError(error.message) from error
        finally:
            for each in filter(None, held):  # behind what `run` has cancelled there
                self._loop.call_soon_threadsafe(each.release)
        if any(answer.finish_reason == "error" for output in outputs for answer in output.outputs):
            raise ValueError("vLLM didn't read the documents of a prompt as they were linked: its log says why")
        for one, lease, token, output in zip(found, held, tokens, outputs, strict=True):
            link = None if token is None else self._reports.take(name_of(token))
            output.comb = report(one, lease, link)
        return outputs

    async def _linked(self, path: str, body: dict[str, Any], held: list[Lease | None]) -> PreprocessedRequest:
        one = await self.preprocessor.preprocess(path, body, "")
        try:
            held.append(await self.preprocessor.acquire(one.segments, "", one.compiled_with) if one.linked else None)
        except NO_PLACE:
            held.append(None)
            return self.preprocessor.inlined(one)
        return one


def _body(given: str | Mapping[str, Any] | Document) -> Any:
    """A document as a request's JSON has it."""
    if not isinstance(given, Document):
        return given
    fields = {name: value for name, value in asdict(given).items() if value is not None}
    return {**fields, "token_ids": list(given.token_ids)} if given.token_ids is not None else fields

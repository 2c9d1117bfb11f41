"""vLLM as what compiles documents of plain models, with an engine that does as a test says."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from comb_serving.encoding.compiler import DocumentPrompt, EngineCompiler, LocalCompiler
from comb_serving.encoding.protocol import EncoderError
from comb_serving.linking.layout import LinkingLayout
from comb_serving.linking.methods import LinkMethod
from comb_serving.manager.leases import WantedDocument
from comb_serving.manager.manager import PICManager
from comb_serving.pool.capability import COMPILE, Capability, PoolHandle, pack
from tests.helpers.fakes import until
from tests.helpers.processes import wait_for

LAYOUT = LinkingLayout(8, 16, 24, "model", "float32", 63, 4096)
SECRET = b"of the instance"
HANDLE = PoolHandle(3, (5,))
NAIVE = LinkMethod("naive")


def ended(reason: str = "length") -> Any:
    return SimpleNamespace(outputs=[SimpleNamespace(finish_reason=reason)])


class Client:
    """Answers at once, unless a test closes its `gate`."""

    def __init__(self, reason: str = "length", error: Exception | None = None, policy: str = "fcfs") -> None:
        self.reason, self.error, self.gate = reason, error, asyncio.Event()
        self.gate.set()
        self.vllm_config = SimpleNamespace(scheduler_config=SimpleNamespace(policy=policy))
        self.priorities: list[int] = []
        self.tiers: list[str | None] = []
        self.asked: list[Any] = []

    async def generate(
        self, prompt: Any, parameters: Any, request_id: str, lora_request: Any, priority: int
    ) -> AsyncIterator[Any]:
        self.asked.append((prompt, parameters, request_id))
        self.priorities.append(priority)
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        yield ended(self.reason)

    async def collective_rpc(self, name: str, args: Any = ()) -> list[Any]:
        if name == "comb_kept":
            return [{"host": 3, "disk": 4, "host_size": 6}, {"host": 5, "host_size": 6}]
        assert name == "comb_fetch"
        self.asked.append(args)
        return self.tiers


def compiler(
    client: Client, method: LinkMethod = NAIVE, layout: LinkingLayout = LAYOUT, **options: Any
) -> EngineCompiler:
    pytest.importorskip("vllm")
    made = EngineCompiler(layout, method, SECRET, **options)
    made.client = client
    return made


@pytest.mark.parametrize(
    ("method", "front"),
    [("naive", []), ("legolink:16", []), ("naive,front=dummies:2", [1, 1]), ("primed:4", [4, 5, 6])],
)
async def test_a_document_is_a_request_of_its_own(method: str, front: list[int]) -> None:
    client, wanted = Client(), LinkMethod.parse(method)
    layout = replace(LAYOUT, front=tuple(front))
    made = compiler(client, wanted, layout)
    identity = await made.identity()
    assert identity.method.startswith(wanted.compiled)
    assert identity.max_document_tokens == 63 - len(front)
    other = await EngineCompiler(replace(LAYOUT, front=tuple(front[1:])), wanted, SECRET).identity()
    assert (other.method == identity.method) == (not front)  # a document on the disk says what it was compiled behind
    found = await made.submit("key", [7, 8, 9], HANDLE)
    assert found.tier == "compiled"
    ((prompt, parameters, name),) = client.asked
    ids = [*front, 7, 8, 9]
    assert (prompt["prompt_token_ids"], prompt["cache_salt"]) == (ids, "key")
    assert (parameters.max_tokens, parameters.ignore_eos) == (1, True)
    said = Capability.verify(parameters.extra_args["comb_docs"], SECRET)
    said.check(f"{name}-x", "key", ids)
    assert (said.method, said.documents) == (COMPILE, tuple(pack([HANDLE])))
    assert said.spans_in(ids) == ((len(front), 3),)


@pytest.mark.parametrize(("policy", "priority"), [("fcfs", 0), ("priority", -(2**63))])
async def test_who_waits_for_a_document_waits_behind_nobody(policy: str, priority: int) -> None:
    client = Client(policy=policy)
    await compiler(client).submit("key", [7, 8, 9], HANDLE)
    assert client.priorities == [priority]


def test_a_front_that_is_too_long() -> None:
    with pytest.raises(ValueError, match="behind 63 tokens, and prompts have at most 64: raise --max-model-len"):
        EngineCompiler(replace(LAYOUT, front=(5,) * 63), LinkMethod.parse("primed"), SECRET)


@pytest.mark.parametrize("client", [Client(reason="error"), Client(reason="abort"), Client(error=OSError("dead"))])
async def test_what_goes_wrong_is_an_error(client: Client) -> None:
    with pytest.raises(EncoderError, match="vLLM did not compile it"):
        await compiler(client).submit("key", [7, 8, 9], HANDLE)


async def test_documents_that_are_asked_for_together_are_in_one_batch() -> None:
    client = Client()
    client.gate.clear()
    made = compiler(client)
    answers = [made.submit(f"key{place}", (7, place), HANDLE) for place in range(3)]
    await until(lambda: len(client.asked) == 3)
    client.gate.set()
    assert [one.tier for one in await asyncio.gather(*answers)] == ["compiled"] * 3


@pytest.mark.parametrize(
    ("tiers", "found"),
    [(["host"], "host"), (["disk", "host"], "disk"), (["host", None], "compiled"), ([None], "compiled")],
)
async def test_what_every_worker_has_kept_comes_back(tiers: list[str | None], found: str) -> None:
    client = Client()
    client.tiers = tiers
    made = compiler(client, keeps=True)
    assert (await made.submit("key", [7, 8, 9], HANDLE)).tier == found
    assert client.asked[0] == ("key", 3, [5])
    assert len(client.asked) == (2 if found == "compiled" else 1)
    assert made.kept_bytes == {"host": 8, "disk": 4, "host_size": 12}


@pytest.mark.parametrize("error", [None, RuntimeError("dead"), KeyboardInterrupt()])
def test_in_process_documents_are_compiled_by_the_thread_that_waits(error: BaseException | None) -> None:
    batches: list[list[DocumentPrompt]] = []

    def generate(requests: list[DocumentPrompt]) -> list[Any]:
        assert threading.current_thread() is threading.main_thread()
        batches.append(requests)
        if error is not None:
            raise error
        return [ended() for _ in requests]

    made = LocalCompiler(LAYOUT, NAIVE, SECRET, generate)
    manager, loop = PICManager(LAYOUT, made), asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    for turn in range(2):
        wanted = [WantedDocument(f"key{turn}{place}", (7, place)) for place in range(2)]
        found = asyncio.run_coroutine_threadsafe(manager.acquire(wanted), loop)
        if error is not None:
            kind = EncoderError if isinstance(error, Exception) else KeyboardInterrupt
            with pytest.raises(kind, match=str(error) or None):
                made.run(found)
            wait_for(lambda: not manager.references)
        else:
            lease = made.run(found)
            assert [document.tier for document in lease.documents] == ["compiled"] * 2
            loop.call_soon_threadsafe(lease.release)
    assert [len(batch) for batch in batches] == [2, 2]
    assert {request.salt for request in batches[0]} == {"key00", "key01"}
    loop.call_soon_threadsafe(loop.stop)

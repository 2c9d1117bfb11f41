"""The middleware with fakes on both sides: encoders that answer when told to, and a server that says what it got."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from transformers import AutoTokenizer

from comb.documents.document import Document, PromptBuilder
from comb_serving.api.choice import MethodChoice
from comb_serving.api.front import ServerFront
from comb_serving.api.middleware import CombMiddleware
from comb_serving.api.preprocessor import Preprocessor
from comb_serving.api.routes import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from comb_serving.config.serve_options import ServeOptions
from comb_serving.linking.layout import LinkingLayout
from comb_serving.manager.manager import PICManager
from comb_serving.pool.capability import KEY, Capability, PoolHandle, unpack
from comb_serving.pool.shared_pool import PoolLayout
from comb_training.nano import CHECKPOINT
from tests.helpers.fakes import IDENTITY, Answer, Client, Echo, FakeEncoders
from tests.helpers.stores import check_manager

LAYOUT = PoolLayout(cross_layers=1, kv_heads=1, head_dim=2, num_blocks=8, block_size=16)
LINKING_LAYOUT = LinkingLayout(8, 16, 24, "model", "float32", 64, 4096)  # where a method is named
SECRET = b"of the instance"
ASKED = [{"role": "user", "content": "Where is Ada?"}]
ASK: dict[str, dict[str, Any]] = {
    CHAT: {"messages": ASKED},
    COMPLETIONS: {"prompt": "Where is Ada?"},
    RESPONSES: {"input": "Where is Ada?"},
    MESSAGES: {"messages": ASKED, "max_tokens": 1},
}
DOCUMENTS = [{"title": "A", "text": "Ada went to the garden."}, "Bob is in the kitchen."]
BUILDER = PromptBuilder(AutoTokenizer.from_pretrained(CHECKPOINT))


class Server:
    """Middleware, manager, fake encoders and the echoing server behind it."""

    def __init__(
        self, *, layout: Any = None, processes: Any = None, reports: Any = None, max_tokens: int | None = None,
        **options: Any,
    ) -> None:  # fmt: skip
        known = ServeOptions("nano", **{"wait_seconds": 0.0, **options})
        self.echo, self.encoders = Echo(), FakeEncoders()
        if known.method is not None:
            self.encoders = FakeEncoders(known=replace(IDENTITY, method="alone"), made="compiled")
        self.manager: Any = None
        if known.has_pool:
            layout = layout or (LAYOUT if known.method is None else LINKING_LAYOUT)
            self.manager = PICManager(
                layout, self.encoders, wait_seconds=known.wait_seconds, held_share=known.tenant_share,
                pinned_share=known.pinned_share,
            )  # fmt: skip
        preprocessor = Preprocessor(
            BUILDER, self.manager, MethodChoice(known), 3, max_tokens=max_tokens, disk_path=known.disk_path
        )
        front = ServerFront(known, SECRET, preprocessor, processes, reports)
        self.app = CombMiddleware(self.echo, front=front)

    def client(self, key: str | None = None) -> Client:
        return Client(self.app, key)

    async def send(self, method: str, path: str, body: Any = None, key: str | None = None) -> Answer:
        return await self.client(key).send(method, path, body)

    async def post(self, path: str, body: Any, key: str | None = None, **options: Any) -> Answer:
        return await self.client(key).post(path, body, **options)

    async def chat(self, key: str | None = None, **more: Any) -> Answer:
        """The answer to a chat over `DOCUMENTS`, or over others."""
        return await self.post(CHAT, chat(**more), key)

    def registry(self, encoders: Any = None) -> Any:
        """What /metrics shows of it."""
        prometheus_client = pytest.importorskip("prometheus_client", reason="comes with vLLM")
        from comb_serving.api.metrics import CombCollector

        registry = prometheus_client.CollectorRegistry()
        registry.register(CombCollector(self.app.front().preprocessor, encoders, self.app.front().options))
        return registry

    def sample(self, name: str, encoders: Any = None, **labels: str) -> float | None:
        """A value of /metrics."""
        value: float | None = self.registry(encoders).get_sample_value(f"comb:{name}", labels)
        return value

    def check_idle(self) -> None:
        assert self.manager.references == self.manager.waiting == 0
        check_manager(self.manager)


def documents_of(body: dict[str, Any]) -> list[PoolHandle]:
    """The documents in what vLLM got, whose capability is found to be right."""
    found = Capability.verify(body["vllm_xargs"][KEY], SECRET)
    assert found.salt == body["cache_salt"]
    return unpack(found.documents, LAYOUT)


def chat(**more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": ASKED, "documents": DOCUMENTS, **more}


def ids_of(text: str, title: str | None = None) -> tuple[int, ...]:
    return BUILDER.segment(Document(text, title=title))


SEGMENTS = [ids_of("Ada went to the garden.", "A"), ids_of("Bob is in the kitchen.")]  # of `DOCUMENTS`

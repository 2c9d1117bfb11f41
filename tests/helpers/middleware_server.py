"""The middleware with fakes on both sides: encoders that answer when told to, and a server that says what it got."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from transformers import AutoTokenizer

from comb.documents.document import Document, PromptBuilder
from comb_serving.api.choice import MethodChoice
from comb_serving.api.front import ServerFront
from comb_serving.api.middleware import CombMiddleware
from comb_serving.api.preprocessor import Preprocessor
from comb_serving.config.serve_options import ServeOptions
from comb_serving.manager.manager import PICManager
from comb_serving.pool.capability import KEY, Capability, PoolHandle, unpack
from comb_serving.pool.shared_pool import PoolLayout
from comb_training.nano import CHECKPOINT
from tests.helpers.fakes import IDENTITY, Client, Echo, FakeEncoders

LAYOUT = PoolLayout(cross_layers=1, kv_heads=1, head_dim=2, num_blocks=8, block_size=16)
SECRET = b"of the instance"
MESSAGES = [{"role": "user", "content": "Where is Ada?"}]
DOCUMENTS = [{"title": "A", "text": "Ada went to the garden."}, "Bob is in the kitchen."]
BUILDER = PromptBuilder(AutoTokenizer.from_pretrained(CHECKPOINT))


class Server:
    """Middleware, manager, fake encoders and the echoing server behind it."""

    def __init__(
        self, *, layout: Any = LAYOUT, processes: Any = None, reports: Any = None, max_tokens: int | None = None,
        **options: Any,
    ) -> None:  # fmt: skip
        known = ServeOptions("nano", **{"wait_seconds": 0.0, **options})
        self.echo, self.encoders = Echo(), FakeEncoders()
        if known.method is not None:
            self.encoders = FakeEncoders(known=replace(IDENTITY, method="alone"), made="compiled")
        self.manager: Any = None
        if known.has_pool:
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

    def sample(self, name: str, encoders: Any = None, **labels: str) -> float | None:
        """A value of /metrics; needs prometheus_client, which comes with vLLM."""
        from prometheus_client import CollectorRegistry

        from comb_serving.api.metrics import CombCollector

        registry = CollectorRegistry()
        registry.register(CombCollector(self.app.front().preprocessor, encoders, self.app.options))
        value: float | None = registry.get_sample_value(f"comb:{name}", labels)
        return value

    def check_idle(self) -> None:
        assert self.manager.references == self.manager.waiting == 0
        self.manager.check_integrity()


def documents_of(body: dict[str, Any]) -> list[PoolHandle]:
    """The documents in what vLLM got, whose capability is found to be right."""
    found = Capability.verify(body["vllm_xargs"][KEY], SECRET)
    assert found.salt == body["cache_salt"]
    return unpack(found.documents, num_blocks=8, block_size=16)


def chat(**more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": MESSAGES, "documents": DOCUMENTS, **more}


def ids_of(text: str, title: str | None = None) -> tuple[int, ...]:
    return BUILDER.segment(Document(text, title=title))

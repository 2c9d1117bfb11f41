"""The middleware with fakes on both sides: encoders that answer when told to, and a server that says what it got."""

from __future__ import annotations

from typing import Any

from transformers import AutoTokenizer

from comb.documents.document import Document, PromptBuilder
from comb_serving.api.middleware import CombMiddleware
from comb_serving.api.preprocessor import Preprocessor
from comb_serving.config.options import ServeOptions
from comb_serving.manager.manager import PICManager
from comb_serving.pool.capability import KEY, Capability
from comb_serving.pool.handles import PoolHandle, unpack
from comb_serving.pool.pool import PoolLayout
from comb_training.nano import CHECKPOINT
from tests.helpers.fakes import Client, Echo, FakeEncoders

LAYOUT = PoolLayout(cross_layers=1, kv_heads=1, head_dim=2, num_blocks=8, block_size=16)
SECRET = b"of the instance"
MESSAGES = [{"role": "user", "content": "Where is Ada?"}]
DOCUMENTS = [{"title": "A", "text": "Ada went to the garden."}, "Bob is in the kitchen."]
BUILDER = PromptBuilder(AutoTokenizer.from_pretrained(CHECKPOINT))


class Server:
    """Middleware, manager, fake encoders and the echoing server behind it."""

    def __init__(
        self, *, encoder: bool = True, layout: PoolLayout = LAYOUT, processes: Any = None, **options: Any
    ) -> None:
        self.echo, self.encoders = Echo(), FakeEncoders()
        wait = options.setdefault("wait_seconds", 0.0)
        self.manager: Any = PICManager(layout, self.encoders, wait_seconds=wait) if encoder else None
        preprocessor = Preprocessor(BUILDER, self.manager, max_documents=3)
        self.app = CombMiddleware(
            self.echo, options=ServeOptions("nano", **options), preprocessor=preprocessor, encoders=processes,
            secret=SECRET,
        )  # fmt: skip

    def client(self, key: str | None = None) -> Client:
        return Client(self.app, key)

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

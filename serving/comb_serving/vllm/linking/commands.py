"""What the scheduler tells the workers about documents in a step; it goes through vLLM as the connector's metadata.

`blocks` are a request's in vLLM's cache, from its first token on, for each of the model's cache groups.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from comb_serving.linking.plan import Range
from comb_serving.pool.capability import PoolHandle

Blocks = tuple[list[int], ...]


@dataclass(frozen=True)
class LoadCommand:
    """Before the step: tokens [start, end) of a request are those from `offset` on of a document.

    Args:
        compiled: the position of the document's first token when it was compiled.
    """

    handle: PoolHandle
    offset: int
    start: int
    end: int
    blocks: Blocks
    compiled: int


@dataclass(frozen=True)
class ComposeCommand:
    """Before the step: the states of a request's linear layers go from in front of an interior to behind it.

    Args:
        tokens: of the interior.
        fresh: whether it is the prompt's beginning: there is no state in front of it.
    """

    handle: PoolHandle
    tokens: int
    blocks: Blocks
    fresh: bool = False


@dataclass(frozen=True)
class CaptureCommand:
    """After the step: of a document that is compiled, its interior begins here, or a part of it was computed.

    Args:
        begins: what was computed ended where the interior begins.
        ends: what was computed ended where the interior ends.
        whole: it is a prompt's beginning, of which the state is kept as it is.
    """

    handle: PoolHandle
    blocks: Blocks
    begins: bool
    ends: bool
    whole: bool = False


@dataclass(frozen=True, eq=False)
class LookCommand:
    """In the step: tokens [start, end) of a request are its question's, and what they look at is added up.

    Args:
        name: of the request.
        length: of its prompt. spans: of its documents in there.
        method: that chooses by it.
        last: whether these are the question's last tokens.
    """

    name: str
    start: int
    end: int
    blocks: Blocks
    length: int
    spans: tuple[Range, ...]
    method: str
    last: bool


@dataclass(frozen=True)
class SaveCommand:
    """After the step: a request's tokens from `start` on are the document of this key.

    Args:
        stateless: nothing was captured of it, as its seams cover it.
    """

    key: str
    handle: PoolHandle
    start: int
    blocks: Blocks
    stateless: bool = False


@dataclass
class LinkingMetadata(KVConnectorMetadata):
    """A step's commands, in order."""

    loads: list[LoadCommand] = field(default_factory=list)
    composes: list[ComposeCommand] = field(default_factory=list)
    captures: list[CaptureCommand] = field(default_factory=list)
    saves: list[SaveCommand] = field(default_factory=list)
    looks: list[LookCommand] = field(default_factory=list)
    looking: tuple[str, ...] = ()  # requests whose questions are looking, in this step or not

    @property
    def before_step(self) -> bool:
        """Whether the worker has to have them before it computes: what it captures, it listens for."""
        return bool(self.loads or self.composes or self.captures or self.looks)


@dataclass
class ChosenTokens(KVConnectorWorkerMetadata):
    """What the workers answer to looks: by request, which of its document tokens are computed again."""

    positions: dict[str, list[int]]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """All ranks have added up what all of them saw, and say the same."""
        return self

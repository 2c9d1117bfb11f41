"""What the engine tells the front about its pool of compiled documents, in a file beside the instance's secret."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from comb.files import write_whole
from comb_serving.linking.methods import LinkMethod
from comb_serving.linking.plan import LinkPlan, Range, check_spans, plan, plan_interiors
from comb_serving.pool.capability import PoolHandle

MANIFEST = "linking.json"


@dataclass(frozen=True)
class LinkingLayout:
    """The pool of one rank, and the model that its documents are compiled by.

    Args:
        num_blocks, block_size: blocks, and tokens in each; document handles name them.
        bytes_per_token: over all layers.
        fingerprint: of the model's weights; part of every document's key.
        dtype: of keys and values.
        max_document_tokens: longest document that the engine can compile.
        vocab_size: ids are below.
        front: the tokens in front of documents while they are compiled.
        given: whether their keys and values are an adapter's, and lie behind the pool's blocks.
        state_rows: behind a document's tokens, what it does to the states of linear layers takes as much as so many.
        columns: that the convolutions of linear layers look back.
    """

    num_blocks: int
    block_size: int
    bytes_per_token: int
    fingerprint: str
    dtype: str
    max_document_tokens: int
    vocab_size: int
    front: tuple[int, ...] = ()
    given: bool = False
    state_rows: int = 0
    columns: int = 0

    @property
    def nbytes(self) -> int:
        """Of one rank's whole pool."""
        return self.num_blocks * self.block_size * self.bytes_per_token

    def blocks_for(self, tokens: int) -> int:
        """Blocks that a document of so many tokens takes."""
        return -(-(tokens + self.state_rows) // self.block_size)

    @property
    def front_handle(self) -> PoolHandle:
        """Where an adapter's link tokens are in the pool: behind what documents are given."""
        tokens = len(self.front)
        return PoolHandle(tokens, tuple(range(self.num_blocks, self.num_blocks - (-tokens // self.block_size))))

    def seams(self, method: LinkMethod) -> Range:
        """Tokens at either end of documents that a method computes again, never fewer than convolutions look back."""
        return max(method.seam or 0, self.columns), method.seam or 0

    def plan(
        self, method: LinkMethod, length: int, spans: Sequence[Range], chosen: Sequence[int] = (),
        *, exact_first: bool = False,
    ) -> LinkPlan:  # fmt: skip
        """Of a prompt: see `plan.plan`.

        Args:
            chosen: document tokens that are computed again where the question's look says which.
            exact_first: see `plan_interiors`.

        Raises:
            ValueError: for spans that overlap, are empty, or leave the prompt.
        """
        check_spans(length, spans)
        if method.states:
            return plan_interiors(length, spans, *self.seams(method), exact_first=exact_first)
        places = method.recomputed(spans)
        return plan(length, spans, chosen if places is None else places)

    def write(self, folder: Path) -> None:
        """Into an instance's folder, whole or not at all."""
        write_whole(folder / MANIFEST, json.dumps(asdict(self)).encode())

    @classmethod
    def read(cls, folder: Path) -> LinkingLayout:
        """Raises FileNotFoundError while the engine has made no pool."""
        said = json.loads((folder / MANIFEST).read_text())
        return cls(**{**said, "front": tuple(said["front"])})

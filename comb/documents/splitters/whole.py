"""No cutting at all."""

from __future__ import annotations

from collections.abc import Sequence

from comb.documents.splitting import Splitter, splitters


@splitters.register("whole")
class Whole(Splitter):
    """Every document is one segment."""

    cuts = False

    def __init__(self) -> None:
        super().__init__()

    def split(self, token_ids: Sequence[int], pieces: Sequence[str]) -> list[tuple[int, ...]]:
        return [tuple(token_ids)] if token_ids else []

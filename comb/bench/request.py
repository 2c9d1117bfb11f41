"""One request, linked but not decoded: what an engine would start its answer from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from comb.documents.document import Document
from comb.engine.engine import PICEngine
from comb.methods.base import DecodeState


@contextmanager
def linked(engine: PICEngine, question: str, documents: Sequence[str | Document]) -> Iterator[DecodeState]:
    """The state for `question` over `documents`, which are compiled unless the engine's store has them.

    Everything is given back to the store when the block ends.
    """
    segments = engine.segments_of(documents)
    prompt = engine.prompt_builder.build(question, [segment.token_ids for segment in segments])
    handles = engine.store.acquire(
        [segment.key for segment in segments],
        lambda missing: engine.method.compile([segments[index].token_ids for index in missing]),
    )
    with handles:
        state = engine.method.link([handle.picache for handle in handles], prompt.tail, head_ids=prompt.head)
        try:
            yield state
        finally:
            state.release()

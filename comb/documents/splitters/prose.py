"""Prose by its paragraphs or sentences; by length alone; not at all."""

from __future__ import annotations

from collections.abc import Sequence

from comb.documents.splitting import Splitter, paragraphs, sentences, spaces, splitters


@splitters.register("paragraphs")
class Paragraphs(Splitter):
    """Paragraphs packed up to the budget; longer ones are cut at sentences, then at words."""

    levels = (paragraphs, sentences, spaces)


@splitters.register("sentences")
class Sentences(Splitter):
    """Sentences packed up to the budget."""

    levels = (sentences, spaces)


@splitters.register("fixed")
class Fixed(Splitter):
    """Segments of `max_tokens` tokens, wherever that cuts; the last one is what is left."""


@splitters.register("whole")
class Whole(Splitter):
    """Every document is one segment."""

    cuts = False

    def __init__(self) -> None:
        super().__init__()

    def split(self, token_ids: Sequence[int], pieces: Sequence[str]) -> list[tuple[int, ...]]:
        return [tuple(token_ids)] if token_ids else []

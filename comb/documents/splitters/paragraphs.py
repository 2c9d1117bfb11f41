"""Prose by paragraphs."""

from __future__ import annotations

from comb.documents.boundaries import paragraphs, sentences, spaces
from comb.documents.splitting import Splitter, splitters


@splitters.register("paragraphs")
class Paragraphs(Splitter):
    """Paragraphs packed up to the budget; longer ones are cut at sentences, then at words."""

    levels = (paragraphs, sentences, spaces)

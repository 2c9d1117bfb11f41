"""Prose by sentences."""

from __future__ import annotations

from comb.documents.boundaries import sentences, spaces
from comb.documents.splitting import Splitter, splitters


@splitters.register("sentences")
class Sentences(Splitter):
    """Sentences packed up to the budget."""

    levels = (sentences, spaces)

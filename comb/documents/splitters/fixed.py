"""Cuts by length alone."""

from __future__ import annotations

from comb.documents.splitting import Splitter, splitters


@splitters.register("fixed")
class Fixed(Splitter):
    """Segments of `max_tokens` tokens, wherever that cuts; the last one is what is left."""

"""Made-up passages of the nano backbone's words."""

from __future__ import annotations

import random

WORDS = ("Ada", "Bob", "garden", "kitchen", "took", "the", "red", "ball", "went", "to", "and", "then", "left", "hall",
         "book", "Cy", "sleeps", "in")  # fmt: skip


def passage(draw: random.Random, words: int) -> str:
    """So many words and a full stop."""
    return " ".join(draw.choice(WORDS) for _ in range(words)) + "."

"""What tests of dataset readers share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from comb.documents.document import Example

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
"""Samples of real data, beside the checkout; tests that want them are skipped without."""

WriteRows = Callable[..., Path]


def texts(example: Example) -> list[str | None]:
    """The documents' texts."""
    return [document.text for document in example.documents]

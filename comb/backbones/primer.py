"""The passage that documents are compiled behind, as token ids."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from comb.backbones.tokenizer import load_tokenizer

Primer = bool | str | Sequence[int]
"""True: `PASSAGE`; the path of a text file; token ids; False: nothing."""

PASSAGE = (
    "The harbour of Vellin lies at the mouth of the river Arne, where ships have loaded salt and timber since the "
    "twelfth century. A stone bridge was built in 1784, and a railway came in 1862; the town then had about 4,000 "
    "inhabitants. Today most people work in the shipyard, in schools or in small firms.\n\n"
    "Glass was made in the valley until 1931. Sand came from the lake, and the furnaces burned beech wood. One of the "
    "old workshops is now a museum, which shows bottles, windows and lamps. It is open from May to October.\n\n"
)
"""Plain prose about nothing that anybody will ask for. Which passage matters little, prose matters: see
docs/training-free.md."""


def primer_ids(primer: Primer, tokenizer: Any, most: int | None = None) -> list[int]:
    """Token ids of a primer, behind whatever the tokenizer begins a text with.

    Args:
        most: tokens that `PASSAGE` is cut to, so that documents fit behind it; a primer of one's own is never cut.

    Raises:
        ValueError: for a file that can't be read or is empty, or what is no primer.
    """
    if not isinstance(primer, bool | Sequence):
        raise ValueError(f"primer is true, a text file to compile documents behind, or token ids, got {primer!r}")
    if isinstance(primer, bool):
        text = PASSAGE if primer else ""
    elif isinstance(primer, str):
        try:
            text = Path(primer).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"no text to compile documents behind: {error}") from error
        if not text.strip():
            raise ValueError(f"{primer} is empty: documents are compiled behind its text")
    else:
        return list(primer)
    if not text:
        return []
    ids: list[int] = list(tokenizer(text)["input_ids"])
    ids = ids[:-1] if ids[-1] == tokenizer.eos_token_id else ids
    return ids[:most] if primer is True else ids


def own_tokenizer(model: Any) -> Any:
    """The tokenizer beside a loaded model's weights.

    Raises:
        ValueError: when there is none.
    """
    name = getattr(model, "name_or_path", "")
    ways = "give its token ids, or ask through a PICEngine, which has a tokenizer"
    if not name:
        raise ValueError(
            f"documents are compiled behind text, and this model has no tokenizer beside its weights: {ways}"
        )
    try:
        return load_tokenizer(name, model)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"documents are compiled behind text, and the tokenizer of {name!r} can't be had ({error}): {ways}"
        ) from error

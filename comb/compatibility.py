"""Does this tokenizer belong to this model? Asked once, before any document is stored under wrong ids."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from comb.adapter import backbone_beside, resolve_name
from comb.methods.base import backbone_of


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """A short name for what the tokenizer's ids mean: its whole vocabulary and its special tokens."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0]))
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    text = json.dumps([vocabulary, special], sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def load_tokenizer(name_or_path: str | Path, model: Any) -> Any:
    """The tokenizer of a checkpoint; for an adapter folder without one, its backbone's.

    Raises:
        ValueError: when there is none.
        OSError: as transformers does, when the backbone's can't be found.
    """
    try:
        return AutoTokenizer.from_pretrained(resolve_name(name_or_path))
    except (OSError, ValueError) as error:
        backbone = getattr(model.config, "backbone_name_or_path", "")
        if not backbone:
            raise ValueError(
                f"no tokenizer found in {str(name_or_path)!r}: save the model's own there with "
                "tokenizer.save_pretrained(...)"
            ) from error
        return AutoTokenizer.from_pretrained(resolve_name(backbone_beside(backbone, name_or_path)))


def check_tokenizer(model: Any, tokenizer: Any) -> None:
    """Compares a tokenizer with a model's embedding table, and with ``config.tokenizer_fingerprint`` if there is one.

    Raises:
        ValueError: when the tokenizer has ids without an embedding, or isn't the one the model was trained with.
    """
    rows = int(backbone_of(model).get_input_embeddings().weight.shape[0])
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if len(tokenizer) > rows or largest >= rows:
        raise ValueError(
            f"the tokenizer has {len(tokenizer)} tokens (largest id {largest}), the model's embedding table has {rows} "
            "rows: this is another model's tokenizer, load the one from the model's own folder"
        )
    recorded = getattr(model.config, "tokenizer_fingerprint", None)
    if recorded is None:
        return
    found = tokenizer_fingerprint(tokenizer)
    if found != recorded:
        raise ValueError(
            f"the tokenizer is not the one this checkpoint was trained with (fingerprint {found}, expected "
            f"{recorded}): load the one from the checkpoint's folder"
        )

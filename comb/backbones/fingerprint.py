"""Tells one backbone's weights from another's, whatever dtype they were loaded in."""

from __future__ import annotations

import base64
import hashlib
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

_SKETCH_VALUES = 128


def fingerprint(model: PreTrainedModel) -> dict[str, Any]:
    """Identifies a backbone's weights: a hash of all parameter shapes, and a sample of its embedding table.

    The sample is kept as values, not as a hash, so that the same weights loaded in another dtype still match.

    Returns:
        ``{"shapes": sha256 hex, "embedding": base64 of float32 values, "embedding_shape": [rows, hidden]}``
    """
    shapes = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        shapes.update(f"{name}:{tuple(parameter.shape)};".encode())
    table = model.get_input_embeddings().weight.detach()
    rows, columns = _places(table.shape[0], table.shape[1], table.device)
    sample = table[rows, columns].float().cpu()
    return {
        "shapes": shapes.hexdigest(),
        "embedding_shape": list(table.shape),
        "embedding": base64.b64encode(sample.numpy().tobytes()).decode(),
    }


def fingerprint_name(expected: dict[str, Any] | None) -> str | None:
    """A fingerprint in sixteen hex digits, for people; None for none."""
    return None if expected is None else hashlib.sha256(repr(sorted(expected.items())).encode()).hexdigest()[:16]


def backbone_fingerprint(model: PreTrainedModel) -> str:
    """A short name for the backbone's weights, for cache keys: changes with shapes, embedding and dtype."""
    text = repr(sorted(fingerprint(model).items())) + str(model.dtype) + str(model.config.model_type)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def check_fingerprint(model: PreTrainedModel, expected: dict[str, Any], name: str) -> None:
    """Raises ValueError if `model` isn't the backbone that `expected` was taken from."""
    found = fingerprint(model)
    hint = f"this adapter belongs to {name or 'another backbone'}: load it onto that one (backbone=...)"
    if found["embedding_shape"] != expected["embedding_shape"]:
        raise ValueError(
            f"the backbone's embedding table is {found['embedding_shape']}, the adapter was trained on "
            f"{expected['embedding_shape']}; {hint}"
        )
    if found["shapes"] != expected["shapes"] and not getattr(model, "is_quantized", False):
        raise ValueError(f"the backbone's weights have other names or shapes than the adapter's backbone; {hint}")
    if not same_embedding(model.get_input_embeddings().weight, expected):
        raise ValueError(f"the backbone's embedding differs from the one this adapter was trained on; {hint}")


def same_embedding(table: Tensor, expected: dict[str, Any], first: int | None = None) -> bool:
    """Whether an embedding table [rows, hidden] of any dtype is the one that a fingerprint was taken from.

    Args:
        first: `table` is its rows from this one on; None: it is the whole table.
    """
    rows, width = expected["embedding_shape"]
    begin = first or 0
    if table.shape[1] != width or (len(table) != rows if first is None else begin + len(table) > rows):
        return False
    at, columns = _places(rows, width, table.device)
    here = (at >= begin) & (at < begin + len(table))
    ours = table.detach()[at[here] - begin, columns[here]].float().cpu()
    theirs = torch.frombuffer(bytearray(base64.b64decode(expected["embedding"])), dtype=torch.float32)
    # half a unit in the last place of bfloat16, twice (each side may have been rounded once)
    tolerance = theirs.abs() * 2**-7 + theirs.abs().max() * 1e-5
    here = here.cpu()
    return bool(((ours - theirs[here]).abs() <= tolerance[here]).all())


def _places(rows: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows and columns [_SKETCH_VALUES] spread evenly over a table, the same ones for every dtype."""
    count = min(_SKETCH_VALUES, rows * width)
    positions = torch.arange(count, device=device) * (rows * width // count)
    return positions // width, (positions * 31) % width

"""What the commands below `comb bench` measure on: the model, how it is asked, and the questions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from comb.documents.datasets import Counts
    from comb.documents.document import Example
    from comb.evaluation.run import Setting

LEAST_POSITIONS = 128  # of the random model: what is checked before anything is timed must fit


def make_random(
    sizes: Mapping[str, int], positions: int, dtype: str, device: str, *, hybrid: bool = False, seed: int = 0
) -> Any:
    """`random_model` of these sizes with at least so many positions, in the dtype and on the device asked for."""
    from comb.bench.context_length import random_model

    kind, place = dtype_and_device(dtype, device)
    made = random_model(**sizes, positions=max(positions, LEAST_POSITIONS), hybrid=hybrid, seed=seed)
    return made.to(device=place, dtype=kind)


def dtype_and_device(dtype: str, device: str) -> tuple[torch.dtype, str]:
    """What ``--dtype`` and ``--device`` mean where no checkpoint says it: float32, and a GPU if there is one."""
    import torch

    place = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    kind = torch.float32 if dtype == "auto" else getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype) or not kind.is_floating_point:
        raise ValueError(f"--dtype is auto, float32, bfloat16 or float16, not {dtype!r}")
    return kind, place


def make_setting(
    model: str,
    backbone: str | None,
    dtype: str,
    device: str,
    query_template: str | None,
    document_template: str | None,
    splitter: str | None,
) -> Setting:
    """Model, tokenizer and templates; an adapter's own templates where none are given."""
    from comb.backbones.tokenizer import load_tokenizer
    from comb.documents.document import PromptBuilder
    from comb.evaluation.run import Setting
    from comb.model.source import load_named

    trained = _trained_templates(model)
    query = query_template or trained.get("query_template") or "{query}"
    if "{query}" not in query:
        raise ValueError(f"--query-template {query!r} has no {{query}}: every question would be the same")
    loaded = load_named(model, backbone=backbone, dtype=dtype, device=device)
    tokenizer = load_tokenizer(model, loaded)
    builder = PromptBuilder(tokenizer, document_template=document_template or trained.get("document_template"))
    return Setting(loaded, tokenizer, builder, query, splitter)


def _trained_templates(model: str) -> dict[str, Any]:
    """How text was written when an adapter was trained, if its folder says so."""
    import json

    path = Path(model) / "training.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))["config"]["data"]
        return {name: data.get(name) for name in ("query_template", "document_template")}
    except (OSError, KeyError, TypeError, AttributeError, ValueError):
        return {}


def read(
    dataset: str, path: str | None, split: str, num_documents: int | None, limit: int, seed: int
) -> tuple[list[Example], Counts]:
    from comb.documents.datasets import read_dataset

    extra = {} if num_documents is None else {"num_documents": num_documents}
    found = read_dataset(dataset, path, split=split, seed=seed, limit=limit, **extra)
    return list(found), found.counts

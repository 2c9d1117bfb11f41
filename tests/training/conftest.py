"""What tests of training share: registered datasets, nano's prompts, rows in files."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from comb.documents.document import PromptBuilder
from comb_training import plugin
from comb_training.nano import CHECKPOINT
from tests.helpers.training import TOKENIZER, backbone


@pytest.fixture(autouse=True, scope="session")
def _registered() -> None:
    plugin.register()


@pytest.fixture
def builder() -> PromptBuilder:
    return PromptBuilder(AutoTokenizer.from_pretrained(CHECKPOINT))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tiny backbone of `helpers/training.py` and its tokenizer."""
    folder = tmp_path_factory.mktemp("tiny")
    backbone().save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return folder


@pytest.fixture
def write_rows(tmp_path: Path) -> Callable[..., Path]:
    """Writes rows as JSONL, or as a list where the name says so."""

    def write(*items: Any, name: str = "rows.jsonl") -> Path:
        path = tmp_path / name
        text = "\n".join(map(json.dumps, items)) if ".jsonl" in name else json.dumps(items)
        path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
        return path

    return write

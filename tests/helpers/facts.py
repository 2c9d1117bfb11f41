"""A tiny model that reads bytes, questions about facts, and a folder with both: what tests of benchmarks share."""

from __future__ import annotations

import json
from pathlib import Path

from comb import CombForCausalLM, Document, Example
from tests.helpers.byte_text import byte_llama, byte_tokenizer
from tests.helpers.families import BASE, open_gates


def strong_llama() -> CombForCausalLM:
    """A tiny Llama of strong attention with an untrained encoder, gates open."""
    sizes = {**BASE, "vocab_size": 300, "num_hidden_layers": 2}
    backbone = byte_llama(seed=1, **sizes, initializer_range=0.2)
    return open_gates(CombForCausalLM.from_backbone(backbone, num_encoder_layers=1)).eval()


def facts(count: int = 5) -> list[Example]:
    """Questions about two documents each."""
    return [
        Example((Document(f"fact {n} is here"), Document(f"and other {n}")), f"what is {n}?", f"fact {n}", id=str(n))
        for n in range(count)
    ]


def write_facts(folder: Path, model: CombForCausalLM) -> Path:
    """The model without its encoder below `folder`, twelve questions in ``data.jsonl`` beside it."""
    model.backbone.save_pretrained(folder / "model")
    byte_tokenizer().save_pretrained(folder / "model")
    rows = [
        {"documents": [each.text for each in one.documents], "query": one.query, "answer": one.answer}
        for one in facts(12)
    ]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder

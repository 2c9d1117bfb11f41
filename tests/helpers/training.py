"""What tests of training share: a byte tokenizer, a tiny backbone with an encoder, examples, and a trainer of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

from comb import CombForCausalLM, Prompt
from comb_training import plugin
from comb_training.answers.engines import TransformersEngine
from comb_training.config import TrainConfig
from comb_training.data.batches import TrainingExample
from comb_training.trainer.trainer import CombTrainer
from tests.helpers.byte_text import BYTES, tokenizer_of


def byte_tokenizer(*more: str) -> PreTrainedTokenizerFast:
    """One token per byte, behind <pad>, <end> and `more` special ones."""
    special = {"pad_token": "<pad>", "eos_token": "<end>"}
    return tokenizer_of([*special.values(), *more, *BYTES], **special, additional_special_tokens=list(more))


TOKENIZER = byte_tokenizer()


def invoke(*arguments: str, **environment: str) -> Any:
    """A command of training, as `comb` runs it; lines have 200 columns unless `environment` says otherwise."""
    application = typer.Typer()
    plugin.add_commands(application)
    return CliRunner().invoke(application, list(arguments), env={"COLUMNS": "200", **environment})


def backbone(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": len(TOKENIZER), "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128, "eos_token_id": 1,
        "pad_token_id": 0, "bos_token_id": None, "initializer_range": 0.1,
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **changes})).eval()


def comb_model(gate: float = 0.0, on: Any = None) -> CombForCausalLM:
    on = backbone() if on is None else on
    model = CombForCausalLM.from_backbone(on, num_encoder_layers=1, cross_attention_layers=[1])
    for name, parameter in model.named_parameters():
        if name.endswith("gate"):
            torch.nn.init.constant_(parameter, gate)
    return model


def examples(count: int = 12) -> list[TrainingExample]:
    """Questions over three sets of documents, with targets of very different lengths."""
    generator = torch.Generator().manual_seed(3)

    def ids(length: int) -> tuple[int, ...]:
        return tuple(torch.randint(2, len(TOKENIZER), (length,), generator=generator).tolist())

    documents = [(ids(9), ids(5)), (ids(7),), (ids(4), ids(6), ids(3))]
    return [
        TrainingExample(Prompt((2,), documents[n % 3], ids(2 + n % 4)), (*ids(1 + (5 * n) % 11), 1), str(n))
        for n in range(count)
    ]


def trainer(
    model: Any, folder: Path, rows: list[TrainingExample] | None = None, *,
    heldout: Sequence[TrainingExample] = (), **config: Any,
) -> CombTrainer:  # fmt: skip
    settings = TrainConfig(**{"steps": 4, "batch_size": 4, "logging_steps": 1, "output_dir": str(folder), **config})
    given = examples() if rows is None else rows
    return CombTrainer(model, settings, given, TOKENIZER, heldout=heldout, progress=False)


def nano_run(folder: Path, data: dict[str, Any], **train: Any) -> dict[str, Any]:
    """A configuration: an encoder on the nano backbone, no evaluation."""
    return {
        "model": {"backbone": "nano", "num_encoder_layers": 1, "cpu_threads": 1, "device": "cpu"},
        "data": data,
        "train": {"steps": 1, "batch_size": 8, "output_dir": str(folder), **train},
        "eval": {"limit": 0},
    }


def record_questions(monkeypatch: pytest.MonkeyPatch, method: str = "__call__") -> list[TrainingExample]:
    """Fills with the examples that a method of the engine of transformers is given from now on."""
    asked: list[TrainingExample] = []
    inner = getattr(TransformersEngine, method)

    def recording(self: Any, rows: Sequence[TrainingExample]) -> Any:
        asked.extend(rows)
        return inner(self, rows)

    monkeypatch.setattr(TransformersEngine, method, recording)
    return asked

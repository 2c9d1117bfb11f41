"""A tiny model, its tokenizer and documents for tests of the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessor, PreTrainedTokenizerFast

from comb import CombForCausalLM, PICacheStore
from tests.helpers.byte_text import BYTES, tokenizer_of
from tests.helpers.stores import check_store

TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
LAKE, CITY, BOOK = "The lake is 12 m deep.", "Rill is a small city.", "Mira wrote the blue book, in spring."
QUESTION = "How deep?"
NEW = 6


def make_tokenizer(*extra: str, template: str | None = None) -> PreTrainedTokenizerFast:
    """One token per byte, and <pad>, <eos>, <bos> behind them."""
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>"}
    return tokenizer_of([*BYTES, *special.values(), *extra], **special, chat_template=template)


def make_backbone(**changes: Any) -> LlamaForCausalLM:
    """A tiny random model whose tokens depend on its input, and that never ends by itself."""
    torch.manual_seed(1)
    config = {
        "vocab_size": 259, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
        "initializer_range": 0.25, "eos_token_id": 257, "pad_token_id": 256, "bos_token_id": 258,
    }  # fmt: skip
    model = LlamaForCausalLM(LlamaConfig(**{**config, **changes})).eval()
    with torch.no_grad():
        model.lm_head.weight[256:] = 0.0
    return model


def make_comb(backbone: LlamaForCausalLM | None = None, **options: Any) -> CombForCausalLM:
    model = CombForCausalLM.from_backbone(
        make_backbone() if backbone is None else backbone, num_encoder_layers=2, **options
    )
    with torch.no_grad():
        for block in model.cross_blocks:
            block.attention_gate.fill_(1.5)
            block.mlp_gate.fill_(0.5)
    return model


def idle(store: PICacheStore) -> None:
    """Nothing is referenced and no invariant is broken."""
    assert store.stats().in_use == 0
    check_store(store)


def states(answer: Any) -> list[str]:
    return [document.state for document in answer.report.documents]


class Scores(LogitsProcessor):
    """Notes the logits of every step; may do something at one, or have tokens said (None: what the model says)."""

    def __init__(self, says: Sequence[int | None] = (), **at: Callable[[], Any]) -> None:
        self.steps: list[torch.Tensor] = []
        self.says, self.at = iter(says), at

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.at.get(f"step_{len(self.steps)}", lambda: None)()
        self.steps.append(scores[0].float().clone())
        said = next(self.says, None)
        return scores if said is None else torch.full_like(scores, -torch.inf).index_fill(1, torch.tensor([said]), 0.0)


class Always(LogitsProcessor):
    """Makes generation emit one token for ever, after an optional action at each step."""

    def __init__(self, token: int, action: Callable[[], None] = lambda: None) -> None:
        self.token, self.action, self.steps = token, action, 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        self.action()
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self.token] = 0
        return forced

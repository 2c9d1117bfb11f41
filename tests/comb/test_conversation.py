"""Conversations: a turn that goes on from the last one gives what linking it all from the start gives."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from families import open_gates, tiny
from test_documents import byte_tokenizer
from test_hybrid_methods import text_model
from torch import Tensor
from transformers import LogitsProcessor

from comb import CombForCausalLM, PICEngine
from comb.conversation import Conversation
from comb.store import PICacheStore

MILL, CITY, LAKE = "The mill burnt down in spring.", "Rill is a small city by the sea.", "The lake is 12 m deep."
NEW = 6
EXACT = 1e-5
CONTROL = 1e-3
THINKING = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% if m.role == 'assistant' %}<|end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>Hm.{% endif %}"
)
HYBRIDS = ("qwen3_next", "bamba", "jamba", "minimax")
ON_LLAMA = ("full", "prefix", "naive", "legolink:2", "legolink-0", "attnlink:4", "cacheblend:1.0",
            "naive:quantize=int8", "comb")  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny matrices: more threads only wait for each other
    yield
    torch.set_num_threads(threads)


@functools.cache
def model_of(family: str) -> Any:
    if family in HYBRIDS:
        return text_model(family)[0]
    size = {"vocab_size": 300, "max_position_embeddings": 1024}
    torch.manual_seed(3)
    model = tiny(family, **size)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.6 * parameter.shape[-1] ** -0.5)
    return model


@functools.cache
def with_encoder(family: str) -> Any:
    torch.manual_seed(4)
    return open_gates(CombForCausalLM.from_backbone(model_of(family), num_encoder_layers=2))


def engine_of(family: str = "llama", method: str = "legolink:2", **options: Any) -> PICEngine:
    model = with_encoder(family) if method.startswith("comb") else model_of(family)
    tokenizer = byte_tokenizer(**({"chat_template": options.pop("template")} if "template" in options else {}))
    return PICEngine(model, tokenizer, method=method, **options)


class Scores(LogitsProcessor):
    """Notes the logits of every step; may fail at one."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.steps: list[Tensor] = []
        self.fails_at = fails_at

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if len(self.steps) == self.fails_at:
            raise RuntimeError("the lights went out")
        self.steps.append(scores[0].float().clone())
        return scores


def asked(chat: Conversation, question: str, *documents: str, **options: Any) -> tuple[Any, Tensor]:
    """The answer, and the logits [answer tokens, vocabulary] that it was chosen from."""
    scores = Scores()
    settings = {"max_new_tokens": NEW, "min_new_tokens": NEW, **options}
    answer = chat.ask(question, documents, logits_processor=[scores], **settings)
    return answer, torch.stack(scores.steps)


def error(one: Tensor, other: Tensor) -> float:
    seen = torch.isfinite(other)
    return float((one - other)[seen].norm() / other[seen].norm())


def states(answer: Any) -> list[str]:
    return [document.state for document in answer.report.documents]


CASES = [(name, spec) for name in HYBRIDS for spec in ("hypic:4", "full")] + [("llama", spec) for spec in ON_LLAMA]
CASES += [("qwen3_next", "addition"), ("qwen3_next", "prefix"), ("bamba", "comb"), ("jamba", "comb"),
          ("gemma2", "legolink:2"), ("gemma2", "full"), ("gemma3", "naive"), ("deepseek_v2", "legolink:2"),
          ("gpt2", "full")]  # fmt: skip


@pytest.mark.parametrize(("family", "method"), CASES)
def test_a_turn_goes_on_as_if_linked_in_one_go(family: str, method: str) -> None:
    engine = engine_of(family, method)
    continued, anew, other = (engine.conversation([MILL if part < 2 else LAKE]) for part in range(3))
    first = [asked(chat, "When?")[0] for chat in (continued, anew, other)]
    new = () if method == "comb" else (CITY,)
    anew.release()
    answer, logits = asked(continued, "Where to?", *new)
    expected, reference = asked(anew, "Where to?", *new)
    _, control = asked(other, "Where to?", *new)
    assert answer.token_ids == expected.token_ids
    assert error(logits, reference) < EXACT
    assert error(control, reference) > CONTROL
    assert answer.report.prompt_tokens == expected.report.prompt_tokens
    assert expected.report.continued_tokens == 0
    assert "released" in expected.report.relinked
    assert (continued.relinked, anew.relinked) == (0, 1) if (family, method) != ("jamba", "comb") else (1, 1)
    if (family, method) == ("jamba", "comb"):
        assert "scan" in answer.report.relinked
        return
    assert answer.report.relinked == ""
    assert answer.report.continued_tokens == first[0].report.prompt_tokens + NEW - 1
    third, logits = asked(continued, "Why?")  # and on from there
    anew.release()
    _, reference = asked(anew, "Why?")
    assert error(logits, reference) < EXACT
    assert third.report.continued_tokens == answer.report.prompt_tokens + NEW - 1
    if method != "comb":
        assert states(answer)[0] == "continued"
        assert states(third) == ["continued", "continued"]
    assert engine.store.stats().in_use == 0

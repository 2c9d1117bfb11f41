"""Grouped attention of scattered rows against the plain way: the same masks, whole, over repeated keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from comb import methods
from comb.linking import grouped, recomputed
from tests.helpers.families import FAMILIES, tiny

pytestmark = pytest.mark.usefixtures("one_thread")

GROUPED = ("llama", "qwen3", "mistral", "gemma3", "gpt_neox", "qwen2")
DRAW = torch.Generator().manual_seed(1)
DOCUMENTS = [torch.randint(3, 120, (length,), generator=DRAW).tolist() for length in (40, 7, 33)]


def logits(model: Any, monkeypatch: pytest.MonkeyPatch, least_keys: int) -> torch.Tensor:
    monkeypatch.setattr(recomputed, "_LEAST_KEYS", least_keys)
    method = methods.create("legolink:4", model)
    found: torch.Tensor = method.link(method.compile(DOCUMENTS), [9, 17, 33, 41, 12], head_ids=[5, 6]).logits
    return found


@pytest.mark.parametrize("family", GROUPED)
def test_it_is_the_plain_way(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert family in FAMILIES
    model = tiny(family, std=0.15).double()
    plain = logits(model, monkeypatch, 10**9)
    answered: list[int] = []
    parts = grouped.GroupedAttention.parts

    def counted(self: Any, *given: Any) -> Any:
        found = parts(self, *given)
        answered.append(len(found))
        return found

    monkeypatch.setattr(grouped.GroupedAttention, "parts", counted)
    for rows in (3, 16):
        monkeypatch.setattr(grouped, "_ROWS", rows)
        answered.clear()
        torch.testing.assert_close(logits(model, monkeypatch, 0), plain, rtol=1e-9, atol=1e-9)
        assert len(answered) >= model.config.num_hidden_layers
        assert max(answered) > 1 or rows == 16
    # the controls: a part that sees one key too few, heads in another order
    for wrong in (
        lambda found: [(here, end - 1, mask[..., :-1]) for here, end, mask in found],
        lambda found: [(here, end, mask.roll(1, -2)) for here, end, mask in found],
    ):
        monkeypatch.setattr(grouped.GroupedAttention, "parts", lambda self, *given, w=wrong: w(parts(self, *given)))
        assert (logits(model, monkeypatch, 0) - plain).abs().max() > 1e-4


def test_short_prompts_and_other_attention_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(recomputed.WAYS, "grouped", None)  # nobody may make one
    model = tiny("llama", std=0.15)
    logits(model, monkeypatch, recomputed._LEAST_KEYS)
    model.set_attn_implementation("eager")
    logits(model, monkeypatch, 0)

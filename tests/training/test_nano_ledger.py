"""The ledger backbone: its task, how it learns, and that its answers depend on how states are put together."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from comb import PICEngine
from comb.documents.datasets import read_dataset
from comb_training.nano import CHECKPOINT, LEDGER_CHECKPOINT
from comb_training.nano.world import ledger
from scripts.nano.ledger import LedgerRecipe, build_ledger, row_batch, train


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(CHECKPOINT)


def test_the_last_entry_counts() -> None:
    rng = random.Random(1)
    overwritten = 0
    for _ in range(50):
        scene = ledger(rng, 4, 3, 5, 9)
        entries = [line.rstrip(".").split(": ") for text in scene.documents for line in text.split(". ")]
        assert len(entries) == 15
        assert len(scene.questions) == len({name for name, _ in entries})
        for question in scene.questions:
            name = question.query.removeprefix("Where is ").rstrip("?")
            places = [place for other, place in entries if other == name]
            assert places[-1] == question.answer.strip()
            assert all(one != other for one, other in pairwise(places))
            assert any(line.startswith(name) for line in scene.documents[question.supporting[0]].split(". "))
            overwritten += len(places) > 1
    assert overwritten > 50


def test_the_set_is_the_same_again() -> None:
    one, again = (read_dataset("ledger", split="heldout", limit=5) for _ in range(2))
    assert one.examples == again.examples
    assert len(one) == 5
    assert {len(example.documents) for example in one} == {6}
    assert not {e.documents for e in one} & {e.documents for e in read_dataset("ledger", split="train", limit=5)}
    with pytest.raises(ValueError, match="generated"):
        read_dataset("ledger", __file__)


def test_it_learns(tokenizer: PreTrainedTokenizerFast) -> None:
    recipe = LedgerRecipe(rows=2, max_steps=60, cooldown_steps=5, hidden=32, heads=2, adamw_lr=0.02)
    model = build_ledger(tokenizer, recipe)
    scenes = [ledger(random.Random(9), 2, 2, 4, 2) for _ in range(4)]
    ids, targets = row_batch(tokenizer, scenes)
    assert (targets != -100).sum() == 4 * 2 * 2  # a place and the end of the answer
    where = targets != -100

    def loss() -> float:
        with torch.no_grad():
            return float(torch.nn.functional.cross_entropy(model(input_ids=ids).logits[where], targets[where]))

    before = loss()
    assert train(model, tokenizer, recipe)["steps"] == 60
    assert loss() < before - 1


def test_composition_beats_addition() -> None:
    """Equal recomputation and keys turned alike: only equation 6 lies between the methods of a pair."""
    engine = PICEngine.from_pretrained(str(LEDGER_CHECKPOINT), method="hypic:0")
    examples = list(read_dataset("ledger", limit=16))

    def right(method: str) -> int:
        own = PICEngine(engine.model, engine.tokenizer, method=method)
        answers = [own.ask(example.query, example.documents, max_new_tokens=4).text.strip() for example in examples]
        return sum(answer == example.answer for answer, example in zip(answers, examples, strict=True))

    full = right("full")
    assert full >= 14
    for composed, added in (("hypic:0", "hypic:0,compose=false"), ("hypic:mode=rotation", "addition:rotate=true")):
        assert right(composed) >= full - 1
        assert right(added) <= full - 5

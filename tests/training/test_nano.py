"""The nano world, its tokenizer, the packed rows and the checkpoint made from them."""

from __future__ import annotations

import functools
import itertools
import re

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from comb_training.nano import CHECKPOINT, Question, Scene, World
from comb_training.nano import world as words
from comb_training.nano.world import pairs
from scripts.nano.evaluate import exact_match
from scripts.nano.initialise import build_model
from scripts.nano.packing import encode, pack
from scripts.nano.pretrain import forward
from scripts.nano.tokenizer import train_tokenizer


def scenes(split: str, count: int = 60, **options: float) -> list[Scene]:
    world = World(5, split, **options)  # type: ignore[arg-type]
    return [world.scene(1 + index % 8, 8) for index in range(count)]


def every(kind: str) -> list[tuple[Scene, Question]]:
    return [(scene, q) for scene in scenes("heldout", 120) for q in scene.questions if q.kind == kind]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(0)


def test_splits_share_no_name() -> None:
    for heads, tails in ((words.FIRST_NAMES, words.LAST_NAMES), (words.COMPANY_HEADS, words.COMPANY_TAILS)):
        train, heldout = set(pairs(heads, tails, "train")), set(pairs(heads, tails, "heldout"))
        assert train.isdisjoint(heldout)
        assert len(train) + len(heldout) == len(heads) * len(tails)
        assert 0.2 < len(heldout) / (len(train) + len(heldout)) < 0.3


def test_heldout_names_never_occur_in_training_text() -> None:
    told = " ".join(
        itertools.chain.from_iterable((*s.documents, *(q.query for q in s.questions)) for s in scenes("train", 300))
    )
    heldout = pairs(words.FIRST_NAMES, words.LAST_NAMES, "heldout") + pairs(
        words.COMPANY_HEADS, words.COMPANY_TAILS, "heldout"
    )
    assert not [name for name in heldout if name in told]
    movers = {q.query.removeprefix("Where is ").removesuffix("?") for _, q in every("story")}
    assert not [name for name in movers if re.search(rf"\b{name} (moved|went|journeyed|travelled)", told)]


@pytest.mark.parametrize("kind", ["person", "company", "two_document"])
def test_supporting_documents_hold_the_answer(kind: str) -> None:
    assert every(kind)
    for scene, question in every(kind):
        text = " ".join(scene.documents[index] for index in question.supporting)
        value = question.answer.replace(".", "").split()[-1]
        assert re.search(rf"\b{value}\b", text), (question, text)
        assert len(question.supporting) == question.hops == (2 if kind == "two_document" else 1)


def test_two_document_questions_need_both_documents() -> None:
    for scene, question in every("two_document"):
        person_document, company_document = (scene.documents[index] for index in question.supporting)
        first, second = re.findall(r"[^.]+", question.answer)
        person = " ".join(first.split()[:2])
        company = first.split(" works at ")[1]
        assert company not in question.query
        assert person in question.query
        assert person in person_document
        assert company in person_document
        assert person not in company_document
        assert second.strip().startswith(company)


def test_last_place_counts() -> None:
    moves = re.compile(r"(\w+) (?:moved to|went to|went back to|journeyed to|travelled to) the (\w+)\.")
    for scene, question in every("story"):
        told = [scene.documents[index] for index in question.supporting]
        assert re.sub(moves, "", told[0]).strip() == ""
        last = dict(moves.findall(told[0]))
        name = question.query.removeprefix("Where is ").removesuffix("?")
        assert question.answer == f"{name} is in the {last[name]}."
        assert sum(name in document for document in scene.documents) == 1


@pytest.mark.parametrize("count", [1, 2, 12, 30])
def test_any_number_of_documents(count: int) -> None:
    for stories in (0.0, 1.0):
        world = World(1, "heldout", stories=stories, mixed=1.0 - stories)
        assert all(len(world.scene(count, 8).documents) == count for _ in range(50))


@functools.cache
def _checkpoint_tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(CHECKPOINT)


@given(st.text(max_size=60))
@example("Größe 😀👩‍👩‍👧")
@example("日本語")
@example("a  b\n\tc ")
@example("\x00\x7f")
@settings(max_examples=200, deadline=None)
def test_tokenizer_round_trips_any_text(text: str) -> None:
    loaded = _checkpoint_tokenizer()
    ids = loaded(text, add_special_tokens=False)["input_ids"]
    assert loaded.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False) == text


def test_chat_template_gives_the_prompt_layout(tokenizer: PreTrainedTokenizerFast) -> None:
    for scene in scenes("heldout", 20):
        encoded = encode(tokenizer, scene)
        for number, question in enumerate(scene.questions):
            content = "".join(f"{document}\n" for document in scene.documents) + question.query
            turns = [{"role": "user", "content": content}, {"role": "assistant", "content": question.answer}]
            asked = tokenizer.apply_chat_template(turns[:1], tokenize=False, add_generation_prompt=True)
            whole = tokenizer.apply_chat_template(turns, tokenize=False)
            assert tokenizer(asked, add_special_tokens=False)["input_ids"] == encoded.prompt(number)
            expected = encoded.prompt(number) + encoded.answers[number]
            assert tokenizer(whole, add_special_tokens=False)["input_ids"] == expected


def test_packed_rows_equal_single_prompts(tokenizer: PreTrainedTokenizerFast) -> None:
    model = build_model(tokenizer, 0).eval()
    torch.nn.init.normal_(model.model.layers[3].self_attn.o_proj.weight, std=0.1)
    torch.nn.init.normal_(model.model.layers[3].mlp.down_proj.weight, std=0.1)
    encoded = [encode(tokenizer, scene) for scene in scenes("train", 5)]
    rows = pack(encoded, tokenizer.pad_token_id, document_weight=0.0)
    with torch.no_grad():
        packed, _ = forward(model, rows)
        single = []
        for scene in encoded:
            for ask, answer in zip(scene.asks, scene.answers, strict=True):
                ids = torch.tensor([scene.context + ask + answer])
                single.append(model(input_ids=ids).logits[0, -len(answer) - 1 : -1])
    torch.testing.assert_close(packed, torch.cat(single), atol=1e-4, rtol=1e-4)


@pytest.fixture(scope="module")
def checkpoint() -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32).eval()


def test_checkpoint_is_small_and_knows_its_tokens(checkpoint: torch.nn.Module) -> None:
    assert sum(file.stat().st_size for file in CHECKPOINT.iterdir()) <= 10_000_000
    loaded = _checkpoint_tokenizer()
    assert (loaded.eos_token, loaded.pad_token, loaded.bos_token) == ("<|end|>", "<|pad|>", None)
    assert checkpoint.generation_config.eos_token_id == loaded.eos_token_id
    assert checkpoint.config.vocab_size == len(loaded)


def test_checkpoint_answers_heldout_questions(checkpoint: torch.nn.Module) -> None:
    scores = exact_match(checkpoint, _checkpoint_tokenizer(), num_scenes=15, seed=77)
    assert scores["all"]["n"] >= 80
    assert scores["all"]["exact_match"] >= 0.95, scores


def test_checkpoint_reads_stories_in_the_forms_of_babi(checkpoint: torch.nn.Module) -> None:
    world = World(3, "train", stories=1.0)
    hits = []
    for _ in range(40):
        scene = world.scene(1, 1)
        encoded = encode(_checkpoint_tokenizer(), scene)
        ids = torch.tensor([encoded.prompt(0)])
        output = checkpoint.generate(input_ids=ids, do_sample=False)[0, ids.shape[1] :]
        hits.append(output.tolist() == encoded.answers[0])
    assert sum(hits) >= 38


def test_checkpoint_cannot_answer_without_documents(checkpoint: torch.nn.Module) -> None:
    scores = exact_match(checkpoint, _checkpoint_tokenizer(), num_scenes=12, seed=78, documents=False)
    assert scores["all"]["exact_match"] <= 0.08, scores

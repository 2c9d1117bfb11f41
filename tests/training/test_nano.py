"""The nano world and the backbones made on it: the plain one, the hybrid one, and that of ledgers."""

from __future__ import annotations

import itertools
import random
import re
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from comb import PICEngine, methods
from comb.documents.datasets import read_dataset
from comb_training.nano import CHECKPOINT, HYBRID_CHECKPOINT, LEDGER_CHECKPOINT, Question, Scene, World
from comb_training.nano import world as words
from comb_training.nano.world import ledger, pairs
from scripts.nano.evaluate import exact_match
from scripts.nano.hybrid import LINEAR, HybridRecipe, build_hybrid, distil, match_layers, row_stream
from scripts.nano.ledger import LedgerRecipe, build_ledger, row_batch, train
from scripts.nano.packing import encode
from scripts.nano.tokenizer import train_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(CHECKPOINT)


@pytest.fixture(scope="module")
def nano() -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(CHECKPOINT).eval().requires_grad_(False)


def scenes(split: str, count: int = 60, **options: float) -> list[Scene]:
    world = World(5, split, **options)  # type: ignore[arg-type]
    return [world.scene(1 + index % 8, 8) for index in range(count)]


def every(kind: str) -> list[tuple[Scene, Question]]:
    return [(scene, q) for scene in scenes("heldout", 120) for q in scene.questions if q.kind == kind]


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
        assert len(question.supporting) == (2 if kind == "two_document" else 1)


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


@given(st.text(max_size=60))
@example("Größe 😀👩‍👩‍👧")
@example("日本語")
@example("a  b\n\tc ")
@example("\x00\x7f")
@settings(max_examples=200, deadline=None)
def test_tokenizer_round_trips_any_text(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False) == text


def test_chat_template_gives_the_prompt_layout() -> None:
    tokenizer = train_tokenizer(0)
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


def test_checkpoint_is_small_and_knows_its_tokens(nano: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    assert sum(file.stat().st_size for file in CHECKPOINT.iterdir()) <= 10_000_000
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.bos_token) == ("<|end|>", "<|pad|>", None)
    assert nano.generation_config.eos_token_id == tokenizer.eos_token_id
    assert nano.config.vocab_size == len(tokenizer)


def test_checkpoint_answers_heldout_questions(nano: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    scores = exact_match(nano, tokenizer, num_scenes=15, seed=77)
    assert scores["all"]["n"] >= 80
    assert scores["all"]["exact_match"] >= 0.95, scores


def test_checkpoint_reads_stories_in_the_forms_of_babi(
    nano: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    world = World(3, "train", stories=1.0)
    hits = []
    for _ in range(40):
        scene = world.scene(1, 1)
        encoded = encode(tokenizer, scene)
        ids = torch.tensor([encoded.prompt(0)])
        output = nano.generate(input_ids=ids, do_sample=False)[0, ids.shape[1] :]
        hits.append(output.tolist() == encoded.answers[0])
    assert sum(hits) >= 38


def test_checkpoint_cannot_answer_without_documents(nano: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    scores = exact_match(nano, tokenizer, num_scenes=12, seed=78, documents=False)
    assert scores["all"]["exact_match"] <= 0.08, scores


def test_both_steps_of_the_hybrid_learn(nano: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    recipe = HybridRecipe(scenes=2, questions=1, matching_steps=8, distillation_steps=3)
    hybrid, ids = build_hybrid(nano, seed=0), torch.arange(5, 60)[None]
    mixer = hybrid.model.layers[0].mamba

    def distance() -> float:
        with torch.no_grad():
            return (hybrid(ids).logits.softmax(-1) - nano(ids).logits.softmax(-1)).abs().sum().item()

    start, untrained = distance(), mixer.in_proj.weight.clone()
    others = hybrid.model.layers[1].self_attn.q_proj.weight.clone()
    match_layers(hybrid, nano, row_stream(tokenizer, recipe), recipe)
    assert not torch.equal(mixer.in_proj.weight, untrained)
    assert torch.equal(hybrid.model.layers[1].self_attn.q_proj.weight, others)
    matched = distance()
    distil(hybrid, nano, row_stream(tokenizer, recipe), recipe)
    assert not torch.equal(hybrid.model.layers[1].self_attn.q_proj.weight, others)
    assert matched < start


@pytest.mark.slow
def test_the_hybrid_checkpoint_answers_and_needs_its_linear_layers(tokenizer: PreTrainedTokenizerFast) -> None:
    model = AutoModelForCausalLM.from_pretrained(HYBRID_CHECKPOINT).eval()
    assert [index for index, kind in enumerate(model.config.layer_types) if kind == "linear_attention"] == list(LINEAR)
    assert exact_match(model, tokenizer, num_scenes=5, seed=20_000)["all"]["exact_match"] > 0.9
    for index in LINEAR:
        model.model.layers[index].mamba.out_proj.weight.data.zero_()
    assert exact_match(model, tokenizer, num_scenes=2, seed=20_000)["all"]["exact_match"] < 0.1


def streams(model: Any, ids: list[int], held: dict[int, list[Tensor]]) -> tuple[list[Tensor], Tensor]:
    """What every layer reads, and the last log-probabilities, of one pass with places `held` at given streams."""
    seen: list[Tensor] = []

    def hold(index: int) -> Any:
        def hook(_: object, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            stream = arguments[0].clone()
            for place, layers in held.items():
                stream[0, place] = layers[index]
            seen.append(stream[0])
            return stream, *arguments[1:]

        return hook

    hooks = [layer.register_forward_pre_hook(hold(index)) for index, layer in enumerate(model.model.layers)]
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, -1]
    for hook in hooks:
        hook.remove()
    return seen, logits.log_softmax(-1)


@pytest.mark.parametrize("width", [3, 8])
def test_hypic_is_a_pass_whose_interiors_stay_as_they_are_alone(width: int, tokenizer: PreTrainedTokenizerFast) -> None:
    model = AutoModelForCausalLM.from_pretrained(HYBRID_CHECKPOINT).eval()
    method = methods.create("hypic", model, w=width)
    scene = encode(tokenizer, World(20_000, "heldout").scene(5, 2))
    newline = tokenizer("\n", add_special_tokens=False)["input_ids"][0]
    ends = [place + 1 for place, token in enumerate(scene.context) if token == newline]
    segments = [scene.context[start:end] for start, end in zip([1, *ends], ends, strict=False)]
    for ask in scene.asks:
        linked = method.link(method.compile(segments), ask, prefix_ids=scene.context[:1]).logits[0].log_softmax(-1)
        held, at = {}, 1
        for segment in segments:
            alone, _ = streams(model, segment, {})
            held |= {at + t: [layer[t] for layer in alone] for t in range(width, len(segment) - width)}
            at += len(segment)
        _, expected = streams(model, scene.context + ask, held)
        _, full = streams(model, scene.context + ask, {})
        assert (linked - expected).abs().max() < 1e-4
        assert (linked - full).abs().max() > 0.05


def test_the_last_entry_of_a_ledger_counts() -> None:
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
            assert all(one != other for one, other in itertools.pairwise(places))
            assert any(line.startswith(name) for line in scene.documents[question.supporting[0]].split(". "))
            overwritten += len(places) > 1
    assert overwritten > 50


def test_the_set_of_ledgers_is_the_same_again() -> None:
    one, again = (read_dataset("ledger", split="heldout", limit=5) for _ in range(2))
    assert one.examples == again.examples
    assert len(one) == 5
    assert {len(example.documents) for example in one} == {6}
    assert not {e.documents for e in one} & {e.documents for e in read_dataset("ledger", split="train", limit=5)}
    with pytest.raises(ValueError, match="generated"):
        read_dataset("ledger", __file__)


def test_ledgers_are_learned(tokenizer: PreTrainedTokenizerFast) -> None:
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

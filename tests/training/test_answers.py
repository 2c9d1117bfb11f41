"""The backbone's own answers: right, shared prefills included; resumable; nothing dropped in silence."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from comb.documents.datasets import Counts
from comb.documents.document import Prompt, PromptBuilder, until_stop
from comb_training.answers import generate
from comb_training.answers.engines import TransformersEngine
from comb_training.data.batches import TrainingExample
from tests.helpers.byte_text import byte_tokenizer
from tests.helpers.training import record_questions

SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 64, "eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None,
    "initializer_range": 0.3,  # so that answers differ, and some end
}  # fmt: skip


def answer_on_policy(
    model: Any, examples: list[TrainingExample], counts: Counts | None = None, *, stops: tuple[int, ...] = (1,),
    max_new_tokens: int = 8, max_prompt_tokens: int | None = None, batch_size: int = 64, folder: Path | None = None,
) -> list[TrainingExample]:  # fmt: skip
    """The examples with the model's own answers as targets; counted as a run does."""
    limit = generate.prompt_limit(model, max_new_tokens, max_prompt_tokens)
    with tempfile.TemporaryDirectory() as elsewhere:
        answers = generate.generate_answers(
            examples,
            generate.settings_of(model, stops, max_new_tokens),
            lambda: TransformersEngine(model, 0, stops, max_new_tokens, batch_size=batch_size),
            decode=lambda _: "", max_prompt_tokens=limit, folder=folder or elsewhere, counts=counts or Counts(),
            progress=False,
        ).answers  # fmt: skip
    given = zip(examples, answers, strict=True)
    return [replace(e, target=answer.token_ids) for e, answer in given if answer is not None]


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SMALL)).eval()


@pytest.fixture(scope="module")
def backbone() -> LlamaForCausalLM:
    return llama()


@pytest.fixture(scope="module")
def examples() -> list[TrainingExample]:
    """Five sets of documents with one to four questions each, of different lengths."""
    generator = torch.Generator().manual_seed(1)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(2, 64, (count,), generator=generator).tolist())

    rows = []
    for group in range(5):
        documents = tuple(ids(2 + group + index) for index in range(group % 3 + 1))
        prompts = [Prompt((3,), documents, ids(2 + n)) for n in range(group % 4 + 1)]
        rows += [TrainingExample(prompt, (1,), f"{group}-{n}") for n, prompt in enumerate(prompts)]
    return rows


def one_by_one(backbone: Any, example: TrainingExample) -> tuple[int, ...]:
    """The reference: greedy decoding by hand, without cache, padding or batch."""
    ids = list(example.prompt.flat)
    new: list[int] = []
    with torch.no_grad():
        while len(new) < 8 and 1 not in new:
            new.append(int(backbone(torch.tensor([ids + new])).logits[0, -1].argmax()))
    return tuple(new)


@pytest.mark.parametrize(("kind", "batch_size"), [("llama", 1), ("llama", 4), ("llama", 64), ("sliding", 64)])
def test_answers_are_what_the_backbone_says_alone(examples: list[TrainingExample], kind: str, batch_size: int) -> None:
    torch.manual_seed(0)
    sliding = MistralForCausalLM(MistralConfig(**SMALL, sliding_window=6)).eval()  # it gets whole prompts
    backbone = {"llama": llama(), "sliding": sliding}[kind]
    answered = answer_on_policy(backbone, examples, batch_size=batch_size)
    assert [e.target for e in answered] == [one_by_one(backbone, e) for e in examples]
    assert [e.id for e in answered] == [e.id for e in examples]
    assert len({e.target for e in answered}) > len(examples) // 2  # the check is no accident of constant answers
    assert kind == "sliding" or {1 in e.target for e in answered} == {True, False}  # some end, some are cut


@pytest.mark.parametrize("draft", ["right", "longer", "wrong", "unfinished"])
def test_drafts_are_taken_only_where_the_backbone_says_just_that(
    backbone: Any, examples: list[TrainingExample], monkeypatch: pytest.MonkeyPatch, draft: str
) -> None:
    said = [one_by_one(backbone, example) for example in examples]
    finished = [index for index, target in enumerate(said) if target[-1] == 1]
    assert 2 <= len(finished) < len(said)
    change: dict[str, Any] = {
        "right": lambda target: target,
        "longer": lambda target: (*target, 9, 1),  # goes on where the backbone stops
        "wrong": lambda target: (target[0] ^ 1, *target[1:]),
        "unfinished": lambda target: target[:-1] or (9,),
    }
    drafts = [replace(example, target=change[draft](target)) for example, target in zip(examples, said, strict=True)]
    decoded = record_questions(monkeypatch, "_decode")
    answered = answer_on_policy(backbone, drafts)
    assert [e.target for e in answered] == said  # whatever the draft
    skipped = {examples[index].id for index in finished} if draft == "right" else set()
    assert {e.id for e in decoded} == {e.id for e in examples} - skipped


def test_documents_are_prefilled_once_per_group(
    backbone: Any, examples: list[TrainingExample], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[int] = []
    forward = type(backbone).forward

    def counting(self: Any, *args: Any, **kwargs: Any) -> Any:
        rows.append(kwargs["input_ids"].shape[0])
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(backbone), "forward", counting)
    answer_on_policy(backbone, examples)
    passes = [count for count in rows if count > 2]  # discovery looks at the model with two rows
    assert passes[:2] == [5, len(examples)]  # five sets of documents, then all questions


def test_sampling_settings_of_the_backbone_do_not_count_and_its_mode_stays(examples: list[TrainingExample]) -> None:
    model = llama().train()
    expected = [e.target for e in answer_on_policy(model, examples)]
    model.generation_config.update(do_sample=True, temperature=5.0, top_k=3, repetition_penalty=3.0)
    assert [e.target for e in answer_on_policy(model, examples)] == expected
    assert model.training


def test_long_prompts_are_dropped_and_cut_answers_counted(backbone: Any, examples: list[TrainingExample]) -> None:
    long = TrainingExample(Prompt((3,), ((5,) * 60,), (6,)), (1,), "long")
    counts = Counts(read=len(examples) + 1)
    answered = answer_on_policy(backbone, [long, *examples], counts)
    assert "long" not in {e.id for e in answered}
    assert dict(counts.dropped) == {"prompt of more than 56 tokens": 1}  # 64 positions, 8 of them for the answer
    assert counts.kept == len(answered)
    assert counts.truncated == {"answer cut at 8 tokens": sum(1 not in e.target for e in answered)}
    again = Counts(read=len(examples))
    answer_on_policy(backbone, examples, again, max_prompt_tokens=10)
    assert again.dropped == {"prompt of more than 10 tokens": sum(len(e.prompt.flat) > 10 for e in examples)}


@pytest.mark.parametrize("change", ["weights", "length", "stops", "question"])
def test_other_weights_settings_or_prompts_are_other_answers(
    backbone: Any, examples: list[TrainingExample], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    answer_on_policy(backbone, examples, folder=tmp_path)
    model, asked = backbone, examples
    options: dict[str, Any] = {}
    if change == "weights":
        model = llama()
        with torch.no_grad():  # the embedding stays as it was
            model.model.layers[1].mlp.down_proj.weight.mul_(1.5)
    elif change == "length":
        options["max_new_tokens"] = 4
    elif change == "stops":
        options["stops"] = (1, 9)
    else:
        asked = [TrainingExample(Prompt((3,), e.segments, (*e.prompt.query, 9)), (1,), e.id) for e in examples]
    generated = record_questions(monkeypatch)
    there = answer_on_policy(model, asked, folder=tmp_path, **options)
    assert sorted(str(e.id) for e in generated) == sorted(str(e.id) for e in asked)
    assert there == answer_on_policy(model, asked, **options)
    generated.clear()
    answer_on_policy(backbone, examples, folder=tmp_path)  # those of before are still there
    assert generated == []


def test_an_answer_ends_at_a_stop_character_where_no_template_ends_it() -> None:
    tokenizer = byte_tokenizer()
    builder = PromptBuilder(tokenizer, prefix="Answer.\n", stop='"\n')
    assert tokenizer.decode(builder.answer("Rome")[:-1]) == 'Rome"'
    assert until_stop(' Rome"\nQuestion', builder.stop) == until_stop("Rome\n", builder.stop) == "Rome"
    assert until_stop(' "Rome" ', PromptBuilder(tokenizer).stop) == '"Rome"'
    ends = generate.stop_token_ids(SimpleNamespace(generation_config=None), tokenizer, '"\n')
    assert {tokenizer.decode([token]) for token in ends} == {'"', "\n", tokenizer.eos_token}

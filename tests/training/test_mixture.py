"""Mixtures: shares by weight, held-out sides that stay apart, ids, counts, documents split without loss; whole runs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from comb.documents.datasets import Counts
from comb.documents.document import Document, Example, PromptBuilder
from comb.documents.splitting import create
from comb_training.answers import answer_prepared
from comb_training.config import Config, DataConfig, MixtureEntry, config_from_dict, load_config
from comb_training.data.batches import fit_documents
from comb_training.data.mixture import ConfiguredSide, apportion, draw, epoch_numbers, heldout_numbers
from comb_training.nano import CHECKPOINT
from comb_training.train import run_training
from comb_training.trainer.prepare import prepare
from tests.helpers.training import invoke, nano_run


def rows_file(path: Path, rows: int, *, word: str = "box", **more: Any) -> Path:
    """A JSONL file: two questions about each of its documents, ids from the line numbers."""
    lines = []
    for row in range(rows):
        document = f"The {word} number {row // 2} is red."
        fields = {"documents": [document], "query": f"Which {word}, {row}?", "answer": f"It is {row}.", **more}
        lines.append(json.dumps({"group": f"{word}{row // 2}", **fields}))
    path.write_text("\n".join(lines))
    return path


def mixed(*sets: dict[str, Any], **more: Any) -> DataConfig:
    entries = tuple(MixtureEntry(dataset="jsonl", **{"heldout_share": 0.2, **fields}) for fields in sets)
    return DataConfig(mixture=entries, **more)


def two_sets(folder: Path, **more: Any) -> DataConfig:
    a, b = rows_file(folder / "a.jsonl", 50, word="box"), rows_file(folder / "b.jsonl", 20, word="cup")
    return mixed({"name": "a", "path": str(a), "weight": 3}, {"name": "b", "path": str(b)}, **more)


def tokenized(data: DataConfig, builder: PromptBuilder, split: str = "train", limit: int | None = None) -> Any:
    return ConfiguredSide(data, builder, 512, split, limit).tokenized()


def of_sets(examples: Sequence[Any]) -> dict[str, int]:
    return dict(Counter(str(example.id).partition("/")[0].partition("@")[0] for example in examples))


def test_shares_are_whole_numbers_that_sum_to_the_total() -> None:
    assert apportion({"a": 1, "b": 1, "c": 1}, 10) == {"a": 4, "b": 3, "c": 3}
    assert apportion({"a": 0.1, "b": 0.2, "c": 0.7}, 10) == {"a": 1, "b": 2, "c": 7}
    assert apportion({"a": 3, "b": 1}, 0) == {"a": 0, "b": 0}


def test_the_set_that_runs_out_first_decides_the_epoch() -> None:
    sizes, weights = {"a": 100, "b": 10}, {"a": 3.0, "b": 1.0}
    assert epoch_numbers(sizes, weights) == {"a": 30, "b": 10}
    assert epoch_numbers(sizes, weights, max_repeats=2) == {"a": 60, "b": 20}
    assert epoch_numbers(sizes, weights, max_repeats=2.5) == {"a": 75, "b": 25}
    assert epoch_numbers(sizes, weights, epoch_examples=20) == {"a": 15, "b": 5}
    assert epoch_numbers(sizes, weights, limit=8) == {"a": 6, "b": 2}
    assert epoch_numbers({"a": 5}, {"a": 0.3}) == {"a": 5}
    with pytest.raises(ValueError, match=r"takes 25 of set 'b', which has 10 .*epochs of 40.*data.max_repeats=3"):
        epoch_numbers(sizes, weights, epoch_examples=100)
    assert epoch_numbers(sizes, weights, epoch_examples=100, max_repeats=3) == {"a": 75, "b": 25}
    with pytest.raises(ValueError, match="set 'b': no example is left"):
        epoch_numbers({"a": 1, "b": 0}, weights)


def test_held_out_sets_fill_up_for_each_other() -> None:
    weights = {"a": 2.0, "b": 1.0, "c": 1.0}
    assert heldout_numbers({"a": 90, "b": 90, "c": 90}, weights, 40) == {"a": 20, "b": 10, "c": 10}
    assert heldout_numbers({"a": 90, "b": 90, "c": 4}, weights, 40) == {"a": 24, "b": 12, "c": 4}
    assert heldout_numbers({"a": 5, "b": 3, "c": 4}, weights, 40) == {"a": 5, "b": 3, "c": 4}
    assert heldout_numbers({"a": 5, "b": 3, "c": 4}, weights, None) == {"a": 5, "b": 3, "c": 4}


def test_weights_give_the_promised_numbers_and_all_is_counted(tmp_path: Path, builder: PromptBuilder) -> None:
    examples, counts = tokenized(two_sets(tmp_path), builder)
    # 40 and 16 are on the train sides: 3 to 1 is at most 40 and 13
    assert of_sets(examples) == {"a": 40, "b": 13}
    data = two_sets(tmp_path, epoch_examples=24)
    drawn = tokenized(data, builder)[0]
    assert tokenized(data, builder)[0] == drawn
    assert tokenized(replace(data, seed=1), builder)[0] != drawn
    assert sorted(Counter(example.segments for example in drawn).values()) == [2] * 12  # whole documents
    assert counts.kept == len(examples) == 53
    assert counts.sets["b"].dropped == {"over the share of the mixture": 3}
    assert counts.to_dict()["dropped"] == {"b: over the share of the mixture": 3}
    assert counts.to_dict()["sets"]["a"]["kept"] == 40
    assert str(counts).split("\n") == [
        "53 examples of 56 rows",
        "  a: 40 of 40 rows kept",
        "  b: 13 of 16 rows kept; 3 dropped: over the share of the mixture",
    ]


def test_repeats_are_counted_and_have_ids_of_their_own(tmp_path: Path, builder: PromptBuilder) -> None:
    data = two_sets(tmp_path, max_repeats=2.5, epoch_examples=100)
    examples, counts = tokenized(data, builder)
    assert of_sets(examples) == {"a": 75, "b": 25}
    assert len({example.id for example in examples}) == 100
    assert (counts.sets["a"].repeated, counts.sets["b"].repeated) == (35, 9)
    assert counts.kept == 100
    assert str(counts).split("\n")[2] == "  b: 16 of 16 rows kept; 9 repeated"
    times = Counter(example.prompt for example in examples)
    assert set(times.values()) == {1, 2}
    again = next(example for example in examples if str(example.id).startswith("b@2/"))
    assert times[again.prompt] == 2


def test_what_a_set_gives_does_not_depend_on_the_others(tmp_path: Path, builder: PromptBuilder) -> None:
    data = two_sets(tmp_path, epoch_examples=20)
    other = rows_file(tmp_path / "c.jsonl", 40, word="hat")
    more = MixtureEntry("jsonl", str(other), name="c", heldout_share=0.2, weight=4)
    both = replace(data, mixture=(more, *data.mixture), epoch_examples=40)
    few, many = ({e.id for e in tokenized(each, builder)[0] if str(e.id).startswith("a")} for each in (data, both))
    assert len(few) == len(many) == 15
    assert few == many


def test_many_questions_about_few_documents_are_not_the_whole_draw() -> None:
    blocks = [list(range(start, start + 100)) for start in range(0, 400, 100)]
    drawn = [place for place, _ in draw(blocks, 160, seed=0, name="a")]
    assert len(set(drawn)) == len(drawn) == 160
    about = Counter(place // 100 for place in drawn)
    assert sorted(about) == [0, 1, 2, 3]
    assert max(about.values()) < 80
    assert drawn == [place for place, _ in draw(blocks, 160, seed=0, name="a")]
    assert drawn != [place for place, _ in draw(blocks, 160, seed=0, name="b")]
    assert drawn != [place for place, _ in draw(blocks, 160, seed=1, name="a")]


def test_text_and_tokens_are_the_same_examples(tmp_path: Path, builder: PromptBuilder) -> None:
    data = two_sets(tmp_path, epoch_examples=20)
    data = replace(data, mixture=(replace(data.mixture[0], query_template="Say: {query}"), data.mixture[1]))
    texts, _ = ConfiguredSide(data, builder, 512, "train", None).examples()
    tokens, _ = tokenized(data, builder)
    assert [example.id for example in texts] == [example.id for example in tokens]
    assert all(example.query.startswith("Say: ") == str(example.id).startswith("a/") for example in texts)
    assert [builder.build(e.query, list(map(builder.segment, e.documents))) for e in texts] == [
        e.prompt for e in tokens
    ]


def test_ids_are_unique_even_where_files_repeat_theirs(tmp_path: Path, builder: PromptBuilder) -> None:
    a = rows_file(tmp_path / "a.jsonl", 20, id="same")
    b = rows_file(tmp_path / "b.jsonl", 20, word="cup", id="same#2")
    examples, _ = tokenized(mixed({"name": "a", "path": str(a)}, {"name": "b", "path": str(b)}), builder)
    assert len({example.id for example in examples}) == len(examples) == 32


def test_no_set_trains_on_what_is_held_out(tmp_path: Path, builder: PromptBuilder) -> None:
    data = two_sets(tmp_path)
    train = {example.segments for example in tokenized(data, builder)[0]}
    heldout, counts = tokenized(data, builder, "heldout", 8)
    assert of_sets(heldout) == {"a": 6, "b": 2}
    assert counts.kept == 8
    assert not train & {example.segments for example in heldout}


def test_two_sets_of_one_file_hold_out_for_each_other(tmp_path: Path, builder: PromptBuilder) -> None:
    path = str(rows_file(tmp_path / "a.jsonl", 60))
    data = mixed({"name": "a", "path": path}, {"name": "b", "path": path, "heldout_share": 0.4})
    train, counts = tokenized(data, builder)
    heldout, _ = tokenized(data, builder, "heldout", 1000)
    assert len({example.segments for example in heldout}) == 12
    assert not {example.segments for example in train} & {example.segments for example in heldout}
    assert counts.sets["a"].dropped["held out by set b"] == 12
    text, _ = ConfiguredSide(data, builder, 512, "train", None).examples()
    assert [example.id for example in text] == [example.id for example in train]


def test_a_splitter_cuts_where_the_limit_would_truncate(builder: PromptBuilder) -> None:
    long, short = Document("Ann is in the hall. " * 20, title="Hall"), Document("Bob is here.")
    examples = [Example((short, long), "Where?", "There."), Example((long,), "Who?", "Ann.")]
    counts = Counts(read=2)
    cut = fit_documents(examples, builder, 64, counts, create("sentences:32"))
    whole = builder.segment(long)
    parts = cut[1].documents
    assert sum((builder.segment(part) for part in parts), ()) == whole
    assert all(len(builder.segment(part)) <= 32 for part in parts)
    assert cut[0].documents == (short, *parts)
    assert counts.noted == {
        "documents of more than 32 tokens, split without loss": 1,
        "segments made of them": len(parts),
    }
    assert not counts.truncated
    assert counts.kept == 2
    with pytest.raises(ValueError, match=r"segments of up to 128 tokens, but documents may have 64 .*paragraphs:64"):
        fit_documents([], builder, 64, Counts(), create("paragraphs:128"))


def test_splitting_is_part_of_a_run(tmp_path: Path, builder: PromptBuilder) -> None:
    path = rows_file(tmp_path / "a.jsonl", 20, documents=["One two three. " * 30])
    data = DataConfig("jsonl", str(path), splitter="sentences:16")
    examples, counts = tokenized(data, builder)
    cut, truncated = tokenized(replace(data, splitter=None, max_document_tokens=16), builder)
    assert sum(map(len, examples[0].segments)) > sum(map(len, cut[0].segments)) == 16
    assert counts.noted["documents of more than 16 tokens, split without loss"] == 1
    assert truncated.truncated == {"document of more than 16 tokens": 1}
    again = tokenized(data, builder)[1]
    assert again == counts
    assert "split without loss" in str(again)


def test_a_mixture_is_read_from_yaml_and_survives_it(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("data: {mixture: [{dataset: squad, path: a.json, weight: 2}, {dataset: nano, name: world}]}")
    config = load_config(path)
    assert [entry.name for entry in config.data.mixture] == ["squad", "world"]
    assert config.data.mixture[0].weight == 2.0
    assert config.data.dataset == "mixture"
    assert config_from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_a_path_beside_a_mixture_is_the_folder_of_its_sets(tmp_path: Path, builder: PromptBuilder) -> None:
    (tmp_path / "sub").mkdir()
    rows_file(tmp_path / "sub" / "a.jsonl", 20)
    inside = mixed({"name": "a", "path": "sub/a.jsonl"}, path=str(tmp_path))
    full = mixed({"name": "a", "path": str(tmp_path / "sub" / "a.jsonl")}, path="/elsewhere")
    assert list(tokenized(inside, builder)[0]) == list(tokenized(full, builder)[0])
    with pytest.raises(ValueError, match=r"set 'a': .*no file or folder '/elsewhere/sub/a.jsonl'"):
        tokenized(replace(inside, path="/elsewhere"), builder)


SETS = [
    {"dataset": "nano", "name": "a", "weight": 3, "options": {"scenes": 40, "questions": 4}},
    {"dataset": "nano", "name": "b", "options": {"scenes": 20, "questions": 2}, "query_template": "Now: {query}"},
]


def config(folder: Path, data: dict[str, Any] | None = None, **train: Any) -> Config:
    mixed = {"mixture": SETS, "epoch_examples": 24, **(data or {})}
    content = nano_run(folder / "out", mixed, **{"steps": 2, "answers": "gold", **train})
    return config_from_dict(content | {"eval": {"limit": 8, "methods": ["none"], "max_new_tokens": 4}})


def test_a_teacher_reads_what_the_student_reads(tmp_path: Path) -> None:
    # long questions are dropped before the shares are taken: both sides must do that
    data = {"epoch_examples": None, "max_query_tokens": 24}
    own = answer_prepared(prepare(config(tmp_path, data, answers="on_policy")), progress=False)
    taught = prepare(config(tmp_path, data, answers="on_policy", teacher=str(CHECKPOINT), answers_dir=str(tmp_path)))
    assert sum(counts.dropped[f"query and answer of more than {24} tokens"] for counts in taught.counts.sets.values())
    assert answer_prepared(taught, progress=False).examples == own.examples
    assert of_sets(own.examples).keys() == {"a", "b"}


@pytest.mark.parametrize("method", ["comb", "linktokens"])
def test_shares_are_of_what_a_run_can_learn_from(method: str, tmp_path: Path) -> None:
    def prepared(**data: Any) -> Any:
        train = {"answers": "on_policy", "method": method, "answer_max_new_tokens": 8}
        return prepare(config(tmp_path, {"epoch_examples": None, **data}, **train))

    lengths = [len(example.prompt.flat) for example in prepared().examples]
    run = prepared(max_prompt_tokens=sorted(lengths)[len(lengths) // 2])
    dropped = sum(sum(counts.dropped.values()) for counts in run.counts.sets.values())
    assert dropped > len(lengths) // 4
    assert not run.counts.dropped
    found = of_sets(run.examples)
    assert found["a"] == pytest.approx(3 * found["b"], abs=3)
    assert len(answer_prepared(run, progress=False).examples) == len(run.examples)


def test_made_questions_have_no_share_where_the_data_answers(tmp_path: Path) -> None:
    rows = [
        {"_id": str(n), "question": f"Who {n}?", "answer": "Bo", "context": [[f"A {n}", ["Ann."]], [f"B {n}", ["Bo."]]]}
        for n in range(20)
    ]
    (tmp_path / "hotpot.json").write_text(json.dumps(rows))
    sets = [*SETS[:1], {"dataset": "hotpotqa", "name": "hops", "path": str(tmp_path / "hotpot.json"), "weight": 1,
                        "options": {"across": 4}}]  # fmt: skip
    for answers, had in (("gold", 18), ("on_policy", 5 * 18)):
        run = prepare(config(tmp_path, {"mixture": sets, "epoch_examples": None}, answers=answers))
        found = of_sets(run.examples)
        assert found["a"] == pytest.approx(3 * found["hops"], abs=3)
        assert found["hops"] == min(had, found["hops"])
        assert (found["hops"] > 18) == (answers == "on_policy") != all(example.references for example in run.examples)


def test_a_run_tells_of_each_set_and_one_set_alone_is_evaluated(tmp_path: Path) -> None:
    result = run_training(config(tmp_path, eval_steps=1), progress=False)
    assert len(result.record["heldout_losses"]) == 3
    told = json.loads((tmp_path / "out" / "training.json").read_text())
    assert {name: own["examples"] for name, own in told["tokens_by_set"].items()} == {"a": 18, "b": 6}
    assert told["tokens"]["document_tokens"].keys() == {"min", "median", "p90", "max", "total"}
    assert told["data"]["sets"]["a"]["kept"] == 18
    arguments = ["eval", str(tmp_path / "out"), "--out", str(tmp_path / "r.json")]
    for more, sets in (((), {"a", "b"}), (("data=b",), {"b"})):
        result = invoke(*arguments, *more)
        assert result.exit_code == 0, result.output
        written = json.loads((tmp_path / "r.json").read_text())
        assert set(written["data"]["sets"]) == sets
        assert written["data"]["kept"] == 8

"""Data of one's own in one word: a file, a folder, a set on the Hub or a list in the place of what a recipe names."""

from __future__ import annotations

import gzip
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from comb.documents.datasets import hub_id, read_dataset
from comb.documents.document import PromptBuilder
from comb_training.config import load_config
from comb_training.data.mixture import ConfiguredSide
from comb_training.data.records import load_hub_rows, read_records
from tests.helpers.doc_blocks import write_rows
from tests.helpers.training import invoke

ROOT = Path(__file__).resolve().parents[2]
MIXTURE = ROOT / "configs" / "linktokens-smollm2-135m.yaml"
SMALL = ("model.backbone=nano", "model.dtype=float32", "train.steps=2", "train.batch_size=4", "train.max_seconds=null")


def rows(first: int, count: int) -> list[dict[str, Any]]:
    return [
        {"documents": [f"Shelf {n} holds {n + 3} books."], "query": f"Books on {n}?", "answer": f"{n + 3}"}
        for n in range(first, first + count)
    ]


def lines(path: Path, content: list[dict[str, Any]]) -> Path:
    write_rows(path, content)
    return path


def kept(named: str, builder: PromptBuilder, *more: str, split: str = "train") -> int:
    config = load_config(MIXTURE, [f"data={named}", *more])
    return len(ConfiguredSide(config.data, builder, None, split, config.data.limit).examples()[0])


def test_one_word_takes_the_place_of_a_recipe_s_mixture_and_its_keys(tmp_path: Path, builder: PromptBuilder) -> None:
    lines(tmp_path / "mine.jsonl", rows(0, 40))
    (tmp_path / "mine.json").write_text(json.dumps(rows(0, 40)))
    recipe, config = load_config(MIXTURE).data, load_config(MIXTURE, [f"data={tmp_path}/mine.jsonl"]).data
    assert (config.mixture, config.epoch_examples, config.max_repeats, config.num_documents) == ((), None, 1.0, None)
    assert (config.prefix, config.query_template, config.stop) == (recipe.prefix, recipe.query_template, recipe.stop)
    for name in ("mine.jsonl", "mine.json"):
        assert kept(f"{tmp_path}/{name}", builder, "data.questions_per_row=1") == 36
    # in any order, and in a file of one's own
    assert kept(f"{tmp_path}/mine.jsonl", builder, "data.limit=7") == 7
    assert load_config(MIXTURE, ["data.limit=7", f"data={tmp_path}/mine.jsonl"]).data.limit == 7
    own = tmp_path / "own.yaml"
    own.write_text(f"data: {tmp_path}/mine.jsonl")
    assert load_config(own, ["data.seed=3"]).data.dataset == f"{tmp_path}/mine.jsonl"


def test_rows_that_are_all_dropped_say_why(tmp_path: Path) -> None:
    path = lines(tmp_path / "mine.jsonl", [{**row, "answer": ""} for row in rows(0, 5)])
    with pytest.raises(ValueError, match="5 dropped: no answer"):
        read_dataset("jsonl", path, split="train")


def test_documents_alike_but_for_white_space_or_coding_stay_together(tmp_path: Path) -> None:
    twice = [(row, {**row, "documents": [f"Caf\u00e9.\r\n{row['documents'][0]} "]}) for row in rows(0, 30)]
    mine = [{**row, "documents": [f"Cafe\u0301.\n{row['documents'][0]}"]} for row, _ in twice] + [b for _, b in twice]
    sides = [read_dataset("jsonl", lines(tmp_path / "mine.jsonl", mine), split=side) for side in ("train", "heldout")]
    train, heldout = ({row.query for row in side.examples} for side in sides)
    assert (len(sides[1].examples), len(heldout), train & heldout) == (6, 3, set())


def test_home_is_meant_by_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines(tmp_path / "mine.jsonl", rows(0, 4))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert len(read_dataset("~/mine.jsonl")) == len(read_dataset("jsonl", "~/mine.jsonl")) == 4


def test_a_list_is_all_rows_of_all_of_it(tmp_path: Path, builder: PromptBuilder) -> None:
    paths = [lines(tmp_path / "a" / "train.jsonl", rows(0, 60)), lines(tmp_path / "b" / "train.jsonl", rows(100, 20))]
    named = f"[{paths[0]}, {paths[1]}]"
    assert kept(named, builder) == 54 + 18
    assert kept(named, builder, split="heldout") == 6 + 2
    with_share = f"[{{dataset: {paths[0]}, name: a, weight: 1}}, {{dataset: {paths[1]}, name: b, weight: 1}}]"
    assert kept(with_share, builder) == 18 + 18


def test_a_folder_is_read_whole_and_its_test_file_is_what_is_held_out(tmp_path: Path, builder: PromptBuilder) -> None:
    lines(tmp_path / "more-1.jsonl", rows(0, 30))
    lines(tmp_path / "more-2.jsonl", rows(30, 10))
    assert kept(str(tmp_path), builder) == 36
    lines(tmp_path / "test.jsonl", rows(90, 5))
    assert kept(str(tmp_path), builder) == 40
    assert kept(str(tmp_path), builder, split="heldout") == 5
    (tmp_path / "test.jsonl").rename(tmp_path / "squad_dev-2.jsonl")
    (tmp_path / "more-2.jsonl").rename(tmp_path / "train-eval.jsonl")  # it says what it is for
    assert kept(str(tmp_path), builder, split="heldout") == 5
    assert read_dataset(str(tmp_path), split="train").counts.noted == {
        "files held out by their names: squad_dev-2.jsonl": 1
    }
    assert len(read_dataset(str(tmp_path), split="all")) == 45
    assert len({example.id for example in read_dataset(str(tmp_path), split="all")}) == 45
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match=f"no .jsonl or .json file in {tmp_path}/none; .* hf://{tmp_path}/none"):
        read_dataset(str(tmp_path / "none"))


def test_what_is_not_read_of_a_folder_is_named(tmp_path: Path) -> None:
    for number, name in enumerate(("a.jsonl", "b.ndjson", "C.JSONL", "d.jsonl.gz", "sub/e.jsonl")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        content = "\n".join(map(json.dumps, rows(10 * number, 10))).encode()
        (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    for name in ("f.tsv", "g.jsonl.zst", "h.jsonl.bz2", "i.json", ".hidden", "README.md", "x.PARQUET"):
        (tmp_path / name).write_text("x")
    read = read_dataset(str(tmp_path), split="all")
    assert len(read) == 40
    left = "README.md, f.tsv, g.jsonl.zst, h.jsonl.bz2, i.json, ..."
    assert read.counts.noted == {f"files of another kind left out: {left}": 6, "folders left out: sub": 1}
    for name in ("b.ndjson", "C.JSONL"):
        assert len(read_records(tmp_path / name, "mine")) == 10


def test_a_set_on_the_hub_is_read_by_the_reader_whose_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def load(path: str, dataset: str) -> list[dict[str, Any]]:
        asked.append(path)
        if "mine" in path:
            return rows(0, 4)
        table = {"context": "Ada Lovelace wrote a program.", "question": "Who?", "title": "Ada"}
        return [{**table, "id": str(n), "answers": {"text": ["Ada"], "answer_start": [0]}} for n in range(2)]

    for module in ("comb_training.data.records", "comb_training.data.readers.squad"):
        monkeypatch.setattr(f"{module}.{load_hub_rows.__name__}", load, raising=False)
    for name in ("me/mine", "hf://me/mine?split=train"):
        assert len(read_dataset(name)) == 4
    assert asked == ["hf://me/mine", "hf://me/mine?split=train"]
    found = read_dataset("hf://rajpurkar/squad_v2?split=train", num_documents=1)
    assert (found.name, found[0].answer) == ("squad", "Ada")
    # as cards link to it
    given = ("me/mine", "hf://me/mine?split=train", "squad", "mine.jsonl", "gone")
    assert [hub_id(name) for name in given] == ["me/mine", "me/mine", "rajpurkar/squad_v2", None, None]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["data=lost/rows"], "there is no file or folder 'lost/rows' here, and on the Hub: .*lost/rows"),
        (["data=lost.jsonl"], "there is no file or folder 'lost.jsonl'"),
        (["data=lost"], "unknown dataset 'lost'; known: .*jsonl.* a file or folder of rows"),
        (["data=[HERE, lost.jsonl]"], "set 'lost': .*no file or folder 'lost.jsonl'"),
        (["data.path=HERE"], "data.path=HERE is a file, .*data=HERE takes it in the place of the mixture"),
        (["data.dataset=jsonl", "data.path=HERE"], "both given: .*data=FILE"),
        (["data=3"], "data is a section of keys, got 3"),
    ],
)
def test_what_is_not_there_is_one_error(
    given: list[str], message: str, tmp_path: Path, builder: PromptBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("datasets")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    here = str(lines(tmp_path / "here.jsonl", rows(0, 4)))

    with pytest.raises(ValueError, match=message.replace("HERE", re.escape(here))):  # noqa: PT012
        data = load_config(MIXTURE, [item.replace("HERE", here) for item in given]).data
        ConfiguredSide(data, builder, None, "train", None).tokenized()


def test_titles_that_a_template_has_no_place_for_are_counted(tmp_path: Path) -> None:
    own = rows(0, 20)
    for row in own[:10]:
        row["documents"] = [{"title": "Shelves", "text": row["documents"][0]}, "A room."]
    dry = ("train", str(MIXTURE), *SMALL, f"data={lines(tmp_path / 'mine.jsonl', own)}", "--dry-run")
    shown = invoke(*dry)
    assert shown.exit_code == 0, shown.output
    said = " ".join(shown.output.split())  # in lines as wide as a console is that another test may have made
    assert re.search(r"\d documents without their titles: data.document_template has no {title}", said)
    whole = invoke(*dry, "data.document_template='{title} {text} '")
    assert "without their titles" not in whole.output


def test_answers_that_end_before_they_are_said_are_counted(tmp_path: Path, builder: PromptBuilder) -> None:
    own = [row | {"answer": answer} for row, answer in zip(rows(0, 3), ['say "no"', "one\ntwo", "three"], strict=True)]
    data = load_config(MIXTURE, [f"data={lines(tmp_path / 'mine.jsonl', own)}"]).data
    _, counts = ConfiguredSide(replace(data, stop='"\n'), builder, None, "all", None).tokenized()
    assert counts.noted == {"answers that hold a character of data.stop, which ends an answer": 2}


def test_the_same_word_in_every_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trained, answered and evaluated; of what it was trained on the same rows stay held out, however it is named."""
    monkeypatch.chdir(tmp_path)
    lines(tmp_path / "mine.jsonl", rows(0, 40))
    lines(tmp_path / "other.jsonl", rows(60, 40))
    recipe = tmp_path / "recipe.yaml"
    content = {
        "model": {"num_encoder_layers": 1, "cross_attention_layers": [2], "cpu_threads": 1},
        "data": {"mixture": [{"dataset": "squad", "path": "gone.json"}], "epoch_examples": 50},
        "train": {"steps": 2, "batch_size": 4, "output_dir": "out", "answer_max_new_tokens": 2},
        "eval": {"limit": 4, "methods": ["comb"], "max_new_tokens": 2},
    }
    recipe.write_text(yaml.safe_dump(content))
    answered = invoke("answers", str(recipe), "data=mine.jsonl", "data.heldout_share=0.5", "--engine", "transformers")
    assert "20 generated" in answered.output, answered.output
    trained = invoke("train", str(recipe), "data=mine.jsonl", "data.heldout_share=0.5", "--no-eval")
    assert trained.exit_code == 0, trained.output
    for named, asked in (("data=./mine.jsonl", 20), ("data=[other.jsonl, mine.jsonl]", 8)):
        told = invoke("eval", "out", named, "--limit", "30", "--out", "r.json")
        assert told.exit_code == 0, told.output
        written = json.loads((tmp_path / "r.json").read_text())
        assert [row["n"] for row in written["results"]] == [asked]
        assert ("--split all asks all of them" in " ".join(told.output.split())) == (asked < 20)
    for named, trained_on in ((["data=mine.jsonl"], True), ([], True), (["data=other.jsonl"], False)):
        told = invoke("eval", "out", *named, "--split", "all", "--limit", "2")
        assert ("that it was trained on, too" in " ".join(told.output.split())) == trained_on, told.output

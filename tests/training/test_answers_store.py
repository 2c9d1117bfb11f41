"""Answers on disk: whole parts or none, damage said and repaired, nothing mixed; ranks that share the work."""

from __future__ import annotations

import json
import logging
import os
import resource
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from comb.documents.datasets import Counts
from comb.documents.document import Prompt
from comb.files import write_whole
from comb_training.answers import generate
from comb_training.answers.generate import generate_answers
from comb_training.answers.store import METADATA, AnswerSettings, AnswerStore, StoredAnswer
from comb_training.data.batches import TrainingExample

SETTINGS = AnswerSettings("model", "weights", "float32", 8, (1,))
OTHER = AnswerSettings("model", "other weights", "float32", 8, (1,))


def some(name: str, count: int = 3) -> dict[str, StoredAnswer]:
    return {f"{name}{n}": StoredAnswer((n, 7, 1), n % 2 == 0, f"{name} «{n}»") for n in range(count)}


def parts(folder: Path) -> list[Path]:
    return sorted(folder.glob("part-*.parquet"))


def read_back(folder: Path, answers: dict[str, StoredAnswer], settings: AnswerSettings = SETTINGS) -> bool:
    return AnswerStore(folder, settings).answers == answers


def test_answers_come_back_as_they_were_and_say_how_they_were_made(tmp_path: Path) -> None:
    store = AnswerStore(tmp_path / "new" / "folder", SETTINGS, rank=3)
    store.add(some("a"), "vllm 1.2")
    store.add(some("b"), "vllm 1.2")
    assert read_back(tmp_path / "new" / "folder", some("a") | some("b"))
    files = parts(tmp_path / "new" / "folder")
    assert [file.name.split("-")[1] for file in files] == ["00003", "00003"]
    assert sorted(files[0].parent.iterdir()) == files  # nothing temporary is left
    said = json.loads(pq.read_schema(files[0]).metadata[METADATA])
    assert said["engine"] == "vllm 1.2"
    assert {key: said[key] for key in ("model", "weights", "dtype", "max_new_tokens", "stop_token_ids")} == {
        "model": "model", "weights": "weights", "dtype": "float32", "max_new_tokens": 8, "stop_token_ids": [1]
    }  # fmt: skip
    assert pq.read_table(files[0]).column_names == ["key", "token_ids", "text", "finished"]


def test_parts_of_other_settings_and_other_tables_are_left_alone(tmp_path: Path) -> None:
    AnswerStore(tmp_path, SETTINGS).add(some("a"), "e")
    AnswerStore(tmp_path, OTHER).add({"a0": StoredAnswer((9,), False, "other")}, "e")
    pq.write_table(pa.table({"x": [1]}), tmp_path / "part-of-something-else.parquet")
    assert read_back(tmp_path, some("a"))
    assert read_back(tmp_path, {"a0": StoredAnswer((9,), False, "other")}, OTHER)
    assert len(parts(tmp_path)) == 3


@pytest.mark.parametrize("damage", ["truncated", "empty", "a flipped bit"])
def test_a_damaged_part_is_said_and_put_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str) -> None:
    store = AnswerStore(tmp_path, SETTINGS)
    store.add(some("a"), "e")
    store.add(some("b"), "e")
    broken = parts(tmp_path)[0]
    content = broken.read_bytes()
    flipped = content.replace("a «0»".encode(), "` «0»".encode(), 1)
    broken.write_bytes({"truncated": content[:-20], "empty": b"", "a flipped bit": flipped}[damage])
    with caplog.at_level(logging.WARNING):
        assert read_back(tmp_path, some("b"))
    assert broken.name in caplog.text
    assert not broken.exists()
    assert broken.with_name(f"{broken.name}.damaged").exists()
    caplog.clear()
    AnswerStore(tmp_path, SETTINGS).add(some("a"), "e")
    assert read_back(tmp_path, some("a") | some("b"))
    assert not caplog.text


def test_a_full_disk_is_said_with_the_folder_and_leaves_earlier_parts_whole(tmp_path: Path) -> None:
    store = AnswerStore(tmp_path, SETTINGS)
    store.add(some("a"), "e")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, before[1]))  # the kernel stops the write in the middle
    try:
        with pytest.raises(OSError, match="can't keep answers in") as raised:
            store.add(some("b", 2000), "e")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert str(tmp_path) in str(raised.value)
    assert raised.value.__cause__ is not None
    assert [path.name for path in tmp_path.iterdir()] == [parts(tmp_path)[0].name]
    assert read_back(tmp_path, some("a"))


def test_what_a_killed_process_was_writing_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as unfinished:
        unfinished.setattr(Path, "replace", lambda temporary, target: target)
        write_whole(tmp_path / "a", b"PAR1 half of")
        (abandoned,) = tmp_path.iterdir()
        os.utime(abandoned, (1, 1))
        write_whole(tmp_path / "b", b"another thread is at it")
    (mine,) = set(tmp_path.iterdir()) - {abandoned}
    AnswerStore(tmp_path, SETTINGS).add(some("a"), "e")
    assert sorted(tmp_path.iterdir()) == sorted([*parts(tmp_path), mine])
    assert read_back(tmp_path, some("a"))


def test_writers_at_once_keep_out_of_each_others_way(tmp_path: Path) -> None:
    stores = [AnswerStore(tmp_path, SETTINGS, rank=0) for _ in range(2)]  # the same rank, started twice
    for turn in range(3):
        for index, store in enumerate(stores):
            store.add(some(f"{index}-{turn}-"), "e")
    assert len(parts(tmp_path)) == 6
    everything = {k: v for index in range(2) for turn in range(3) for k, v in some(f"{index}-{turn}-").items()}
    assert read_back(tmp_path, everything)
    assert stores[0].refresh() == 9  # what the other wrote
    assert stores[0].refresh() == 0


class Echo:
    """Answers with the first token of the query, and fails once it was asked so many questions."""

    name, batch_size = "echo 1", 2

    def __init__(self, fails_at: int = -1) -> None:
        self.fails_at, self.closed = fails_at, 0
        self.asked: list[str | None] = []

    def __call__(self, examples: Sequence[TrainingExample]) -> list[StoredAnswer]:
        if len(self.asked) == self.fails_at:
            raise RuntimeError("out of memory")
        self.asked += [example.id for example in examples]
        return [StoredAnswer((example.prompt.query[0], 1), True) for example in examples]

    def close(self) -> None:
        self.closed += 1


def questions() -> list[TrainingExample]:
    """Seven sets of documents with three questions each."""
    return [
        TrainingExample(Prompt((), ((100 + group, 5),), (10 * group + n, 2)), (1,), f"{group}-{n}")
        for n in range(3)
        for group in range(7)
    ]


def ask(engine: Echo, folder: Path, rank: int = 0, ranks: int = 1, *, wait: bool = True) -> generate.Answered:
    return generate_answers(
        questions(), SETTINGS, lambda: engine, decode=lambda ids: f"text {ids[0]}", max_prompt_tokens=9, folder=folder,
        counts=Counts(), rank=rank, ranks=ranks, wait=wait, progress=False,
    )  # fmt: skip


def expected() -> list[StoredAnswer]:
    return [StoredAnswer((q.prompt.query[0], 1), True, f"text {q.prompt.query[0]}") for q in questions()]


def test_ranks_answer_disjoint_sets_of_documents_and_all_of_them_together(tmp_path: Path) -> None:
    engines = [Echo() for _ in range(3)]
    for rank, engine in enumerate(engines):
        answered = ask(engine, tmp_path, rank, 3, wait=False)
        assert answered.generated == len(engine.asked)
        assert sum(answer is not None for answer in answered.answers) == answered.found + answered.generated
    groups = [{str(name).split("-")[0] for name in engine.asked} for engine in engines]
    assert [len(group) for group in groups] == [3, 2, 2]
    assert sum(len(engine.asked) for engine in engines) == 21 == len({name for e in engines for name in e.asked})
    later = Echo()
    result = ask(later, tmp_path)
    assert (result.answers, result.found, result.generated, result.engine) == (expected(), 21, 0, None)
    assert not later.closed  # it was never started
    assert {engine.closed for engine in engines} == {1}


def test_ranks_that_wait_end_with_everything(tmp_path: Path) -> None:
    engines = [Echo(), Echo()]
    with ThreadPoolExecutor() as pool:
        waiting = [pool.submit(ask, engine, tmp_path, rank, 2) for rank, engine in enumerate(engines)]
        assert [each.result(30).answers for each in waiting] == [expected()] * 2
    assert len(engines[0].asked) + len(engines[1].asked) == 21


def test_a_rank_that_hears_nothing_answers_the_rest_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(generate, "PATIENCE", 0.1)
    monkeypatch.setattr(generate, "POLL_SECONDS", 0.01)
    engine = Echo()
    with caplog.at_level(logging.WARNING):
        assert ask(engine, tmp_path, 0, 2).answers == expected()
    assert "9 answers of other ranks have not come" in caplog.text
    assert len(engine.asked) == 21


def test_every_batch_is_kept_before_the_next_begins(tmp_path: Path) -> None:
    engine = Echo(fails_at=8)
    with pytest.raises(RuntimeError, match="out of memory"):
        ask(engine, tmp_path)
    assert engine.closed == 1
    assert len(AnswerStore(tmp_path, SETTINGS).answers) == 8
    rest = Echo()
    assert ask(rest, tmp_path).answers == expected()
    assert len(rest.asked) == 13
    assert not set(rest.asked) & set(engine.asked)

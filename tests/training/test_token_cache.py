"""The token cache: equal examples and counts from disk, other keys for other data, and no trouble that stops a run."""

from __future__ import annotations

import json
import logging
import multiprocessing
import resource
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from comb.documents.document import Prompt, PromptBuilder
from comb_training.config import DataConfig
from comb_training.data import mixture
from comb_training.data.batches import Collator, TrainingExample
from comb_training.data.token_cache import DamagedCacheError, DocumentTokens, cached, read, write
from comb_training.data.token_statistics import TokenStatistics
from comb_training.trainer.sampler import BatchSampler, Budget

KEY = {"seed": 0}


def some(number: int = 12) -> list[TrainingExample]:
    """Examples over two of six documents each, of different lengths."""
    documents = [tuple(range(start, 2 * start + 3)) for start in range(6)]
    return [
        TrainingExample(
            Prompt((1, 2), (documents[n // 2 % 6], documents[(n // 2 + 1) % 6]), tuple(range(n % 5 + 1))),
            tuple(range(n % 3 + 1)),
            None if n == 3 else f"e{n}",
            ("Ünï\ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16"), "b")[: n % 2 + 1],
        )
        for n in range(number)
    ]


def written(folder: Path, examples: list[TrainingExample] | None = None) -> list[TrainingExample]:
    write(folder / "x.safetensors", examples or some(), {"read": 12})
    return read(folder / "x.safetensors")[0]


def is_kept(examples: Any) -> bool:
    """Whether they come from a file."""
    return all(isinstance(segment, DocumentTokens) for example in examples for segment in example.segments)


def test_examples_come_back_equal(tmp_path: Path) -> None:
    examples, found = some(), written(tmp_path)
    assert found == examples
    segment = found[0].segments[1]
    assert isinstance(segment, DocumentTokens)
    assert (len(segment), segment[0], segment[1:3], list(segment)) == (4, 1, (2, 3), [1, 2, 3, 4])
    assert segment == (1, 2, 3, 4)
    assert segment not in ((1, 2, 3), [1, 2, 3, 4])
    assert torch.tensor(segment).tolist() == [1, 2, 3, 4]
    assert read(tmp_path / "x.safetensors")[1] == {"read": 12}
    assert [hash(example) for example in found] == [hash(example) for example in examples]
    # what is mapped outlives its file
    write(tmp_path / "x.safetensors", some(3), {})  # another rank's rename
    assert found == examples
    (tmp_path / "x.safetensors").unlink()
    assert found == examples


def test_batches_and_statistics_are_the_same_from_disk(tmp_path: Path) -> None:
    examples, found = some(40), written(tmp_path, some(40))
    for budget in (Budget(4), Budget(8, 30, 60)):
        plain, lazy = (BatchSampler(source, budget, seed=3, accumulation=2) for source in (examples, found))
        assert [plain.batches(epoch) for epoch in range(3)] == [lazy.batches(epoch) for epoch in range(3)]
    assert TokenStatistics.of(examples) == TokenStatistics.of(found)
    batches = [Collator(0)([source[n] for n in (0, 5, 7)]) for source in (examples, found)]
    for name in ("input_ids", "labels", "attention_mask"):
        assert torch.equal(batches[0][name], batches[1][name])
    assert [[d.tolist() for d in row] for row in batches[0]["documents"]] == [
        [d.tolist() for d in row] for row in batches[1]["documents"]
    ]


def test_sorting_into_batches_reads_each_document_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = written(tmp_path, some(40))
    read: list[tuple[int, ...]] = []
    inner = DocumentTokens.__iter__

    def reading(document: DocumentTokens) -> Iterator[int]:
        read.append(tuple(inner(document)))
        return inner(document)

    monkeypatch.setattr(DocumentTokens, "__iter__", reading)
    sampler = BatchSampler(found, Budget(4, 100, 100))
    for epoch in range(3):
        sampler.batches(epoch)
    assert len(read) == len(set(read)) == 6


def test_documents_stand_in_the_file_once(tmp_path: Path) -> None:
    documents = tuple(tuple(range(start, start + 5000)) for start in (0, 10_000))
    examples = [TrainingExample(Prompt((1,), documents, (n,)), (2,), str(n)) for n in range(100)]
    write(tmp_path / "x.safetensors", examples, {})
    assert (tmp_path / "x.safetensors").stat().st_size < 2 * 5000 * 4 + 20_000


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "other", "trailer"])
def test_a_damaged_file_is_built_anew(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    calls = []

    def build() -> tuple[list[TrainingExample], dict[str, Any]]:
        calls.append(1)
        return some(), {"read": 12}

    cached(tmp_path, "x", KEY, build)
    [path] = tmp_path.iterdir()
    content = path.read_bytes()
    changed = {
        "cut": content[: len(content) // 2],
        "flipped": content[:200] + bytes([content[200] ^ 1]) + content[201:],
        "empty": b"",
        "other": b"something else" * 100,
        "trailer": content[:-1],
    }[damage]
    path.write_bytes(changed)
    with pytest.raises(DamagedCacheError):
        read(path)
    found, counts = cached(tmp_path, "x", KEY, build)
    assert len(calls) == 2
    assert list(found) == some()
    assert counts == {"read": 12}
    assert "is damaged" in caplog.text
    assert path.read_bytes() == content
    cached(tmp_path, "x", KEY, build)
    assert len(calls) == 2


def rows_file(path: Path, rows: int = 30) -> Path:
    lines = [
        {"documents": [f"Box {n // 2} is red. " * 20], "query": f"Which, {n}?", "answer": f"{n}."} for n in range(rows)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def in_children(work: Callable[[Any], None], number: int) -> list[Any]:
    """What forked children put into the queue they are given."""
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    children = [context.Process(target=work, args=(queue,)) for _ in range(number)]
    for child in children:
        child.start()
    told = [queue.get(timeout=60) for _ in children]
    for child in children:
        child.join(60)
        assert child.exitcode == 0
    return told


def test_a_full_disk_stops_nothing(tmp_path: Path) -> None:
    def work(queue: Any) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        examples, counts = cached(tmp_path, "x", KEY, lambda: (some(), {"read": 12}))
        queue.put((examples == some(), is_kept(examples), counts))

    assert in_children(work, 1) == [(True, False, {"read": 12})]
    assert not list(tmp_path.iterdir())
    # the control: with room on the disk it is kept
    assert is_kept(cached(tmp_path, "x", KEY, lambda: (some(), {}))[0])


def test_several_processes_at_once(tmp_path: Path) -> None:
    start = multiprocessing.get_context("fork").Barrier(4)

    def build() -> tuple[list[TrainingExample], dict[str, Any]]:
        start.wait(60)  # all have missed, all write
        return some(), {"read": 12}

    def work(queue: Any) -> None:
        examples, counts = cached(tmp_path, "x", KEY, build)
        queue.put((examples == some(), is_kept(examples), counts))

    assert in_children(work, 4) == [(True, True, {"read": 12})] * 4
    [path] = tmp_path.iterdir()
    assert read(path)[0] == some()


def test_texts_that_are_no_unicode_are_kept(tmp_path: Path) -> None:
    odd = [replace(some()[0], references=("\ud800",))]
    found, _ = cached(tmp_path, "x", KEY, lambda: (odd, {}))
    assert is_kept(found)
    assert found == odd


def test_a_folder_that_cannot_be_made_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    found, _ = cached(tmp_path / "file", "x", KEY, lambda: (some(), {}))
    assert found == some()
    assert "could not be kept" in caplog.text


def files(folder: Path) -> int:
    return len(list((folder / "cache").iterdir()))


def test_a_hit_gives_the_same_examples_and_counts(
    tmp_path: Path, builder: PromptBuilder, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    data = DataConfig("jsonl", str(rows_file(tmp_path / "a.jsonl")), cache_dir=str(tmp_path / "cache"))
    first, counts = mixture.read_tokenized(data, builder, 64, split="train", limit=None)
    assert counts.truncated
    plain, plain_counts = mixture.read_tokenized(replace(data, cache=False), builder, 64, split="train", limit=None)
    monkeypatch.setattr(mixture, "tokenize", None)  # nothing may be tokenised now
    again, again_counts = mixture.read_tokenized(data, builder, 64, split="train", limit=None)
    assert "tokenised examples found in" in caplog.text
    assert list(first) == list(again) == plain
    assert counts == again_counts == plain_counts
    assert str(counts) == str(again_counts)


def test_whatever_changes_the_tokens_changes_the_file(tmp_path: Path, builder: PromptBuilder) -> None:
    path = rows_file(tmp_path / "a.jsonl")
    data = DataConfig("jsonl", str(path), cache_dir=str(tmp_path / "cache"))

    def read(data: DataConfig = data, builder: PromptBuilder = builder, longest: int = 64, **more: Any) -> None:
        mixture.read_tokenized(data, builder, longest, **{"split": "train", "limit": None, **more})

    read()
    read()
    assert files(tmp_path) == 1
    moved = tmp_path / "moved.jsonl"
    moved.write_bytes(path.read_bytes())
    read(replace(data, path=str(moved)))
    read(replace(data, max_prompt_tokens=100))  # of the answers alone
    assert files(tmp_path) == 1
    changes = [
        lambda: read(replace(data, seed=1)),
        lambda: read(replace(data, heldout_share=0.3)),
        lambda: read(replace(data, query_template="Say: {query}")),
        lambda: read(replace(data, max_query_tokens=99)),
        lambda: read(replace(data, splitter="sentences:32")),
        lambda: read(longest=32),
        lambda: read(limit=5),
        lambda: read(split="heldout"),
        lambda: read(builder=PromptBuilder(builder.tokenizer, document_template="{text}")),
    ]
    for number, change in enumerate(changes, start=2):
        change()
        assert files(tmp_path) == number
    rows_file(path, 32)
    read()
    assert files(tmp_path) == number + 1
    builder.tokenizer.add_tokens(["Box"])
    read()
    assert files(tmp_path) == number + 2
    builder.tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}!"
    read()
    assert files(tmp_path) == number + 3


def test_other_weights_need_no_tokenising(tmp_path: Path, builder: PromptBuilder) -> None:
    from comb_training.config import MixtureEntry

    path = str(rows_file(tmp_path / "a.jsonl"))
    one, two = MixtureEntry("jsonl", path, name="a"), MixtureEntry("nano", options={"scenes": 3})
    data = DataConfig(mixture=(one, two), cache_dir=str(tmp_path / "cache"))
    mixture.read_tokenized(data, builder, 64, split="train", limit=None)
    assert files(tmp_path) == 2
    other = replace(data, dataset="mixture", mixture=(replace(one, weight=3), two), epoch_examples=8)
    examples, _ = mixture.read_tokenized(other, builder, 64, split="train", limit=None)
    assert len(examples) == 8
    assert files(tmp_path) == 2

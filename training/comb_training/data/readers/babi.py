"""bAbI (Weston et al. 2015) from its original text files (``qa1_single-supporting-fact_train.txt``, ...).

document: the statements of a story up to the question, in one document, because their order matters (the last move
counts) and documents of a prompt have no order; query: the question; answer: the file's answer. Distractors are other
stories of the same length without the statements about whoever is asked for: the people of all stories have
the same few names, so a whole other story would contradict the right one. That is sound for task 1 (one supporting
fact) only; other tasks are read with their story alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from comb.documents.datasets import Counts, Dataset, MissingDataError, datasets
from comb.documents.document import Document, Example
from comb_training.data.grouping import Split, seeded, split_groups

_LINE = re.compile(r"^(\d+) (.+)$")
_WHERE_IS = re.compile(r"^Where is (.+)\?$")


@dataclass
class _Story:
    name: str
    # (statements before the question, question, answer), in the order of the file
    questions: list[tuple[tuple[str, ...], str, str]] = field(default_factory=list)
    statements: list[str] = field(default_factory=list)


@datasets.register("babi", hub_id="facebook/babi_qa")
def read_babi(
    path: str | Path | None = None,
    *,
    split: Split = "all",
    seed: int = 0,
    limit: int | None = None,
    num_documents: int = 3,
    heldout_share: float = 0.1,
    answer_style: Literal["word", "sentence"] = "word",
    tasks: Sequence[int] = (1,),
) -> Dataset:
    """Reads a bAbI task file, or a folder of them; held-out examples are whole stories.

    In a folder with ``*_train.txt`` and ``*_test.txt`` files these are the two sides of the split, as published;
    a single file is split by story.

    Args:
        num_documents: documents per question: the story and distractors.
        answer_style: ``sentence`` makes "Mary is in the office." of the answer to "Where is Mary?", for backbones
            that answer so; the bare word stays an accepted answer.
        tasks: which tasks of a folder to read.

    Raises:
        ValueError: if the path is missing or holds no bAbI text, or distractors are asked for beyond task 1.
    """
    if path is None:
        raise MissingDataError("dataset 'babi' needs a path: a bAbI text file, or a folder of them (data.path=en-10k)")
    if num_documents < 1:
        raise ValueError(f"num_documents must be at least 1, not {num_documents}")
    if answer_style not in ("word", "sentence"):
        raise ValueError(f"answer_style is 'word' or 'sentence', not {answer_style!r}")
    files, split = _files(Path(path), split, tasks)
    counts = Counts()
    stories = [story for file in files for story in _parse(file, counts)]
    if not stories:
        raise ValueError(f"no bAbI story in {path}: expected lines like '1 Mary moved to the bathroom.' ({counts})")
    if num_documents > 1 and any(not file.name.startswith("qa1_") for file in files):
        raise ValueError(
            "distractor stories contradict each other beyond task 1 (qa1_...): use data.num_documents=1, "
            "or point data.path to the qa1 file"
        )
    side = split_groups((story.name for story in stories), split, heldout_share=heldout_share, seed=seed)
    other_side = sum(len(story.questions) for story in stories if story.name not in side)
    counts.read -= other_side
    stories = [story for story in stories if story.name in side]
    if limit is not None:
        seeded(seed, "limit").shuffle(stories)
    examples = []
    for story in stories:
        for number, texts in enumerate(_documents(story, stories, num_documents, seed, counts)):
            _, question, word = story.questions[number]
            answers = _answers(question, word, answer_style)
            documents = tuple(Document(text) for text in texts)
            name = f"{story.name}:{number}"
            examples.append(Example(documents, question, answers[0], answers, id=name, group=story.name))
    if limit is not None and len(examples) > limit:
        counts.drop("over the limit", len(examples) - limit)
        examples = examples[:limit]
    return Dataset(tuple(examples), counts, "babi")


def _files(path: Path, split: Split, tasks: Sequence[int]) -> tuple[list[Path], Split]:
    if path.is_file():
        return [path], split
    files = sorted(file for task in tasks for file in path.glob(f"qa{task}_*.txt"))
    if not files:
        raise ValueError(f"no bAbI file of tasks {list(tasks)} (qa{next(iter(tasks), 1)}_*.txt) in {path}")
    ending = {"train": "_train.txt", "heldout": "_test.txt"}.get(split)
    published = [file for file in files if file.name.endswith(("_train.txt", "_test.txt"))]
    if ending is None or len({file.name.rsplit("_", 1)[1] for file in published}) < 2:
        return files, split
    return [file for file in published if file.name.endswith(ending)], "all"


def _parse(path: Path, counts: Counts) -> list[_Story]:
    stories: list[_Story] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.strip():
            continue
        match = _LINE.match(line.strip())
        if match is None:
            counts.read += 1
            counts.drop("line without a number")
            continue
        number, text = int(match[1]), match[2]
        if number == 1 or not stories:  # numbering starts again with every story
            stories.append(_Story(f"{path.stem}:{len(stories)}"))
        story = stories[-1]
        if "\t" not in text:
            story.statements.append(text.strip())
            continue
        counts.read += 1
        question, answer = (part.strip() for part in text.split("\t")[:2])
        if not answer or not story.statements:
            counts.drop("question without an answer or a statement before it")
            continue
        story.questions.append((tuple(story.statements), question, answer))
    return stories


def _documents(
    story: _Story, stories: list[_Story], num_documents: int, seed: int, counts: Counts
) -> Iterator[list[str]]:
    """The documents of each question of `story`, shuffled."""
    # the same other stories for all its questions, so that they can share encodings where documents are equal
    candidates = seeded(seed, story.name).sample(range(len(stories)), min(len(stories), 4 * num_documents))
    others = [stories[index] for index in candidates if stories[index] is not story]
    for number, (statements, question, _) in enumerate(story.questions):
        texts = [" ".join(statements)]
        asked = set(re.findall(r"[A-Z]\w+", question.partition(" ")[2]))
        for other in others:
            if len(texts) == num_documents:
                break
            kept = [s for s in other.statements if not asked & set(re.findall(r"\w+", s))][: len(statements)]
            if kept and " ".join(kept) not in texts:
                texts.append(" ".join(kept))
        if len(texts) < num_documents:
            counts.truncate("fewer distractor stories than num_documents")
        seeded(seed, story.name, number).shuffle(texts)
        yield texts


def _answers(question: str, word: str, style: str) -> tuple[str, ...]:
    where = _WHERE_IS.match(question)
    if style == "word" or where is None:
        return (word,)
    return (f"{where[1]} is in the {word}.", word)

"""bAbI (Weston et al. 2015) from its original text files (``qa1_single-supporting-fact_train.txt``, ...)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from comb.documents.document import Document, Example
from comb_training.data.records import is_blank, read_text
from comb_training.data.side import DatasetSide, reader


@dataclass
class BabiStory:
    """A story's statements, and its questions: (statements before it, question, answer), in the file's order."""

    name: str
    questions: list[tuple[tuple[str, ...], str, str]] = field(default_factory=list)
    statements: list[str] = field(default_factory=list)


@reader("babi", hub_id="facebook/babi_qa", heldout_share=0.1, reads="a bAbI text file, or a folder of them (en-10k)")
def read_babi(
    side: DatasetSide, *, num_documents: int = 3, answer_style: Literal["word", "sentence"] = "word"
) -> Iterable[Example]:
    """Reads a bAbI task file, or task 1 of a folder; held-out examples are whole stories.

    document: the statements of a story up to the question, in one document, because their order matters (the last move
    counts) and documents of a prompt have no order; answer: the file's answer. Distractors are other stories of the
    same length without the statements about whoever is asked for: the people of all stories have the same few names, so
    a whole other story would contradict the right one. That is sound for task 1 (one supporting fact) only.

    In a folder with ``*_train.txt`` and ``*_test.txt`` files these are the two sides of the split, as published;
    a single file is split by story.

    Args:
        num_documents: documents per question: the story and distractors.
        answer_style: ``sentence`` makes "Mary is in the office." of the answer to "Where is Mary?", for backbones
            that answer so; the bare word stays an accepted answer.
    """
    if answer_style not in ("word", "sentence"):
        raise ValueError(f"answer_style is 'word' or 'sentence', not {answer_style!r}")
    files = [Path(side.path)]
    if not files[0].is_file():
        files = sorted(files[0].glob("qa1_*.txt"))
        if not files:
            raise ValueError(f"no bAbI file of task 1 (qa1_*.txt) in {side.path}")
        published = [file for file in files if file.name.endswith(("_train.txt", "_test.txt"))]
        both = len({file.name.rsplit("_", 1)[1] for file in published}) == 2
        ending = {"train": "_train.txt", "heldout": "_test.txt"}.get(side.split)
        if both and ending is not None:
            files, side.split = [file for file in published if file.name.endswith(ending)], "all"
    stories = [story for file in files for story in _parse(file, side)]
    if not stories:
        raise ValueError(
            f"no bAbI story in {side.path}: expected lines like '1 Mary moved to the bathroom.' ({side.counts})"
        )
    if num_documents > 1 and any(not file.name.startswith("qa1_") for file in files):
        raise ValueError(
            "distractor stories contradict each other beyond task 1 (qa1_...): use data.num_documents=1, "
            "or point data.path to the qa1 file"
        )
    here = side.groups(story.name for story in stories)
    side.counts.read -= sum(len(story.questions) for story in stories if story.name not in here)
    stories = [story for story in stories if story.name in here]
    if side.limit is not None:
        side.rng("limit").shuffle(stories)
    return side.first(
        [example for story in stories for example in _examples(story, stories, side, num_documents, answer_style)]
    )


def _parse(path: Path, side: DatasetSide) -> list[BabiStory]:
    counts, stories = side.counts, list[BabiStory]()
    for line in read_text(path, side.name).splitlines():
        if not line.strip():
            continue
        match = re.match(r"^(\d+) (.+)$", line.strip())
        if match is None:
            counts.read += 1
            counts.drop("line without a number")
            continue
        number, text = int(match[1]), match[2]
        if number == 1 or not stories:  # numbering starts again with every story
            stories.append(BabiStory(f"{path.stem}:{len(stories)}"))
        story = stories[-1]
        if "\t" not in text:
            if not is_blank(text):
                story.statements.append(text.strip())
            continue
        counts.read += 1
        question, answer = (part.strip() for part in text.split("\t")[:2])
        if is_blank(question) or is_blank(answer) or not story.statements:
            counts.drop("no question, answer, or statement before it")
            continue
        story.questions.append((tuple(story.statements), question, answer))
    return stories


def _examples(
    story: BabiStory, stories: list[BabiStory], side: DatasetSide, num_documents: int, answer_style: str
) -> Iterator[Example]:
    """Each question of `story` over its statements and distractors, shuffled."""
    # the same other stories for all its questions, so that they can share encodings where documents are equal
    candidates = side.rng(story.name).sample(range(len(stories)), min(len(stories), 4 * num_documents))
    others = [stories[index] for index in candidates if stories[index] is not story]
    for number, (statements, question, word) in enumerate(story.questions):
        texts = [" ".join(statements)]
        asked = set(re.findall(r"[A-Z]\w+", question.partition(" ")[2]))
        for other in others:
            if len(texts) == num_documents:
                break
            kept = [s for s in other.statements if not asked & set(re.findall(r"\w+", s))][: len(statements)]
            if kept and " ".join(kept) not in texts:
                texts.append(" ".join(kept))
        if len(texts) < num_documents:
            side.counts.truncate("fewer distractor stories than num_documents")
        side.rng(story.name, number).shuffle(texts)
        where = re.match(r"^Where is (.+)\?$", question)
        answers = (word,) if answer_style == "word" or where is None else (f"{where[1]} is in the {word}.", word)
        documents = tuple(map(Document, texts))
        yield Example(documents, question, answers[0], answers, id=f"{story.name}:{number}", group=story.name)

"""One document that answers, among many: any data set's needle at every depth, and NQ-open."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from comb.documents.datasets import Counts, Dataset, datasets, read_dataset
from comb.documents.document import Document, Example
from comb.evaluation.metrics import normalize_answer
from comb_training.data.records import DatasetRow
from comb_training.data.side import DatasetSide, Split, draw, reader

DEPTHS = (0, 25, 50, 75, 100)
# no content words
_COMMON = frozenset({"and", "are", "did", "does", "for", "from", "has", "have", "her", "his", "how", "its", "the",
                     "was", "what", "where", "which", "who", "with"})  # fmt: skip


@datasets.register("needle")
def read_needle(
    path: str | Path | None = None,
    *,
    split: Split = "heldout",
    seed: int = 0,
    limit: int | None = None,
    num_documents: int | None = 16,
    of: str = "nano",
    **options: Any,
) -> Dataset:
    """Examples of another data set, each with `num_documents` documents, its needle at one depth after the other.

    Examples without a needle (`supporting`) are left out: two documents are needed, or none answers. Documents that
    hold a word of the question which the needle holds too are no filler. `of`: the data set, which `path`, `split`,
    `seed` and further options are for. Raises ValueError for fewer than two documents, or a data set that has too few
    without the question's words.
    """
    if num_documents is None or num_documents < 2:
        raise ValueError(f"num_documents of a haystack are 2 or more, got {num_documents}")
    # questions share documents: of each some are needed for every haystack
    most = None if limit is None else 8 * (limit + num_documents)
    examples = read_dataset(of, path, split=split, seed=seed, limit=most, **options).examples
    counts, found = Counts(read=len(examples)), list[Example]()
    for index, example in enumerate(examples):
        if len(found) == limit:
            counts.drop("over the limit", len(examples) - index)
            break
        needle = supporting(example)
        if needle is None:
            counts.drop("no document answers alone")
            continue
        asked = _words(example.query) & _words(needle.text or "")
        filler: dict[Document, None] = {}
        for other in (*examples[index:], *examples[:index]):
            if len(filler) >= num_documents - 1:
                break
            if other is example or (other.group is not None and other.group == example.group):
                continue
            for document in other.documents:
                if document != needle and not asked & _words(document.text or ""):
                    filler[document] = None
        if len(filler) < num_documents - 1:
            raise ValueError(
                f"{of!r} gives {len(filler)} documents beside a needle, not {num_documents - 1}: read more"
            )
        hay = list(filler)[: num_documents - 1]
        place = round((num_documents - 1) * DEPTHS[len(found) % len(DEPTHS)] / 100)
        found.append(replace(example, documents=(*hay[:place], needle, *hay[place:])))
    return Dataset(tuple(found), counts, "needle")


def supporting(example: Example) -> Document | None:
    """The one document with every content word of question and answer that any document has; None without one."""
    words = [_words(document.text or "") for document in example.documents]
    wanted = _words(f"{example.query} {example.answer}") & set().union(*words)
    holding = [document for document, own in zip(example.documents, words, strict=True) if wanted <= own]
    return holding[0] if wanted and len(holding) == 1 else None


def _words(text: str) -> set[str]:
    """Content words in normal form, without an apostrophe's s."""
    plain = re.sub(r"['’]s\b", "", text)
    return {word for word in normalize_answer(plain).split() if len(word) > 2 and word not in _COMMON}


@reader("nq_open", hub_id="google-research-datasets/nq_open")
def read_nq_open(side: DatasetSide, *, num_documents: int = 10) -> Iterable[Example]:
    """NQ-open with its gold passage (Liu et al. 2023, Lost in the Middle), from JSONL, gzipped or not.

    Rows ``{question, answers, ctxs: [{title, text, isgold}]}``. document: the gold passage, and gold passages of other
    rows as distractors (random ones, not retrieved, and none that holds an accepted answer); answer: the first of
    ``answers``, all of them accepted. Split by the title of the gold passage.

    Args:
        num_documents: documents per question, the gold one among them, at a place drawn with the seed.
    """
    rows = side.rows(_nq_row)
    passages = {row.documents[0]: row.group for row in rows}  # questions may share one
    pool = [(passage, group, str(passage.text).casefold()) for passage, group in passages.items()]
    for row in side.limited(rows):
        # whole words: almost every passage has the letters of an answer like "A"
        answers = re.compile("|".join(rf"(?<!\w){re.escape(answer.casefold())}(?!\w)" for answer in row.answers))
        rng = side.rng("nq", row.id)
        fits = partial(_is_distractor, group=row.group, answers=answers)
        drawn = [passage for passage, _, _ in draw(rng, pool, num_documents - 1, fits)]
        if len(drawn) < num_documents - 1:
            side.counts.truncate("fewer passages in the file than num_documents")
        place = rng.randrange(len(drawn) + 1)
        yield replace(row, documents=(*drawn[:place], row.documents[0], *drawn[place:]))


def _is_distractor(passage: tuple[Document, str | None, str], group: str | None, answers: re.Pattern[str]) -> bool:
    return passage[1] != group and answers.search(passage[2]) is None


def _nq_row(record: DatasetRow) -> Example | str:
    passages = record.parts("ctxs")
    gold = next((passage for passage in passages if passage.flag("isgold")), None)
    answers = record.items("answers", str)
    if gold is None:
        return "no gold passage"
    if len(passages) > 1:
        record.left_out["retrieved passage that random distractors replace"] += len(passages) - 1
    title, text = gold.title(), gold.text("text")
    documents = record.documents([(title, text)])
    return record.example(documents, record.text("question"), answers, group=title or text)

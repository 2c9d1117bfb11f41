"""Plain text made into tasks that can't be solved without the documents: copying, and going on where one ends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from comb.documents.document import Document, Example
from comb_training.data.records import read_records
from comb_training.data.side import DatasetSide, reader

TASKS = ("copy", "continue")
COPY = 'Continue word for word from "{quoted}".'
CONTINUE = 'Write what comes next, behind the end of the text that begins with "{quoted}".'
QUOTED_WORDS = 8


@reader("passages", heldout_share=0.1)
def read_passages(
    side: DatasetSide,
    *,
    num_documents: int = 3,
    words: int = 100,
    answer_words: int = 24,
    questions: int = 2,
    tasks: Sequence[str] = TASKS,
    passages: int = 20_000,
) -> Iterable[Example]:
    """Reads texts from JSON or JSONL, gzipped or not; a text is on one side of the split as a whole.

    Rows ``{text}`` (``title`` and ``id`` optional). document: passages of `words` words, some of them from other texts;
    query: to go on word for word from a quoted place in one of them (copy), or where the one ends that begins so
    (continue); answer: the words that follow there. With the backbone's own distribution as the target
    (train.ce_weight 0, train.kl_weight 1) no label is needed: what is learned is to read documents as it reads them.

    Args:
        num_documents: passages per example at most; how many is drawn, from one on.
        words: of a passage; half to all of them are taken.
        answer_words: of an answer.
        questions: over the same passages.
        tasks: which of ``copy`` and ``continue`` are asked, in turn.
        passages: examples at most are made of these many groups of passages.
    """
    if not tasks or not set(tasks) <= set(TASKS):
        raise ValueError(f"tasks are of {', '.join(TASKS)}, not {list(tasks)}")
    if words // 2 < QUOTED_WORDS + answer_words:
        raise ValueError(f"words must be at least {2 * (QUOTED_WORDS + answer_words)} for such answers, not {words}")
    texts: dict[str, list[list[str]]] = {}
    for record in read_records(side.path, side.name):
        split = record.text("text").split()
        if len(split) < words + answer_words:
            side.counts.noted[f"texts of fewer than {words + answer_words} words, left out"] += 1
        else:
            group = record.label("id", "title") or str(record.number)
            texts.setdefault(group, []).append(split)
    if not texts:
        raise ValueError(f"{side.path} has no text of at least {words + answer_words} words")
    here = sorted(side.groups(texts))
    wanted = passages if side.limit is None else min(passages, -(-side.limit // questions))
    made: list[Example] = []
    for number in range(wanted):
        rng, places = side.rng("passages", number), []
        for _ in range(rng.randint(1, num_documents)):
            group = rng.choice(here)
            text = rng.choice(texts[group])  # chapters of a book, say
            length = rng.randint(words // 2, words)
            places.append((group, text, rng.randrange(len(text) - length - answer_words + 1), length))
        documents = tuple(Document(" ".join(text[start : start + length])) for _, text, start, length in places)
        for turn in range(questions):
            _, text, start, length = rng.choice(places)
            if tasks[(number + turn) % len(tasks)] == "copy":
                begin = start + rng.randrange(length - QUOTED_WORDS - answer_words + 1)
                query, answer = COPY, begin + QUOTED_WORDS
            else:
                begin, query, answer = start, CONTINUE, start + length
            query = query.format(quoted=" ".join(text[begin : begin + QUOTED_WORDS]))
            said = " ".join(text[answer : answer + answer_words])
            made.append(Example(documents, query, said, id=f"{number}-{turn}", group=places[0][0]))
    side.counts.read = len(made)
    return side.first(made)

"""Questions that take several paragraphs: HotpotQA, 2WikiMultihopQA, MuSiQue and WikiHop."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from comb.documents.document import Example
from comb_training.data.records import DatasetRow
from comb_training.data.side import DatasetSide, reader, row_reader

ACROSS = (
    "What do {0} and {1} have in common?", "What is {0}, and what is {1}?", "Which of {0} and {1} came first?",
    "How is {0} connected with {1}?",
)  # fmt: skip


@reader("2wikimultihopqa", hub_id="framolfese/2WikiMultihopQA")
@reader("hotpotqa", hub_id="hotpotqa/hotpot_qa")
def read_hotpotqa(side: DatasetSide, *, num_documents: int | None = None, across: int = 0) -> Iterable[Example]:
    """HotpotQA (Yang et al. 2018), two hops over ten paragraphs; 2WikiMultihopQA (Ho et al. 2020), two to four.

    The official JSON (``context: [[title, [sentence, ...]], ...]``) and the Hub's form (``context: {title: [...],
    sentences: [[...], ...]}``). document: a paragraph's sentences joined, its title as title; query: ``question``;
    answer: ``answer``, which 2WikiMultihopQA's official test file has none of.

    Args:
        num_documents: keep only the first so many documents (counted); None keeps all of them.
        across: made questions about two of a row's titles, beside its own and for training alone. They have no answer
            but the backbone's (train.answers=on_policy).
    """
    found: list[Example] = []
    for example in side.rows(partial(_hotpotqa_row, num_documents=num_documents)):
        found.append(example)
        titles = [document.title for document in example.documents if document.title]
        rng = side.rng("across", example.id)
        for turn in range(across if side.split == "train" and len(titles) > 1 else 0):
            one, other = rng.sample(titles, 2)
            asked = ACROSS[turn % len(ACROSS)].format(one, other)
            found.append(replace(example, query=asked, answer="", answers=(), id=f"{example.id}-across{turn}"))
            side.counts.read += 1
    return side.limited(found)


def _hotpotqa_row(record: DatasetRow, *, num_documents: int | None) -> Example | str:
    context: Any = record.row.get("context")
    if context is None and "context" in record.row:
        context = []
    try:
        rows = zip(context["title"], context["sentences"], strict=True) if isinstance(context, dict) else context
        pairs = [(title, sentences) for title, sentences in rows]
    except (KeyError, TypeError, ValueError) as error:
        got = str(context)[:80]
        raise ValueError(f"{record.where}: 'context' is a list of [title, [sentence, ...]], got {got!r}") from error
    paragraphs = []
    for title, sentences in pairs:
        paragraph = replace(record, row={"title": title, "sentences": sentences})
        # official sentences mostly bring the space before them, but not all do
        stripped = (sentence.strip() for sentence in paragraph.items("sentences", str))
        paragraphs.append((paragraph.title(), " ".join(sentence for sentence in stripped if sentence)))
    documents = record.documents(paragraphs, num_documents)
    question, answer = record.text("question"), record.text("answer")
    return record.example(documents, question, [answer], id=record.label("_id"), group=question)


@row_reader("musique", hub_id="dgslibisey/MuSiQue")
def read_musique(record: DatasetRow, *, num_documents: int | None = None) -> Example | str:
    """MuSiQue (Trivedi et al. 2022): the example of a row.

    Two schemas: ``{ctxs: [{title, text}], question, answers}`` with ten retrieved documents each, and the official
    ``{id, paragraphs: [{title, paragraph_text}], question, answer, answer_aliases}``. document: a context or paragraph,
    in the file's order; answer: the first of ``answers``, or ``answer``; aliases are accepted too. `num_documents`:
    keep only the first so many documents (counted); None keeps all of them.
    """
    official = record.row.get("paragraphs") is not None
    if official and record.flag("answerable") is False:
        return "unanswerable question"
    parts = record.parts("paragraphs" if official else "ctxs")
    pairs = ((part.title(), part.text("paragraph_text" if official else "text")) for part in parts)
    documents = record.documents(pairs, num_documents)
    if official:
        aliases = record.items("answer_aliases", str) if "answer_aliases" in record.row else []
        answers = [record.text("answer"), *aliases]
    else:
        answers = record.items("answers", str)
    question = record.text("question")
    return record.example(documents, question, answers, group=question)

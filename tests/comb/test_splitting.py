"""KVSplit: nothing is lost, no budget exceeded, and cuts fall where a reader would cut."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from comb import PICEngine, splitters
from comb.documents.splitting import Splitter, create, sentences, split_document, token_pieces
from tests.helpers.byte_text import byte_llama, byte_tokenizer
from tests.helpers.stores import check_store

BUDGETED = [name for name in splitters.names() if name != "whole"]

MARKDOWN = """# First

Intro line one. Intro line two.

```python
# not a heading

x = 1
```

## Second

More text.
"""
CODE = """import os


# adds
@decorated
def add(a, b):

    return a + b


class Box:
    def open(self):
        pass
"""


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return byte_tokenizer()


def split(tokenizer: Any, text: str, spec: Any) -> list[str]:
    ids = tokenizer.encode(text, add_special_tokens=False)
    segments = split_document(tokenizer, ids, create(spec))
    assert [token for segment in segments for token in segment] == ids
    return [tokenizer.decode(segment) for segment in segments]


@pytest.mark.parametrize("name", BUDGETED)
@pytest.mark.parametrize("seed", range(10))
def test_nothing_is_lost_and_no_budget_exceeded(tokenizer: Any, name: str, seed: int) -> None:
    draw = random.Random(seed)
    alphabet = ["word ", "End. ", "\n\n", "\n", "\r\n\r\n", "  ", "x" * 50, "# h\n", "```\n"]
    alphabet += ["é", "日本。", "🙂", "e.g. ", "\t"]
    text = "".join(draw.choices(alphabet, k=draw.randrange(1, 60)))
    ids = tokenizer.encode(text, add_special_tokens=False)
    budget = draw.randrange(1, 40)
    segments = split_document(tokenizer, ids, create(f"{name}:{budget}"))
    assert [token for segment in segments for token in segment] == ids
    assert all(0 < len(segment) <= budget for segment in segments)
    assert (len(segments) == 1) == (len(ids) <= budget)
    assert segments == split_document(tokenizer, ids, create(f"{name}:{budget}"))


def test_paragraphs_are_packed_and_long_ones_cut_at_sentences(tokenizer: Any) -> None:
    text = "One.\n\nTwo.\n\nThis is a long one. It has two sentences.\n\nEnd."
    assert split(tokenizer, text, "paragraphs:26") == [
        "One.\n\nTwo.\n\n", "This is a long one. ", "It has two sentences.\n\n", "End.",
    ]  # fmt: skip
    assert split(tokenizer, "one\r\n\r\ntwo", "paragraphs:7") == ["one\r\n\r\n", "two"]
    pieces = ["One", ".\n\nTwo", " is", " here"]  # a boundary inside a token counts behind it
    assert create("paragraphs:3").split([1, 2, 3, 4], pieces) == [(1, 2), (3, 4)]


def test_sentences(tokenizer: Any) -> None:
    text = 'Dr. Bell paid $3.14 in the U.S. market. "Why?" she asked. J. Smith left! Then 7.'
    assert split(tokenizer, text, "sentences:41") == [
        "Dr. Bell paid $3.14 in the U.S. market. ", '"Why?" she asked. J. Smith left! Then 7.',
    ]  # fmt: skip
    text = "1. Take it. (See p. 7.) St. Paul's. Well... maybe “no?” he said. No. That is all. See No. 5."
    assert [text[first:last].strip() for first, last in pairwise([0, *sentences(text), len(text)])] == [
        "1. Take it.", "(See p. 7.)", "St. Paul's.", "Well... maybe “no?” he said.", "No.", "That is all.",
        "See No. 5.",
    ]  # fmt: skip
    assert split(tokenizer, "今日は。明日も！はい", "sentences:13") == ["今日は。", "明日も！", "はい"]
    # words stay whole where they fit
    assert split(tokenizer, "alpha beta gamma", "sentences:8") == ["alpha", " beta", " gamma"]


def test_markdown_and_code(tokenizer: Any) -> None:
    sections = split(tokenizer, MARKDOWN, "markdown:90")
    assert sections == [MARKDOWN.partition("## Second")[0], "## Second\n\nMore text.\n"]
    blocks = split(tokenizer, MARKDOWN, "markdown:45")
    assert "```python\n# not a heading\n\nx = 1\n```\n" in [block.rstrip("\n") + "\n" for block in blocks]
    text = "Text before.\n\n## Head\n\nBody of the section is long. And longer still."
    assert split(tokenizer, text, "markdown:40")[0] == "Text before.\n\n"  # a heading is never the end of a segment
    fence = "~~~\n" + "line of code\n" * 9 + "~~~\n"
    assert all(part.endswith("\n") for part in split(tokenizer, fence, "markdown:30"))
    unclosed = "text\n\n```\n# a comment\n\nmore\n"
    assert split(tokenizer, unclosed, "markdown:24")[-1] == "```\n# a comment\n\nmore\n"
    blocks = split(tokenizer, CODE, "code:62")
    assert blocks == ["import os\n\n\n", CODE[CODE.index("# adds") : CODE.index("class")], CODE[CODE.index("class") :]]


def test_pieces_join_to_the_text(tokenizer: Any) -> None:
    ids = tokenizer.encode("It's 3 o'clock — naïve?\n\n\tYes.", add_special_tokens=False)
    assert "".join(token_pieces(tokenizer, ids)).startswith("It's 3 o'clock ")
    # marks spaces inside the words, as SentencePiece does, and drops the first one when it decodes
    words = ["▁", "▁a", "▁cat", "▁sat.", "▁It", "▁slept.", "a", "<unk>"]
    made = Tokenizer(models.Unigram([(word, -1.0) for word in words], unk_id=7))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    spaced = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")
    ids = spaced.encode("a cat sat. It slept.", add_special_tokens=False)
    assert token_pieces(spaced, ids) == [" a", " cat", " sat.", " It", " slept."]
    assert split_document(spaced, ids, create("sentences:3")) == [tuple(ids[:3]), tuple(ids[3:])]


def bars(text: str) -> list[int]:
    return [index + 1 for index, character in enumerate(text) if character == "|"]


def test_functions_and_classes_of_ones_own(tokenizer: Any) -> None:
    own = create(bars)
    assert isinstance(own, Splitter)
    own.max_tokens = 8
    assert split(tokenizer, "ab|cdef|g|hijklmnop", own) == ["ab|cdef|", "g|", "hijklmno", "p"]
    for found, why in (*((offsets, "increasing offsets") for offsets in ([3, 2], [0, 99], [-1])),
                       *((offsets, "whole numbers") for offsets in (None, [1.5], ["x"]))):  # fmt: skip
        wrong = create(lambda text, found=found: found)
        wrong.max_tokens = 5
        with pytest.raises(ValueError, match=why):
            split(tokenizer, "x" * 30, wrong)

    @splitters.register("test-bars")
    class Bars(Splitter):
        levels = (bars,)

    assert split(tokenizer, "abc|def|", "test-bars:5") == ["abc|", "def|"]
    with pytest.raises(ValueError, match="registered already"):
        splitters.register("test-bars")(type("Other", (Splitter,), {}))


@pytest.mark.parametrize("made", [[], [[5, 6]], [[6, 5], [7]], [[5, 6], [], [7]]])
def test_a_splitter_that_loses_or_turns_tokens_is_refused(tokenizer: Any, made: list[list[int]]) -> None:
    class Own(Splitter):
        def split(self, token_ids: Any, pieces: Any) -> Any:
            return made

    with pytest.raises(ValueError, match=r"Own made \d segments that are not the document"):
        split_document(tokenizer, [5, 6, 7], Own())
    made = [[5], [6, 7]]
    assert split_document(tokenizer, [5, 6, 7], Own()) == [(5,), (6, 7)]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("verses", "unknown splitter 'verses'; known: code, fixed"),
        ("fixed:0", "at least 1"),
        ("fixed:many", "expected a number of tokens, as in 'fixed:512'"),
        ("whole:3", "'whole' takes no budget"),
        (3, "a name, a Splitter or a function, not int"),
    ],
)
def test_bad_specs(spec: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        create(spec)


def test_the_engine_splits_and_reports_whole_documents(tokenizer: Any) -> None:
    model = byte_llama()
    engine = PICEngine(model, tokenizer, method="legolink:2", splitter="sentences:24")
    text = "Anna lives in Rome. Bela lives in York. She left."
    first = engine.ask("who?", documents=[text, "Short."], max_new_tokens=2)
    found = [(d.state, d.tokens, d.segments) for d in first.report.documents]
    assert found == [("compiled", 50, 3), ("compiled", 7, 1)]
    assert "in 3 segments" in str(first.report)
    (again,) = engine.ask("who?", documents=["Bela lives in York. "], max_new_tokens=2).report.documents
    assert again.state == "compiled"  # the template puts a line end behind a document: another text
    ids = engine.add_documents([text], pin=True, ttl=60)
    assert ids == [first.report.documents[0].id]
    assert [d.state for d in engine.ask("who?", document_ids=ids, max_new_tokens=2).report.documents] == ["hit"]
    assert engine.store.stats().pinned == 3
    engine.remove_documents(ids)
    (gone,) = engine.ask("who?", documents=[text], max_new_tokens=2).report.documents
    assert gone.state == "compiled"
    cut, whole = (
        PICEngine(model, tokenizer, method="full", splitter=each).ask("who?", documents=[text], max_new_tokens=4)
        for each in ("sentences:24", "whole")
    )
    assert cut.token_ids == whole.token_ids
    check_store(engine.store)

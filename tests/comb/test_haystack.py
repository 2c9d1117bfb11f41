"""Haystacks: the needle stands where it shall, documents stay whole, and files are read or refused."""

from __future__ import annotations

import pytest

from comb import Document, Example
from comb.bench.haystack import ExampleHaystack, TextHaystack, place, supporting
from comb.documents.document import PromptBuilder
from tests.helpers.byte_text import byte_tokenizer


@pytest.mark.parametrize(
    ("tokens", "depth", "needle", "chunk", "start"),
    [
        (100, 0, 10, 50, 0),
        (100, 100, 10, 50, 90),
        (100, 25, 10, 50, 22),  # round(90 * 0.25)
        (100, 50, 10, 50, 40),  # 45 would end at 55
        (100, 52, 10, 50, 40),
        (100, 56, 10, 50, 50),
        (100, 50, 10, 200, 45),  # one chunk
    ],
)
def test_a_needle_never_lies_across_chunks(tokens: int, depth: float, needle: int, chunk: int, start: int) -> None:
    found = place(tokens, depth, needle, chunk)
    assert found // chunk == (found + needle - 1) // chunk
    assert found == start
    with pytest.raises(ValueError, match="a needle of 60"):
        place(tokens, depth, 60, 50)


def test_a_text_haystack_has_its_needle_at_the_exact_token() -> None:
    tokenizer = byte_tokenizer()
    haystack = TextHaystack(tokenizer, 100)
    for depth in (0, 25, 50, 75, 100):
        case = haystack.case(430, depth, 1)
        ids = [token for document in case.documents for token in document.token_ids or ()]
        assert len(ids) == case.tokens == 430
        assert [len(document.token_ids or ()) for document in case.documents] == [100, 100, 100, 100, 30]
        needle = tokenizer.decode(ids[case.needle_token : case.needle_token + case.needle_tokens])
        assert needle.startswith(" The secret code")
        assert needle.endswith(f"{case.answer}.")
        assert abs(case.needle_token / 430 - depth / 100) < 0.2
        assert not any(character.isdigit() for character in tokenizer.decode(ids).replace(needle, ""))
    assert haystack.case(430, 50, 1) == TextHaystack(tokenizer, 100).case(430, 50, 1)
    assert haystack.case(430, 50, 1).question != haystack.case(430, 50, 2).question


def test_the_supporting_document_is_the_only_one_with_all_words() -> None:
    right, other = Document("Hannah went to the station."), Document("Felix went to the park.")
    example = Example((other, right), "Where is Hannah?", "Hannah is in the station.")
    assert supporting(example) == right
    two = Example((Document("Ann works at Acme."), Document("Acme is in Rome.")), "Ann's city?", "Acme is in Rome.")
    assert supporting(two) is None
    assert supporting(Example((right, right), "Where is Hannah?", "station")) is None


def test_a_dataset_haystack_keeps_documents_whole() -> None:
    builder = PromptBuilder(byte_tokenizer())
    examples = [
        Example(
            (Document(f"name{n} went to room{n}."), Document(f"person{n} sat down.")),
            f"Where is name{n}?", f"name{n} is in room{n}.", group=str(n),
        )
        for n in range(9)
    ]  # fmt: skip
    haystack = ExampleHaystack(examples, builder)
    for depth in (0, 50, 100):
        case = haystack.case(150, depth, 0)
        texts = [document.text for document in case.documents]
        place_of_needle = texts.index("name0 went to room0.")
        assert case.needle_token == sum(len(f"{text}\n") for text in texts[:place_of_needle])
        assert case.tokens == sum(len(f"{text}\n") for text in texts) <= 150
        assert "person0 sat down." not in texts  # of the same group
    with pytest.raises(ValueError, match="not 100000"):
        haystack.case(100_000, 50, 0)
    with pytest.raises(ValueError, match="answers it alone"):
        ExampleHaystack([Example((Document("a"),), "why?", "so")], builder)

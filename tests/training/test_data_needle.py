"""Needles: the document that answers stands where it shall, among others that don't."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from comb import Document, Example
from comb.documents.datasets import read_dataset
from comb_training.data.readers.haystacks import supporting


def test_needles_stand_at_every_depth_in_turn() -> None:
    found = read_dataset("needle", num_documents=9, limit=10)
    places = []
    for example in found:
        assert len(set(example.documents)) == 9
        needle = supporting(example)
        assert needle is not None
        places.append(example.documents.index(needle))
    assert places == [0, 2, 4, 6, 8] * 2
    assert found.counts.kept == 10
    assert found.examples == read_dataset("needle", num_documents=9, limit=10).examples


def test_needles_of_another_set(tmp_path: Path) -> None:
    rows = [
        {"documents": [f"name{n} went to room{n}.", f"person{n} sat down."], "query": f"Where is name{n}?",
         "answer": f"name{n} is in room{n}."} for n in range(9)
    ]  # fmt: skip
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    given = {"of": "jsonl", "split": "all"}
    first = read_dataset("needle", path, **given, num_documents=4)[1]
    assert [document.text for document in first.documents].count("name1 went to room1.") == 1
    with pytest.raises(ValueError, match=r"'jsonl' gives \d+ documents beside a needle, not 99: read more"):
        read_dataset("needle", path, **given, num_documents=100)
    with pytest.raises(ValueError, match="2 or more, got 1"):
        read_dataset("needle", num_documents=1)


def test_the_supporting_document_is_the_only_one_with_all_words() -> None:
    right, other = Document("Hannah went to the station."), Document("Felix went to the park.")
    example = Example((other, right), "Where is Hannah?", "Hannah is in the station.")
    assert supporting(example) == right
    two = Example((Document("Ann works at Acme."), Document("Acme is in Rome.")), "Ann's city?", "Acme is in Rome.")
    assert supporting(two) is None
    assert supporting(Example((right, right), "Where is Hannah?", "station")) is None

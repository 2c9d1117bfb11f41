"""The words and sentence patterns of the closed world, which are in lexicon.yaml."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

_FILE: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
_WORDS = {name: tuple(text.split()) for name, text in _FILE["words"].items()}
_WORDS["years"] = tuple(str(year) for year in range(1950, 2010))

WOMEN, MEN, LAST_NAMES = _WORDS["women"], _WORDS["men"], _WORDS["last_names"]
FIRST_NAMES = tuple(name for pair in zip(WOMEN, MEN, strict=True) for name in pair)
COMPANY_HEADS, COMPANY_TAILS = _WORDS["company_heads"], _WORDS["company_tails"]
CITIES, PLACES, YEARS = _WORDS["cities"], _WORDS["places"], _WORDS["years"]
INSTRUMENTS, DISHES, PRODUCTS = _WORDS["instruments"], _WORDS["dishes"], _WORDS["products"]
MOVES = tuple(_FILE["moves"])


@dataclass(frozen=True)
class Relation:
    """One kind of fact: how documents state it, how questions ask for it and how the answer says it."""

    values: tuple[str, ...]
    statements: tuple[str, ...]
    queries: tuple[str, ...]
    answer: str


def _relations(rows: Mapping[str, dict[str, Any]]) -> dict[str, Relation]:
    return {
        name: Relation(
            _WORDS.get(row.get("values", ""), ()), tuple(row["statements"]), tuple(row["queries"]), row["answer"]
        )
        for name, row in rows.items()
    }


EMPLOYER = "employer"
PERSON_RELATIONS, COMPANY_RELATIONS = (_relations(_FILE[f"{who}_relations"]) for who in ("person", "company"))
BRIDGE_QUERIES: dict[str, tuple[str, ...]] = {name: tuple(asked) for name, asked in _FILE["bridge_queries"].items()}
PLACE_QUERY = "Where is {s}?"
PLACE_ANSWER = "{s} is in the {v}."

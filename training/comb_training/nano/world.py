"""A closed world of people, companies and rooms, told in short documents with questions about them.

Three kinds of document: a person (employer and two more facts), a company (seat, product, founding year) and a
story of people moving between rooms in the sentence forms of bAbI task 1 (Weston et al. 2015). Every fact is drawn
afresh for every scene, so that a question can only be answered from the documents beside it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

_FILE: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("lexicon.yaml").read_text(encoding="utf-8"))
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
    found = {}
    for name, row in rows.items():
        values = _WORDS.get(row.get("values", ""), ())
        found[name] = Relation(values, tuple(row["statements"]), tuple(row["queries"]), row["answer"])
    return found


EMPLOYER = "employer"
PERSON_RELATIONS, COMPANY_RELATIONS = (_relations(_FILE[f"{who}_relations"]) for who in ("person", "company"))
BRIDGE_QUERIES: dict[str, tuple[str, ...]] = {name: tuple(asked) for name, asked in _FILE["bridge_queries"].items()}
PLACE_QUERY = "Where is {s}?"
PLACE_ANSWER = "{s} is in the {v}."

Split = Literal["train", "heldout"]
KINDS = ("person", "company", "two_document", "story")

# Rooms are asked for by first name alone, so what is held out there is first names rather than pairs of names.
# The names of bAbI task 1 (Mary, John, Sandra, Daniel) stand first in the list and are trained on.
# Surnames stand for people too: the more names move, the less depends on which.
_TRAIN_STORY_NAMES = (*FIRST_NAMES[:-16], *LAST_NAMES)
_HELDOUT_STORY_NAMES = FIRST_NAMES[-16:]
_MAX_STORIES = 8  # in one scene, so that the held-out names are enough for two people in each


@dataclass(frozen=True)
class Question:
    """A question with its whole-sentence answer; `supporting` indexes the documents that are needed."""

    query: str
    answer: str
    kind: str
    supporting: tuple[int, ...]


@dataclass(frozen=True)
class Scene:
    """Documents (without trailing newline) and questions about them."""

    documents: tuple[str, ...]
    questions: tuple[Question, ...]


@dataclass(frozen=True)
class _Entity:
    """A person or a company: its document's facts in the order told, `{relation: value}`."""

    name: str
    pronoun: str
    possessive: str
    facts: dict[str, str]


def pairs(heads: tuple[str, ...], tails: tuple[str, ...], split: Split) -> list[str]:
    """Two-part names of one split: a quarter of all pairs is held out, and each part occurs in both splits."""
    return [
        f"{head} {tail}"
        for i, head in enumerate(heads)
        for j, tail in enumerate(tails)
        if ((i + j) % 4 == 0) == (split == "heldout")
    ]


class World:
    """Seeded stream of scenes: the same seed, split and calls give the same scenes.

    `pronouns` is the probability that a document says "she", "he" or "it" after its first sentence, `stories` the
    probability that a scene holds room stories only, `mixed` that stories stand among people and companies. Up to
    three stories in a scene have up to `longest_story` moves each, more of them up to 5.
    """

    def __init__(
        self,
        seed: int,
        split: Split = "train",
        *,
        pronouns: float = 0.5,
        stories: float = 0.2,
        mixed: float = 0.25,
        longest_story: int = 10,
    ) -> None:
        self._random = random.Random(f"{split}:{seed}")
        self._people = pairs(FIRST_NAMES, LAST_NAMES, split)
        self._companies = pairs(COMPANY_HEADS, COMPANY_TAILS, split)
        self._story_names = _TRAIN_STORY_NAMES if split == "train" else _HELDOUT_STORY_NAMES
        self._pronouns = pronouns
        self._stories = stories
        self._mixed = mixed
        self._longest_story = longest_story

    def scene(self, num_documents: int, num_questions: int) -> Scene:
        """Draw one scene; it has fewer questions where the documents don't hold `num_questions` different ones."""
        if num_documents < 1 or num_questions < 0:
            raise ValueError(
                f"expected num_documents >= 1 and num_questions >= 0, got {num_documents}, {num_questions}"
            )
        kind, num_stories = self._random.random(), 0
        if kind < self._stories:
            num_stories = min(num_documents, _MAX_STORIES)
        elif kind < self._stories + self._mixed and num_documents > 1:
            num_stories = self._random.randint(1, min(_MAX_STORIES, max(1, num_documents // 3)))
        rest = num_documents - num_stories
        names = self._distinct(self._companies, rest // 2 if rest > 1 else self._random.randrange(2) * rest)
        companies = [_Entity(name, "It", "Its", self._facts(COMPANY_RELATIONS, 3)) for name in names]
        stories = self._draw_stories(num_stories)
        taken = frozenset(name for moves in stories for name, _ in moves)
        people = self._draw_people(rest - len(companies), companies, taken)
        order = self._random.sample(range(num_documents), num_documents)
        told = [self._tell(entity) for entity in (*people, *companies)]
        for moves in stories:
            sentences = [f"{name} {self._random.choice(MOVES)} the {place}." for name, place in moves]
            told.append(" ".join(sentences))
        documents = [""] * num_documents
        for place, text in zip(order, told, strict=True):
            documents[place] = text
        asked = list(self._ask(people, companies, stories, order))
        # a random kind is drawn first, so that the kinds with few questions are asked as often
        pools = {kind: [question for question in asked if question.kind == kind] for kind in KINDS}
        chosen: list[Question] = []
        while len(chosen) < num_questions and any(pools.values()):
            pool = pools[self._random.choice([kind for kind in KINDS if pools[kind]])]
            chosen.append(pool.pop(self._random.randrange(len(pool))))
        return Scene(tuple(documents), tuple(chosen))

    def _distinct(self, names: list[str], count: int, taken: frozenset[str] = frozenset()) -> list[str]:
        """Draw `count` two-part names with different first parts and no part `taken`, so that none are confused."""
        by_head: dict[str, list[str]] = {}
        for name in names:
            head, tail = name.split()
            if head not in taken and tail not in taken:
                by_head.setdefault(head, []).append(name)
        if count > len(by_head):
            raise ValueError(f"a scene has room for {len(by_head)} people and as many companies, asked for {count}")
        return [self._random.choice(by_head[head]) for head in self._random.sample(sorted(by_head), count)]

    def _draw_people(self, count: int, companies: list[_Entity], taken: frozenset[str]) -> list[_Entity]:
        """People without a name that is `taken` by a story, so that a single name stands for one person."""
        people = []
        for name in self._distinct(self._people, count, taken):
            others = {key: rel for key, rel in PERSON_RELATIONS.items() if key != EMPLOYER}
            facts = self._facts(others, 2)
            # One person in six works for a company that no document is about.
            absent = not companies or self._random.random() < 1 / 6
            employer = self._random.choice(self._companies) if absent else self._random.choice(companies).name
            items = [*facts.items(), (EMPLOYER, employer)]
            self._random.shuffle(items)
            woman = name.split()[0] in WOMEN
            people.append(_Entity(name, "She" if woman else "He", "Her" if woman else "His", dict(items)))
        return people

    def _facts(self, relations: dict[str, Relation], count: int) -> dict[str, str]:
        return {key: self._random.choice(relations[key].values) for key in self._random.sample(list(relations), count)}

    def _draw_stories(self, count: int) -> list[list[tuple[str, str]]]:
        """Stories as `(name, place)` moves; nobody is in two stories, so document order never matters."""
        names = self._random.sample(self._story_names, len(self._story_names))
        stories: list[list[tuple[str, str]]] = []
        for _ in range(count):
            few = count <= 3
            longest = self._longest_story if few else min(5, self._longest_story)
            cast = [names.pop() for _ in range(self._random.randint(1, 4 if few else 2))]
            moves = [self._random.choice(cast) for _ in range(self._random.randint(2, longest))]
            stories.append([(name, self._random.choice(PLACES)) for name in moves])
        return stories

    def _tell(self, entity: _Entity) -> str:
        relations = PERSON_RELATIONS if EMPLOYER in entity.facts else COMPANY_RELATIONS
        full = (entity.name, f"{entity.name}'" if entity.name.endswith("s") else f"{entity.name}'s")
        again = (entity.pronoun, entity.possessive) if self._random.random() < self._pronouns else full
        sentences = []
        for index, (key, value) in enumerate(entity.facts.items()):
            subject, possessive = again if index else full
            pattern = self._random.choice(relations[key].statements)
            sentences.append(pattern.format(s=subject, p=possessive, v=value))
        return " ".join(sentences)

    def _ask(
        self,
        people: list[_Entity],
        companies: list[_Entity],
        stories: list[list[tuple[str, str]]],
        order: list[int],
    ) -> Iterator[Question]:
        """Every different question of a scene; `order[i]` is the document index of the i-th thing told."""
        where = {company.name: order[len(people) + i] for i, company in enumerate(companies)}
        for document, person in zip(order, people, strict=False):
            yield from self._direct(person, PERSON_RELATIONS, "person", document)
            employer = next((c for c in companies if c.name == person.facts[EMPLOYER]), None)
            if employer is not None:
                first = PERSON_RELATIONS[EMPLOYER].answer.format(s=person.name, v=employer.name)
                for key, value in employer.facts.items():
                    query = self._random.choice(BRIDGE_QUERIES[key]).format(s=person.name)
                    answer = f"{first} {COMPANY_RELATIONS[key].answer.format(s=employer.name, v=value)}"
                    yield Question(query, answer, "two_document", (document, where[employer.name]))
        for company in companies:
            yield from self._direct(company, COMPANY_RELATIONS, "company", where[company.name])
        for document, moves in zip(order[len(people) + len(companies) :], stories, strict=True):
            for name, place in dict(moves).items():  # the last move of each person counts
                answer = PLACE_ANSWER.format(s=name, v=place)
                yield Question(PLACE_QUERY.format(s=name), answer, "story", (document,))

    def _direct(self, entity: _Entity, relations: dict[str, Relation], kind: str, document: int) -> Iterator[Question]:
        for key, value in entity.facts.items():
            query = self._random.choice(relations[key].queries).format(s=entity.name)
            yield Question(query, relations[key].answer.format(s=entity.name, v=value), kind, (document,))


LARGEST_LEDGER = (10, 6, 16)
"""Names in a prompt, documents, and entries of a document, at most, that `nano-ledger` was trained on."""


def ledger(rng: random.Random, names: int, documents: int, entries: int, questions: int) -> Scene:
    """Logs over a few names ("Mary: garden. John: attic."), and questions where some of them are now: the last entry.

    What an entry says, a later one takes back, so documents can't be summed up in any order: a state that adds them up
    holds every place at once. It is the task of the backbone `nano-ledger`. `entries`: of each document;
    `questions`: about different names, at most as many as there are entries on.
    """
    people = rng.sample(FIRST_NAMES, names)
    now: dict[str, tuple[str, int]] = {}
    texts = []
    for number in range(documents):
        lines = []
        for _ in range(entries):
            name = rng.choice(people)
            # one who is noted again is elsewhere
            place = rng.choice([place for place in PLACES if place != now.get(name, ("", 0))[0]])
            now[name] = place, number
            lines.append(f"{name}: {place}.")
        texts.append(" ".join(lines))
    asked = ((name, *now[name]) for name in rng.sample(sorted(now), min(questions, len(now))))
    return Scene(
        tuple(texts), tuple(Question(f"Where is {name}?", f" {place}", "story", (by,)) for name, place, by in asked)
    )

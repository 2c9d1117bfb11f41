"""Logs of who went where, over several documents: where somebody is stands in the last entry on the name.

What an entry says, a later one takes back, so documents can't be summed up in any order: a state that adds them up
holds every place at once. It is the task of the backbone `nano-ledger`.
"""

from __future__ import annotations

import random

from comb_training.nano import lexicon as lex
from comb_training.nano.world import Question, Scene

LARGEST = (10, 6, 16)
"""Names in a prompt, documents, and entries of a document, at most, that `nano-ledger` was trained on."""


def ledger(rng: random.Random, names: int, documents: int, entries: int, questions: int) -> Scene:
    """Logs over a few names ("Mary: garden. John: attic."), and questions where some of them are now.

    Args:
        entries: of each document. questions: about different names, at most as many as there are entries on.
    """
    people = rng.sample(lex.FIRST_NAMES, names)
    now: dict[str, tuple[str, int]] = {}
    texts = []
    for number in range(documents):
        lines = []
        for _ in range(entries):
            name = rng.choice(people)
            # one who is noted again is elsewhere
            place = rng.choice([place for place in lex.PLACES if place != now.get(name, ("", 0))[0]])
            now[name] = place, number
            lines.append(f"{name}: {place}.")
        texts.append(" ".join(lines))
    asked = ((name, *now[name]) for name in rng.sample(sorted(now), min(questions, len(now))))
    return Scene(
        tuple(texts), tuple(Question(f"Where is {name}?", f" {place}", 1, "story", (by,)) for name, place, by in asked)
    )

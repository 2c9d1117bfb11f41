"""Which replica a request goes to: an even spread, few moves when replicas come and go, and no replica overrun."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from comb_serving.replicas.affinity import RoutedDocument, documents_of, home, limit, preferred, ranked

REPLICAS = [f"replica-{number}" for number in range(5)]
KEYS = [f"document {number}" for number in range(5000)]
IDLE = dict.fromkeys(REPLICAS, 0)


def test_documents_are_spread_evenly() -> None:
    held = Counter(home(key, REPLICAS) for key in KEYS)
    assert set(held) == set(REPLICAS)
    # 1,000 each; the standard deviation of a fair draw is 28
    assert max(abs(count - 1000) for count in held.values()) < 120


def test_a_replica_that_joins_or_leaves_moves_its_own_documents_alone() -> None:
    before = {key: home(key, REPLICAS) for key in KEYS}
    left = {key: home(key, REPLICAS[:-1]) for key in KEYS}
    assert all(left[key] == place for key, place in before.items() if place != REPLICAS[-1])
    moved = Counter(left[key] for key, place in before.items() if place == REPLICAS[-1])
    assert len(moved) == 4
    assert max(moved.values()) < 2 * min(moved.values())
    joined = {key: home(key, [*REPLICAS, "replica-5"]) for key in KEYS}
    changed = [key for key in KEYS if joined[key] != before[key]]
    assert all(joined[key] == "replica-5" for key in changed)
    assert len(KEYS) / 6 * 0.8 < len(changed) < len(KEYS) / 6 * 1.2
    # the control: by remainder, as dicts do it, nearly everything moves
    modulo = [key for key in KEYS if hash(key) % 5 != hash(key) % 6]
    assert len(modulo) > len(KEYS) / 2
    assert [home(key, REPLICAS[::-1]) for key in KEYS[:99]] == [before[key] for key in KEYS[:99]]


def body(*documents: Any) -> dict[str, Any]:
    return {"documents": list(documents)}


def test_order_does_not_matter_and_most_bytes_decide() -> None:
    texts = [f"{number} " * 50 for number in range(8)]
    draw = random.Random(1)
    parts = documents_of(body(*texts), "")
    wanted = preferred(parts, REPLICAS)
    for _ in range(20):
        assert preferred(draw.sample(parts, len(parts)), REPLICAS) == wanted
    long, short = RoutedDocument("long", 1000), [RoutedDocument(f"short {number}", 10) for number in range(9)]
    assert preferred([*short, long], REPLICAS) == home("long", REPLICAS)
    where = home("short 0", REPLICAS)
    together = [
        part for part in (RoutedDocument(f"p{number}", 10) for number in range(99)) if home(part.key, REPLICAS) == where
    ]
    assert preferred([*together[:3], RoutedDocument("other", 12)], REPLICAS) == where
    assert preferred([long, *[RoutedDocument("short 0", 400)] * 9], REPLICAS) == home(
        "long", REPLICAS
    )  # each counts once
    assert preferred([], REPLICAS) is None


def test_what_a_document_is() -> None:
    def key(item: Any, tenant: str = "a") -> str:
        (part,) = documents_of(body(item), tenant)
        return part.key

    assert key("text") == key({"text": "text"}) == key({"text": "text", "id": "a name"})
    different = ["text", {"text": "text", "title": "t"}, {"id": "text"}, {"token_ids": [5, 6]}, "other", {"data": {}}]
    assert len({key(item) for item in different} | {key("text", "b")}) == 7
    named = {"messages": [{"role": "user", "content": [{"type": "document", "id": "x"}, {"type": "text"}, 3]}]}
    assert [part.key for part in documents_of(named, "a")] == [key({"id": "x"})]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["id", "text", "title", "token_ids", "type", "content"]), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(st.fixed_dictionaries({}, optional={"documents": JSON | st.lists(JSON), "messages": st.lists(JSON)}) | JSON)
def test_any_body_has_a_place(asked: Any) -> None:
    assert sorted(ranked(documents_of(asked, ""), IDLE)) == REPLICAS


def test_a_request_goes_home_until_home_has_too_much() -> None:
    parts, bound = [RoutedDocument("document", 9)], {"factor": 1.25, "floor": 4}
    wanted = home("document", REPLICAS)
    loads = dict(IDLE)
    places = []
    for _ in range(30):
        place, *_ = ranked(parts, loads, **bound)
        loads[place] += 1
        places.append(place)
    assert places[:4] == [wanted] * 4
    assert places[4] != wanted
    assert max(loads.values()) <= 9  # ceil(1.25 * 30 / 5) and one
    # what spills together spills to one place, where it is a hit the next time
    full = {**IDLE, wanted: 4}
    assert len({ranked(parts, full, **bound)[0] for _ in range(9)}) == 1
    assert ranked(parts, {**dict.fromkeys(REPLICAS, 50), wanted: 55}, **bound)[0] == wanted
    assert ranked(parts, {**dict.fromkeys(REPLICAS, 50), wanted: 90}, **bound)[-1] == wanted


@given(st.lists(st.integers(0, 30), min_size=1, max_size=6), st.integers(1, 9), st.floats(1, 3))
def test_no_replica_gets_more_than_the_bound_unless_all_have(given_loads: list[int], floor: int, factor: float) -> None:
    loads = {f"replica-{number}": load for number, load in enumerate(given_loads)}
    place, *_ = ranked([RoutedDocument("d", 1)], loads, factor=factor, floor=floor)
    assert loads[place] < limit(loads, factor, floor) or loads[place] == min(loads.values())
    assert place == home("d", list(loads)) or loads[place] == min(loads.values())


def test_requests_without_documents_go_to_the_least_loaded() -> None:
    loads = {**dict.fromkeys(REPLICAS, 3), REPLICAS[2]: 1}
    assert ranked([], loads)[0] == REPLICAS[2]
    assert ranked([], {}) == []

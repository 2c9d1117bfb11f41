"""The methods that vLLM can link with, as a server or a request names them: ``legolink:16``, ``hypic:8``, ``full``.

They are the library's: whatever front its documents have, and every rule of selection that needs to see nothing but
where documents are, which the scheduler knows beforehand, or what the question looks at, which a step tells it.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from comb import methods
from comb.linking.cache import Span
from comb.methods.fronts import DUMMIES, dummies_of
from comb.methods.hypic import Hypic
from comb.methods.linked import Linked
from comb.methods.selection import NOTHING, QueryLook, Rule, TokenCount

Range = tuple[int, int]

FULL = "full"  # nothing linked: plain vLLM computes the documents with the rest of the prompt
TRAINED = "linktokens"  # documents behind what an adapter has learned, nothing computed again
ADAPTER = "adapter"


@dataclass(frozen=True)
class LinkMethod:
    """How documents of a plain model are compiled and linked."""

    name: str  # as it is written in requests and reports, in one way only: ``legolink:16``, never ``legolink``
    front: str = "none"  # what documents are compiled behind, as the library writes it; ``dummies:n`` with its number
    rule: Rule = field(default=NOTHING, compare=False)  # which of their tokens are computed again where they are linked
    values: Mapping[str, Any] = field(default_factory=dict, compare=False)  # its parameters
    seam: int | None = None  # tokens at either end that hybrids compute again (HYPIC, sec. 4.2); None: for others

    @property
    def states(self) -> bool:
        """Whether it links what documents do to the states of linear layers, which depends on its seams."""
        return self.seam is not None

    @property
    def compiled(self) -> str:
        """How its documents are compiled; methods that agree share them."""
        if self.states:
            return self.name
        return "alone" if self.front == "none" else self.front

    @property
    def full(self) -> bool:
        """Whether nothing is linked."""
        return self.name == FULL

    @property
    def on_hybrids(self) -> LinkMethod:
        """What stands for it on hybrid models, as in the library; itself where nothing does."""
        name, given = methods.parse(self.name)
        other = methods.get(name).on_hybrids
        return self.parse(f"{other}:front={self.front}") if other and not given.keys() - {"front"} else self

    def recomputed(self, spans: Sequence[Range], paid: Tensor | None = None) -> list[int] | None:
        """Sorted positions of the document tokens that are computed again; None where the question's look has to say.

        `paid`: [N], `QueryLook.paid` of the prompt.
        """
        alone = self.front == "none"
        found = [Span(*span, first=alone and not span[0]) for span in spans]
        if self.rule.by_query and paid is None:
            # a document that begins the prompt was compiled in its place
            return [] if all(span.first for span in found) else None
        look = None if paid is None else QueryLook(paid, found, not alone)
        return self.rule.select(look, found, not alone, **self.values)

    @classmethod
    def parse(cls, spec: str) -> LinkMethod:
        """Reads a method with its parameters.

        Raises ValueError for a method that the library doesn't have, one that vLLM can't link with, or wrong numbers.
        """
        name, given = methods.parse(spec)
        kind = methods.get(name)
        if name == FULL and not given:
            return cls(name)
        front = str(given.pop("front", getattr(kind, "default_front", "none")))
        if front.partition(":")[0] == DUMMIES:
            front = f"{DUMMIES}:{dummies_of(front)}"
        if name == "hypic" and not given.keys() - {"w"}:
            width = given.get("w", inspect.signature(Hypic).parameters["w"].default)
            TokenCount().check(f"{name}:w", width)
            behind = "" if front == "none" else f",front={front}"
            return cls(f"{name}:{width}{behind}", front, seam=width)
        if not issubclass(kind, Linked) or kind.rule.looks or given.keys() - kind.rule.defaults.keys():
            looks = getattr(kind, "rule", NOTHING).looks
            looking = f"{name} looks into the prompt before it chooses, and " if looks else ""
            served = []  # with the names of their numbers
            for each, other in ((each, methods.get(each)) for each in methods.names()):
                if each == "hypic" or (issubclass(other, Linked) and not other.rule.looks):
                    served.append(":".join([each, *other.positional]))
            raise ValueError(
                f"{looking}vLLM links documents with {', '.join(served)}, behind front=prose, {DUMMIES}:n or an "
                f"adapter's, or not at all (full), not with {spec!r}"
            )
        values = kind.rule.read(name, given)
        # the first one needs no name; a 0 that is meant anyway isn't written
        said = [f"{value}" if number == 0 else f"{key}={value}" for number, (key, value) in enumerate(values.items())
                if value != kind.rule.defaults[key] or (number == 0 and value)]  # fmt: skip
        parts = [*said, *([] if front == kind.default_front else [f"front={front}"])]
        written = (":" if said and "=" not in said[0] else ",").join([name, ",".join(parts)]) if parts else name
        return cls(written, front, kind.rule, values)

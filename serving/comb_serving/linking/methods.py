"""The methods that vLLM can link with, as a server or a request names them: ``legolink:16``, ``hypic:8``, ``full``."""

from __future__ import annotations

from dataclasses import dataclass

from comb import methods

TRAINED = "linktokens"  # documents behind an adapter's
FULL = "full"  # nothing linked: plain vLLM computes the documents with the rest of the prompt
NUMBERS = {"legolink": ("k", 16, 0), "primed": ("k", 0, 0), "legolink-0": ("dummies", 4, 1), "hypic": ("w", 8, 0)}
"""The number after a method's name: what it is called, its default (the papers' and the library's), and the least."""


@dataclass(frozen=True)
class LinkMethod:
    """How documents of a plain model are compiled and linked (EPIC, sec. 4.2 and 5.4; hybrids: HYPIC, sec. 4.2).

    Args:
        name: as it is written in requests and reports, in one way only: ``legolink:16``, never ``legolink``.
        seam_tokens: first tokens of each document that are computed again where it is linked.
        dummies: BOS tokens in front of each document while it is compiled, whose keys and values are dropped.
        primed: whether the primer is there instead.
        tail_tokens: last tokens of each document that are computed again, in models of linear layers; None: the
            method is for models without.
        trained: whether what stands there is an adapter's link tokens, given as keys and values.
    """

    name: str
    seam_tokens: int = 0
    dummies: int = 0
    primed: bool = False
    tail_tokens: int | None = None
    trained: bool = False

    @property
    def states(self) -> bool:
        """Whether it links what documents do to the states of linear layers, which depends on its seams."""
        return self.tail_tokens is not None

    @property
    def compiled(self) -> str:
        """How its documents are compiled; methods that agree share them."""
        if self.states or self.trained:
            return self.name
        if self.primed:
            return "primed"
        return f"dummies:{self.dummies}" if self.dummies else "alone"

    @property
    def full(self) -> bool:
        """Whether nothing is linked."""
        return self.name == FULL

    @classmethod
    def parse(cls, spec: str) -> LinkMethod:
        """Reads ``naive``, ``legolink:k``, ``primed:k``, ``legolink-0:dummies``, ``hypic:w``, ``hypic:w,primer=true``,
        ``linktokens``, ``full``.

        Raises:
            ValueError: for a method that the library doesn't have, one that vLLM can't link with, or wrong numbers.
        """
        name, given = methods.parse(spec)
        if name in (FULL, "naive") and not given:
            return cls(name)
        if name == TRAINED and not given:
            return cls(name, primed=True, trained=True)
        primer = given.pop("primer", False) if name == "hypic" else name == "primed"
        if name not in NUMBERS or given.keys() - {NUMBERS[name][0]} or not isinstance(primer, bool):
            raise ValueError(
                "vLLM links documents with primed:k, legolink:k, naive, legolink-0:dummies, hypic:w or "
                f"hypic:w,primer=true, an adapter's linktokens, or not at all (full), not with {spec!r}"
            )
        parameter, default, least = NUMBERS[name]
        count = given.get(parameter, default)
        if type(count) is not int or count < least:
            raise ValueError(f"method {spec!r}: a number of tokens, at least {least}, not {count!r}")
        if name == "legolink-0":
            return cls(f"{name}:{count}", dummies=count)
        if name == "primed":
            return cls(f"{name}:{count}" if count else name, seam_tokens=count, primed=True)
        if name == "hypic":
            written = f"{name}:{count},primer=true" if primer else f"{name}:{count}"
            return cls(written, seam_tokens=count, tail_tokens=count, primed=primer)
        return cls(f"{name}:{count}", seam_tokens=count)

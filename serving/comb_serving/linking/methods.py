"""The methods that vLLM can link with, as a server or a request names them: ``legolink:16``, ``hypic:8``, ``full``."""

from __future__ import annotations

from dataclasses import dataclass

from comb import methods

FULL = "full"  # nothing linked: plain vLLM computes the documents with the rest of the prompt
SEAM_TOKENS, DUMMIES, WIDTH = 16, 4, 8  # the papers' defaults, and the library's


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
    """

    name: str
    seam_tokens: int = 0
    dummies: int = 0
    primed: bool = False
    tail_tokens: int | None = None

    @property
    def states(self) -> bool:
        """Whether it links what documents do to the states of linear layers, which depends on its seams."""
        return self.tail_tokens is not None

    @property
    def compiled(self) -> str:
        """How its documents are compiled; methods that agree share them."""
        if self.states:
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
        """Reads ``naive``, ``legolink:k``, ``primed:k``, ``legolink-0:dummies``, ``hypic:w`` or ``full``.

        Raises:
            ValueError: for a method that the library doesn't have, one that vLLM can't link with, or wrong numbers.
        """
        name, given = methods.parse(spec)
        if name == FULL and not given:
            return cls(FULL)
        if name == "naive" and not given:
            return cls("naive")
        if name == "legolink" and not given.keys() - {"k"}:
            count = _count(spec, given.get("k", SEAM_TOKENS), least=0)
            return cls(f"legolink:{count}", seam_tokens=count)
        if name == "primed" and not given.keys() - {"k"}:
            count = _count(spec, given.get("k", 0), least=0)
            return cls(f"primed:{count}" if count else "primed", seam_tokens=count, primed=True)
        if name == "legolink-0" and not given.keys() - {"dummies"}:
            count = _count(spec, given.get("dummies", DUMMIES), least=1)
            return cls(f"legolink-0:{count}", dummies=count)
        if name == "hypic" and not given.keys() - {"w"}:
            count = _count(spec, given.get("w", WIDTH), least=0)
            return cls(f"hypic:{count}", seam_tokens=count, tail_tokens=count)
        raise ValueError(
            "vLLM links documents with primed:k, legolink:k, naive, legolink-0:dummies, hypic:w, or not at all (full), "
            f"not with {spec!r}"
        )


def _count(spec: str, value: object, *, least: int) -> int:
    if type(value) is not int or value < least:
        raise ValueError(f"method {spec!r}: a number of tokens, at least {least}, not {value!r}")
    return value

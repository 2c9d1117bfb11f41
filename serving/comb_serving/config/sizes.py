"""Sizes, shares and switches as people write them."""

from __future__ import annotations

import re

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SHARE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*%\s*")


def parse_bytes(text: str) -> int:
    """A size such as ``512MiB``, ``8GB`` or ``1073741824``. Raises ValueError for anything else."""
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?i?)b?\s*", text.lower())
    if found is None or found[2] not in _UNITS:
        raise ValueError(f"a size is a number of bytes, or like 512MiB or 8GB, not {text!r}")
    return int(float(found[1]) * _UNITS[found[2]])


def parse_share(text: str) -> float:
    """A share such as ``25%``, as a number above 0 and at most 1. Raises ValueError for anything else."""
    found = _SHARE.fullmatch(text)
    if found is None or not 0 < float(found[1]) <= 100:
        raise ValueError(f"a share is above 0% and at most 100%, not {text!r}")
    return float(found[1]) / 100


def parse_pool_size(text: str) -> str:
    """A size in bytes, or a share such as ``25%``, which only who makes the pool can work out. Raises ValueError."""
    share = _SHARE.fullmatch(text)
    if share is None:
        try:
            size = parse_bytes(text)
        except ValueError as error:
            raise ValueError(f"{error}; a pool's may also be a share of its memory, like 25%") from None
        if not size:
            raise ValueError(f"a pool of {text} has no room for a document: give it 1GiB, say, or a share like 25%")
        return str(size)
    if not 0 < float(share[1]) < 100:
        raise ValueError(f"a share of memory is between 0% and 100%, not {text!r}")
    return f"{share[1]}%"


def parse_switch(text: str) -> bool:
    """``on`` or ``off``. Raises ValueError for anything else."""
    if text not in ("on", "off"):
        raise ValueError(f"--encoder is on or off, not {text!r}")
    return text == "on"

"""Whose words an exception says: comb's own, meant for a person, or a library's."""

from __future__ import annotations

import dis
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

OWN = ("comb", "comb_training", "comb_serving")


def raised_by_us(error: BaseException) -> bool:
    """Whether a ``raise`` in comb's own code made it, with words for a person, and not a slip in a line of it."""
    if isinstance(error, AssertionError | NotImplementedError):
        return False
    *_, last = [None, *frames(error)]
    if last is None or not in_comb(last):
        return False
    return last.tb_frame.f_code.co_code[last.tb_lasti] == dis.opmap["RAISE_VARARGS"]


def in_comb(frame: TracebackType) -> bool:
    """Whether a frame is of comb's own code."""
    return str(frame.tb_frame.f_globals.get("__name__", "")).partition(".")[0] in OWN


def frames(error: BaseException) -> Iterator[TracebackType]:
    """Where an exception passed through, the innermost last."""
    frame = error.__traceback__
    while frame is not None:
        yield frame
        frame = frame.tb_next


class DamagedError(ValueError):
    """A file of a checkpoint isn't what it should be."""


@contextmanager
def named(place: str | Path, more: str = "") -> Iterator[None]:
    """Puts `place`, and `more`, in front of what comb's own errors say that don't name it yet."""
    try:
        yield
    except DamagedError:  # it has its file
        raise
    except (ValueError, OSError) as error:
        if not raised_by_us(error) or re.search(rf"(?<!\w){re.escape(str(place))}(?!\w)", str(error)):
            raise
        raise ValueError(f"{place}{more}: {error}") from error

"""What methods that move what a backbone caches check: the model they are made on, and the PICaches they link."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from comb.cache.picache import PICache
from comb.linking.positions import UnmovableError
from comb.methods.base import Method

P = TypeVar("P", bound=PICache)


def check_token_count(parameter: str, value: object, *, least: int = 0) -> None:
    """Raises ValueError if the value of a method's parameter is no number of tokens, or less than `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{parameter} is a number of tokens, an integer of at least {least}, got {value!r}")


def check_share(parameter: str, value: object) -> None:
    """Raises ValueError if the value of a method's parameter is no share of the document tokens, above 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
        raise ValueError(
            f"{parameter} is a share of the document tokens, 0 < {parameter.split(':')[1]} <= 1, got {value!r}"
        )


@contextmanager
def usable_with_model(method: Method) -> Iterator[None]:
    """Raises ValueError with a way out where the code inside finds that the model can't be linked."""
    try:
        yield
    except UnmovableError as reason:
        raise ValueError(
            f"method {method.name!r} can't be used with this model: {reason}; use method='full', or 'comb' with a "
            "trained encoder"
        ) from reason


def own_picache(method: Method, picache: PICache, kind: type[P], fingerprint: str, *, links: str, other: str) -> P:
    """`picache`, if it is the method's, whose `fingerprint` is given: to ask for it is a walk over the weights.

    Args:
        links: what a PICache of this `kind` holds, for the message.
        other: what may have compiled one with another fingerprint, for the message.

    Raises:
        ValueError: for a PICache of another method, model or dtype.
    """
    if not isinstance(picache, kind):
        raise ValueError(
            f"method {method.name!r} links {links}, got a {type(picache).__name__}: PICaches can't be linked by "
            "another method than the one that compiled them"
        )
    if picache.fingerprint != fingerprint:
        raise ValueError(
            f"this PICache was compiled by {other} (fingerprint {picache.fingerprint}, method {method.name!r} on this "
            f"model has {fingerprint}): compile the document again"
        )
    return picache

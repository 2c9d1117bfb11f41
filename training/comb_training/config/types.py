"""Types of a configuration's values: strict, but for what YAML writes in its own way."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, ConfigDict, Field, StrictInt

T = TypeVar("T")

KNOWN_KEYS = ConfigDict(extra="forbid")
"""For pydantic's `dataclass`: a key that is not known is an error."""


def _number(value: Any) -> Any:
    """YAML 1.1 reads 1e-3 (no dot) as text."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _items(value: Any) -> Any:
    """A list, or one value instead of it."""
    return value if value is None or isinstance(value, tuple) else tuple(value) if isinstance(value, list) else (value,)


Number = Annotated[float, Field(strict=True, allow_inf_nan=False), BeforeValidator(_number)]
Positive = Annotated[Number, Field(gt=0)]
NotNegative = Annotated[Number, Field(ge=0)]
Share = Annotated[Number, Field(ge=0, lt=1)]
AboveZero = Annotated[StrictInt, Field(gt=0)]
AtLeastZero = Annotated[StrictInt, Field(ge=0)]
AtLeastOne = Annotated[StrictInt, Field(ge=1)]
Items = Annotated[tuple[T, ...], BeforeValidator(_items)]
Options = dict[str, Any]

"""One small registry for methods, datasets and backbone names: lookups by name whose error lists what exists."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module, metadata
from typing import Generic, TypeVar

T = TypeVar("T")

PLUGIN_GROUP = "comb.plugins"


class Registry(Generic[T]):
    """Maps a name to an object of one kind; entries may be given lazily as ``"module:attribute"``.

    Args:
        kind: what the entries are, for error messages ("method", "dataset").
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, T | str] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator that adds the decorated object under `name`. Raises ValueError if the name is taken."""

        def add(entry: T) -> T:
            self._add(name, entry)
            return entry

        return add

    def register_lazy(self, name: str, target: str) -> None:
        """Adds ``"module:attribute"``, imported at the first lookup, so that optional dependencies stay optional."""
        self._add(name, target)

    def _add(self, name: str, entry: T | str) -> None:
        known = self._entries.get(name)
        # a lazy entry is replaced by the object it names when that module registers itself
        if known is not None and known != entry and not isinstance(known, str):
            raise ValueError(f"{self.kind} {name!r} is registered already; choose another name")
        self._entries[name] = entry

    def get(self, name: str) -> T:
        """The entry called `name`. Raises ValueError naming the known entries."""
        load_plugins()
        if name not in self._entries:
            known = ", ".join(self.names()) or "none"
            raise ValueError(f"unknown {self.kind} {name!r}; known: {known}")
        entry = self._entries[name]
        if isinstance(entry, str):
            module, _, attribute = entry.partition(":")
            entry = getattr(import_module(module), attribute)
            self._entries[name] = entry
        return entry

    def names(self) -> list[str]:
        """All names, sorted."""
        load_plugins()
        return sorted(self._entries)

    def __contains__(self, name: str) -> bool:
        load_plugins()
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())


_plugins_loaded = False


def load_plugins() -> None:
    """Runs the ``comb.plugins`` entry points once (training and serving add their datasets and names there)."""
    global _plugins_loaded
    if _plugins_loaded:
        return
    _plugins_loaded = True
    for entry_point in metadata.entry_points(group=PLUGIN_GROUP):
        entry_point.load()()

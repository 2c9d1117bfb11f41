"""Registries: a method, a dataset, a benchmark is a file with a decorator, found by walking its folder.

A registry knows the packages whose modules register its entries, and imports those at the first lookup. So a new entry
is a new file, nothing else has to name it, and nothing is imported before somebody looks.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module, metadata
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pkgutil import iter_modules
from types import ModuleType
from typing import Generic, TypeVar

T = TypeVar("T")

PLUGIN_GROUP = "comb.plugins"
"""Entry points of other distributions: functions without arguments that register, or call `Registry.look_in`."""


class Registry(Generic[T]):
    """Maps a name to an object of one kind.

    Args:
        kind: what the entries are, for error messages ("method", "dataset").
        packages: where they are found (`look_in`).
    """

    def __init__(self, kind: str, *packages: str) -> None:
        self.kind = kind
        self._entries: dict[str, T] = {}
        self._packages: dict[str, bool] = dict.fromkeys(packages, False)  # which were walked
        self._failed: dict[str, ImportError] = {}
        self._lock = threading.RLock()

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator that adds the decorated object under `name`. Raises ValueError if the name is taken."""

        def add(entry: T) -> T:
            if self._entries.setdefault(name, entry) != entry:
                raise ValueError(f"{self.kind} {name!r} is registered already; choose another name")
            return entry

        return add

    def look_in(self, package: str) -> None:
        """Has the modules of a package (or one module) imported at the next lookup; again, it changes nothing."""
        self._packages.setdefault(package, False)

    def get(self, name: str) -> T:
        """The entry called `name`. Raises ValueError naming the known entries, and modules that can't be imported."""
        self._walk()
        if name not in self._entries:
            known = ", ".join(self.names()) or "none"
            failed = "".join(f"; {module} can't be imported: {error}" for module, error in self._failed.items())
            raise ValueError(f"unknown {self.kind} {name!r}; known: {known}{failed}")
        return self._entries[name]

    def names(self) -> list[str]:
        """All names, sorted."""
        self._walk()
        return sorted(self._entries)

    def __contains__(self, name: str) -> bool:
        self._walk()
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def _walk(self) -> None:
        """Imports what may hold entries. A module whose optional dependency is missing is left out until it is asked
        for by a name that nobody else has."""
        load_plugins()
        with self._lock:  # another thread may be in the middle of it
            for package in [package for package, walked in self._packages.items() if not walked]:
                self._packages[package] = True  # first: a module may look into the registry that it is found by
                folder = getattr(import_module(package), "__path__", ())
                for module in (f"{package}.{found.name}" for found in iter_modules(folder)):
                    try:
                        import_module(module)
                    except ImportError as error:
                        if (error.name or "").partition(".")[0] == module.partition(".")[0]:
                            raise  # not an optional dependency, but a mistake in the module
                        self._failed[module] = error


_plugins_loaded = False


def load_plugins() -> None:
    """Runs the ``comb.plugins`` entry points once (training names the packages of its datasets and backbones there)."""
    global _plugins_loaded
    if _plugins_loaded:
        return
    _plugins_loaded = True
    for entry_point in metadata.entry_points(group=PLUGIN_GROUP):
        entry_point.load()()


def when_imported(name: str, call: Callable[[ModuleType], None]) -> None:
    """Calls with the module `name` at the end of its import; at once where that is done.

    For what is to be said to a package that takes long to import, and that may never be.
    """
    if name in sys.modules:
        call(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Watcher(name, call))


class _Watcher(MetaPathFinder):
    def __init__(self, name: str, call: Callable[[ModuleType], None]) -> None:
        self._name, self._call = name, call

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        try:
            spec = find_spec(fullname)  # as the other finders find it
        finally:
            sys.meta_path.insert(0, self)  # who only looks for it doesn't import it
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_call(module: ModuleType) -> None:
                execute(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                self._call(module)

            spec.loader.exec_module = execute_and_call  # type: ignore[method-assign]
        return spec

"""Entries are files: found when somebody looks, and told apart from files that can't be imported."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from comb.registry import Registry

ENTRY = "from comb_test_entries import registry\n\nregistry.register({name!r})({value})\n"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "comb_test_entries"
    folder.mkdir()
    (folder / "__init__.py").write_text(
        "from comb.registry import Registry\n\nregistry = Registry('thing', __name__)\n"
    )
    (folder / "one.py").write_text(ENTRY.format(name="one", value=1))
    monkeypatch.syspath_prepend(tmp_path)
    yield folder
    for name in [name for name in sys.modules if name.startswith("comb_test_entries")]:
        del sys.modules[name]


def registry() -> Registry[int]:
    import comb_test_entries  # type: ignore[import-not-found]

    found: Registry[int] = comb_test_entries.registry
    return found


def test_a_file_is_an_entry_and_is_imported_at_the_first_lookup(package: Path) -> None:
    things = registry()
    assert "comb_test_entries.one" not in sys.modules
    assert (things.get("one"), list(things), "two" in things) == (1, ["one"], False)
    things.look_in("comb_test_entries")
    assert things.names() == ["one"]
    with pytest.raises(ValueError, match="thing 'one' is registered already"):
        things.register("one")(2)


def test_a_missing_optional_dependency_is_said_at_lookup(package: Path) -> None:
    (package / "heavy.py").write_text("import no_such_package\n" + ENTRY.format(name="heavy", value=3))
    things = registry()
    assert things.names() == ["one"]
    with pytest.raises(ValueError, match=r"unknown thing 'heavy'; known: one; .*heavy can't be .*no_such_package"):
        things.get("heavy")


def test_a_mistake_in_a_file_is_raised(package: Path) -> None:
    (package / "wrong.py").write_text("from comb_test_entries import nothing\n")
    with pytest.raises(ImportError, match="nothing"):
        registry().names()

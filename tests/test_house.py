"""The house stays one: rooms on floors, no circles, one word for one thing, nothing mocked in the product."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from comb import CombForCausalLM, LinkTokensForCausalLM

ROOT = Path(__file__).parents[1]
PRODUCT = ("comb", "training/comb_training", "serving/comb_serving")


def product_files() -> list[Path]:
    return [path for folder in PRODUCT for path in sorted((ROOT / folder).rglob("*.py"))]


def classes(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef):
            yield node.name.lstrip("_")


def test_rooms_stand_on_their_floors_and_nothing_goes_in_circles() -> None:
    """The contracts stand in pyproject.toml."""
    pytest.importorskip("importlinter")
    code = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    result = subprocess.run(
        [sys.executable, "-c", code, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "5 kept, 0 broken" in result.stdout


def test_the_root_of_the_library_holds_rooms_not_modules() -> None:
    assert len([path for path in (ROOT / "comb").iterdir() if path.is_file()]) <= 6


def test_one_word_is_one_class() -> None:
    found = defaultdict(list)
    for path in product_files():
        for name in classes(path):
            found[name].append(str(path.relative_to(ROOT)))
    assert {name: places for name, places in found.items() if len(places) > 1} == {}


def test_the_product_mocks_nothing() -> None:
    assert [str(path) for path in product_files() if "mock" in path.read_text(encoding="utf-8")] == []


def test_every_room_has_a_door() -> None:
    """A room's ``__init__.py`` says what the room is for."""
    rooms = [path for path in product_files() if path.name == "__init__.py"]
    assert [str(path) for path in rooms if not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))] == []


@pytest.mark.parametrize(
    ("adapter", "options", "pinned"),
    [
        (CombForCausalLM, {"num_encoder_layers": 2}, "9054642167e6e843"),
        (LinkTokensForCausalLM, {"num_link_tokens": 2}, "06551782a373906d+523b7f6a5d9336c1"),
    ],
    ids=["encoder", "link tokens"],
)
@torch.no_grad()
def test_what_adapters_have_compiled_stays_theirs(adapter: type, options: dict[str, int], pinned: str) -> None:
    """Another fingerprint is another key of every stored PICache: to change it is a decision, so it is changed here."""
    model = adapter.from_backbone("nano", **options)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.copy_(torch.arange(parameter.numel()).remainder(7).sub(3).div(16).reshape(parameter.shape))
    assert model.fingerprint == pinned


PAGES = [*sorted((ROOT / "docs").glob("*.md")), *sorted(ROOT.glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_names_is_there(page: Path) -> None:
    """Files in backquotes, from the root, a package or the room they are shown in, and relative links."""
    text = page.read_text(encoding="utf-8")
    packages = [ROOT, *(ROOT / folder for folder in (*PRODUCT, "training", "serving", "serving/deploy"))]
    named = re.findall(r"`([\w.-]+(?:/[\w.-]+)+\.(?:py|yaml|json|jinja))`", text)
    missing = [name for name in named if "mine" not in name and not any((place / name).exists() for place in packages)]
    links = re.findall(r"\]\((?!https?:)([^)#]+)(?:#[\w-]+)?\)", text)
    missing += [link for link in links if not (page.parent / link).exists()]
    assert missing == []

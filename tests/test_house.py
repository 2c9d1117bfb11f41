"""The house stays one: rooms on floors, no circles, one word for one thing, nothing mocked in the product."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from comb import CombForCausalLM, LinkTokensForCausalLM, methods
from comb.bench import benchmarks

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


def test_no_file_name_stands_more_than_twice() -> None:
    """It says what is in the file: a third ``worker.py`` says nothing."""
    names = Counter(path.name for path in product_files() if not path.name.startswith("__"))
    assert {name: count for name, count in names.items() if count > 2} == {}


class Classes(ast.NodeVisitor):
    """The classes of the product, their subclasses, and the names that are used otherwise than as base or type."""

    def __init__(self) -> None:
        self.children: defaultdict[str, set[str]] = defaultdict(set)
        self.defined, self.used = set[str](), set[str]()

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.defined.add(node.name)
        for base in node.bases:
            self.children[ast.unparse(base).partition("[")[0]].add(node.name)
        if any("register" in ast.unparse(decorator) for decorator in node.decorator_list):
            self.used.add(node.name)  # made by its name
        for part in node.body:
            self.visit(part)

    def visit_Name(self, node: ast.Name) -> None:
        self.used.add(node.id)

    def visit_arg(self, node: ast.arg) -> None:
        """A type is no use."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        for part in node.body:
            self.visit(part)


def test_few_classes_are_there_for_one_other_alone() -> None:
    """With one subclass, and used by nobody else: an interface for one, or a class in two parts."""
    found = Classes()
    for path in product_files():
        found.visit(ast.parse(path.read_text(encoding="utf-8")))
    alone = {name for name in found.defined - found.used if len(found.children[name]) == 1}
    assert len(alone) <= 4, alone


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


def test_no_test_hides() -> None:
    """A test function outside of a file of tests is run by no name, or not at all."""
    hidden = [
        f"{path.relative_to(ROOT)}: {node.name}"
        for path in (ROOT / "tests").rglob("*.py") if not path.name.startswith("test_")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    ]  # fmt: skip
    assert hidden == []


def test_there_are_few_benchmarks() -> None:
    benchmarks.look_in("comb_serving.bench.serve")
    assert len(benchmarks.names()) <= 8, benchmarks.names()


def test_there_is_one_list_of_methods() -> None:
    """The registry. What names more than a comparison's few is a second one, which a new method isn't on."""
    known, lists = set(methods.names()), []
    for path in product_files():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            items: list[Any] = []
            if isinstance(node, ast.List | ast.Tuple | ast.Set | ast.Dict):
                parts = node.keys if isinstance(node, ast.Dict) else node.elts
                items = [part.value for part in parts if isinstance(part, ast.Constant)]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value:
                items = node.value.split(",")  # as the command line takes them
            named = {item.partition(":")[0] for item in items if isinstance(item, str)} & known
            if len(named) > 4:
                lists.append(f"{path.relative_to(ROOT)}:{node.lineno}: {sorted(named)}")
    assert lists == []


SET_NOWHERE = {
    "data.max_prompt_tokens": "of long documents under a KL loss, where memory ends first",
    "data.seed": "a result is worth something if another seed gives it too",
    "train.bf16": "of a GPU without DeepSpeed, whose configurations have it",
    "train.kl_top_k": "the loss of docs/linktokens.md is defined with it",
    "train.max_grad_norm": "tests compare gradients as they are; the large recipes spell it out",
    "train.save_total_limit": "of a disk that is too small, or a run that must keep all",
    "train.seed": "as data.seed",
}
"""Keys that may keep their default wherever we train, and why they are keys all the same."""


def test_every_key_of_a_training_run_is_set_somewhere() -> None:
    """To something else than its default: in a configuration, a page, an example, a script, a command or an adapter's
    training.json. A key that isn't is a constant.
    """
    config = pytest.importorskip("comb_training.config")
    defaults: dict[str, dict[str, Any]] = config.Config().to_dict()
    given: list[tuple[str, str, Any]] = []
    for path in (ROOT / "configs").glob("*.yaml"):
        given += flat(yaml.safe_load(path.read_text(encoding="utf-8")))
    for path in (ROOT / "training" / "adapters").glob("*/training.json"):
        given += flat(json.loads(path.read_text(encoding="utf-8"))["config"])
    key = rf"\b({'|'.join(defaults)})\.(\w+)"
    for files in (
        "docs/*.md",
        "*.md",
        "examples/*.py",
        "scripts/*",
        "configs/*.yaml",
        "training/comb_training/cli/*.py",
    ):
        for text in (path.read_text(encoding="utf-8") for path in ROOT.glob(files) if path.is_file()):
            # on a command line, and `section.key: value` in a page
            given += re.findall(rf"{key}=([\w./:{{\[-][^\s`'\"]*)", text) + re.findall(rf"`{key}: ([^`]+)`", text)
    unset = {f"{section}.{name}" for section, keys in defaults.items() for name in keys}
    for section, name, value in given:
        default = defaults.get(section, {}).get(name)
        if value != default and value not in (str(default), json.dumps(default)):
            unset.discard(f"{section}.{name}")
    assert unset == SET_NOWHERE.keys()


def flat(content: dict[str, Any]) -> list[tuple[str, str, Any]]:
    """A configuration's values with their sections and keys."""
    return [(section, key, value) for section, keys in content.items() if isinstance(keys, dict)
            for key, value in keys.items()]  # fmt: skip


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

"""The library stays light; entries of registries are files: found when somebody looks, told apart from broken ones."""

from __future__ import annotations

import ast
import builtins
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

import comb
from comb import CombForCausalLM
from comb.registry import Registry

ROOT = Path(__file__).parents[2]
HEAVY = ("vllm", "deepspeed", "datasets", "triton", "peft", "matplotlib", "wandb", "ray")


def test_the_library_pulls_in_nothing_heavy() -> None:
    # torch imports triton wherever it is installed: here it can't, and comb must do without
    names = f"print([n for n in {HEAVY} if sys.modules.get(n)])"
    code = f"import sys; sys.modules['triton'] = None; from comb import *; {names}"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip().endswith("[]"), result.stdout


def test_the_library_wants_what_it_declares() -> None:
    """At the top of its files: elsewhere a package may be an extra's. Who asks for `lm_eval` and triton's has them."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    known = {re.split(r"[<>=]", each)[0] for each in declared} - {"pyyaml"} | {"yaml", "lm_eval", "triton", "comb"}
    for path in (ROOT / "comb").rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert {name.partition(".")[0] for name in names} - sys.stdlib_module_names <= known, path


@cache
def third_party(code: str, *arguments: str) -> set[str]:
    """The installed packages that a process has imported at its end."""
    whole = (
        f"import sys\ntry:\n    {code}\nexcept SystemExit:\n    pass\n"
        "names = {name.partition('.')[0] for name in sys.modules} - sys.stdlib_module_names\n"
        "print('loaded', *(name for name in names if name[0] != '_'))"
    )
    result = subprocess.run([sys.executable, "-c", whole, *arguments], capture_output=True, text=True, check=True)
    return {*result.stdout.splitlines()[-1].split()[1:]} - OURS


OURS = {"comb", "comb_training", "comb_serving"}
YAML = {"yaml", "cython_runtime"}
SPEAKING = {"typer", "tqdm", "annotated_doc", "rich", "pygments", "markdown_it", "mdurl", "shellingham", "attr", *YAML}
CHECKING = {"pydantic", "pydantic_core", "annotated_types", "typing_extensions", "typing_inspection"}


def test_importing_comb_imports_nothing_else() -> None:
    assert third_party("import comb; comb.__version__") == third_party("pass")
    everything = "import comb; assert comb.methods.names and 'PICEngine' in dir(comb); from comb import *; PICEngine"
    assert "torch" in third_party(everything)  # and what is asked for is there


@pytest.mark.parametrize(
    "arguments",
    [
        "--help", "--version", "ask --help", "train --help", "eval --help", "serve --help", "push --help",
        "aks", "ask --hlp", "ask nano q --encoder maybe", "ask nano q --doc nowhere.txt", "ask nano q --workers none",
        "train nowhere.yaml", "train configs/nano.yaml train.stpes=3", "answers configs/nano.yaml --vllm nothing",
        "eval nowhere", "eval nano data=a.jsonl data.nmu=3", "serve nano --encoder x",
        "bench --help", "bench mehtods", "bench methods --qestions 3", "bench serve --help",
        "bench paper --questions x",
    ],
)  # fmt: skip
def test_help_and_mistaken_options_wait_for_no_model_library(arguments: str) -> None:
    pytest.importorskip("comb_training")
    loaded = third_party("from comb.cli.main import main; main()", *arguments.split())
    assert loaded - third_party("pass") - SPEAKING - CHECKING == set()


@pytest.mark.parametrize("imports", ["import comb, transformers", "from transformers import AutoConfig; import comb"])
def test_auto_classes_know_adapters_once_comb_is_imported(model: CombForCausalLM, tmp_path: Path, imports: str) -> None:
    model.backbone.save_pretrained(tmp_path / "plain")
    CombForCausalLM.from_backbone(str(tmp_path / "plain"), num_encoder_layers=2).save_pretrained(tmp_path / "adapter")
    code = (
        f"{imports}; import sys; loaded = 'comb.model.modeling' in sys.modules; from transformers import AutoConfig, "
        "AutoModelForCausalLM as Auto; place = sys.argv[1]; "
        "print(loaded, type(Auto.from_pretrained(place)).__name__, type(AutoConfig.from_pretrained(place)).__name__)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "adapter")], capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == ["False", "CombForCausalLM", "CombConfig"]


def test_no_pickle_anywhere() -> None:
    pickles = re.compile(r"^\s*(import|from) (pickle|dill|cloudpickle|marshal)\b", re.MULTILINE)
    files = [path for folder in ("comb", "serving", "training") for path in (ROOT / folder).rglob("*.py")]
    assert pickles.search("if x:\n    import pickle\n")
    assert [path for path in files if pickles.search(path.read_text(encoding="utf-8"))] == []


def test_errors_that_the_engine_names_can_be_imported_from_comb() -> None:
    methods = (getattr(comb.PICEngine, name).__doc__ or "" for name in vars(comb.PICEngine) if name[0] != "_")
    named = {name for text in methods for name in re.findall(r"\w+Error", text)}
    assert "UnknownDocumentError" in named
    assert not [name for name in named if not hasattr(comb, name) and not hasattr(builtins, name)]


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

"""Imports go one way, and the library stays light."""

from __future__ import annotations

import ast
import builtins
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import comb
from comb import CombForCausalLM

ROOT = Path(__file__).parents[2]
HEAVY = ("vllm", "deepspeed", "datasets", "triton", "peft", "matplotlib", "wandb", "ray")


def imported(folder: Path) -> dict[str, set[str]]:
    """Every package that a file below `folder` imports, anywhere in it, and by which files."""
    found: dict[str, set[str]] = {}
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [node.module]
            for name in names:
                found.setdefault(name.split(".")[0], set()).add(str(path.relative_to(ROOT)))
    return found


@pytest.mark.parametrize(
    ("folder", "forbidden"),
    [
        ("comb", ("comb_training", "comb_serving")),
        ("training/comb_training", ("comb_serving",)),
        ("serving/comb_serving", ("comb_training",)),
    ],
)
def test_imports_go_one_way(folder: str, forbidden: tuple[str, ...]) -> None:
    found = imported(ROOT / folder)
    assert found or folder.startswith("serving")
    assert {name: found[name] for name in forbidden if name in found} == {}


def test_the_library_pulls_in_nothing_heavy() -> None:
    # torch imports triton wherever it is installed: here it can't, and comb must do without
    names = f"print([n for n in {HEAVY} if sys.modules.get(n)])"
    code = f"import sys; sys.modules['triton'] = None; from comb import *; {names}"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip().endswith("[]"), result.stdout


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
        "aks", "ask --hlp", "ask nano q --encoder maybe", "ask nano q --doc nowhere.txt", "ask nano q --repeat none",
        "train nowhere.yaml", "train configs/nano.yaml train.stpes=3", "answers configs/nano.yaml --vllm nothing",
        "eval nowhere", "eval nano data=a.jsonl data.nmu=3", "eval nano --dataset a data=b", "serve nano --encoder x",
        "bench --help", "bench mehtods", "bench methods --qestions 3", "bench serve --help",
        "bench paper --questions x",
    ],
)  # fmt: skip
def test_help_and_mistaken_options_wait_for_no_model_library(arguments: str) -> None:
    pytest.importorskip("comb_training")
    loaded = third_party("from comb.cli.main import main; main()", *arguments.split())
    assert loaded - third_party("pass") - SPEAKING - CHECKING == set()


BEHIND_TRANSFORMERS = "from transformers import AutoConfig; import comb"


@pytest.mark.parametrize("imports", ["import comb, transformers", BEHIND_TRANSFORMERS])
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
    for folder in ("comb", "serving", "training"):
        found = imported(ROOT / folder)
        assert not {"pickle", "dill", "cloudpickle", "marshal"} & found.keys()


def test_errors_that_the_engine_names_can_be_imported_from_comb() -> None:
    methods = (getattr(comb.PICEngine, name).__doc__ or "" for name in vars(comb.PICEngine) if name[0] != "_")
    named = {name for text in methods for name in re.findall(r"\w+Error", text)}
    assert "UnknownDocumentError" in named
    assert not [name for name in named if not hasattr(comb, name) and not hasattr(builtins, name)]

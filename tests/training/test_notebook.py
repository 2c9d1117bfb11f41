"""The notebook of examples/ runs from its first cell to its last, and is committed without outputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")
NotebookClient = pytest.importorskip("nbclient").NotebookClient
pytest.importorskip("ipykernel")

NOTEBOOK = Path(__file__).parents[2] / "examples" / "documents.ipynb"


def read() -> Any:
    return nbformat.read(NOTEBOOK, as_version=4)


def test_it_is_committed_without_outputs() -> None:
    nbformat.validate(read())
    code = [cell for cell in read().cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == [None] * len(code)
    assert not any(cell.outputs for cell in code)


@pytest.mark.slow
def test_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shortened by what its own cells read; every result is shown."""
    monkeypatch.setenv("COMB_NOTEBOOK_SECONDS", "3")
    monkeypatch.setenv("COMB_NOTEBOOK_QUESTIONS", "4")
    notebook = read()
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    text = "".join(output.get("text", "") + output.get("data", {}).get("text/plain", "") for output in outputs)
    assert text.count(": first token") == 5  # two orders; cold, cached, and without the encoder
    for method in ("full", "prefix", "naive", "legolink:16", "cacheblend:0.15", "comb", "none"):
        assert method in text
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 3
    assert (tmp_path / "out" / "notebook" / "adapter" / "model.safetensors").is_file()

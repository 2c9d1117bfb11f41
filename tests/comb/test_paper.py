"""`comb bench paper`: protocols hold together, their figures never become ours, and each runs."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import yaml
from typer.testing import CliRunner

from comb.bench import paper as module
from comb.bench.paper import BENCHMARKS, FORMS, FORMULAS, PAPERS, PaperRow, measured, tables
from comb.cli import main as cli
from comb.evaluation.setting import read_sets
from comb.evaluation.table import Timing

runner = CliRunner()
ROOT = Path(__file__).parents[2]


def protocol(name: str) -> Any:
    return yaml.safe_load(PAPERS[name].read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", PAPERS)
def test_a_protocol_names_what_there_is(name: str) -> None:
    content = protocol(name)
    claims = [PaperRow(**row) for row in content["rows"]]
    assert {claim.run for claim in claims} - {""} == set(content["runs"])
    for claim in claims:
        assert bool(claim.refused) != bool(claim.run)
        assert claim.form in FORMS
        texts = [one.what for one in claim.expanded(sets=False)]
        assert not any("{" in text for text in texts)
        assert len(texts) == len(set(texts))
        if isinstance(claim.paper, dict):  # a figure that no row shows would be lost
            for sets in (True, False):
                assert {one.paper for one in claim.expanded(sets)} - {"plotted"} == set(claim.paper.values())
    known = set(read_sets(ROOT / "configs" / "longbench.yaml"))
    for run in content["runs"].values():
        if "formula" in run:
            assert run["formula"] in FORMULAS
            continue
        kind = get_type_hints(BENCHMARKS[run["benchmark"]])["options"]
        assert set(run["options"]) <= {each.name for each in fields(kind)}
        assert set(run.get("sets", ())) <= known


@pytest.mark.parametrize("name", PAPERS)
def test_without_measurements_our_column_is_empty(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "_rows", lambda name, options: [])
    monkeypatch.setattr(module, "FORMULAS", dict.fromkeys(FORMULAS, list))
    assert runner.invoke(cli.app, ["bench", "paper", name, "--out", str(tmp_path / "p.json")]).exit_code == 0
    rows = json.loads((tmp_path / "p.json").read_text(encoding="utf-8"))["results"]
    assert any(row["paper"] != "plotted" for row in rows)
    assert all(row["ours"] is None and row["text"] == "-" and row["refused"] for row in rows)
    (table,) = tables(rows)
    assert {line[3] for line in table.lines()} == {"refused"}
    assert all(any(row["refused"] in note for note in table.notes()) for row in rows)


def test_ours_comes_from_rows_alone() -> None:
    rows = [
        {"method": "full", "set": "a", "f1": 0.5, "rouge_l": 0.1, "ttft": Timing(2.0, 2.0, 2.0, 3), "refused": ""},
        {"method": "x", "set": "a", "f1": 0.4, "rouge_l": 0.3, "ttft": Timing(0.5, 0.5, 0.5, 3), "layers": [{"e": 7}],
         "refused": ""},
        {"method": "x", "set": "samsum", "f1": 0.0, "rouge_l": 0.3, "refused": ""},
        {"method": "y", "set": "a", "refused": "doesn't fit"},
    ]  # fmt: skip

    def ours(**claim: Any) -> Any:
        return measured(PaperRow("Fig. 1", "", paper="4242", run="r", **claim), rows)["text"]

    x = {"method": "x", "set": "a"}
    assert ours(pick=x, over={"method": "full"}, form="kept") == "80.0"
    assert ours(pick=x, over={"method": "full"}, form="points") == "-10.0"
    assert ours(pick=x, over={"method": "full"}, value="ttft", form="times") == "4.00"
    assert ours(pick=x, over={"method": "full"}, value="ttft", form="fold") == "0.25"
    assert ours(pick=x, over={"method": "full"}, value="ttft", form="saved") == "75.0"
    assert ours(pick=x, value="f1", by="ttft", form="kept") == "80.0"
    assert ours(pick=x, value="layers.-1.e") == "7.000"
    assert ours(pick={"method": "x", "set": "samsum"}) == "0.300"  # ROUGE-L there, F1 elsewhere
    for pick, why in (({"method": "y"}, "doesn't fit"), ({"set": "b"}, "no set b"), ({"method": "z"}, "no row")):
        with pytest.raises(ValueError, match=why):
            ours(pick=pick)
    with pytest.raises(ValueError, match="no layers"):
        ours(pick={"method": "full"}, value="layers.0.e")
    with pytest.raises(ValueError, match="is 0"):
        ours(pick=x, over={"method": "x", "set": "samsum"}, value="f1", form="kept")


@pytest.mark.parametrize(
    ("name", "only", "least"),
    [("comb", "Fig. 9", 0), ("epic", "arXiv Fig. 6", 1), ("hypic", "Table", 20), ("mac", "Table 7", 4)],
)
def test_each_paper_runs(name: str, only: str, least: int, tmp_path: Path) -> None:
    out = tmp_path / "p.json"
    arguments = ["bench", "paper", name, "--only", only, "--questions", "1", "--out", str(out)]
    result = runner.invoke(cli.app, arguments, catch_exceptions=False)
    rows = json.loads(out.read_text(encoding="utf-8"))["results"]
    assert sum(row["ours"] is not None for row in rows) >= least
    if name == "comb":  # nano has no encoder
        assert "encoder" in rows[0]["refused"]
    assert "Theirs:" in result.stdout


def test_what_is_no_paper_or_no_set_is_said(tmp_path: Path) -> None:
    assert "comb, epic, hypic, mac" in str(runner.invoke(cli.app, ["bench", "paper", "nothing"]).exception)
    assert "no row" in str(runner.invoke(cli.app, ["bench", "paper", "mac", "--only", "Fig. 99"]).exception)
    out = tmp_path / "p.json"
    config = ["--config", str(ROOT / "configs" / "longbench.yaml"), "--data", str(tmp_path)]
    runner.invoke(cli.app, ["bench", "paper", "epic", "--only", "arXiv Fig. 6", "--out", str(out), *config])
    reasons = {row["refused"] for row in json.loads(out.read_text(encoding="utf-8"))["results"]}
    assert all("longbench" in reason for reason in reasons)


def test_table_2_is_the_papers() -> None:
    """What our classes compute from the paper's decays is what it printed."""
    printed = next(row["paper"] for row in protocol("hypic")["rows"] if row["at"] == "Table 2")
    found = {f"{row['bits']} {row['tokens']}": f"{row['error']:.3f}" for row in FORMULAS["addition_error"]()}
    assert found == printed

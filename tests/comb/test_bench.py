"""`comb bench`: its pieces by hand, every command once on tiny models, and the papers' protocols."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
import yaml
from typer.testing import CliRunner

from comb import PromptBuilder
from comb.bench import benchmarks
from comb.bench.context_length import measure_context_length
from comb.bench.context_length import tables as length_tables
from comb.bench.drift import measure_drift, without_full_layers
from comb.bench.drift import tables as drift_tables
from comb.bench.harness import BenchmarkReport, OutOptions, benchmark
from comb.bench.options import integers, numbers, split_methods
from comb.bench.paper import BENCHMARKS, FORMS, PAPERS, PaperRow, measured, tables
from comb.cli import main as cli
from comb.evaluation.random_prompts import RandomPrompt, random_model
from comb.evaluation.setting import Setting, read_sets
from comb.evaluation.table import Column, TextTable, Timing
from tests.helpers.byte_text import byte_tokenizer
from tests.helpers.facts import facts, strong_llama, write_facts
from tests.helpers.hybrids import text_model


def run(*arguments: object) -> Any:
    return CliRunner().invoke(cli.app, ["bench", *(str(argument) for argument in arguments)], env={"COLUMNS": "100"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_facts(tmp_path_factory.mktemp("bench"), strong_llama())


def written(path: Path, *arguments: object) -> Any:
    """The JSON of a command, which also writes a table and a plot."""
    result = run(*arguments, "--out", path)
    assert result.exit_code == 0, result.output
    assert path.with_suffix(".md").read_text().count("|") > 20
    pytest.importorskip("matplotlib", reason="plots need matplotlib (the demo extra)")
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    return json.loads(path.read_text())


# --- lists on the command line --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "specs"),
    [
        (" full , comb ,", ["full", "comb"]),
        ("full, legolink:2,legolink:16,none", ["full", "legolink:2", "legolink:16", "none"]),
        ("cacheblend:0.15,layers=1,quantize=int8,full", ["cacheblend:0.15,layers=1,quantize=int8", "full"]),
        ("naive,rotate=false,full", ["naive:rotate=false", "full"]),
        ("naive:rotate=false,quantize=fp8", ["naive:rotate=false,quantize=fp8"]),
    ],
)
def test_methods_are_split_at_commas_between_methods(text: str, specs: list[str]) -> None:
    assert split_methods(text) == specs


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "names no method"),
        ("full,fool", "unknown method 'fool'"),
        ("full,full", "full twice"),
        ("k=2,full", "unknown method 'k=2'"),
        ("full:2", "no unnamed parameter"),
    ],
)
def test_bad_method_lists(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        split_methods(text)


def test_numbers_are_sorted_and_checked() -> None:
    assert integers("4, 2,2", "--lengths") == [2, 4]
    assert numbers("100,0,12.5", "--depths", least=0) == [0.0, 12.5, 100.0]
    for text, message in (("a,1", "numbers from 1"), ("0", "numbers from 1"), ("1.5", "whole"), ("", "got ''")):
        with pytest.raises(ValueError, match=message):
            integers(text, "--lengths")
    with pytest.raises(ValueError, match=r"from 2 to 1e\+12"):
        numbers("1.9", "--depths", least=2)
    with pytest.raises(ValueError, match="--rates"):
        numbers("nan", "--rates", least=0)


# --- the harness ----------------------------------------------------------------------------------------------------


def test_a_run_that_is_broken_off_keeps_what_it_has(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "b.json"
    seen: list[Any] = []

    @benchmark("broken", lambda rows: [TextTable("T", [Column("name", "name", names=True), Column("n", "n")], rows)])
    def broken(options: OutOptions, report: BenchmarkReport) -> None:
        report.add({"name": "a", "n": 1})
        seen.append(json.loads(out.read_text())["results"])
        report.add({"name": "b", "refused": "too long"})
        raise KeyboardInterrupt

    try:
        with pytest.raises(KeyboardInterrupt):
            benchmarks.get("broken")(out=out)
    finally:
        del benchmarks._entries["broken"]
    assert seen == [[{"name": "a", "n": 1}]]  # after every row
    content = json.loads(out.read_text())
    assert (content["benchmark"], len(content["results"])) == ("broken", 2)
    assert "| b | refused |" in out.with_suffix(".md").read_text()
    assert "b refused: too long" in out.with_suffix(".md").read_text()


# --- comb bench context-length --------------------------------------------------------------------------------------


def test_lengths_are_compared_within_a_repeat() -> None:
    model = random_model(layers=2, hidden=32, heads=2, kv_heads=1, vocab=64, positions=80)
    specs = ["full", "prefix", "naive", "legolink:4", "comb"]
    found = list(measure_context_length(model, specs, [32, 64, 128], (16, 4), repeats=2, seed=0))
    assert [(row["tokens"], row["method"]) for row in found] == [(n, s) for n in (32, 64, 128) for s in specs]
    by_name = {(row["tokens"], row["method"]): row for row in found}
    full = by_name[64, "full"]
    assert full["speedup"] == Timing(1.0, 1.0, 1.0, 2)
    assert (full["computed_tokens"], full["recomputed_tokens"], full["cache_bytes"]) == (68, 64, 0)
    lego = by_name[64, "legolink:4"]
    assert lego["speedup"] is not None
    assert (lego["computed_tokens"], lego["recomputed_tokens"]) == (3 * 4 + 4, 3 * 4)
    assert lego["cache_bytes"] == 64 * (2 * 2 * 16 * 4 + 8)  # keys and values of two layers, and token ids
    assert {"assemble", "recompute", "first token"} <= set(lego["stages_s"])
    for exact in ("naive", "prefix"):
        assert (by_name[64, exact]["computed_tokens"], by_name[64, exact]["recomputed_tokens"]) == (4, 0)
    assert by_name[64, "prefix"]["cache_bytes"] > 0
    assert "plain backbone" in by_name[32, "comb"]["refused"]
    assert "80 positions" in by_name[128, "naive"]["refused"]  # and the shorter ones went on
    tables = length_tables(found)
    assert len(tables) == 2
    assert all(len(line) == len(table.columns) for table in tables for line in table.lines())


def test_no_ratio_is_printed_over_a_failing_check(monkeypatch: pytest.MonkeyPatch) -> None:
    from comb.methods.decode_state import DecodeState

    model = random_model(layers=2, hidden=32, heads=2, kv_heads=1, vocab=64, positions=80)
    right = DecodeState.logits.fget  # type: ignore[attr-defined]  # a property
    monkeypatch.setattr(DecodeState, "logits", property(lambda state: right(state) + 1.0))
    with pytest.raises(ValueError, match=r"gives it other positions or other tokens than its own forward pass"):
        list(measure_context_length(model, ["full"], [32], (512, 32), repeats=1, seed=0))
    monkeypatch.setattr(DecodeState, "logits", property(lambda state: right(state) * math.nan))
    [found] = measure_context_length(model, ["naive"], [32], (512, 32), repeats=1, seed=0)
    assert "not finite" in found["refused"]


def test_a_random_hybrid_is_measured() -> None:
    model = random_model(layers=4, hidden=32, heads=2, kv_heads=1, vocab=64, positions=128, hybrid=True)
    specs = ["full", "prefix", "hypic:4", "addition", "legolink"]
    measured = measure_context_length(model, specs, [60], (20, 6), repeats=1, seed=0)
    found = {row["method"]: row for row in measured}
    assert {name for name, row in found.items() if row["refused"]} == {"legolink"}
    assert (found["hypic:4"]["recomputed_tokens"], found["addition"]["recomputed_tokens"]) == (24, 0)
    assert (found["hypic:4"]["computed_tokens"], found["addition"]["computed_tokens"]) == (24 + 6, 6)
    assert {"compose", "recompute"} <= set(found["hypic:4"]["stages_s"])


def test_random_models_and_prompts_are_seeded() -> None:
    sizes = {"layers": 1, "hidden": 16, "heads": 2, "kv_heads": 1, "vocab": 20, "positions": 8}
    first, again = random_model(**sizes), random_model(**sizes)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    prompt = RandomPrompt.random(first, 100, 32, 7)
    assert prompt == RandomPrompt.random(first, 100, 32, 7)
    assert [*map(len, prompt.segments), len(prompt.query)] == [32, 32, 32, 4, 7]


# --- comb bench drift -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "reason"), [("hypic", "hybrid"), ("prefix", "isn't a hybrid"), ("comb", "decoder")])
def test_what_has_no_drift_says_so(method: str, reason: str) -> None:
    tokenizer = byte_tokenizer()
    rows = measure_drift(Setting(strong_llama(), tokenizer, PromptBuilder(tokenizer)), facts(1), [method])
    assert reason in rows[0]["refused"]
    [line] = drift_tables(rows)[0].lines()
    assert line[:2] == (method, "refused")


# --- the commands ---------------------------------------------------------------------------------------------------


def test_files_of_ones_own_are_sets_beside_each_other(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "model"
    shutil.copytree(folder / "model", model)
    data = {"prefix": "Read. ", "stop": ";", "query_template": "Q: {query}"}
    (model / "training.json").write_text(json.dumps({"config": {"data": data}}))
    other = tmp_path / "rows"
    other.mkdir()
    shutil.copy(folder / "data.jsonl", other / "more.jsonl")
    content = written(
        tmp_path / "m.json", "methods", "--model", model, "--methods", "naive", "--data",
        f"{folder / 'data.jsonl'},{other}", "--split", "all", "--questions", 2, "--max-new-tokens", 2,
        "--timing-questions", 0,
    )  # fmt: skip
    assert [row["set"] for row in content["results"]] == ["data"] * 3 + ["rows"] * 3
    # asked as the adapter was trained to be
    made_with = json.loads((tmp_path / "m" / "rows.jsonl").read_text().splitlines()[0])
    assert "Read. " in json.dumps(made_with)
    # two files of one name
    shutil.copy(folder / "data.jsonl", tmp_path / "data.jsonl")
    monkeypatch.chdir(other)
    shutil.copy(folder / "data.jsonl", other / "data.jsonl")
    content = written(
        tmp_path / "n.json", "methods", "--model", model, "--methods", "naive", "--data", "data.jsonl,../data.jsonl",
        "--split", "all", "--questions", 1, "--max-new-tokens", 1, "--timing-questions", 0,
    )  # fmt: skip
    assert {row["set"] for row in content["results"]} == {"1-data.jsonl", "2-data.jsonl"}
    own = run("methods", "--model", model, "--out", model / "results.json")
    assert "choose another name" in str(own.exception)  # an adapter's own results are left alone


def test_context_length_command(tmp_path: Path) -> None:
    content = written(
        tmp_path / "c.json", "context-length", "--lengths", "16,32", "--segment-tokens", 8, "--query-tokens", 2,
        "--methods", "full,legolink:2,legolink-0", "--repeats", 1, "--layers", 1, "--hidden", 16, "--heads", 2,
        "--kv-heads", 2, "--vocab", 40,
    )  # fmt: skip
    assert content["results"][1]["speedup"]["n"] == 1
    assert content["threads"] == torch.get_num_threads()


def test_drift_command(folder: Path, tmp_path: Path) -> None:
    for part in text_model("bamba"):
        part.save_pretrained(tmp_path / "hybrid")
    content = written(
        tmp_path / "d.json", "drift", "--model", tmp_path / "hybrid", "--methods", "full,addition,hypic:2,hypic:100",
        "--dataset", folder / "data.jsonl", "--split", "all", "--limit", 3,
    )  # fmt: skip
    assert "full refused: this method leaves the whole prompt" in (tmp_path / "d.md").read_text()
    _, addition, hypic, covered = content["results"]
    for row in (addition, hypic, covered):
        assert row["n"] == 3
        assert [layer["layer"] for layer in row["layers"]] == [0, 1, 3]
    deepest = [row["layers"][-1]["error"]["median"] for row in (addition, hypic, covered)]
    assert deepest[0] > deepest[1] > 1e-3
    assert deepest[2] < 1e-5
    assert hypic["layers"][0]["error"]["high"] < 1e-5 < addition["layers"][0]["error"]["low"]
    without = written(
        tmp_path / "l.json", "drift", "--model", tmp_path / "hybrid", "--methods", "addition,hypic:2",
        "--no-full-layers", "--dataset", folder / "data.jsonl", "--split", "all", "--limit", 3,
    )["results"][1]  # fmt: skip
    assert without["layers"][0]["error"]["high"] < 1e-5
    assert without["layers"][-1]["error"]["median"] != hypic["layers"][-1]["error"]["median"]


def test_full_layers_are_left_out() -> None:
    """HYPIC's protocol for its table 4: with nothing but linear layers, what is below is exact longer."""
    model, _ = text_model("bamba")
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        before = model(ids).logits
        with without_full_layers(model):
            left_out = model(ids).logits
        model.model.layers[2].self_attn.o_proj.weight.zero_()
        model.model.layers[2].feed_forward.down_proj.weight.zero_()
        assert torch.allclose(left_out, model(ids).logits, atol=1e-5)
    assert (left_out - before).abs().max() > 1e-3
    with pytest.raises(ValueError, match="no full layer"), without_full_layers(text_model("falcon_h1")[0]):
        pass


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["methods", "--methods", "fool"], "unknown method 'fool'"),
        (["methods", "--dataset", "nothing"], "unknown dataset 'nothing'"),
        (["methods", "--dataset", "missing.jsonl"], "missing.jsonl"),
        (["methods", "--data", ""], "unknown dataset ''"),
        (["methods", "--out", "here.png"], "expected a name in .json"),
        (["methods", "--query-template", "nothing"], "has no {query}"),
        (["context-length", "--lengths", "short"], "--lengths takes numbers"),
        (["context-length", "--heads", "7"], "heads must divide hidden"),
        (["drift", "--methods", "none"], "leave the control"),
        (["methods", "--data", "a.jsonl", "--dataset", "b.jsonl"], "--data and --dataset both say"),
        (["mac", "--quality", "slow"], "presets"),
        (["paper", "nothing"], "comb, epic, hypic, mac"),
        (["paper", "mac", "--only", "Fig. 99"], "no row"),
    ],
)
def test_bad_input_is_one_clear_line(arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert isinstance(result.exception, ValueError)
    assert message in str(result.exception)
    assert "\n" not in str(result.exception)


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
        kind = get_type_hints(BENCHMARKS[run["benchmark"]])["options"]
        assert set(run["options"]) <= {each.name for each in fields(kind)}
        assert set(run.get("sets", ())) <= known


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
    [("comb", "Fig. 9", 0), ("epic", "arXiv Fig. 6", 1), ("hypic", "Table", 8)],
)
def test_each_paper_runs(name: str, only: str, least: int, tmp_path: Path) -> None:
    result = run("paper", name, "--only", only, "--questions", 1, "--out", tmp_path / "p.json")
    assert result.exit_code == 0, result.exception
    rows = json.loads((tmp_path / "p.json").read_text(encoding="utf-8"))["results"]
    assert sum(row["ours"] is not None for row in rows) >= least
    if name == "comb":  # nano has no encoder
        assert "encoder" in rows[0]["refused"]
    assert "Theirs:" in result.stdout


def test_a_paper_without_its_sets_says_so(tmp_path: Path) -> None:
    config = ["--config", ROOT / "configs" / "longbench.yaml", "--data", tmp_path]
    run("paper", "epic", "--only", "arXiv Fig. 6", "--out", tmp_path / "p.json", *config)
    rows = json.loads((tmp_path / "p.json").read_text(encoding="utf-8"))["results"]
    assert all("longbench" in row["refused"] and (row["ours"], row["text"]) == (None, "-") for row in rows)
    (table,) = tables(rows)
    assert {line[3] for line in table.lines()} == {"refused"}
    assert all(any(row["refused"] in note for note in table.notes()) for row in rows)

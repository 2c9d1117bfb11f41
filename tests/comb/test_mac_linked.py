"""MAC attention behind linked PICaches, in the engine, on the command line, and in its benchmark."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from comb import Document, Example, PICEngine, PromptBuilder, methods
from comb.bench.mac import measure_quality, tables
from comb.cli import main as cli
from comb.evaluation.setting import Setting
from comb.mac import mac
from tests.helpers.byte_text import byte_tokenizer
from tests.helpers.facts import strong_llama, write_facts
from tests.helpers.families import tiny
from tests.helpers.mac_models import FREE, NEVER, NEW

SEGMENTS = [list(range(3, 23)), list(range(30, 55)), list(range(60, 75))]
QUERY = [80, 81, 82, 83, 84, 85, 86]


@pytest.mark.parametrize("spec", ["full", "prefix", "naive", "legolink:4", "legolink-0", "cacheblend:0.3", "focus:0.3"])
def test_linked_prompts(spec: str) -> None:
    model = tiny("llama", std=0.2)
    method = methods.create(spec, model)
    picaches = method.compile(SEGMENTS)

    def run() -> Tensor:
        state = method.link(picaches, QUERY)
        arguments = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        output = state.generate(**arguments, output_logits=True, return_dict_in_generate=False)
        return output[:, -NEW:]

    plain = run()
    with mac(model, NEVER) as session:
        assert torch.equal(plain, run())
    assert len(session.report().layers) == 4
    with mac(model, FREE) as session:
        run()
    assert session.report().hit_rate > 0.8
    assert model.config._attn_implementation == "sdpa"


def test_linking_leaves_rows_of_what_it_computed() -> None:
    """Only seam and query tokens have queries; their rows are there before the first answer token."""
    model = tiny("llama", std=0.2)
    method = methods.create("legolink", model, k=4)
    picaches = method.compile(SEGMENTS)
    wide = replace(FREE, window=64)
    with mac(model, wide) as session:
        state = method.link(picaches, QUERY)
        rows = {index: sorted(p for p in ring.pos[0].tolist() if p >= 0) for index, ring in session.states().items()}
        starts = [*range(20, 24), *range(45, 49)]
        assert session.report().steps == 0
        assert rows == {key: [*starts, *range(60, 66)] for key in range(4)}  # the last token is left to `generate`
        state.generate(max_new_tokens=2, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert session.report().hit_rate == 1.0
        assert session.report().events in ({}, {"new prompt": 1})


def test_a_single_recomputed_token_is_no_decode_step() -> None:
    model = tiny("llama", std=0.2)
    method = methods.create("legolink", model, k=1)
    picaches = method.compile(SEGMENTS[:2])
    exact = method.link(picaches, QUERY[:1]).logits
    with mac(model, FREE) as session:
        state = method.link(picaches, QUERY[:1])
        assert session.report().steps == 0
        assert {tuple(p for p in ring.pos[0].tolist() if p >= 0) for ring in session.states().values()} == {(20,)}
    assert torch.equal(exact, state.logits)


@pytest.mark.parametrize("method", ["comb", "full", "legolink:4"])
def test_the_engine_takes_mac(method: str) -> None:
    model = strong_llama()
    documents = ["The lake is twelve metres deep.", "Rill is a small city."]
    arguments: dict[str, Any] = {"max_new_tokens": 10, "eos_token_id": -1}
    texts = {}
    for name, config in (("plain", None), ("never", NEVER), ("free", FREE)):
        engine = PICEngine(model, byte_tokenizer(), method=method, mac=config)
        answers = engine.ask_batch([("How deep is it?", documents), ("Where?", documents[:1])], **arguments)
        texts[name] = [answer.token_ids for answer in answers]
        report = answers[0].report.mac
        assert (report is None) == (config is None)
        if report is not None:
            assert (report.hit_rate > 0.3) == (name == "free")
            assert "hits" in str(answers[0].report)
            assert answers[0].report.to_dict()["mac"]["steps"] == report.steps
    assert texts["plain"] == texts["never"]
    engine = PICEngine(model, byte_tokenizer(), method=method, mac="generation:min_length=0")
    pieces = engine.stream("Where?", documents, max_new_tokens=4)
    assert "".join(pieces) == pieces.answer.text
    assert pieces.report.mac is not None
    assert model.backbone.config._attn_implementation == "sdpa"


def test_ask_on_the_command_line(tmp_path: Path) -> None:
    folder = write_facts(tmp_path, strong_llama()) / "model"
    (tmp_path / "a.txt").write_text("The lake is deep.")
    arguments = ["ask", str(folder), "--doc", str(tmp_path / "a.txt"), "--max-new-tokens", "6", "How deep?"]
    done = CliRunner().invoke(cli.app, [*arguments, "--mac", "context:min_length=4,window=8,band=4"])
    assert done.exit_code == 0, done.output
    assert "MAC: " in done.output
    short = CliRunner().invoke(cli.app, [*arguments, "--mac", "context"])
    assert "all exact; left to exact attention: below min_length" in " ".join(short.output.split())
    assert "MAC: " not in CliRunner().invoke(cli.app, arguments).output
    bad = CliRunner().invoke(cli.app, [*arguments, "--mac", "quickly"])
    assert "presets" in str(bad.exception)


# ---- `comb bench mac`: answers with MAC on and off, and the command once ----


def test_quality_compares_with_exact_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    right = ("a fact", "another")
    examples = tuple(Example((Document(f"fact {n} is here"),), f"what is {n}?", "a fact", right) for n in range(2))
    monkeypatch.setattr("comb.bench.mac.contains", lambda text, references: float(references == right))
    free = replace(FREE, audit_every=4)
    configs = {"never": replace(free, tau=1.0), "free": free}
    model, tokenizer = strong_llama().backbone, byte_tokenizer()
    setting = Setting(model, tokenizer, PromptBuilder(tokenizer))
    results = list(measure_quality(setting, "made up", examples, configs, 16))
    by_name = {row["name"]: row for row in results}
    assert by_name["exact"]["same"] == by_name["never"]["same"] == 1.0
    assert by_name["exact"]["found"] == 1.0  # of all that are right, as EM and F1
    assert by_name["exact"]["hit_rate"] is None
    assert by_name["never"]["hit_rate"] == 0.0
    assert by_name["never"]["read_share"] == 1.0
    assert by_name["free"]["same"] < 1.0
    assert by_name["never"]["rouge_l_exact"] == 1.0 >= by_name["free"]["rouge_l_exact"]
    assert by_name["free"]["hit_rate"] is not None
    assert by_name["free"]["hit_rate"] > 0.5
    layers = by_name["free"]["layers"]  # the mean of all is that of the layers, which were searched alike
    assert len(layers) == model.config.num_hidden_layers
    assert sum(layer["hit_rate"] for layer in layers) / len(layers) == pytest.approx(by_name["free"]["hit_rate"])
    assert len(tables(results)[0].lines()) == 3


def test_the_command(tmp_path: Path) -> None:
    write_facts(tmp_path, strong_llama())
    arguments = [
        "bench", "mac", "--model", tmp_path / "model", "--dataset", tmp_path / "data.jsonl", "--split", "all",
        "--questions", 2, "--max-new-tokens", 4, "--quality", "context", "--common", "window=16,band=4,min_length=8",
        "--out", tmp_path / "mac.json",
    ]  # fmt: skip
    done = CliRunner().invoke(cli.app, [str(argument) for argument in arguments], env={"COLUMNS": "120"})
    assert done.exit_code == 0, done.output
    content = json.loads((tmp_path / "mac.json").read_text())
    assert [row["name"] for row in content["results"]] == ["exact", "context"]
    assert (tmp_path / "mac.png").exists()
    assert "context" in (tmp_path / "mac.md").read_text()

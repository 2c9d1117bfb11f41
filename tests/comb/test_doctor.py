"""The gate on methods: passes where methods are exact, names refusals, and fails on a model that breaks the promise."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from comb import methods
from comb.cli.doctor import check_methods, random_model
from comb.methods import split_specs
from tests.comb.test_linking import LINKABLE, REFUSED
from tests.helpers.families import FAMILIES, LINK_FAMILIES, tiny


@pytest.mark.parametrize("family", LINKABLE)
def test_every_linkable_family_passes(family: str) -> None:
    verdicts = {verdict.method: verdict for verdict in check_methods(tiny(family, std=0.15))}
    assert sorted(verdicts) == methods.names()
    failed = {name: [c for c in v.checks if not c.passed] for name, v in verdicts.items() if not v.passed}
    assert not failed
    refused = {name for name, verdict in verdicts.items() if verdict.refused}
    # no encoder; sliding windows; no BOS token; no linear layers
    assert refused <= {"comb", "prefix", "legolink-0", "hypic", "addition"}


@pytest.mark.parametrize("family", sorted(REFUSED))
def test_refusals_are_findings_not_failures(family: str) -> None:
    verdicts = {verdict.method: verdict for verdict in check_methods(tiny(family, std=0.15))}
    assert REFUSED[family] in (verdicts["legolink"].refused or "")
    assert all(verdict.passed for verdict in verdicts.values())


def test_a_broken_model_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: a pass whose rows all see everything."""
    from comb.linking.masks import Masks

    model = tiny("llama", std=0.15)
    check_methods(model, ["naive"])  # support is found while all is well
    monkeypatch.setattr(
        Masks, "build", lambda self, rows, model: torch.ones(1, 1, len(rows.positions), rows.visible, dtype=torch.bool)
    )
    (verdict,) = check_methods(model, ["legolink"])
    assert not verdict.passed
    failed = {check.name for check in verdict.checks if not check.passed}
    assert {"everything recomputed == full", "nothing sees what comes later"} <= failed


def test_wrong_parameters_are_the_callers_fault() -> None:
    with pytest.raises(ValueError, match="even integer"):
        check_methods(tiny("llama"), ["attnlink:3"])
    with pytest.raises(ValueError, match="known: addition"):
        check_methods(tiny("llama"), ["magic"])


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_moe", "deepseek_v3", "cohere2"])
def test_random_models_keep_the_architecture(family: str) -> None:
    config = (FAMILIES | LINK_FAMILIES)[family]()
    config.vocab_size = 5000
    model = random_model(config)
    assert model.config.model_type == config.model_type
    assert model.config.vocab_size == 1024
    assert set(getattr(model.config, "layer_types", None) or ()) == set(getattr(config, "layer_types", None) or ())
    assert all(verdict.passed for verdict in check_methods(model, ["naive", "legolink"]))


@pytest.mark.parametrize(
    ("text", "specs"),
    [
        ("full", ["full"]),
        ("full, legolink:2,legolink:16", ["full", "legolink:2", "legolink:16"]),
        ("a,b:2,c:1,quantize=int8,d", ["a", "b:2", "c:1,quantize=int8", "d"]),
        ("naive,rotate=false,full", ["naive:rotate=false", "full"]),
        ("naive:rotate=false,quantize=fp8", ["naive:rotate=false,quantize=fp8"]),
        ("", []),
    ],
)
def test_splitting_a_list_of_methods(text: str, specs: list[str]) -> None:
    assert split_specs(text) == specs


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from comb.cli import main as cli

    tiny("llama", std=0.15).save_pretrained(tmp_path / "llama")
    FAMILIES["gpt2"]().save_pretrained(tmp_path / "gpt2")

    def run(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr("sys.argv", ["comb", "doctor", *arguments])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return int(stop.value.code or 0), capsys.readouterr().out

    code, out = run(str(tmp_path / "llama"), "--encoder-layers", "2", "--methods", "naive,legolink:3,comb")
    assert code == 0
    assert "safe     legolink:3" in out
    assert "refused  comb" in out
    code, out = run(str(tmp_path / "gpt2"), "--random", "--encoder-layers", "2")
    assert code == 0
    assert "refused  cacheblend" in out
    assert "learned absolute positions" in out

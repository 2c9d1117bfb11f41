"""The gate on methods: passes where methods are exact, names refusals, and fails on a model that breaks the promise."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from comb import methods
from comb.cli.doctor import check_methods, random_model
from comb.linking import passes
from comb.linking.masks import Masks
from comb.methods import linked, split_specs
from comb.methods.base import LinkRequest
from comb.methods.linked import Linked
from tests.comb.test_focus import UNSEEN
from tests.helpers.families import FAMILIES, LINK_FAMILIES, STATE_FAMILIES, tiny

EVERY_FAMILY = sorted(FAMILIES | LINK_FAMILIES | STATE_FAMILIES)
STATES = {"hypic", "addition", "prefix", "full"}
# what is usable where that isn't all the methods for softmax attention, and why linking is refused
ONLY = {
    **dict.fromkeys(("qwen3_next", "bamba", "falcon_h1", "lfm2", "mamba", "mamba2", "falcon_mamba"),
                    (STATES, "keep a state, not keys and values per token")),
    **dict.fromkeys(("gpt2", "opt"), ({"full", "prefix"}, "learned absolute positions")),
    "llama4": ({"full"}, "chunks"),
    "rwkv": ({"full"}, "leaves nothing in a cache of keys and values"),
    "xlstm": ({"full"}, "leaves nothing in a cache of keys and values"),
    "recurrent_gemma": ({"full"}, "layers 0, 1 leave no keys and values in its cache"),
}  # fmt: skip


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_every_family_gets_a_verdict_on_every_method(family: str) -> None:
    """Usable and right by its own definition, or refused with the reason; and `full` generates as transformers does."""
    model = tiny(family, std=0.15)
    verdicts = {verdict.method: verdict for verdict in check_methods(model)}
    assert sorted(verdicts) == methods.names()
    assert not {name: [c for c in v.checks if not c.passed] for name, v in verdicts.items() if not v.passed}
    usable = {name for name, verdict in verdicts.items() if not verdict.refused}
    if family in ONLY:
        expected, reason = ONLY[family]
        assert usable == expected
        assert reason in (verdicts["legolink"].refused or "")
    else:  # refused: nothing trained; rotary by the prompt's length; no BOS or tokenizer; no linear layers; unseen
        refused = set(methods.names()) - usable
        assert refused <= {"comb", "linktokens", "prefix", "legolink-0", "primed", "hypic", "addition", "focus"}
        assert ("focus" in usable) == (family not in UNSEEN)
    full, settings = methods.create("full", model), {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    documents, query = [[7, 8, 9, 10, 11], [12, 13, 14]], [90, 17, 33]
    picaches = full.compile(documents)
    prompts = [[*documents[0], *documents[1], *query], [*documents[1], *query]]
    own = [model.generate(torch.tensor([prompt]), **settings)[0, -6:] for prompt in prompts]
    rows = [LinkRequest(picaches, query), LinkRequest(picaches[1:], query)]
    for row, expected_tokens in zip(rows, own, strict=True):
        assert torch.equal(full.link_row(row).generate(**settings)[0, -6:], expected_tokens)
    # the first three ignore the mask of padded rows; the others turn all rows by the longest
    alone = ("rwkv", "xlstm", "recurrent_gemma", "dynamic_ntk", "longrope")
    assert full.batches == (family not in alone)
    if full.batches:
        assert torch.equal(full.link_batch(rows).generate(**settings)[:, -6:], torch.stack(own))


def test_what_a_model_raises_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama", std=0.15)
    monkeypatch.setattr(Linked, "compile", lambda *_: {}["nothing"])
    (naive, full) = check_methods(model, ["naive", "full"])
    assert [check.detail for check in naive.checks] == ["KeyError: 'nothing'"]
    assert not naive.passed
    assert full.passed
    monkeypatch.setattr(type(model), "generate", lambda *_, **__: {}["nothing"])
    (only,) = check_methods(model)
    assert (only.method, only.passed) == ("full", False)


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


def test_rows_that_see_what_comes_later_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the mask that published implementations use, aligned to a corner."""

    class Corner(Masks):
        def build(self, rows: Any, model: Any) -> torch.Tensor:
            count = len(rows.positions)
            return torch.ones(count, rows.visible).tril(rows.visible - count).bool()[None, None]

    def recompute(model: Any, cache: Any, ids: Any, positions: Any, masks: Masks, **more: Any) -> Any:
        return passes.recompute(model, cache, ids, positions, Corner(masks.windows, masks.mapping), **more)

    model = tiny("llama", std=0.15)
    check_methods(model, ["legolink:3"])
    monkeypatch.setattr(linked, "recompute", recompute)
    (verdict,) = check_methods(model, ["legolink:3"])
    assert "nothing sees what comes later" in [check.name for check in verdict.checks if not check.passed]


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

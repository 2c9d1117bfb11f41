"""`comb doctor`: is a method safe on a model, what are segments written in, and what does linking each kind cost."""

from __future__ import annotations

import json
import random
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from comb import methods
from comb.backbones.tokenizer import load_tokenizer
from comb.cli import doctor_segments as segments
from comb.cli import main as cli
from comb.cli.doctor import check_methods, random_model
from comb.cli.doctor_segments import KindVerdict, check_segments, kinds_below, made_prompts, read_prompts
from comb.documents.found import KINDS, SegmentFinder, kind_of
from comb.linking.masks import Masks
from comb.methods.base import LinkRequest
from comb.methods.linked import Linked
from comb.model.source import load_named
from tests.comb.test_linking import UNSEEN
from tests.helpers.chunks import passage
from tests.helpers.families import FAMILIES, LINK_FAMILIES, STATE_FAMILIES, tiny

EVERY_FAMILY = sorted(FAMILIES | LINK_FAMILIES | STATE_FAMILIES)
STATES = {"hypic", "addition", "prefix", "full", "naive", "primed", "legolink-0"}
# what is usable where that isn't all the methods for softmax attention, and why linking is refused
ONLY = {
    **dict.fromkeys(("qwen3_next", "bamba", "falcon_h1", "lfm2", "mamba", "mamba2", "falcon_mamba", "bailing_hybrid"),
                    (STATES, "keep a state, not keys and values per token")),
    **dict.fromkeys(("lara_mini", "lfm3", "inkling2"), ({"full"}, "keep a state, not keys and values per token")),
    "dory": ({"full"}, "goes through some layers more than once"),
    **dict.fromkeys(("gpt2", "opt"), ({"full", "prefix"}, "learned absolute positions")),
    "llama4": ({"full"}, "chunks"),
    "rwkv": ({"full"}, "leaves nothing in a cache of keys and values"),
    "xlstm": ({"full"}, "doesn't go on from a cache (AttributeError: 'DynamicCache' object has no attribute"),
    # until transformers 5.22 two layers "leave no keys and values in its cache", since then there are layers of states
    "recurrent_gemma": ({"full"}, "keep a state"),
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
        said = verdicts["legolink"].refused or ""
        assert reason in said
        assert "'full'" in said
    else:  # refused: nothing trained; rotary by the prompt's length; no BOS or tokenizer; no linear layers; unseen
        refused = set(methods.names()) - usable
        assert refused <= {"comb", "linktokens", "prefix", "legolink-0", "primed", "hypic", "addition", "focus"}
        if family != "gptj":  # whose attention can be asked from transformers 5.24 on
            assert ("focus" in usable) == (family not in UNSEEN)
    full, settings = methods.create("full", model), {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    documents, query = [[7, 8, 9, 10, 11], [12, 13, 14]], [90, 17, 33]
    picaches = full.compile(documents)
    prompts = [[*documents[0], *documents[1], *query], [*documents[1], *query]]
    own = [model.generate(torch.tensor([prompt]), **settings)[0, -6:] for prompt in prompts]
    rows = [LinkRequest(picaches, query), LinkRequest(picaches[1:], query)]
    for row, expected_tokens in zip(rows, own, strict=True):
        assert torch.equal(full.link_row(row).generate(**settings)[0, -6:], expected_tokens)
    # the first three ignore the mask of padded rows; two turn all rows by the longest; hybrids that aren't linked may
    # mask them wrongly behind a cache
    alone = ("rwkv", "xlstm", "recurrent_gemma", "dynamic_ntk", "longrope", "lara_mini", "lfm3", "inkling2")
    assert full.batches == (family not in alone)
    if full.batches:
        assert torch.equal(full.link_batch(rows).generate(**settings)[:, -6:], torch.stack(own))


def test_rounding_to_sixteen_bits_is_no_finding() -> None:
    verdicts = check_methods(load_named("nano", dtype="bfloat16"))
    assert not {verdict.method for verdict in verdicts if not verdict.refused and not verdict.passed}
    assert "naive" in {verdict.method for verdict in verdicts if verdict.passed}


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


def test_the_command(tmp_path: Path) -> None:
    tiny("llama", std=0.15).save_pretrained(tmp_path / "llama")
    FAMILIES["gpt2"]().save_pretrained(tmp_path / "gpt2")
    for arguments, said in (
        ([str(tmp_path / "llama"), "--methods", "naive,legolink:3,comb"], ["safe     legolink:3", "refused  comb"]),
        ([str(tmp_path / "gpt2"), "--random"], ["refused  cacheblend", "learned absolute positions"]),
        # behind random tokens: the tokenizer's are not all in the small vocabulary
        (["nano", "--random", "--methods", "primed,focus:0.5,front=prose"],
         ["safe     primed", "safe     focus:0.5,front=prose"]),
    ):  # fmt: skip
        done = CliRunner().invoke(cli.app, ["doctor", *arguments])
        assert done.exit_code == 0, done.output
        assert [words for words in said if words not in done.output] == []


HARD = {
    "code": [
        '@dataclass\nclass Point:\n    """A thing.\n    """\n\n    x: int\n    y: int = 0\n',
        "#include <map>\nint main() {\n  std::map<int, int> a;\n  return a.size();\n}",
        "const a = await fetch(url);\nif (!a.ok) {\n  throw new Error(a.status);\n}",
    ],
    "json": [json.dumps({"a": 1, "b": [1, 2], "c": {"d": None}}, indent=2), '{"name": "x", "in": {"type": "object"}}'],
    "logs": ["[12:01:07] started\n[12:01:09] stopped\n", "INFO a\nERROR b\n  at c\nINFO d"],
    "prose": [
        "There is a class of people who return from work; if they do, they import nothing: so it was.",
        "# Title\n\n- one thing\n- another thing, for the sake of it\n\nAnd a line of text.",
        "On 2024-05-01 we met.\nIt was warm.\nNobody spoke.",
        " \n ",
    ],
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_are_told_by_the_forms_of_lines(kind: str) -> None:
    assert [kind_of(text) for text in HARD[kind]] == [kind] * len(HARD[kind])
    made = list(islice(segments._TEXTS[kind](random.Random(1)), 30))
    assert [kind_of(text) for text in made] == [kind] * 30
    assert len(set(made)) > 10


def test_a_finder_leaves_other_kinds_alone() -> None:
    tokenizer = load_tokenizer("nano")
    parts = [f"[{n}]\n{text}" for n, text in enumerate([passage(random.Random(0), 60), HARD["code"][0] * 3], 1)]
    ids = tokenizer("\n\n".join(parts), add_special_tokens=False)["input_ids"]
    every = SegmentFinder(tokenizer, least=16, most=256).find(ids)
    by_kind = {kind: SegmentFinder(tokenizer, least=16, most=256, kinds=(kind,)).find(ids) for kind in KINDS}
    assert by_kind["prose"]
    assert by_kind["code"]
    assert sorted(chain.from_iterable(by_kind.values())) == every
    with pytest.raises(ValueError, match="there is no 'poems'"):
        SegmentFinder(tokenizer, kinds=("prose", "poems"))


def test_made_prompts_are_the_same_each_time_and_hold_their_kind() -> None:
    prompts = made_prompts(2)
    assert prompts == made_prompts(2)
    assert set(prompts) == {*KINDS, segments.CHAT}
    assert [message["role"] for message in prompts[segments.CHAT][0]][-3:] == ["user", "assistant", "user"]


def test_a_file_of_prompts_is_lists_of_messages_or_bodies(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Where?"}]
    file = tmp_path / "mine.jsonl"
    file.write_text(f"{json.dumps(messages)}\n\n{json.dumps({'model': 'm', 'messages': messages})}\n")
    assert read_prompts(file) == [messages, messages]
    odd = [{"role": "user", "content": "one\u2028two\x85three"}]
    file.write_bytes(b"\xef\xbb\xbf" + json.dumps(odd, ensure_ascii=False).encode())
    assert read_prompts(file) == [odd]
    for line in ("{}", "3", "[1]", "{"):
        file.write_text(f"{json.dumps(messages)}\n{line}\n")
        with pytest.raises(ValueError, match="line 2"):
            read_prompts(file)


def test_a_kind_is_let_through_with_all_of_its_interval_in_every_group() -> None:
    def row(kind: str, high: float, method: str = "naive") -> KindVerdict:
        return KindVerdict(method, kind, 8, high / 2, high, 0.5)

    rows = [row("prose", 0.08), row("chat/prose", 0.12), row("code", 0.09), row("mine/code", 0.05), row("json", 0.3)]
    assert kinds_below(rows, "naive", 0.1) == ["code"]
    assert kinds_below(rows, "naive", 0.2) == ["prose", "code"]
    assert kinds_below(rows, "primed", 1.0) == []


@pytest.fixture(scope="module")
def nano() -> Any:
    return load_named("nano", dtype="float32", device="cpu")


def test_what_is_recomputed_whole_costs_nothing_and_less_costs_more(
    nano: Any, caplog: pytest.LogCaptureFixture
) -> None:
    draw = random.Random(5)
    texts = ["\n".join(f"[{n}] {passage(draw, 90)}" for n in range(3)) + "\n\nWhere is Ada?" for _ in range(3)]
    prompts = {"mine": [[{"role": "user", "content": text}] for text in texts]}
    tokenizer = load_tokenizer("nano")
    rows = {row.method: row for row in check_segments(nano, tokenizer, ["naive", "cacheblend:1.0"], prompts)}
    assert {row.kind for row in rows.values()} == {"mine/prose"}
    assert rows["cacheblend:1.0"].kl == pytest.approx(0, abs=1e-6)
    assert rows["naive"].high >= rows["naive"].kl > 1e-3
    assert 0.3 < rows["naive"].linked < 1
    caplog.clear()
    longer = {"mine": [*prompts["mine"], [{"role": "user", "content": passage(draw, 3000)}]]}
    again = {row.method: row for row in check_segments(nano, tokenizer, ["naive"], longer)}
    assert again["naive"] == rows["naive"]
    assert "1 prompts have no room" in caplog.text
    with pytest.raises(ValueError, match="no segment of 64 tokens"):
        check_segments(nano, tokenizer, ["naive"], {"mine": [[{"role": "user", "content": "Where is Ada?"}]]})


def test_the_command_says_what_to_tell_the_server(tmp_path: Path) -> None:
    draw = random.Random(6)
    file = tmp_path / "mine.jsonl"
    text = "\n".join(f"[{n}] {passage(draw, 90)}" for n in range(2))
    file.write_text(json.dumps([{"role": "user", "content": f"{text}\n\nWhere is Ada?"}]))
    asked = ["doctor", "nano", "--segments", "--prompts", str(file), "--methods", "naive", "--dtype", "float32"]
    done = CliRunner().invoke(cli.app, [*asked, "--threshold", "9"])
    assert done.exit_code == 0, done.output
    assert "--comb-segment-kinds prose" in done.output
    done = CliRunner().invoke(cli.app, [*asked, "--threshold", "1e-9"])
    assert "no kind of segment; leave --comb-segments off" in done.output
    assert torch.is_grad_enabled()

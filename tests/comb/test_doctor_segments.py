"""`comb doctor --segments`: what segments are written in, and what linking each kind of them costs."""

from __future__ import annotations

import json
import random
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from comb.backbones.tokenizer import load_tokenizer
from comb.cli import doctor_segments as segments
from comb.cli.doctor_segments import KindVerdict, check_segments, kinds_below, made_prompts, read_prompts
from comb.cli.main import app
from comb.documents.found import KINDS, SegmentFinder, kind_of
from comb.model.source import load_named
from tests.helpers.chunks import passage

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
    prompts = {
        "mine": [
            [
                {
                    "role": "user",
                    "content": "\n".join(f"[{n}] {passage(draw, 40)}" for n in range(3)) + "\n\nWhere is Ada?",
                }
            ]
            for _ in range(3)
        ]
    }
    tokenizer = load_tokenizer("nano")
    rows = {row.method: row for row in check_segments(nano, tokenizer, ["naive", "cacheblend:1.0"], prompts, least=16)}
    assert {row.kind for row in rows.values()} == {"mine/prose"}
    assert rows["cacheblend:1.0"].kl == pytest.approx(0, abs=1e-6)
    assert rows["naive"].high >= rows["naive"].kl > 1e-3
    assert 0.3 < rows["naive"].linked < 1
    caplog.clear()
    longer = {"mine": [*prompts["mine"], [{"role": "user", "content": passage(draw, 3000)}]]}
    again = {row.method: row for row in check_segments(nano, tokenizer, ["naive"], longer, least=16)}
    assert again["naive"] == rows["naive"]
    assert "1 prompts have no room" in caplog.text
    with pytest.raises(ValueError, match="no segment of 500 tokens"):
        check_segments(nano, tokenizer, ["naive"], prompts, least=500)


def test_the_command_says_what_to_tell_the_server(nano: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(6)
    file = tmp_path / "mine.jsonl"
    text = "\n".join(f"[{n}] {passage(draw, 90)}" for n in range(2))
    file.write_text(json.dumps([{"role": "user", "content": f"{text}\n\nWhere is Ada?"}]))
    asked = ["doctor", "nano", "--segments", "--prompts", str(file), "--methods", "naive", "--dtype", "float32"]
    done = CliRunner().invoke(app, [*asked, "--threshold", "9"])
    assert done.exit_code == 0, done.output
    assert "--comb-segment-kinds prose" in done.output
    done = CliRunner().invoke(app, [*asked, "--threshold", "1e-9"])
    assert "no kind of segment; leave --comb-segments off" in done.output
    assert torch.is_grad_enabled()

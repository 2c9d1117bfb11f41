"""Methods against full recompute: hand-made rows, a tiny model, the nano backbone with wrong documents, the command."""

from __future__ import annotations

import gc
import json
import math
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from comb import Document, Example, PICEngine, PromptBuilder
from comb.backbones.tokenizer import load_tokenizer
from comb.bench.methods import panels
from comb.cli import main as cli
from comb.documents.datasets import Counts, read_dataset
from comb.evaluation.compare import compare, kl_divergence, measure_times, question_name
from comb.evaluation.plot import Frontier
from comb.evaluation.record import Journal
from comb.evaluation.setting import AnswerRules, Setting, drop_too_long, read_sets, spread
from comb.evaluation.summary import comparison_tables, summarize
from comb.evaluation.table import Row, Timing
from comb.model.source import load_named
from tests.helpers.byte_text import byte_tokenizer
from tests.helpers.facts import facts, strong_llama, write_facts

EXAMPLES = facts()
METHODS = ("full", "prefix", "naive", "naive@fixed:8", "legolink:64", "comb", "none")


@pytest.fixture(scope="module")
def setting() -> Setting:
    """With few-shot text in front."""
    tokenizer = byte_tokenizer()
    return Setting(strong_llama(), tokenizer, PromptBuilder(tokenizer, prefix="Q: a? A: b\n"), "Q: {query} A:")


def compared(
    setting: Setting, examples: Sequence[Example], methods: Sequence[str], tokens: int, **options: Any
) -> dict[str, Row]:
    journal = Journal(None, {})
    refused = compare(setting, examples, methods, journal, rules=AnswerRules(tokens), progress=False, **options)
    return {row["method"]: row for row in summarize(journal.rows, examples, methods, refused)}


def journalled(
    setting: Setting, examples: Sequence[Example], methods: Sequence[str], *rules: Any, into: Journal | None = None,
    **options: Any,
) -> list[Row]:  # fmt: skip
    """All rows of the journal."""
    journal = Journal(None, {}) if into is None else into
    compare(setting, examples, methods, journal, rules=AnswerRules(*rules), progress=False, **options)
    return journal.rows


@pytest.fixture(scope="module")
def results(setting: Setting) -> dict[str, Row]:
    return compared(setting, EXAMPLES, METHODS, 6, answers=4)


# --- on a model -----------------------------------------------------------------------------------------------------


def test_what_recomputes_everything_is_full_recompute(results: dict[str, Row]) -> None:
    for method in ("full", "prefix", "legolink:64"):
        row = results[method]
        assert (row["same"], row["rouge_l_full"], row["top1_agreement"]) == (1.0, 1.0, 1.0)
        assert row["kl"] == pytest.approx(0.0, abs=1e-6)
        assert row["minus_full"]["f1"] == (0.0, 0.0, 0.0)
    assert results["full"]["kl"] == 0.0
    assert results["legolink:64"]["recomputed_tokens"] == results["full"]["document_tokens"] > 0
    assert results["full"]["cache_bytes_per_document_token"] == 0


def test_others_diverge_and_all_have_the_same_questions(results: dict[str, Row]) -> None:
    for method in ("naive", "naive@fixed:8", "comb", "none"):
        assert results[method]["kl"] > 1e-3
        assert results[method]["recomputed_tokens"] == 0
    assert results["naive"]["kl"] != results["naive@fixed:8"]["kl"]
    assert {(row["n"], row["kl_questions"]) for row in results.values()} == {(4, 5)}
    assert len({row["kl_n"] for row in results.values()}) == 1
    assert results["none"]["document_tokens"] == results["none"]["cache_bytes_per_document_token"] == 0
    # one cross layer: K and V of two heads of 8 float32
    assert results["comb"]["cache_bytes_per_document_token"] == 2 * 2 * 8 * 4


def test_answers_are_those_of_the_engine(setting: Setting) -> None:
    """Whether an answer was decoded or read off the pass over full recompute's."""
    same = {"as full": 0, "its own": 0}
    for row in journalled(setting, EXAMPLES, METHODS, 6):
        example = EXAMPLES[int(row["question"].partition(":")[0])]
        answer = setting.engine(row["method"]).ask(*setting.request(row["method"], example), max_new_tokens=6)
        assert row["text"] == answer.text.strip()
        same["as full" if row["top1"] == 1 else "its own"] += 1
    assert min(same.values()) > 3


def test_an_edited_question_is_asked_anew(setting: Setting) -> None:
    old, kept = replace(EXAMPLES[0], id="0"), replace(EXAMPLES[1], id="1")
    journal = Journal(None, {})
    journalled(setting, [old, kept], ["full"], 2, into=journal)
    edits = replace(old, query="Which other one?"), replace(old, documents=EXAMPLES[2].documents)
    for number, edited in enumerate(edits, 3):
        assert len(journalled(setting, [edited, kept], ["full"], 2, into=journal)) == number
        assert summarize(journal.rows, [edited, kept], ["full"], {})[0]["n"] == 2
    same = replace(old, answer="another", answers=("another",))  # what is right isn't asked
    assert len(journalled(setting, [same, kept], ["full"], 2, into=journal)) == 4


def test_the_head_counts_for_no_method(setting: Setting) -> None:
    """It is computed once and kept for all: a run that begins, or goes on, counts what any other does."""
    computed = []
    for _ in range(2):
        computed.append([row["computed"] for row in journalled(setting, EXAMPLES[:2], ["naive", "legolink:2"], 2)])
        if not computed[1:]:
            setting.engine("naive").prefixes.clear()
    assert computed[0] == computed[1]
    naive, lego = computed[0][::2], computed[0][1::2]
    assert [more - less for less, more in zip(naive, lego, strict=True)] == [4, 4]


def test_an_answer_ends_at_the_stop(setting: Setting) -> None:
    long = compared(setting, EXAMPLES, ["full"], 12)
    [first, *_] = setting.engine("full").ask(*setting.request("full", EXAMPLES[0]), max_new_tokens=12).text[3:]
    [row] = journalled(setting, EXAMPLES[:1], ["full"], 12, first)
    assert first not in row["text"]
    assert row["tokens"] <= 4  # the stop is the last token that is compared
    assert long["full"]["kl_n"] > 12


def test_a_method_that_cannot_run_is_refused_and_the_others_go_on(setting: Setting) -> None:
    plain = replace(setting, model=setting.model.backbone)
    found = compared(plain, EXAMPLES[:2], ["full", "comb", "legolink:k=none"], 2)
    assert "plain backbone" in found["comb"]["refused"]
    assert "legolink:k" in found["legolink:k=none"]["refused"]
    scores, gaps = comparison_tables(list(found.values()), "tiny")
    assert "comb refused: method 'comb' needs" in scores.markdown()
    assert not gaps.rows


def test_questions_without_room_are_dropped_and_counted(setting: Setting) -> None:
    long, counts = replace(EXAMPLES[0], documents=(Document("x" * 250),)), Counts(read=6)
    assert drop_too_long(setting, [*EXAMPLES, long], ["full", "none"], 8, counts) == EXAMPLES
    assert counts.kept == 5
    assert "256 positions" in str(counts)
    assert drop_too_long(setting, [long], ["comb", "none"], 8, Counts(read=1)) == [long]
    for method, message in (("naive", "no question is left"), ("fool", "unknown method 'fool'")):
        with pytest.raises(ValueError, match=message):
            drop_too_long(setting, [long], [method], 8, Counts(read=1))


def test_where_full_recompute_has_no_room_others_answer_without_kl(
    setting: Setting, caplog: pytest.LogCaptureFixture
) -> None:
    long = replace(EXAMPLES[0], documents=(Document("x" * 250),))
    found = compared(setting, [*EXAMPLES[:2], long], ["comb", "none"], 6)
    assert {(row["n"], row["kl_questions"]) for row in found.values()} == {(3, 2)}
    assert found["comb"]["closed"] == pytest.approx(1 - found["comb"]["kl"] / found["none"]["kl"])
    assert "no KL of 1 questions" in caplog.text
    alone = compared(setting, [long], ["comb", "none"], 6)
    assert not {"kl", "closed"} & alone["comb"].keys()
    assert alone["comb"]["em"] == 0.0
    scores, _ = comparison_tables(list(alone.values()))
    assert "no KL, full recompute has no room" in scores.markdown()
    assert "positions" in compared(setting, [long], ["full"], 6)["full"]["refused"]


def test_times_are_taken_cold_and_cached_of_questions_without_a_document_in_common(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no method's store outlives it."""
    states: list[set[str]] = []
    made = weakref.WeakSet[PICEngine]()
    held: list[int] = []
    plain_engine, plain_ask = Setting.engine, PICEngine.ask

    def engine(setting: Setting, method: str) -> PICEngine:
        made.add(found := plain_engine(setting, method))
        return found

    def ask(self: PICEngine, *request: Any, **options: Any) -> Any:
        gc.collect()
        held.extend(tier.bytes for one in made - {self} for tier in one.store.stats().tiers.values())
        answer = plain_ask(self, *request, **options)
        states.append({document.state for document in answer.report.documents})
        return answer

    monkeypatch.setattr(Setting, "engine", engine)
    monkeypatch.setattr(PICEngine, "ask", ask)
    journal, specs = Journal(None, {}), ["comb", "legolink:2"]
    measure_times(setting, EXAMPLES, specs, journal, 2)
    assert states == 2 * [{"compiled"}, *2 * [{"compiled"}, {"hit"}]]  # a warm-up, and two questions
    assert set(held) == {0}
    before = list(journal.rows)
    assert all(min(row["cold"], row["cached"]) > 0 for row in before)
    measure_times(setting, EXAMPLES, specs, journal, 2)
    assert journal.rows == before
    shared = [replace(example, documents=EXAMPLES[0].documents) for example in EXAMPLES]
    measure_times(setting, shared, ["full"], journal, 3)
    assert [row["question"] for row in journal.rows[4:]] == [question_name(0, EXAMPLES[0])]


def test_divergence_by_hand() -> None:
    p, q = torch.tensor([[0.5, 0.5], [1.0, 0.0]]).log(), torch.tensor([[0.25, 0.75], [0.5, 0.5]]).log()
    # 0.5 ln 2 + 0.5 ln (2/3), and ln 2
    assert kl_divergence(p, q).tolist() == pytest.approx([0.143841, 0.693147], abs=1e-6)
    assert kl_divergence(p, p).tolist() == [0.0, 0.0]
    assert kl_divergence(q, p)[1].item() == math.inf  # ruled out by the other, not by the reference


def test_wrong_documents_are_noticed() -> None:
    """The control: on a backbone that can read them, other questions' documents cost the answers, another order not."""
    examples = list(read_dataset("nano", limit=12, num_documents=4))
    groups = list(dict.fromkeys(example.documents for example in examples))
    other = dict(zip(groups, [*groups[1:], groups[0]], strict=True))
    model = load_named("nano", dtype="float32", device="cpu")
    tokenizer = load_tokenizer("nano", model)
    setting = Setting(model, tokenizer, PromptBuilder(tokenizer))
    methods = ["full", "legolink-0"]
    right = compared(setting, examples, [*methods, "none"], 24)
    turned = [replace(example, documents=example.documents[::-1]) for example in examples]
    shuffled = compared(setting, turned, methods, 24)
    swapped = [replace(example, documents=other[example.documents]) for example in examples]
    wrong = compared(setting, swapped, methods, 24)
    for method in methods:
        assert min(right[method]["contains"], shuffled[method]["contains"]) > 0.8
        assert wrong[method]["contains"] < 0.3
    assert right["none"]["kl"] > 5 * right["legolink-0"]["kl"]
    assert [right[method]["closed"] for method in ("full", "none")] == [1.0, 0.0]
    lego = right["legolink-0"]
    assert lego["closed"] == pytest.approx(1 - lego["kl"] / right["none"]["kl"])
    low, high = lego["intervals"]["closed"]
    assert low < lego["closed"] < high
    assert right["none"]["minus_full"]["contains"][2] < 0  # the interval says so too


# --- by hand --------------------------------------------------------------------------------------------------------


def made(method: str, question: str, text: str, kl: float, tokens: int) -> Row:
    costs = {"computed": 7, "recomputed": 2, "document_tokens": 10, "cache_bytes": 50}
    return {"method": method, "question": question, "text": text, "kl": kl, "top1": 0.5, "tokens": tokens, **costs}


def test_a_summary_by_hand() -> None:
    examples = [Example((), "q", "Rome", id="a"), Example((), "q", "Oslo", ("Oslo", "the Tigerstaden"), id="b")]
    first, second = (question_name(number, example) for number, example in enumerate(examples))
    rows = [
        made("full", first, "Rome", 0.0, 3), made("full", second, "It is Tigerstaden now", 0.0, 1),
        made("x", first, "Milan", 0.2, 3), made("x", second, "It is Tigerstaden now", 0.6, 1),
        {key: value for key, value in made("x", "7:z", "", 9.0, 9).items() if key != "text"},  # not asked for any more
    ]  # fmt: skip
    times = [{"method": "x", "question": name, "cold": cold, "cached": 0.5} for name, cold in ((first, 1), (second, 3))]
    full, x, y = summarize([*rows, *times], examples, ["full", "x", "y"], {"y": "too big"})
    assert (full["em"], full["contains"], full["same"]) == (0.5, 1.0, 1.0)
    assert full["f1"] == pytest.approx((1 + 2 * 0.25 * 1 / 1.25) / 2)  # one of four words, no article left
    assert (x["em"], x["contains"], x["same"], x["rouge_l_full"]) == (0.0, 0.5, 0.5, 0.5)
    assert x["minus_full"]["em"] == (-0.5, -1.0, 0.0)
    assert x["minus_full"]["contains"] == (-0.5, -1.0, 0.0)
    assert x["kl"] == pytest.approx((3 * 0.2 + 1 * 0.6) / 4)  # by token
    assert x["intervals"]["kl"] == pytest.approx((0.2, 0.6))
    costs = ("kl_n", "computed_tokens", "recomputed_tokens", "cache_bytes_per_document_token")
    assert [x[name] for name in costs] == [4, 7, 2, 5]
    assert (x["ttft_cold_s"].median, x["ttft_cached_s"].median) == (2.0, 0.5)
    assert y == {"method": "y", "refused": "too big", "ttft_cold_s": None, "ttft_cached_s": None}
    [alone] = summarize(rows, examples, ["x"], {})  # full recompute wasn't asked
    assert (alone["n"], alone["em"], alone["kl"], alone["minus_full"]) == (2, 0.0, x["kl"], {})


def test_questions_come_in_rounds_over_the_documents() -> None:
    documents = [(Document(name),) for name in "abc"]
    examples = tuple(Example(documents[n % 3], f"{n}", "") for n in range(9))
    order = spread(examples, seed=0)
    assert sorted(order, key=lambda e: e.query) == list(examples)
    for first in (0, 3, 6):
        assert {example.documents for example in order[first : first + 3]} == set(documents)
    assert spread(examples, seed=0) == order != spread(examples, seed=1)


# --- a run that is broken off ---------------------------------------------------------------------------------------


def test_a_journal_goes_on_behind_the_last_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "set.jsonl"
    Journal(path, {"seed": 1}).add({"text": "one\u2028line"})
    with path.open("a") as file:
        file.write('{"text": "hal')
    again = Journal(path, {"seed": 1})
    assert again.rows == [{"text": "one\u2028line"}]
    again.add({"text": "two"})
    assert [row["text"] for row in Journal(path, {"seed": 1}).rows] == ["one\u2028line", "two"]
    with pytest.raises(ValueError, match="made with seed=1, now it is 2"):
        Journal(path, {"seed": 2})
    for damaged in (b"no JSON\n", b'{"seed": 1}\n"\xff"\n'):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="is damaged, line by line"):
            Journal(path, {"seed": 1})


def test_a_journal_spares_what_is_there(setting: Setting) -> None:
    journal, specs = Journal(None, {}), ["full", "naive"]
    before = list(journalled(setting, EXAMPLES[:3], specs, 3, into=journal, answers=2))
    assert len(before) == 6
    assert journalled(setting, EXAMPLES[:3], specs, 3, into=journal, answers=2) == before
    rows = journalled(setting, EXAMPLES[:3], ["full", "none"], 3, into=journal, answers=3)
    new = [(row["method"], row["question"], "text" in row) for row in rows[6:]]
    first, second, third = (question_name(number, example) for number, example in enumerate(EXAMPLES[:3]))
    assert new == [("none", first, True), ("none", second, True), ("full", third, True), ("none", third, True)]


def test_what_an_older_version_or_another_adapter_was_asked_is_asked_again(setting: Setting) -> None:
    """Versions that counted documents' tokens only; and the last rows count, which may be those of another adapter."""
    journal, specs = Journal(None, {}), ["full", "naive"]
    old = journalled(setting, EXAMPLES[:2], specs, 3, into=journal)[1].pop("computed")
    rows = journalled(setting, EXAMPLES[:2], specs, 3, into=journal)
    assert [(row["method"], row["question"]) for row in rows[4:]] == [("naive", question_name(0, EXAMPLES[0]))]
    assert 0 < rows[4]["computed"] <= old < rows[0]["computed"]
    assert summarize(rows, EXAMPLES, specs, {})[1]["n"] == 2
    journal, specs = Journal(None, {}), ["full", "naive", "none"]
    first = list(journalled(setting, EXAMPLES[:1], specs, 3, into=journal))
    for row in first:
        journal.add({**row, "kl": 9.0, "made_by": "another"})
    assert journalled(setting, EXAMPLES[:1], specs, 3, into=journal)[6:] == first


def test_rows_of_other_weights_or_of_another_template_are_asked_again() -> None:
    tokenizer, model = byte_tokenizer(), strong_llama()

    def asked(**arguments: Any) -> int:
        before = len(journal.rows)
        builder = PromptBuilder(tokenizer, prefix="Q: a? A: b\n", chat_template_kwargs=arguments)
        own = Setting(model, tokenizer, builder, "Q: {query} A:")
        journalled(own, EXAMPLES[:1], ["full", "naive"], 3, into=journal)
        return len(journal.rows) - before

    journal = Journal(None, {})
    assert [asked(), asked()] == [2, 0]
    assert [asked(enable_thinking=False), asked(enable_thinking=False)] == [2, 0]
    with torch.no_grad():
        model.backbone.model.layers[1].mlp.down_proj.weight.mul_(1.5)  # not the embedding
    assert [asked(enable_thinking=False), asked(enable_thinking=False)] == [2, 0]


# --- the command ----------------------------------------------------------------------------------------------------

CONFIG = """
templates:
  few: {prefix: "Q: a? A: b\\n", document: "{text}\\n", query: "Q: {query} A:", stop: "\\n"}
sets:
  facts: {dataset: jsonl, path: data.jsonl, template: few, split: all, max_new_tokens: 3}
  again: {dataset: jsonl, path: data.jsonl, template: few, split: all, max_new_tokens: 3}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, setting: Setting) -> Path:
    folder = write_facts(tmp_path_factory.mktemp("compare"), setting.model)
    (folder / "sets.yaml").write_text(CONFIG)
    return folder


def bench(folder: Path, **options: object) -> Any:
    given = {"model": folder / "model", "config": folder / "sets.yaml", "data": folder, "out": folder / "out.json"}
    words = [str(word) for name, value in {**given, **options}.items() for word in (f"--{name}", value)]
    return CliRunner().invoke(cli.app, ["bench", "methods", *words], env={"COLUMNS": "120"})


def test_the_command_makes_tables_of_all_sets_and_goes_on(folder: Path) -> None:
    options = {"methods": "naive,legolink:2", "questions": 3, "timing-questions": 2}
    first = bench(folder, sets="facts", **options)
    assert first.exit_code == 0, first.output
    journal = folder / "out" / "facts.jsonl"
    before = journal.read_text()
    second = bench(folder, sets="facts,again,facts", **options | {"methods": "naive,legolink:2,legolink:2@fixed:8"})
    assert second.exit_code == 0, second.output
    assert journal.read_text().startswith(before)
    assert len(journal.read_text().splitlines()) == len(before.splitlines()) + 5  # the new method's answers and times
    content = json.loads((folder / "out.json").read_text())
    assert [(row["set"], row["method"]) for row in content["results"]] == [
        (name, method)
        for name in ("facts", "again")
        for method in ("full", "naive", "legolink:2", "legolink:2@fixed:8", "none")
    ]
    assert content["sets"]["facts"]["template"]["query"] == "Q: {query} A:"
    assert content["sets"]["facts"]["data"]["kept"] == 3
    assert content["results"][1]["ttft_cached_s"]["n"] == 2
    tables = (folder / "out.md").read_text()
    assert all(f"### {title}" in tables for title in ("facts", "facts: intervals", "again"))
    pytest.importorskip("matplotlib", reason="plots need matplotlib (the demo extra)")
    assert (folder / "out.png").read_bytes().startswith(b"\x89PNG")
    other = bench(folder, **options | {"max-new-tokens": 5})
    assert "choose another --out" in str(other.exception or other.output)


OFFICIAL = """
templates:
  official: {prompts: prompts.json}
sets:
  asked: {dataset: jsonl, template: official, prompt: question}
  told: {dataset: jsonl, template: official, prompt: summary}
"""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (OFFICIAL.replace(", prompt: question", ""), "sets.asked: a set names its prompt if"),
        (OFFICIAL.replace("prompts.json", "prompts.json, lead: a"), "official: a template has either prompts"),
        (CONFIG.replace("template: few", "template: fow"), "sets.facts.template is one of few, not 'fow'"),
        (CONFIG.replace("max_new_tokens", "max_tokens"), r"sets.facts: expected keys among .* got \['max_tokens'\]"),
        (CONFIG.replace("Q: {query} A:", "Q:"), "templates.few: a template's query needs"),
        (CONFIG.replace("dataset: jsonl, ", ""), "sets.facts: .*dataset"),
        (OFFICIAL.replace("told:", "asked:"), "asked stands there twice"),
        ("sets: {}", "expected the keys templates and sets"),
        ("a: [", "can't be read as YAML"),
    ],
)
def test_a_wrong_file_says_where(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "sets.yaml").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_sets(tmp_path / "sets.yaml")


def test_prompts_of_a_file_are_templates(tmp_path: Path) -> None:
    prompts = {"question": "Read {this}.\n{context}\nQ: {input}\nA:", "summary": "News:\n{context}\nSummary:"}
    (tmp_path / "prompts.json").write_text(json.dumps(prompts))
    (tmp_path / "sets.yaml").write_text(OFFICIAL)
    asked, told = (each.asked(tmp_path) for each in read_sets(tmp_path / "sets.yaml").values())
    assert (asked.lead, asked.query) == ("Read {this}.\n", "\nQ: {query}\nA:")
    assert (told.lead, told.query) == ("News:\n", "\nSummary:")


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (None, "prompts.json can't be read"),
        ("{", "can't be read as JSON"),
        ("[]", "has no prompt 'question'"),
        ('{"summary": "{context}"}', "has no prompt 'question'"),
        ('{"question": "Q: {input}"}', "needs {context} once"),
        ('{"question": 3}', "needs {context} once"),
    ],
)
def test_a_file_without_the_prompt_is_named(tmp_path: Path, prompts: str | None, message: str) -> None:
    (tmp_path / "sets.yaml").write_text(OFFICIAL)
    if prompts is not None:
        (tmp_path / "prompts.json").write_text(prompts)
    with pytest.raises(ValueError, match=message):
        read_sets(tmp_path / "sets.yaml")["asked"].asked(tmp_path)


def test_the_command_asks_by_a_file_of_prompts(folder: Path) -> None:
    (folder / "prompts.json").write_text(json.dumps({"p": "Read.\n{context}\nQ: {input}\nA:"}))
    (folder / "official.yaml").write_text(
        "templates: {official: {prompts: prompts.json, prefix: 'H. '}}\n"
        "sets: {facts: {dataset: jsonl, path: data.jsonl, split: all, template: official, prompt: p}}\n"
    )
    own = {"config": folder / "official.yaml", "out": folder / "official.json", "methods": "naive", "questions": 2}
    assert bench(folder, **own, **{"timing-questions": 0, "max-new-tokens": 4}).exit_code == 0
    (folder / "prompts.json").write_text(json.dumps({"p": "Read this.\n{context}\nQ: {input}\nA:"}))
    other = bench(folder, **own, **{"timing-questions": 0, "max-new-tokens": 4})
    assert "choose another --out" in str(other.exception or other.output)  # answers to other prompts


def test_a_set_or_an_option_that_is_not_there_is_named(folder: Path) -> None:
    assert "has no set 'fact'; it has facts, again" in str(bench(folder, sets="fact").exception)
    assert "--num-documents has no effect with --config" in str(bench(folder, **{"num-documents": 3}).exception)


def test_the_sets_of_the_project_can_be_read() -> None:
    sets = read_sets(Path(__file__).parents[2] / "configs" / "evaluation.yaml")
    assert len(sets) >= 4
    assert all(each.template.stop for each in sets.values())


def frontiers(**seconds: float | None) -> dict[str, Any]:
    """Panels of methods of these times, by their axis."""
    rows = [
        {"set": "squad", "method": name, "refused": "", "computed_tokens": 5, "ttft_cold_s": times,
         "ttft_cached_s": times, "cache_bytes_per_document_token": KEPT.get(name, 100.0)}
        for name, each in seconds.items()
        for times in [None if each is None else Timing(each, each, each, 3)]
    ]  # fmt: skip
    rows.append({**rows[0], "method": "gone", "ttft_cold_s": None, "ttft_cached_s": None, "refused": "why"})
    return {panel.xlabel: panel for panel in panels(rows) if isinstance(panel, Frontier)}


KEPT = {"full": 0, "none": 0, "small": 30.0}


def test_methods_are_drawn_by_how_much_sooner_they_answer_and_by_bytes_where_those_differ() -> None:
    (sooner,) = [panel for label, panel in frontiers(full=2.0, naive=0.1, untimed=None).items() if "sooner" in label]
    assert [(row["method"], row[sooner.cost]) for row in sooner.rows] == [
        ("full", 1.0), ("naive", 20.0), ("untimed", None),
    ]  # fmt: skip
    assert "bytes kept of a document's token" in frontiers(full=None, naive=None, small=None, none=None)
    assert "bytes kept of a document's token" not in frontiers(full=None, naive=None, primed=None, none=None)

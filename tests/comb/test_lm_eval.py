"""comb in lm-evaluation-harness: the plain model's scores where nothing is linked, a method's where something is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("lm_eval")

from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from comb.evaluation.lm_eval import CombLM
from comb.evaluation.metrics import f1
from comb.evaluation.setting import read_sets
from tests.helpers.plugin import nano_adapter as nano_adapter

ROOT = Path(__file__).parents[2]
NAMES = ["Ada Bell", "Bob Cole", "Carl Dane", "Dora Egan"]
TASK = {
    "dataset_path": "json",
    "test_split": "test",
    "doc_to_text": "Answer from the passages.\n\n{{context}}\n\nQuestion: {{question}}\nAnswer:",
    "doc_to_target": "{{answer}}",
}
KINDS: dict[str, dict[str, Any]] = {
    "generates": {
        "output_type": "generate_until", "generation_kwargs": {"until": ["\n"], "max_gen_toks": 12},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    },
    "chooses": {
        "output_type": "multiple_choice", "doc_to_choice": [" Rome", " Paris", " Oslo", " Vienna went"],
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    },
    "rolls": {
        "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{context}}",
        "metric_list": [{"metric": "bits_per_byte", "higher_is_better": False, "aggregation": "bits_per_byte"}],
    },
}  # fmt: skip


SENTENCES = [f"{name} went to the museum. Then {name} moved to Rome, and works at Solara Foods." for name in NAMES]
PASSAGES = [" ".join(SENTENCES[place:] + SENTENCES[:place]) for place in range(3)]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of tasks over local rows, whose passages are numbered as LongBench numbers them."""
    folder = tmp_path_factory.mktemp("tasks")
    rows = []
    for order in ([0, 1, 2], [2, 0, 1], [1, 2, 0]):
        context = "\n\n".join(f"Passage {n}:\n{PASSAGES[place]}" for n, place in enumerate(order, 1))
        rows.append({"context": context, "question": f"Where is {NAMES[order[0]]}?", "answer": "0"})
    (folder / "rows.json").write_text(json.dumps(rows))
    for name, kind in KINDS.items():
        task = {**TASK, "dataset_kwargs": {"data_files": {"test": str(folder / "rows.json")}}, **kind, "task": name}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(task))
    return folder


def outcome(model: HFLM, tasks: Path) -> dict[str, list[Any]]:
    """What a model says to each request of each task."""
    manager = TaskManager(include_path=str(tasks), include_defaults=False)  # the harness has thousands
    found = simple_evaluate(model, tasks=list(KINDS), task_manager=manager, log_samples=True, bootstrap_iters=0)
    assert found is not None
    rows = {name: sorted(found["samples"][name], key=lambda row: int(row["doc_id"])) for name in KINDS}
    return {name: [row["resps"] for row in each] for name, each in rows.items()}


def scores(said: dict[str, list[Any]]) -> list[float]:
    """Log-probabilities of all choices."""
    return [choice[0][0] for row in said["chooses"] for choice in row]


def comb(method: str | None, on: str | Path = "nano", **more: Any) -> CombLM:
    return CombLM(str(on), method, dtype="float32", device="cpu", batch_size=2, **more)


def harness(tasks: Path, **more: Any) -> dict[str, list[Any]]:
    """What the harness's own model for transformers says."""
    engine = comb("full").engine
    return outcome(HFLM(engine.model, tokenizer=engine.tokenizer, batch_size=2, device="cpu", **more), tasks)


@pytest.fixture(scope="module")
def plain(tasks: Path) -> dict[str, list[Any]]:
    return harness(tasks)


@pytest.mark.parametrize(("method", "encoder", "least"), [
    ("full", False, 512), ("prefix", False, 512), ("naive", False, 512), ("full", True, 64), (None, True, 512),
])  # fmt: skip
def test_where_nothing_is_linked_scores_are_the_plain_models_to_the_last_digit(
    method: str | None, encoder: bool, least: int, nano_adapter: Path, tasks: Path, plain: dict[str, list[Any]]
) -> None:
    """With an encoder that is switched off or has no documents as well (COMB sec. 6.3)."""
    model = comb(method, nano_adapter if encoder else "nano", segment_tokens=least)
    assert model.engine.method.name == (method or "comb")
    assert outcome(model, tasks) == plain
    assert model.linked_tokens == 0 < model.computed_tokens == model.prompt_tokens


def test_what_is_linked_is_the_engines_and_a_whole_text_is_not_cut(tasks: Path, plain: dict[str, list[Any]]) -> None:
    linked, exact = comb("naive"), comb("legolink:65536")
    found, whole = outcome(linked, tasks), outcome(exact, tasks)
    assert found["rolls"] == whole["rolls"] == plain["rolls"]
    assert whole["generates"] == plain["generates"]
    assert scores(whole) == pytest.approx(scores(plain), abs=1e-4)
    apart = [abs(one - other) for one, other in zip(scores(found), scores(plain), strict=True)]
    assert max(apart) > 1e-2  # the control
    # three passages, each compiled once for all orders and both tasks
    assert linked.engine.store.stats().tiers["device"].entries == 3
    assert linked.linked_tokens > linked.prompt_tokens / 2
    # what stands in front of the passages is cached, too
    assert 0 < linked.computed_tokens < linked.prompt_tokens - linked.linked_tokens
    info = linked.get_model_info()
    assert (info["comb_method"], info["comb_linked_tokens"]) == ("naive", linked.linked_tokens)


def test_a_context_that_is_too_long_loses_its_start_as_in_the_harness(tasks: Path) -> None:
    given, found = harness(tasks, max_length=200), outcome(comb("legolink:65536", max_length=200), tasks)
    assert found["generates"] == given["generates"]
    assert scores(found) == pytest.approx(scores(given), abs=1e-4)


def test_a_context_that_leaves_no_position_to_answer_in_is_the_harnesss() -> None:
    model = comb("legolink:65536")
    passage = model.tok_encode(PASSAGES[0])
    context = [*passage, *model.tok_encode(" Where? " * model.max_length)][: model.max_length]
    request = (("", ""), context, passage[:1])  # one word behind it is scored at its last token
    assert model._loglikelihood_tokens([request]) == HFLM._loglikelihood_tokens(model, [request])
    assert model.linked_tokens == 0
    model._loglikelihood_tokens([(("", ""), context[:-1], passage[:1])])
    assert model.linked_tokens > 0


def test_an_encoder_that_reads_documents_changes_scores(
    nano_adapter: Path, tasks: Path, plain: dict[str, list[Any]]
) -> None:
    """The control."""
    model = comb(None, nano_adapter)
    said = outcome(model, tasks)
    assert model.linked_tokens > model.prompt_tokens / 2
    assert model.engine.store.stats().tiers["device"].entries == len(PASSAGES)
    apart = [abs(one - other) for one, other in zip(scores(said), scores(plain), strict=True)]
    assert min(apart) > 1e-3
    assert said["generates"] != plain["generates"]
    assert said["rolls"] == plain["rolls"]  # nothing is found in a whole text


@pytest.fixture
def squad(tmp_path: Path) -> Path:
    """A file of sets, and their data beside it: articles of three paragraphs, a question about each."""
    articles = [
        {"title": f"Town {n}", "paragraphs": [
            {"context": f"In {n} {text}", "qas": [{
                "id": f"q{n}", "question": f"Who came in {n}?", "is_impossible": False,
                "answers": [{"text": name, "answer_start": 0} for name in NAMES[:2]],
            }]}
            for text in PASSAGES
        ]}
        for n in range(20)
    ]  # fmt: skip
    (tmp_path / "squad.json").write_text(json.dumps({"data": articles}))
    content = yaml.safe_load((ROOT / "configs" / "evaluation.yaml").read_text())
    content["sets"]["squad"]["path"] = "squad.json"  # those of the others stay on the Hub
    (tmp_path / "sets.yaml").write_text(yaml.safe_dump(content))
    return tmp_path


def test_the_tasks_of_configs_ask_about_passages_that_are_found(squad: Path) -> None:
    metadata = {"data": str(squad), "sets": str(squad / "sets.yaml"), "pretrained": "nano"}
    manager = TaskManager(include_path=str(ROOT / "configs" / "lm_eval"), include_defaults=False, metadata=metadata)
    assert manager.all_subtasks == ["comb_hotpotqa", "comb_musique", "comb_nq_open", "comb_squad"]
    model = comb("legolink:16", front="none")
    found = simple_evaluate(model, tasks=["comb_squad"], task_manager=manager, limit=2, log_samples=True)
    assert found is not None
    rows = found["samples"]["comb_squad"]
    asked = read_sets(squad / "sets.yaml")["squad"].read(squad)
    assert [row["doc"]["question"] for row in rows] == [each.query for each in asked[:2]]
    prompt = rows[0]["arguments"][0][0]
    assert all(f"Passage {n}:\n{each.title}\n{each.text}" in prompt for n, each in enumerate(asked[0].documents, 1))
    documents = {each for example in asked[:2] for each in example.documents}
    assert model.engine.store.stats().tiers["device"].entries == len(documents)
    assert model.linked_tokens > model.prompt_tokens / 2
    for row in rows:
        assert row["f1"] == f1(row["resps"][0][0], NAMES[:2])


def test_its_command_line_is_the_harnesss_with_one_more_model(squad: Path) -> None:
    arguments = ["--model", "comb", "--model_args", "pretrained=nano,method=legolink:16,front=none,dtype=float32"]
    arguments += ["--tasks", "comb_squad", "--include_path", str(ROOT / "configs" / "lm_eval"), "--limit", "2"]
    arguments += ["--metadata", json.dumps({"data": str(squad), "sets": str(squad / "sets.yaml")})]
    command = [sys.executable, "-m", "comb.evaluation.lm_eval", *arguments, "--output_path", str(squad)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    (written,) = squad.rglob("results*.json")
    said = json.loads(written.read_text())
    assert said["config"]["comb_method"] == "legolink:16,front=none"
    assert said["config"]["comb_linked_tokens"] > said["config"]["comb_prompt_tokens"] / 2
    assert said["n-samples"]["comb_squad"]["effective"] == 2
    assert {"em,none", "f1,none"} <= set(said["results"]["comb_squad"])

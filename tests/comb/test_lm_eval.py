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


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of tasks over local rows, whose passages are numbered as LongBench numbers them."""
    folder = tmp_path_factory.mktemp("tasks")
    sentences = [f"{name} went to the museum. Then {name} moved to Rome, and works at Solara Foods." for name in NAMES]
    passages = [" ".join(sentences[place:] + sentences[:place]) for place in range(3)]
    rows = []
    for order in ([0, 1, 2], [2, 0, 1], [1, 2, 0]):
        context = "\n\n".join(f"Passage {n}:\n{passages[place]}" for n, place in enumerate(order, 1))
        rows.append({"context": context, "question": f"Where is {NAMES[order[0]]}?", "answer": "0"})
    (folder / "rows.json").write_text(json.dumps(rows))
    for name, kind in KINDS.items():
        task = {**TASK, "dataset_kwargs": {"data_files": {"test": str(folder / "rows.json")}}, **kind, "task": name}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(task))
    return folder


def outcome(model: HFLM, tasks: Path) -> dict[str, list[Any]]:
    """What a model says to each request of each task."""
    manager = TaskManager(include_path=str(tasks))
    found = simple_evaluate(model, tasks=list(KINDS), task_manager=manager, log_samples=True, bootstrap_iters=0)
    assert found is not None
    rows = {name: sorted(found["samples"][name], key=lambda row: int(row["doc_id"])) for name in KINDS}
    return {name: [row["resps"] for row in each] for name, each in rows.items()}


def scores(said: dict[str, list[Any]]) -> list[float]:
    """Log-probabilities of all choices."""
    return [choice[0][0] for row in said["chooses"] for choice in row]


def comb(method: str, **more: Any) -> CombLM:
    return CombLM("nano", method, dtype="float32", device="cpu", batch_size=2, **more)


@pytest.fixture(scope="module")
def plain(tasks: Path) -> dict[str, list[Any]]:
    """Of the harness's own model for transformers."""
    engine = comb("full").engine
    return outcome(HFLM(engine.model, tokenizer=engine.tokenizer, batch_size=2, device="cpu"), tasks)


@pytest.mark.parametrize("method", ["full", "prefix", "naive"])
def test_where_nothing_is_linked_scores_are_the_plain_models_to_the_last_digit(
    method: str, tasks: Path, plain: dict[str, list[Any]]
) -> None:
    model = comb(method, segment_tokens=512)
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
    short = {"max_length": 200}
    engine = comb("full").engine
    given = outcome(HFLM(engine.model, tokenizer=engine.tokenizer, batch_size=2, device="cpu", **short), tasks)
    found = outcome(comb("legolink:65536", **short), tasks)
    assert found["generates"] == given["generates"]
    assert scores(found) == pytest.approx(scores(given), abs=1e-4)


def test_its_command_line_is_the_harnesss_with_one_more_model(tasks: Path, tmp_path: Path) -> None:
    arguments = ["--model", "comb", "--model_args", "pretrained=nano,method=legolink:16,front=none,dtype=float32"]
    arguments += ["--tasks", "generates", "--include_path", str(tasks), "--limit", "2", "--output_path", str(tmp_path)]
    command = [sys.executable, "-m", "comb.evaluation.lm_eval", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    (written,) = tmp_path.rglob("results*.json")
    said = json.loads(written.read_text())
    assert said["config"]["comb_method"] == "legolink:16,front=none"
    assert said["n-samples"]["generates"]["effective"] == 2

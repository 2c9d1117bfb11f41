"""Segment parallelism: what workers compile is what the engine compiles, whatever happens; and its benchmark."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from comb import CombForCausalLM, PICache, PICEngine, methods
from comb.bench.parallel import ParallelOptions, measure_parallel, panels, tables
from comb.cli import main as cli
from comb.engine.workers import CompileExecutor, ExecutorStats
from comb.engine.workers import executor as executor_module
from comb.engine.workers.actor import Reply
from comb.engine.workers.executor import lpt
from comb.evaluation.plot import draw
from comb.evaluation.random_prompts import RandomPrompt
from comb.methods.base import Method
from comb.methods.presets import Naive
from comb.model.source import ModelSource
from tests.helpers.families import open_gates
from tests.helpers.hybrids import tiny_hybrid
from tests.helpers.parallel import ActorDiedError, ActorUnavailableError, InsideRay, at_once, inside
from tests.helpers.parallel_faults import FAULT_TOKEN
from tests.helpers.stores import same
from tests.helpers.tiny_engine import BOOK, CITY, LAKE, NEW, QUESTION, make_backbone, make_tokenizer

SEGMENTS = [[11, 12, 13, 14, 15, 16], [21, 22, 23], [31, 32, 33, 34], [41, 42], [51, 52, 53, 54, 55]]
FAULTY = [[11, 12, 13, 14, 15, FAULT_TOKEN], *SEGMENTS[1:]]
METHODS = ["comb", "naive", "legolink:4", "legolink-0", "cacheblend:0.5", "focus:0.5", "naive:quantize=int8"]


@pytest.fixture(scope="module")
def source(backbone_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    """An adapter."""
    path = tmp_path_factory.mktemp("adapter")
    model = open_gates(CombForCausalLM.from_backbone(str(backbone_folder), num_encoder_layers=2), 1.5, 0.5)
    model.save_pretrained(path, tokenizer=make_tokenizer())
    return ModelSource(str(path))


@pytest.fixture(scope="module")
def model(source: ModelSource) -> Any:
    return source.load()


@pytest.fixture(scope="module")
def whole(source: ModelSource) -> Iterator[CompileExecutor]:
    """Two workers in this process; Ray's are in test_parallel_ray.py."""
    with inside(source, 2) as executor:
        yield executor


def alone(method: Method, segments: list[list[int]]) -> list[PICache]:
    return [method.compile([segment])[0] for segment in segments]


def counted(executor: CompileExecutor, before: Any) -> dict[str, int]:
    now = asdict(executor.stats)
    return {name: now[name] - value for name, value in asdict(before).items() if now[name] != value}


# ---- what workers compile ----


@pytest.mark.parametrize("spec", METHODS)
def test_workers_compile_what_the_method_compiles(whole: CompileExecutor, model: Any, spec: str) -> None:
    method, before = methods.create(spec, model), whole.stats
    whole.check(method)
    segments = [*SEGMENTS, SEGMENTS[1]]
    assert same(whole.compile(method, segments), alone(method, segments))
    assert counted(whole, before) == {"requests": 1, "by_workers": 5}  # one was given twice
    if spec != "comb":  # whose encoder pads a batch of segments, which may change the last bit
        assert same(whole.compile(method, segments), method.compile(segments))
    assert not same(whole.compile(method, SEGMENTS), alone(method, SEGMENTS[::-1]))  # the comparison can fail


def test_a_worker_compiles_the_states_of_a_hybrid(tmp_path: Path) -> None:
    tiny_hybrid("bamba").save_pretrained(tmp_path)
    source = ModelSource(str(tmp_path))
    method, segments = methods.create("hypic:4", source.load()), [list(range(3, 33)), list(range(40, 61))]
    with inside(source, 1) as executor:
        executor.check(method)
        assert same(executor.compile(method, segments), alone(method, segments))
        assert executor.stats.by_workers == 2
    assert all("state.0" in picache.tensors() for picache in alone(method, segments))


def test_methods_that_keep_tokens_only_stay_here(whole: CompileExecutor, model: Any) -> None:
    before = whole.stats
    for spec in ("full", "prefix"):
        method = methods.create(spec, model)
        assert same(whole.compile(method, SEGMENTS), method.compile(SEGMENTS))
    assert whole.stats == before


def test_the_engine_answers_alike_with_and_without_workers(whole: CompileExecutor, model: Any) -> None:
    for method in ("comb", "legolink:4", "naive,front=dummies:8"):
        alone = PICEngine(model, make_tokenizer(), method=method)
        engine = PICEngine(model, make_tokenizer(), method=method, executor=whole)
        before = whole.stats
        expected = alone.ask(QUESTION, [LAKE, CITY, BOOK], max_new_tokens=NEW)
        answer = engine.ask(QUESTION, [LAKE, CITY, BOOK], max_new_tokens=NEW)
        assert answer.token_ids == expected.token_ids
        # two workers have computed a front each
        assert answer.report.compiled_tokens - expected.report.compiled_tokens == (8 if "front" in method else 0)
        assert counted(whole, before) == {"requests": 1, "by_workers": 3}
        again = engine.ask(QUESTION, [BOOK, LAKE, CITY], max_new_tokens=NEW)
        assert [document.state for document in again.report.documents] == ["hit"] * 3
        assert counted(whole, before) == {"requests": 1, "by_workers": 3}
        engine.close()
        assert len(whole.ready) == 2  # it is not the engine's own


def test_threads_take_turns(whole: CompileExecutor, model: Any) -> None:
    method = methods.create("naive", model)
    expected = alone(method, SEGMENTS)
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(lambda _: same(whole.compile(method, SEGMENTS), expected), range(12)))


# ---- what goes wrong ----


def test_bad_segments_raise_what_the_method_raises(whole: CompileExecutor, model: Any) -> None:
    method, before = methods.create("naive", model), whole.stats
    for bad in ([[1, 2], []], [[1, 2], [3, 4], [5, 9999]]):
        with pytest.raises(ValueError) as ours:
            whole.compile(method, bad)
        with pytest.raises(ValueError) as theirs:
            method.compile(bad)
        assert str(ours.value) == str(theirs.value)
    assert counted(whole, before) == {"requests": 1, "by_workers": 2, "failed": 1}
    # what was under way then is not taken for a result of the next request
    assert same(whole.compile(method, SEGMENTS), alone(method, SEGMENTS))


def test_weights_changed_since_the_workers_loaded_them(whole: CompileExecutor, source: ModelSource) -> None:
    changed = source.load()
    with torch.no_grad():
        changed.backbone.get_input_embeddings().weight[30:40] += 1.0
    for spec in ("naive", "comb"):
        method, before = methods.create(spec, changed), whole.stats
        with pytest.raises(ValueError, match="fingerprint"):
            whole.check(method)
        assert same(whole.compile(method, SEGMENTS), alone(method, SEGMENTS))
        assert counted(whole, before) == {"requests": 1, "refused": 5, "locally": 5}
        with pytest.raises(ValueError, match="workers don't compile"):
            PICEngine(changed, make_tokenizer(), method=spec, executor=whole)


def test_pins_and_references_end_with_a_request_that_fails(whole: CompileExecutor, model: Any) -> None:
    engine = PICEngine(model, make_tokenizer(), method="naive", executor=whole)
    with patch.object(InsideRay, "wait", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        engine.ask(QUESTION, [LAKE, CITY], max_new_tokens=NEW)
    assert engine.store.stats().in_use == 0
    alone = PICEngine(model, make_tokenizer(), method="naive")
    ours, theirs = (each.ask(QUESTION, [LAKE, CITY], max_new_tokens=NEW).token_ids for each in (engine, alone))
    assert ours == theirs
    assert engine.store.stats().in_use == 0


def test_what_workers_cannot_load_is_said(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(RuntimeError, match="a worker could not load '/nowhere': OSError"):
        inside(ModelSource("/nowhere"), 1)
    with pytest.raises(ValueError, match="at least one worker"):
        inside(ModelSource("nothing"), 0)
    with pytest.raises(ValueError, match="plain options"):
        ModelSource("x", {"quantization_config": object()})
    cases = [(make_backbone(), "naive", 2, "made in memory"), (model, Naive(model), 2, "make it with comb"),
             (model, "naive", -1, "or 0 for none")]  # fmt: skip
    if find_spec("ray") is None:
        cases.append((model, "naive", 2, "pip install 'comb-pic"))
    for model, method, workers, message in cases:
        with pytest.raises(ValueError, match=message):
            PICEngine(model, make_tokenizer(), method=method, workers=workers)
    engine = PICEngine(model, make_tokenizer(), method="full", workers=2)
    assert engine.executor is None
    assert "nothing to compile" in caplog.text


# ---- any order of events, without processes ----


@pytest.mark.parametrize("seed", range(12))
def test_whatever_happens_every_segment_is_compiled_and_right(source: ModelSource, model: Any, seed: int) -> None:
    method, generator = methods.create("naive", model), random.Random(seed)

    def chaos(compile: Any, spec: Any, fingerprint: str, key: str, token_ids: tuple[int, ...]) -> Reply | None:
        """A worker that answers now or never, dies, for good or not, and sends rubbish."""
        event = generator.random()
        if event < 0.1:
            raise (ActorDiedError if event < 0.02 else ActorUnavailableError)("gone\nfor good")
        if event < 0.15:
            return None
        reply = compile(spec, fingerprint, key if event < 0.9 else "another", token_ids)
        if reply.data is not None and 0.8 < event < 0.9:
            reply = replace(reply, data=reply.data[: len(reply.data) // 2])
        return reply

    executor = inside(source, generator.randint(1, 5), chaos)
    for _ in range(6):
        segments = [
            [generator.randrange(256) for _ in range(generator.randint(1, 12))] for _ in range(generator.randint(2, 9))
        ]
        assert same(executor.compile(method, segments), alone(method, segments))
    stats = executor.stats
    assert stats.locally == stats.died + stats.late + stats.damaged > 0
    assert stats.by_workers > 0


def test_who_is_late_is_ended_and_gets_nothing_until_it_is_back(source: ModelSource, model: Any) -> None:
    def never(compile: Any, *call: Any) -> Reply | None:
        return None if call[-1] == tuple(SEGMENTS[0]) else at_once(compile, *call)

    method, executor = methods.create("naive", model), inside(source, 2, never)
    assert same(executor.compile(method, SEGMENTS), alone(method, SEGMENTS))
    assert executor._ray.killed == [False]  # with another in its place
    assert counted(executor, ExecutorStats()) == {"requests": 1, "by_workers": 4, "late": 1, "locally": 1}
    away = list(executor._actors)
    with patch.object(InsideRay, "wait", lambda self, refs, **_: ([], refs)):  # Ray is still starting them
        assert same(executor.compile(method, SEGMENTS), alone(method, SEGMENTS))
    assert executor.stats.locally == 1 + 5
    assert list(executor.ready) == away
    with patch.object(InsideRay, "is_initialized", lambda self: False):  # somebody has called ray.shutdown()
        assert same(executor.compile(method, SEGMENTS), alone(method, SEGMENTS))
        executor.close()
    assert executor._ray.killed == [False]


def test_a_result_under_another_key_is_not_taken(
    source: ModelSource, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the control of the test above: without the key, a PICache of another segment gets through."""

    def swapped(compile: Any, spec: Any, fingerprint: str, key: str, token_ids: tuple[int, ...]) -> Any:
        return compile(spec, fingerprint, "another", (7,) * len(token_ids))

    method, executor = methods.create("naive", model), inside(source, 2, swapped)
    assert same(executor.compile(method, FAULTY), alone(method, FAULTY))
    assert executor.stats.damaged == 5
    unchecked = executor_module.deserialize
    monkeypatch.setattr(executor_module, "deserialize", lambda data, key, device: unchecked(data, "another", device))
    assert not same(executor.compile(method, FAULTY), alone(method, FAULTY))


# ---- `comb bench parallel` and `comb ask --workers`: what is measured adds up, and the commands run once ----


runner = CliRunner()


def test_stages_add_up(backbone_folder: Path, tmp_path: Path) -> None:
    source = ModelSource(str(backbone_folder))
    model = source.load()
    options, prompt = ParallelOptions(repeats=3), RandomPrompt.random(model, 90, 20, 4)
    lengths = [len(segment) for segment in prompt.segments]
    rows = measure_parallel(model, inside(source, 3), ["naive", "legolink:2"], [1, 3], prompt, options)
    assert [(row["method"], row["workers"]) for row in rows] == [
        ("naive", 1), ("naive", 3), ("legolink:2", 1), ("legolink:2", 3),
    ]  # fmt: skip
    for row in rows:
        stages = row["dispatch_s"].low + row["transfer_s"].low + row["combine_s"].low
        assert 0 < stages <= row["ttft_s"].high
        if row["workers"] == 1:
            assert (row["speedup"].low, row["speedup"].high) == (1.0, 1.0)
            assert 0 < row["combine_share"].median < 1
        assert row["dispatch_s"].median == pytest.approx(1e-6 * makespan(lengths, lpt(lengths, row["workers"])))
    assert "| naive | 3 |" in "".join(table.markdown() for table in tables(rows))
    pytest.importorskip("matplotlib")
    assert draw(panels(rows), tmp_path / "plot.png").stat().st_size > 1000


def test_no_time_is_shown_when_workers_are_lost_or_wrong(backbone_folder: Path) -> None:
    source = ModelSource(str(backbone_folder))
    model = source.load()
    prompt = RandomPrompt.random(model, 30, 10, 4)

    def measure(executor: CompileExecutor, workers: list[int]) -> Any:
        return measure_parallel(model, executor, ["naive"], workers, prompt, ParallelOptions(repeats=1))

    def lost(compile: Any, *call: Any) -> Any:
        if call[-1]:
            raise ActorUnavailableError("lost")
        return compile(*call)

    with pytest.raises(ValueError, match="no times of workers"):
        measure(inside(source, 2, lost), [1, 2])
    for workers in ([2], [1, 3], []):
        with pytest.raises(ValueError, match="from 1 to 2"):
            measure(inside(source, 2), workers)
    with torch.no_grad():
        model.get_input_embeddings().weight[:100] += 1.0
    with pytest.raises(ValueError, match="workers don't compile"):
        measure(inside(source, 2), [1, 2])
    for wrong in (["--segments", "1"], ["--segment-tokens", "0"], ["--query-tokens", "0"]):
        assert "Invalid value" in runner.invoke(cli.app, ["bench", "parallel", *wrong]).output


def test_the_commands(backbone_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With workers in this process; over Ray: test_parallel_ray.py."""

    monkeypatch.setitem(sys.modules, "ray", InsideRay())
    out = tmp_path / "out.json"
    result = runner.invoke(
        cli.app,
        [
            "bench", "parallel", "--layers", "2", "--hidden", "32", "--heads", "4", "--kv-heads", "2", "--vocab", "64",
            "--segment-tokens", "16", "--segments", "4", "--repeats", "1", "--methods", "naive", "--out", str(out),
        ],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    content = json.loads(out.read_text())
    assert [(r["method"], r["workers"]) for r in content["results"]] == [("naive", 1), ("naive", 2)]
    assert len(content["load_before"]) == 3
    (tmp_path / "a.txt").write_text("The lake is deep.")
    (tmp_path / "b.txt").write_text("Rill is a city.")
    documents = ["--doc", str(tmp_path / "a.txt"), "--doc", str(tmp_path / "b.txt")]
    asked = runner.invoke(
        cli.app,
        ["ask", str(backbone_folder), "How?", *documents, "--method=naive", "--workers=2", "--max-new-tokens=3"],
    )
    assert asked.exit_code == 0, asked.output
    assert "workers 2: requests 1, by workers 2" in asked.output


# ---- who compiles what ----


def makespan(costs: list[int], plan: list[list[int]]) -> int:
    """The load of the busiest worker."""
    return max(sum(costs[index] for index in indices) for indices in plan)


@given(st.lists(st.integers(1, 4000), min_size=1, max_size=8), st.integers(1, 5))
def test_a_plan_holds_every_segment_once_and_is_deterministic(costs: list[int], workers: int) -> None:
    plan = lpt(costs, workers)
    assert len(plan) == workers
    assert sorted(index for indices in plan for index in indices) == list(range(len(costs)))
    assert plan == lpt(costs, workers)
    for indices in plan:  # each worker has its longest first
        assert [costs[index] for index in indices] == sorted((costs[index] for index in indices), reverse=True)


def test_lpt_reaches_its_bound() -> None:
    costs = [5, 5, 4, 4, 3, 3, 3]  # Graham's worst case for three workers: 11 against 9 of [5, 4], [5, 4], [3, 3, 3]
    assert makespan(costs, lpt(costs, 3)) == 11
    assert lpt([2, 2, 2, 2], 2) == [[0, 2], [1, 3]]

"""Segment parallelism over Ray: two nodes of a cluster on this machine, with an object store each."""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from comb import methods
from comb.bench.work import RandomPrompt, random_model
from comb.engine.engine import PICEngine
from comb.engine.workers import CompileExecutor, Deadline
from comb.engine.workers.executor import ExecutorStats, spec_of
from comb.engine.workers.request import CompileRequest
from comb.model.source import ModelSource
from tests.comb.test_parallel import FAULTY, SEGMENTS, alone, counted, fragile, same, wait_until_ready
from tests.helpers.processes import wait_for
from tests.helpers.tiny_engine import BOOK, CITY, LAKE, NEW, QUESTION, make_backbone, make_tokenizer

ray: Any = pytest.importorskip("ray")
pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("one_thread")]
SECONDS = 120  # Ray itself waits for ever, for an actor that no node has room for, say


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    before = {name: os.environ.get(name) for name in ("PYTHONPATH", "RAY_USAGE_STATS_ENABLED")}
    # a cluster's machines must be able to import what the workers import
    os.environ.update(PYTHONPATH=os.pathsep.join(filter(None, sys.path)), RAY_USAGE_STATS_ENABLED="0")
    small = {"object_store_memory": 200 * 2**20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **small})
    try:
        for name in ("one", "two"):
            cluster.add_node(num_cpus=1, resources={name: 1}, **small)
        ray.init(address=cluster.address, log_to_driver=False)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ray")
    make_backbone().save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def executor(cluster: Any, folder: Path) -> Iterator[CompileExecutor]:
    from comb.engine.workers.ray_actors import ray_executor

    with ray_executor(ModelSource(str(folder)), 2, imports=("tests.helpers.register_fragile",)) as executor:
        yield executor


@pytest.fixture
def whole(executor: CompileExecutor) -> Iterator[CompileExecutor]:
    """Both actors there; what a test has lost is back."""
    wait_until_ready(executor)
    before = executor.deadline
    yield executor
    executor.deadline = before


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return ModelSource(str(folder)).load()


def test_actors_compile_what_the_method_compiles(whole: CompileExecutor, model: Any, cluster: Any) -> None:
    workers: Any = whole.ready
    nodes = {ray.get(worker.actor.__ray_call__.remote(_node)) for worker in workers}
    assert len(nodes) == 2  # two machines, as far as Ray knows
    for spec in ("naive", "legolink-0", "naive:quantize=int8"):
        method, before = methods.create(spec, model), whole.stats
        whole.check(method)
        assert same(whole.compile(method, SEGMENTS), alone(method, SEGMENTS))
        assert counted(whole, before) == {"requests": 1, "by_workers": 5}


def _node(actor: Any) -> str:
    import ray

    return str(ray.get_runtime_context().get_node_id())


def test_the_engine_answers_alike(whole: CompileExecutor, model: Any) -> None:
    engine = PICEngine(model, make_tokenizer(), method="legolink:4", executor=whole)
    local = PICEngine(model, make_tokenizer(), method="legolink:4")
    answers = [each.ask(QUESTION, [LAKE, CITY, BOOK], max_new_tokens=NEW) for each in (engine, local)]
    assert answers[0].token_ids == answers[1].token_ids


def test_an_actor_that_dies_hangs_or_damages(whole: CompileExecutor, model: Any) -> None:
    for fault, count in (("damage", "damaged"), ("raise", "failed"), ("swap", "damaged"), ("kill", "died")):
        method, before = fragile(model, fault), whole.stats
        assert same(whole.compile(method, FAULTY), alone(method, FAULTY))
        found = counted(whole, before)
        assert found[count] == 1
        assert found["locally"] >= 1


def test_a_late_actor_is_replaced(whole: CompileExecutor, model: Any) -> None:
    method, before = fragile(model, "hang"), whole.stats
    whole.compile(method, SEGMENTS)
    whole.deadline = Deadline(floor_s=1.5, factor=4, first_s=1.5)
    assert same(whole.compile(method, FAULTY), alone(method, FAULTY))
    assert counted(whole, before)["late"] >= 1


def test_other_weights_are_refused(whole: CompileExecutor, model: Any, folder: Path) -> None:
    changed = ModelSource(str(folder)).load()
    with torch.no_grad():
        changed.get_input_embeddings().weight[30:40] += 1.0
    with pytest.raises(ValueError, match="fingerprint"):
        whole.check(methods.create("naive", changed))


# --- shared between engines -------------------------------------------------------------------------------------------


class OtherEngine:
    """In an actor of its own: compiles, and owns what it has had compiled."""

    def __init__(self, name: str) -> None:
        from comb.engine.workers.ray_actors import ray_executor

        source = ModelSource(name)
        self._model = source.load()
        self._executor = ray_executor(source, 1, share="test", resources={"num_cpus": 0})

    def compile(self, spec: str, segments: list[list[int]]) -> dict[str, int]:
        self._executor.compile(methods.create(spec, self._model), segments)
        return {name: count for name, count in asdict(self._executor.stats).items() if count}


@pytest.fixture(scope="module")
def sharing(cluster: Any, folder: Path) -> Iterator[CompileExecutor]:
    from comb.engine.workers.ray_actors import ray_executor

    with ray_executor(ModelSource(str(folder)), 1, share="test", resources={"num_cpus": 0}) as sharing:
        yield sharing


def another_engine(folder: Path) -> Any:
    return ray.remote(num_cpus=0)(OtherEngine).remote(str(folder))


def wait_until_shared(method: Any, segments: list[list[int]]) -> None:
    """An index is told without waiting for it."""
    request = CompileRequest(method, spec_of(method), [tuple(each) for each in segments], Counter())
    index, end = ray.get_actor("test", namespace="comb"), time.monotonic() + 60
    while not all(ray.get(index.find.remote(request.keys))):
        assert time.monotonic() < end
        time.sleep(0.05)


def wait_until_lost(method: Any, segments: list[list[int]]) -> None:
    """A node hears of an owner's end a little after the others."""
    request = CompileRequest(method, spec_of(method), [tuple(each) for each in segments], Counter())
    index, end = ray.get_actor("test", namespace="comb"), time.monotonic() + 60
    for [reference] in ray.get(index.find.remote(request.keys)):
        while fetchable(reference):
            assert time.monotonic() < end
            time.sleep(0.1)


def fetchable(reference: Any) -> bool:
    try:
        ray.get(reference, timeout=5)
    except ray.exceptions.RayError:
        return False
    return True


def kill(actor: Any) -> None:
    """Kills it and waits until it is gone: `ray.kill` alone returns at once, and a dying actor may still answer."""

    def gone() -> bool:
        try:
            ray.get(actor.__ray_ready__.remote(), timeout=60)
        except ray.exceptions.RayActorError:
            return True
        return False

    ray.kill(actor)
    wait_for(gone)


def test_what_another_engine_has_compiled_is_fetched(sharing: CompileExecutor, model: Any, folder: Path) -> None:
    other, method = another_engine(folder), methods.create("naive", model)
    assert ray.get(other.compile.remote("naive", SEGMENTS), timeout=SECONDS) == {"requests": 1, "by_workers": 5}
    wait_until_shared(method, SEGMENTS)
    before = sharing.stats
    assert same(sharing.compile(method, SEGMENTS), alone(method, SEGMENTS))
    assert counted(sharing, before) == {"requests": 1, "shared": 5}
    new = [[7, 8, 9], SEGMENTS[0], [9, 9]]  # one of three, in another order
    before = sharing.stats
    assert same(sharing.compile(method, new), alone(method, new))
    assert counted(sharing, before) == {"requests": 1, "shared": 1, "by_workers": 2}
    wait_until_shared(method, new)
    assert ray.get(other.compile.remote("naive", [[9, 9]]), timeout=SECONDS) == {
        "requests": 2,
        "by_workers": 5,
        "shared": 1,
    }
    before, differently = sharing.stats, methods.create("legolink-0", model)
    assert same(sharing.compile(differently, SEGMENTS), alone(differently, SEGMENTS))
    assert counted(sharing, before) == {"requests": 1, "by_workers": 5}  # another fingerprint


def test_fetching_beside_compiling_and_without_the_owner(cluster: Any, tmp_path: Path) -> None:
    """The same bits; `-rP` prints the times that docs/segment-parallel.md shows."""
    from comb.engine.workers.ray_actors import ray_executor

    name, source = str(tmp_path), ModelSource(str(tmp_path))
    random_model(layers=8, hidden=512, heads=8, kv_heads=2, vocab=2048, positions=4096, hybrid=True).save_pretrained(
        name
    )
    model = source.load()
    method = methods.create("hypic:8", model)
    other = ray.remote(num_cpus=0, resources={"one": 1})(OtherEngine).remote(name)
    with ray_executor(source, 1, share="test", resources={"num_cpus": 0, "resources": {"two": 1}}) as executor:
        for seed in range(3):
            segments = RandomPrompt.random(2048, 4096, 512, 1, seed).segments
            ray.get(other.compile.remote("hypic:8", segments), timeout=SECONDS)
            wait_until_shared(method, segments)
            run = executor.run(method, segments)
            start = time.perf_counter()
            expected = alone(method, segments)
            seconds, mebibytes = time.perf_counter() - start, sum(each.nbytes for each in expected) / 2**20
            print(
                f"8 documents of 512 tokens, {mebibytes:.0f} MiB: {run.seconds:.2f} s fetched, {seconds:.2f} s compiled"
            )
            assert same(run.picaches, expected)
        assert counted(executor, ExecutorStats()) == {"requests": 3, "shared": 24}
        # Ray keeps small objects everywhere; these end with their owner
        segments = RandomPrompt.random(2048, 1024, 512, 1, seed=3).segments
        ray.get(other.compile.remote("hypic:8", segments), timeout=SECONDS)
        wait_until_shared(method, segments)
        kill(other)
        wait_until_lost(method, segments)
        for expected in ("by_workers", "shared"):  # compiled, and then it is there again
            before = executor.stats
            assert same(executor.compile(method, segments), alone(method, segments))
            assert counted(executor, before) == {"requests": 1, expected: 2}
            wait_until_shared(method, segments)


def test_a_wrong_or_silent_index_costs_time_alone(sharing: CompileExecutor, model: Any, folder: Path) -> None:
    from comb.engine.workers.ray_actors import ray_executor

    method, segments = methods.create("naive", model), [[15, 16, 17], [18, 17, 16]]
    with ray_executor(ModelSource(str(folder)), 1, share="wrong", resources={"num_cpus": 0}) as executor:
        sources = [CompileRequest(method, spec_of(method), [tuple(each)], Counter()) for each in segments]
        swapped = executor.compile(method, segments[:1])  # then its reply is called that of the other
        index, reference = ray.get_actor("wrong", namespace="comb"), []
        while not reference:
            (reference,) = ray.get(index.find.remote(sources[0].keys))
        ray.get(index.add.remote(sources[1].keys[0], reference, 1))
        before = executor.stats
        assert same(executor.compile(method, segments), alone(method, segments))
        assert counted(executor, before) == {"requests": 1, "shared": 1, "by_workers": 1}
        assert same(swapped, alone(method, segments[:1]))
        kill(index)
        before = executor.stats
        assert same(executor.compile(method, segments), alone(method, segments))
        assert counted(executor, before) == {"requests": 1, "by_workers": 2}


def test_what_an_actor_cannot_load_is_said(cluster: Any, folder: Path, executor: CompileExecutor) -> None:
    from comb.engine.workers.ray_actors import ray_executor

    executor.close()  # there are CPUs for two actors only
    with pytest.raises(RuntimeError, match="nowhere"):
        ray_executor(ModelSource(str(folder / "nowhere")), 1)

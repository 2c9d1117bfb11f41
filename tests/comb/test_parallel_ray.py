"""Segment parallelism over Ray: two nodes of a cluster on this machine, with an object store each."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from comb import methods
from comb.engine.engine import PICEngine
from comb.engine.workers import CompileExecutor
from comb.methods.base import Method
from comb.model.source import ModelSource
from tests.comb.test_parallel import FAULTY, SEGMENTS, alone, counted
from tests.helpers.parallel_faults import Fragile
from tests.helpers.processes import wait_for
from tests.helpers.stores import same
from tests.helpers.tiny_engine import CITY, LAKE, NEW, QUESTION

ray: Any = pytest.importorskip("ray")
pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


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
def executor(cluster: Any, backbone_folder: Path) -> Iterator[CompileExecutor]:
    with CompileExecutor(ModelSource(str(backbone_folder)), 2, imports=("tests.helpers.register_fragile",)) as executor:
        yield executor


@pytest.fixture
def whole(executor: CompileExecutor) -> CompileExecutor:
    """Both actors there; what a test has lost is back."""
    wait_for(lambda: len(executor.ready) == 2, 120)
    return executor


def fragile(model: Any, fault: str) -> Method:
    parameters = {"home": os.getpid(), "fault": fault}
    method = Fragile(model, **parameters)
    method.spec = methods.MethodSpec("fragile", parameters)
    return method


@pytest.fixture(scope="module")
def model(backbone_folder: Path) -> Any:
    return ModelSource(str(backbone_folder)).load()


def test_actors_compile_what_the_method_compiles(whole: CompileExecutor, model: Any, cluster: Any) -> None:
    nodes = {ray.get(actor.__ray_call__.remote(_node)) for actor in whole.ready.values()}
    assert len(nodes) == 2  # two machines, as far as Ray knows
    for spec in ("naive", "legolink-0", "naive:quantize=int8"):
        method, before = methods.create(spec, model), whole.stats
        whole.check(method)
        assert same(whole.compile(method, SEGMENTS), alone(method, SEGMENTS))
        assert counted(whole, before) == {"requests": 1, "by_workers": 5}


def _node(actor: Any) -> str:
    import ray

    return str(ray.get_runtime_context().get_node_id())


def test_an_actor_that_dies(whole: CompileExecutor, model: Any) -> None:
    method, before = fragile(model, "kill"), whole.stats
    assert same(whole.compile(method, FAULTY), alone(method, FAULTY))
    found = counted(whole, before)
    assert found["locally"] == found["died"] >= 1  # all that one owed
    wait_for(lambda: len(whole.ready) == 2, 120)


def test_a_late_actor_is_replaced(whole: CompileExecutor, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    method, before = fragile(model, "hang"), whole.stats
    whole.compile(method, SEGMENTS)
    monkeypatch.setattr(whole, "timeout_s", 1.5)
    assert same(whole.compile(method, FAULTY), alone(method, FAULTY))
    assert counted(whole, before)["late"] >= 1
    wait_for(lambda: len(whole.ready) == 2, 120)
    before = whole.stats
    assert same(whole.compile(method, SEGMENTS), alone(method, SEGMENTS))
    assert counted(whole, before) == {"requests": 1, "by_workers": 5}


def test_what_an_actor_cannot_load_is_said(cluster: Any, backbone_folder: Path, executor: CompileExecutor) -> None:
    executor.close()  # there are CPUs for two actors only
    with pytest.raises(RuntimeError, match="nowhere"):
        CompileExecutor(ModelSource(str(backbone_folder / "nowhere")), 1)


def test_more_workers_than_cpus_are_refused_at_once(backbone_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr("ray.init", lambda **_: None)
    monkeypatch.setattr("ray.shutdown", lambda: None)
    monkeypatch.setattr("ray.cluster_resources", lambda: {"CPU": 3.0})
    with pytest.raises(ValueError, match=r"2 workers of 2 CPUs each are more than Ray has here \(3\)"):
        CompileExecutor(ModelSource(str(backbone_folder)), 2, threads=2)


def test_a_ray_that_was_started_anew_has_no_workers_of_before(
    cluster: Any, model: Any, backbone_folder: Path, executor: CompileExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    executor.close()  # there are CPUs for two actors only
    method = methods.create("naive", model)
    with CompileExecutor(ModelSource(str(backbone_folder)), 2) as other:
        ray.shutdown()
        ray.init(address=cluster.address, log_to_driver=False)
        for _ in range(2):
            assert same(other.compile(method, SEGMENTS), alone(method, SEGMENTS))
        assert other.stats.locally == 5  # then it is one without workers
    assert "make another executor" in caplog.text


def test_an_engines_own_actors_end_with_it(cluster: Any, backbone_folder: Path, executor: CompileExecutor) -> None:
    executor.close()
    with PICEngine.from_pretrained(backbone_folder, method="naive", workers=2, dtype=torch.float32) as engine:
        assert engine.executor is not None
        first = engine.ask(QUESTION, [LAKE, CITY], max_new_tokens=NEW)
        assert engine.executor.stats.by_workers == 2
        actors = list(engine.executor.ready.values())
        assert len(actors) == 2

    def gone(actor: Any) -> bool:
        try:
            ray.get(actor.loaded.remote(), timeout=60)
        except ray.exceptions.RayActorError:
            return True
        return False  # it is told to end, and may still answer

    for actor in actors:
        wait_for(lambda actor=actor: gone(actor))
    assert engine.ask(QUESTION, [LAKE, CITY], max_new_tokens=NEW).token_ids == first.token_ids
    new = engine.ask(QUESTION, ["The lake is cold.", "The city is old."], max_new_tokens=NEW)  # compiled here
    assert [document.state for document in new.report.documents] == ["compiled"] * 2

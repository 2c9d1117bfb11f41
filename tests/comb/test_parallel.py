"""Segment parallelism: what workers compile is what the engine compiles, whatever happens to a worker."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from comb import methods
from comb.cache.picache import PICache
from comb.cache.picache_file import serialize
from comb.engine.engine import PICEngine
from comb.engine.workers import CompileExecutor, Deadline, ModelSource, wire
from comb.engine.workers.pool import Reply, Task, WorkerLostError, WorkerPool
from comb.engine.workers.processes import ProcessPool, process_executor
from comb.engine.workers.worker import Compiler, WorkerSpec, decode_ids, encode_ids
from comb.methods.base import Method
from comb.methods.naive import Naive
from tests.comb.test_engine import BOOK, CITY, LAKE, NEW, QUESTION, make_backbone, make_comb, make_tokenizer
from tests.helpers.parallel_faults import FAULT_TOKEN, Fragile
from tests.helpers.processes import gone, wait_until_gone

# sums are taken in the order of a worker, which has one thread
pytestmark = pytest.mark.usefixtures("one_thread")

SEGMENTS = [[11, 12, 13, 14, 15, 16], [21, 22, 23], [31, 32, 33, 34], [41, 42], [51, 52, 53, 54, 55]]
FAULTY = [[11, 12, 13, 14, 15, FAULT_TOKEN], *SEGMENTS[1:]]
METHODS = ["comb", "naive", "block", "legolink:4", "legolink-0", "cacheblend:0.5", "naive:quantize=int8"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter, and its backbone beside it."""
    path = tmp_path_factory.mktemp("parallel")
    make_backbone().save_pretrained(path / "backbone")
    make_tokenizer().save_pretrained(path / "backbone")
    from comb import CombForCausalLM

    model = CombForCausalLM.from_backbone(str(path / "backbone"), num_encoder_layers=2)
    for ours, theirs in zip(model.cross_blocks, make_comb().cross_blocks, strict=True):
        ours.load_state_dict(theirs.state_dict())
    model.save_pretrained(path / "adapter", tokenizer=make_tokenizer())
    return path


@pytest.fixture(scope="module")
def source(folder: Path) -> ModelSource:
    return ModelSource(str(folder / "adapter"))


@pytest.fixture(scope="module")
def model(source: ModelSource) -> Any:
    return source.load()


@pytest.fixture(scope="module")
def executor(source: ModelSource) -> Iterator[CompileExecutor]:
    """Two processes for all tests of this file; those that a test has lost are back before the next one."""
    with process_executor(source, 2, imports=("tests.helpers.parallel_faults",), restarts=20) as executor:
        yield executor


@pytest.fixture
def whole(executor: CompileExecutor) -> Iterator[CompileExecutor]:
    end = time.monotonic() + 120
    while len(executor.pool.ready) < 2 and time.monotonic() < end:
        executor.pool.wait(0.1)
    assert len(executor.pool.ready) == 2
    before = executor.deadline
    yield executor
    executor.deadline = before


def same(ours: list[PICache], theirs: list[PICache]) -> bool:
    """Whether all PICaches are equal, bit for bit."""
    return len(ours) == len(theirs) and all(
        type(a) is type(b)
        and a.fingerprint == b.fingerprint
        and a.tensors().keys() == b.tensors().keys()
        and all(torch.equal(tensor, b.tensors()[name]) for name, tensor in a.tensors().items())
        for a, b in zip(ours, theirs, strict=True)
    )


def alone(method: Method, segments: list[list[int]]) -> list[PICache]:
    return [method.compile([segment])[0] for segment in segments]


def shared_memory(*processes: int) -> list[str]:
    """Every piece of shared memory that this process and `processes` hold; they are the only ones that can."""
    found = []
    for process in (os.getpid(), *processes):
        for descriptor in Path(f"/proc/{process}/fd").iterdir():
            try:
                target = str(descriptor.readlink())
            except OSError:
                continue  # closed meanwhile
            found += [target] if "comb-picache" in target else []
    return found


def counted(executor: CompileExecutor, before: Any) -> dict[str, int]:
    now = executor.stats.to_dict()
    return {name: now[name] - value for name, value in before.to_dict().items() if now[name] != value}


def fragile(model: Any, fault: str) -> Method:
    parameters = {"home": os.getpid(), "fault": fault}
    method = Fragile(model, **parameters)
    method.spec = methods.MethodSpec("fragile", parameters)
    return method


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


def test_methods_that_keep_tokens_only_stay_here(whole: CompileExecutor, model: Any) -> None:
    before = whole.stats
    for spec in ("full", "prefix"):
        method = methods.create(spec, model)
        assert same(whole.compile(method, SEGMENTS), method.compile(SEGMENTS))
    assert whole.stats == before


def test_the_engine_answers_alike_with_and_without_workers(whole: CompileExecutor, model: Any, folder: Path) -> None:
    for method in ("comb", "legolink:4"):
        alone = PICEngine(model, make_tokenizer(), method=method)
        engine = PICEngine(model, make_tokenizer(), method=method, executor=whole)
        before = whole.stats
        expected = alone.ask(QUESTION, [LAKE, CITY, BOOK], max_new_tokens=NEW)
        answer = engine.ask(QUESTION, [LAKE, CITY, BOOK], max_new_tokens=NEW)
        assert answer.token_ids == expected.token_ids
        assert counted(whole, before) == {"requests": 1, "by_workers": 3}
        again = engine.ask(QUESTION, [BOOK, LAKE, CITY], max_new_tokens=NEW)
        assert [document.state for document in again.report.documents] == ["hit"] * 3
        assert counted(whole, before) == {"requests": 1, "by_workers": 3}
        engine.close()
        assert whole.pool.ready == [0, 1]  # it is not the engine's own


def test_threads_take_turns(whole: CompileExecutor, model: Any) -> None:
    method = methods.create("naive", model)
    expected = alone(method, SEGMENTS)
    found: list[bool] = []

    def ask() -> None:
        found.extend(same(whole.compile(method, SEGMENTS), expected) for _ in range(3))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 12


# ---- what happens to workers ----


def test_a_worker_killed_while_it_compiles(whole: CompileExecutor, model: Any) -> None:
    method, before, pool = fragile(model, "kill"), whole.stats, whole.pool
    assert isinstance(pool, ProcessPool)
    assert same(whole.compile(method, FAULTY), alone(method, FAULTY))
    counts = counted(whole, before)
    assert counts.pop("by_workers") + counts["locally"] == 5
    assert counts.pop("locally") >= 1
    assert counts == {"requests": 1, "died": 1, "restarted": 1}
    assert shared_memory(*pool.process_ids) == []


def test_shared_memory_is_seen_while_it_is_held_and_has_no_name() -> None:
    """The control of the tests around it."""
    descriptor = wire._shared(b"12345")
    assert len(shared_memory()) == 1
    assert not list(Path("/dev/shm").glob("*comb-picache*"))
    os.close(descriptor)
    assert shared_memory() == []


def test_a_worker_killed_between_requests(whole: CompileExecutor, model: Any) -> None:
    method, before = methods.create("naive", model), whole.stats
    pool: Any = whole.pool
    os.kill(pool.process_ids[1], signal.SIGKILL)
    assert same(whole.compile(method, SEGMENTS), alone(method, SEGMENTS))
    assert counted(whole, before)["died"] == 1


def test_a_late_worker_is_replaced(whole: CompileExecutor, model: Any) -> None:
    method, before = fragile(model, "hang"), whole.stats
    pool: Any = whole.pool
    processes = set(pool.process_ids)
    whole.compile(method, SEGMENTS)  # made before the clock runs
    whole.deadline = Deadline(floor_s=1.0, factor=4, first_s=1.0)
    start = time.monotonic()
    assert same(whole.compile(method, FAULTY), alone(method, FAULTY))
    assert time.monotonic() - start < 60
    counts = counted(whole, before)
    assert counts["late"] >= 1
    assert counts["locally"] >= 1
    assert len(processes & set(pool.process_ids)) == 2 - counts["late"]


def test_a_damaged_result_is_compiled_again(whole: CompileExecutor, model: Any) -> None:
    method, before = fragile(model, "damage"), whole.stats
    assert same(whole.compile(method, FAULTY), alone(method, FAULTY))
    assert counted(whole, before) == {"requests": 1, "by_workers": 4, "damaged": 1, "locally": 1}


def test_a_worker_that_raises_or_sends_another_segment(whole: CompileExecutor, model: Any) -> None:
    for fault, name in (("raise", "failed"), ("swap", "damaged")):
        method, before = fragile(model, fault), whole.stats
        assert same(whole.compile(method, FAULTY), alone(method, FAULTY))
        assert counted(whole, before) == {"requests": 1, "by_workers": 4, name: 1, "locally": 1}


def test_bad_segments_raise_what_the_method_raises(whole: CompileExecutor, model: Any) -> None:
    method = methods.create("naive", model)
    for bad in ([[1, 2], []], [[1, 2], [3, 4], [5, 9999]]):
        with pytest.raises(ValueError) as ours:
            whole.compile(method, bad)
        with pytest.raises(ValueError) as theirs:
            method.compile(bad)
        assert str(ours.value) == str(theirs.value)
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


def test_a_pool_that_breaks_down_aborts_nothing(
    whole: CompileExecutor, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = methods.create("naive", model)

    def broken(*arguments: Any) -> Any:
        raise ConnectionError("the cluster is gone")

    for name in ("wait", "submit"):
        before = whole.stats
        with monkeypatch.context() as patch:
            patch.setattr(whole.pool, name, broken)
            patch.setattr(whole.pool, "replace", broken)
            assert same(whole.compile(method, SEGMENTS), alone(method, SEGMENTS))
        assert counted(whole, before) == {"requests": 1, "died": 2, "locally": 5}
    assert same(whole.compile(method, SEGMENTS), alone(method, SEGMENTS))  # late replies change nothing


def test_pins_and_references_end_with_a_request_that_fails(
    whole: CompileExecutor, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = PICEngine(model, make_tokenizer(), method="naive", executor=whole)

    def broken(*arguments: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(whole.pool, "wait", broken)
        with pytest.raises(KeyboardInterrupt):
            engine.ask(QUESTION, [LAKE, CITY], max_new_tokens=NEW)
    assert engine.store.stats().in_use == 0
    alone = PICEngine(model, make_tokenizer(), method="naive")
    assert (
        engine.ask(QUESTION, [LAKE, CITY], max_new_tokens=NEW).token_ids
        == alone.ask(QUESTION, [LAKE, CITY], max_new_tokens=NEW).token_ids
    )
    assert engine.store.stats().in_use == 0


# ---- the engine's own workers ----


def test_a_closed_engine_leaves_nothing_behind(folder: Path) -> None:
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    with PICEngine.from_pretrained(folder / "backbone", method="naive", workers=2, dtype=torch.float32) as engine:
        assert engine.executor is not None
        pool: Any = engine.executor.pool
        processes = pool.process_ids
        assert len(processes) == 2
        assert not any(gone(process) for process in processes)
        first = engine.ask(QUESTION, [LAKE, CITY], max_new_tokens=NEW)
        assert engine.executor.stats.by_workers == 2
        os.kill(processes[0], signal.SIGKILL)
        engine.ask(QUESTION, [BOOK, "Rill has a lake."], max_new_tokens=NEW)
        processes += pool.process_ids
    assert all(gone(process) for process in processes)
    assert shared_memory() == []
    assert engine.ask(QUESTION, [LAKE, CITY], max_new_tokens=NEW).token_ids == first.token_ids
    new = engine.ask(QUESTION, ["The lake is cold.", "The city is old."], max_new_tokens=NEW)  # compiled here
    assert [document.state for document in new.report.documents] == ["compiled"] * 2
    del engine, pool
    gc.collect()
    assert len(list(Path("/proc/self/fd").iterdir())) <= descriptors + 1


def test_a_forgotten_pool_ends_its_processes(source: ModelSource) -> None:
    pool = ProcessPool(WorkerSpec(source), 1)
    (process,) = pool.process_ids
    assert not gone(process)
    del pool
    gc.collect()
    assert gone(process)


def test_workers_end_with_an_engine_that_is_killed(source: ModelSource) -> None:
    code = (
        "import os, signal, sys\n"
        "from comb.engine.workers import ModelSource\n"
        "from comb.engine.workers.processes import process_executor\n"
        "executor = process_executor(ModelSource(sys.argv[1]), 1)\n"
        "print(*executor.pool.process_ids, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code, source.name], capture_output=True, text=True, check=False)
    assert ended.returncode == -signal.SIGKILL
    (process,) = map(int, ended.stdout.split())
    wait_until_gone(process, 30)


def test_what_workers_cannot_load_is_said(folder: Path, model: Any, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(RuntimeError, match="nowhere"):
        process_executor(ModelSource(str(folder / "nowhere")), 1)
    with pytest.raises(ValueError, match="made in memory"):
        PICEngine(make_backbone(), make_tokenizer(), method="naive", workers=2)
    with pytest.raises(ValueError, match="at least one worker"):
        process_executor(ModelSource(str(folder / "backbone")), 0)
    with pytest.raises(ValueError, match="make it with comb"):
        PICEngine(model, make_tokenizer(), method=Naive(model), workers=2)
    with pytest.raises(ValueError, match="or 0 for none"):
        PICEngine(model, make_tokenizer(), workers=-1)
    with pytest.raises(ValueError, match="plain options"):
        ModelSource("x", {"quantization_config": object()})
    engine = PICEngine(model, make_tokenizer(), method="full", workers=2)
    assert engine.executor is None
    assert "nothing to compile" in caplog.text


def test_token_ids_travel_unchanged() -> None:
    ids = [0, 1, 255, 256, 2**31, 2**40]
    assert decode_ids(encode_ids(ids)) == ids
    assert encode_ids([1]) == b"\x01" + b"\x00" * 7


# ---- any order of events, without processes ----


class Chaos(WorkerPool):
    """Workers in this process that answer in random order between each other, die, hang and send rubbish."""

    def __init__(self, compiler: Any, size: int, seed: int) -> None:
        self.compiler, self.random = compiler, random.Random(seed)
        self.tasks: list[list[Task]] = [[] for _ in range(size)]
        self.alive = [True] * size
        self.hung: set[int] = set()
        self.told: list[Reply] = []

    @property
    def size(self) -> int:
        return len(self.tasks)

    @property
    def ready(self) -> list[int]:
        return [worker for worker, alive in enumerate(self.alive) if alive]

    def submit(self, worker: int, task: Task) -> None:
        if not self.alive[worker] or self.random.random() < 0.05:
            raise WorkerLostError("gone")
        self.tasks[worker].append(task)

    def wait(self, timeout_s: float) -> list[Reply]:
        replies = []
        for worker, tasks in enumerate(self.tasks):
            event = self.random.random()
            if not tasks or not self.alive[worker] or worker in self.hung or event < 0.3:
                continue
            if event < 0.36:
                self.alive[worker] = False
                replies.append(Reply(worker, None, error="died"))
                continue
            if event < 0.4:
                self.hung.add(worker)
                continue
            task = tasks.pop(0)
            reply, picache = self.compiler.compile(worker, task)
            data = None if picache is None else serialize(picache, task.key if event < 0.9 else "another")
            if data is not None and 0.8 < event < 0.9:
                data = data[: len(data) // 2]
            replies.append(Reply(worker, task.number, data, reply.seconds, error=reply.error, refused=reply.refused))
        if not replies and timeout_s:
            time.sleep(min(timeout_s, 0.01))
        return replies

    def replace(self, worker: int) -> bool:
        self.tasks[worker].clear()
        self.hung.discard(worker)
        self.alive[worker] = self.random.random() < 0.8
        return self.alive[worker]

    def close(self) -> None:
        self.alive = [False] * self.size


@pytest.mark.parametrize("seed", range(12))
def test_whatever_happens_every_segment_is_compiled_and_right(source: ModelSource, model: Any, seed: int) -> None:
    compiler = Compiler(WorkerSpec(source))
    method = methods.create("naive", model)
    generator = random.Random(seed)
    executor = CompileExecutor(
        Chaos(compiler, generator.randint(1, 5), seed), deadline=Deadline(floor_s=0.05, factor=1, first_s=0.05)
    )
    trouble = 0
    for _ in range(6):
        segments = [
            [generator.randrange(256) for _ in range(generator.randint(1, 12))] for _ in range(generator.randint(2, 9))
        ]
        assert same(executor.compile(method, segments), alone(method, segments))
        trouble = executor.stats.died + executor.stats.late + executor.stats.damaged + executor.stats.locally
    assert trouble > 0  # the test has tested something
    executor.close()
    assert same(executor.compile(method, SEGMENTS), method.compile(SEGMENTS))


def test_a_result_nobody_checks_would_be_wrong(
    source: ModelSource, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the test above: without the key, a PICache of another segment gets through."""
    from comb.engine.workers import run

    method = fragile(model, "swap")
    compiler = Compiler(WorkerSpec(source))
    segment = FAULTY[0]

    class Swapping(Chaos):
        def wait(self, timeout_s: float) -> list[Reply]:
            replies = []
            for worker, tasks in enumerate(self.tasks):
                while tasks:
                    task = tasks.pop(0)
                    picache = method.compile([[7] * len(task.token_ids)])[0]
                    replies.append(Reply(worker, task.number, serialize(picache, "another"), 0.1))
            return replies

    class Steady(random.Random):
        def random(self) -> float:
            return 0.5

    pool = Swapping(compiler, 2, 0)
    pool.random = Steady()
    executor = CompileExecutor(pool)
    assert same(executor.compile(method, FAULTY), alone(method, FAULTY))
    assert executor.stats.damaged == 5
    unchecked = run.deserialize
    monkeypatch.setattr(run, "deserialize", lambda data, key, device: unchecked(data, "another", device))
    assert not same(executor.compile(method, FAULTY), alone(method, FAULTY))
    assert isinstance(method, Fragile)
    assert len(segment) in method.seen

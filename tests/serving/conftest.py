"""A server for the tests of the vLLM plug-in, and a loop for those that are coroutines."""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.plugin import nano_adapter as nano_adapter
from tests.helpers.plugin import plugin as plugin

if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    # each worker's engines on a core of their own; vLLM would give all of them all cores, whose threads wait busily
    cores = sorted(os.sched_getaffinity(0))
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", str(cores[int(worker.removeprefix("gw")) % len(cores)]))


def in_a_loop(test: Callable[..., Any], seconds: float) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*arguments, **named), seconds))

    return run


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that are coroutines, also under hypothesis' `given`, run in a loop of their own, and not for ever."""
    for item in items:
        if isinstance(item, pytest.Function):
            seconds = 300 if item.get_closest_marker("slow") else 60
            given = getattr(item.obj, "hypothesis", None)
            if inspect.iscoroutinefunction(item.obj):
                item.obj = in_a_loop(item.obj, seconds)
            elif given is not None and inspect.iscoroutinefunction(given.inner_test):
                given.inner_test = in_a_loop(given.inner_test, seconds)


@pytest.fixture
def server() -> Iterator[Any]:
    """An adapter's middleware, with encoders and a model that only say what they got (`middleware_server.Server`)."""
    from tests.helpers.middleware_server import Server

    found = Server()
    yield found
    found.check_idle()


@pytest.fixture
def told(tmp_path: Path) -> Iterator[tuple[Any, Any]]:
    """What takes an engine's reports (`capability.ReportReceiver`), and what sends them."""
    from comb_serving.pool.capability import ReportReceiver, ReportSender

    receiver = ReportReceiver(tmp_path)
    yield receiver, ReportSender(tmp_path)
    receiver.close()


@pytest.fixture(scope="session")
def nano_comb(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A folder with an adapter on nano whose documents matter, and the library's model of it (`engines.served`)."""
    from tests.helpers.engines import checkpoint

    folder = tmp_path_factory.mktemp("nano-comb")
    return folder, checkpoint(folder, "nano", front="prose")


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A plain model that was saved, for documents to be linked in (`linked.linked_engine`)."""
    from tests.helpers.linked import plain_llama

    return plain_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def served(plugin: None, nano_adapter: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One `comb serve` for all tests that ask over HTTP (`served.Served`); they leave it idle."""
    from tests.helpers.served import serve

    with serve(nano_adapter, tmp_path_factory.mktemp("r")) as server:
        yield server

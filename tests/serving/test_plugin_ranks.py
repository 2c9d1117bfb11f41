"""The plug-in over two tensor-parallel ranks, each a process with a pool of its own heads."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.engines import checkpoint, served

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.usefixtures("plugin")]


def test_two_ranks_answer_as_the_library_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    prompts = [list(range(10, 10 + length)) for length in (7, 40)]
    with served(tmp_path, checkpoint(tmp_path, "nano"), tensor_parallel_size=2) as found:
        assert [pool.layout.kv_heads for pool in found.pools] == [1, 1]
        asked = [(prompt, names) for names in ("A", "", "BC") for prompt in prompts]
        for (prompt, names), (ids, logs) in zip(asked, found.ask(asked), strict=True):
            wanted, likely = found.reference(prompt, names)
            assert ids == wanted
            assert logs == pytest.approx(likely, abs=1e-5)
        assert found.ask([(prompts[0], "B")])[0][1] != pytest.approx(found.reference(prompts[0], "A")[1], abs=1e-3)

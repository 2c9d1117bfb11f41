"""Answers of a real engine whose attention over documents is Triton's interpreter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.engines import checkpoint, served

pytestmark = pytest.mark.usefixtures("plugin")
STEPS: list[int] = []


@pytest.mark.parametrize("stored", ["auto", "fp8"])
def test_the_kernels_answer_as_the_library_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: str) -> None:
    from comb.kernels.paged import kernel as paged

    def counted(query: Any, layer: Any, batch: Any, **options: Any) -> Any:
        STEPS.append(sum(batch.counts))
        return run(query, layer, batch, **options)

    def plain(*_: Any) -> None:
        raise AssertionError("the plain way was taken")

    run = paged.attend_paged
    monkeypatch.setattr(paged, "attend_paged", counted)
    monkeypatch.setattr("comb.kernels.dispatch.attend_plain", plain)
    prompts = [list(range(5, 5 + length)) for length in (9, 40)]
    asked = [(prompt, names) for names in ("A", "", "CAB", "B") for prompt in prompts]
    with served(tmp_path, checkpoint(tmp_path, "nano"), pool_dtype=stored) as found:
        for (prompt, names), (ids, logs) in zip(asked, found.ask(asked, tokens=3), strict=True):
            wanted = found.reference(prompt, names, tokens=3)
            exact = stored == "auto" or not names
            assert not exact or ids == wanted[0]
            torch.testing.assert_close(logs[0], wanted[1][0], atol=1e-5 if exact else 0.1, rtol=0)
    assert max(STEPS) > 49  # several rows in one step
    assert min(STEPS) == 6  # decoding

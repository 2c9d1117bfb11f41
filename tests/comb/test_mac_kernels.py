"""When the kernels of MAC attention aren't taken."""

from __future__ import annotations

import pytest
import torch

from comb.kernels.dispatch import why_plain_step


def test_reasons_for_the_plain_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def why(dtype: torch.dtype, keys: torch.dtype | None = None, *, width: int = 8, heads: int = 2) -> str:
        query = torch.zeros(1, heads, width, dtype=dtype)
        some = torch.zeros(1, 1, 3, width, dtype=keys or dtype)
        return why_plain_step(query, some, some)

    monkeypatch.setattr("comb.kernels.dispatch.has_triton", lambda: True)
    monkeypatch.setattr("comb.kernels.dispatch.INTERPRETED", False)
    assert why(torch.float32) == "device cpu"
    monkeypatch.setattr("comb.kernels.dispatch.INTERPRETED", True)
    assert why(torch.float32) == why(torch.bfloat16) == ""
    assert why(torch.float64) == "float64 queries, float64 keys"
    assert why(torch.float32, torch.bfloat16) == "float32 queries, bfloat16 keys"
    assert why(torch.float32, width=320) == "heads of more than 256 channels"
    assert why(torch.float32, heads=65) == "more than 64 query heads to a key/value head"
    monkeypatch.setattr("comb.kernels.dispatch.has_triton", lambda: False)
    assert why(torch.float32) == "triton is not installed"

"""The ways in which recomputed tokens attend without a mask, against the mask by position.

Torch's varlen attention is CUDA's alone: here its arguments go to a plain function that consumes exactly those.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from comb import methods
from comb.backbones.attention_calls import AttentionCall
from comb.linking import recomputed
from comb.linking.cache import ScatteredRows
from comb.linking.masks import Masks
from comb.linking.recomputed import (
    GroupedAttention,
    RunPlan,
    VarlenAttention,
    chosen,
    error_of,
    torch_varlen,
    varlen_plain,
)
from tests.helpers.families import tiny

WAYS: dict[str, Any] = {"grouped": GroupedAttention, "varlen": VarlenAttention}

DRAW = torch.Generator().manual_seed(1)
DOCUMENTS = [torch.randint(3, 120, (length,), generator=DRAW).tolist() for length in (40, 7, 33)]
POSITIONS = {
    "one run": [4, 5, 6, 7],
    "runs with gaps": [1, 2, 3, 5, 6, 14, 20, 27, 34, 35, 36],
    "single tokens": [1, 3, 5, 150, 299],
    "everything": list(range(12)),
    "tiles of keys": [*range(120, 140), 255, 256, 257, 290],
}
WINDOWS = (None, 1, 9, 200)


def sdpa(module: Any, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, **options: Any) -> tuple[Tensor, None]:
    """The plain twin: one mask over all rows, keys repeated for each head."""
    repeated = query.shape[1] // keys.shape[1]
    keys, values = (tensor.repeat_interleave(repeated, 1) for tensor in (keys, values))
    mixed = torch.nn.functional.scaled_dot_product_attention(
        query, keys, values, attn_mask=mask, scale=options["scaling"]
    )
    return mixed.transpose(1, 2), None


def call_of(
    positions: list[int], window: int | None, dtype: torch.dtype, *, batch: int = 1
) -> tuple[ScatteredRows, AttentionCall]:
    rows = ScatteredRows(positions[-1] + 5, torch.tensor(positions))
    draw = torch.Generator().manual_seed(2)

    def noise(*shape: int) -> Tensor:
        return torch.randn(batch, *shape, 16, generator=draw, dtype=dtype)

    mask = Masks((("all", window),), False).build(rows, tiny("llama"))
    query, keys, values = noise(6, len(positions)), noise(2, rows.visible), noise(2, rows.visible)
    return rows, AttentionCall(sdpa, torch.nn.Identity(), query, keys, values, mask, 0.3, 0.0, {})


def answered(make: Callable[..., Any], rows: ScatteredRows, call: AttentionCall, window: int | None) -> Tensor:
    with torch.inference_mode():
        found: Tensor = make(rows, [(call.mask, window)]).attend(call)[0]
    return found


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", POSITIONS)
@pytest.mark.parametrize("way", WAYS)
def test_each_way_is_the_mask(way: str, name: str, dtype: torch.dtype) -> None:
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    for window in WINDOWS:
        rows, call = call_of(POSITIONS[name], window, dtype)
        taken = dataclasses.replace(call, exact_function=lambda *args, **kwargs: pytest.fail("left to the mask"))
        found = answered(WAYS[way], rows, taken, window)
        torch.testing.assert_close(found, call.exact()[0], rtol=tolerance, atol=tolerance)
        if way != "grouped" and name != "everything":  # the control: ends that are one key too early
            moved = torch.cat([rows.positions[:-1] - 1, rows.positions[-1:]])
            wrong = answered(WAYS[way], ScatteredRows(rows.length, moved), taken, window)
            assert ((wrong - found).norm(dim=-1) / found.norm(dim=-1)).max() > 0.05


@pytest.mark.parametrize("window", [None, 4])
def test_what_a_way_does_not_take_is_left_to_the_mask(window: int | None) -> None:
    rows, call = call_of(POSITIONS["runs with gaps"], window, torch.float64, batch=2)
    other = call_of(POSITIONS["runs with gaps"], window, torch.float64)[1]
    calls = {
        "rows of a batch": call,
        "dropout": dataclasses.replace(other, dropout=0.1),
        "a bias by position": dataclasses.replace(other, options={"position_bias": torch.zeros(1)}),
        "another mask": dataclasses.replace(other, mask=other.mask.clone()),
    }
    for way in WAYS:
        for what, given in calls.items():
            left: list[str] = []
            seen = dataclasses.replace(
                given, exact_function=lambda *a, n=what, to=left, **k: to.append(n) or sdpa(*a, **k)
            )
            masks = [(other.mask if what == "another mask" else given.mask, window)]
            with torch.inference_mode():
                found = WAYS[way](rows, masks).attend(seen)[0]
            assert left == [what]
            torch.testing.assert_close(found, given.exact()[0])


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma3", "gpt_neox", "qwen2"])
@pytest.mark.parametrize("method", ["legolink:4", "cacheblend:0.3"])
def test_linked_prompts_are_those_under_the_mask(family: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny(family, std=0.15).double()
    made = methods.create(method, model)
    compiled = made.compile(DOCUMENTS)

    def logits(way: type[Any] | None) -> Tensor:
        monkeypatch.setattr(recomputed, "chosen", lambda rows, device: way)
        found: Tensor = made.link(compiled, [9, 17, 33, 41, 12], prefix_ids=[5, 6]).logits
        return found

    plain = logits(None)
    taken: list[Any] = []
    for way in WAYS.values():
        mixed = way.mixed
        monkeypatch.setattr(way, "mixed", lambda *given, w=way, m=mixed: taken.append(w) or m(*given))
        torch.testing.assert_close(logits(way), plain, rtol=1e-9, atol=1e-9)
        assert taken.count(way) >= model.config.num_hidden_layers
    # the control: runs that end a token too early
    ranges = ScatteredRows.runs
    monkeypatch.setattr(
        ScatteredRows, "runs", lambda self: ((max(s - 1, 0), e - 1) if s else (s, e) for s, e in ranges(self))
    )
    assert (logits(VarlenAttention) - plain).abs().max() > 1e-4


def test_the_way_goes_by_device_and_count() -> None:
    boundaries = ScatteredRows(8192, torch.cat([torch.arange(start, start + 128) for start in range(0, 8192, 1024)]))
    scattered = ScatteredRows(8192, torch.arange(0, 8192, 32))
    assert [chosen(rows, "cuda") for rows in (boundaries, scattered)] == [VarlenAttention, None]
    plan = RunPlan(tuple(scattered.runs()))
    assert (plan.tiles, plan.masked_tiles) == (sum(range(1, 8192, 32)), 2 * 8161)
    few = ScatteredRows(511, torch.arange(9))
    assert [chosen(rows, "cpu") for rows in (boundaries, few)] == [GroupedAttention, None]
    assert chosen(boundaries, "mps") is None


def test_torch_is_asked_for_what_its_version_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """By signature: a version without `seqused_k` is asked below its public function, by the operator's own schema."""
    module = pytest.importorskip("torch.nn.attention.varlen")
    asked: list[dict[str, Any]] = []
    rows, call = call_of([3, 4, 5, 20, 21], 7, torch.float32)
    sent = RunPlan(tuple(rows.runs())).arguments(torch.device("cpu"))

    def newest(
        query: Any, key: Any, value: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: Any, max_k: Any,
        *, scale: Any = 0, window_size: Any = 0, enable_gqa: bool = False, seqused_k: Any = None,
    ) -> Any:  # fmt: skip
        asked.append({"enable_gqa": enable_gqa})
        bounds = cu_seq_q, cu_seq_k, max_q, max_k
        return varlen_plain(query, key, value, *bounds, scale=scale, window_size=window_size, seqused_k=seqused_k)

    def older(
        query: Any, key: Any, value: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: Any, max_k: Any, is_causal: bool = False
    ) -> Any:
        pytest.fail("it can't say where keys end")

    tensors = [tensor[0].transpose(0, 1) for tensor in (call.query, call.keys, call.values)]
    given = {**sent, "scale": 0.3, "window_size": (6, 0)}
    monkeypatch.setattr(module, "varlen_attn", newest)
    torch.testing.assert_close(torch_varlen()(*tensors, **given), call.exact()[0][0])
    assert asked == [{"enable_gqa": True}]
    monkeypatch.setattr(module, "varlen_attn", older)
    on_meta = [tensor.to("meta", torch.bfloat16) for tensor in tensors]
    given |= {name: each.to("meta") for name, each in sent.items() if isinstance(each, Tensor)}
    assert torch_varlen()(*on_meta, **given).shape == (5, 6, 16)  # the schema takes the arguments


def test_a_kernel_is_compared_before_it_is_used(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The controls: a kernel that leaves out a run's last key, one that looks behind it, one that refuses."""
    kind = torch.device("cpu"), torch.float32, 6, 2, 16
    assert error_of(varlen_plain, *kind, windowed=False) < 1e-5
    assert error_of(varlen_plain, *kind, windowed=True) < 1e-5

    def changed(**changes: Any) -> Callable[..., Tensor]:
        return lambda *tensors, **given: varlen_plain(
            *tensors, **{**given, **{name: change(given[name]) for name, change in changes.items()}}
        )

    early, whole = changed(seqused_k=lambda ends: ends - 1), changed(window_size=lambda _: (-1, 0))
    shifted = changed(seqused_k=lambda ends: ends + 1, max_k=lambda most: most + 1)
    assert error_of(early, *kind, windowed=False) > 0.1
    assert error_of(whole, *kind, windowed=True) > 0.1
    assert math.isnan(error_of(shifted, *kind, windowed=False))

    def refuses(*tensors: Any, **given: Any) -> Tensor:
        raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.")

    for function, message in ((early, "recomputed tokens attend under a mask instead"), (shifted, "off by nan"),
                              (refuses, "only supports Ampere")):  # fmt: skip
        recomputed._checked.cache_clear()
        monkeypatch.setattr(recomputed, "torch_varlen", lambda f=function: f)
        with caplog.at_level("INFO", logger="comb"):
            assert recomputed._checked(*kind, False) is None
        assert message in caplog.text
    monkeypatch.setattr(recomputed, "torch_varlen", lambda: varlen_plain)
    recomputed._checked.cache_clear()
    assert recomputed._checked(*kind, False) is varlen_plain
    recomputed._checked.cache_clear()


def test_only_sdpa_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama")
    model.set_attn_implementation("eager")
    monkeypatch.setattr(recomputed, "chosen", lambda rows, device: VarlenAttention)
    monkeypatch.setattr(recomputed, "attention", None)
    with recomputed.recomputed_attention(model, ScatteredRows(9, torch.arange(9)), []):
        pass

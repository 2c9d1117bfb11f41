"""Documents in vLLM's fp8 cache: kept as its bytes, turned as the numbers that they stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.engines import answer, engine, greedy
from tests.helpers.linked import PROMPTS, LinkedPrompt, adapter, check_nothing_is_left, linked_engine
from tests.helpers.linked import largest_difference as difference

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.usefixtures("plugin")]

SCALES = (0.5, 0.125)  # of keys and of values, as a calibrated checkpoint brings them
ROUNDING = {"fp8": 2**-4, "fp8_e5m2": 2**-3}  # of a number's own size, at most; twice that where it is cut off
SMALLEST = {"fp8": 2**-9, "fp8_e5m2": 2**-16}


@pytest.fixture(autouse=True)
def calibrated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scales that aren't 1."""
    from vllm.model_executor.layers.attention import attention

    made = attention.set_default_quant_scales

    def scaled(layer: Any, *given: Any, **options: Any) -> None:
        made(layer, *given, **options)
        for part, scale in zip("kv", SCALES, strict=True):
            getattr(layer, f"_{part}_scale").fill_(scale)
            setattr(layer, f"_{part}_scale_float", scale)

    monkeypatch.setattr(attention, "set_default_quant_scales", scaled)


def near(found: Tensor, exact: Tensor, dtype: str, scale: float, cut: int = 1) -> bool:
    """Whether it is `exact` but for being rounded, or cut off (2)."""
    bound = cut * (ROUNDING[dtype] * exact.abs() * 1.001 + SMALLEST[dtype] * scale)
    return bool(((found - exact).abs() <= bound).all())


@pytest.mark.parametrize("dtype", ["fp8", "fp8_e5m2"])
def test_what_is_exact_is_vllms_own_and_what_moves_is_rounded_once_more(dtype: str, llama: Any) -> None:
    options = {"kv_cache_dtype": dtype, "enable_prefix_caching": False}
    first = llama.model.layers[0].self_attn
    with linked_engine(llama, "focus:0.3", **options) as linked:
        whole = linked.ask([(prompt, "legolink:64") for prompt in PROMPTS])
        (exact,) = linked.ask([(PROMPTS[3], "naive")])
        pool = linked.pool
        assert (pool.rows.dtype, linked.layout.dtype) == (torch.uint8, dtype)
        assert pool.bytes_per_token == pool.rows.shape[1]
        name, layer = next(iter(pool.layers.items()))
        seen: list[tuple[Tensor, ...]] = []
        kept: list[Tensor] = []
        load = pool.load

        def loaded(commands: Any) -> None:
            load(commands)
            for each in commands:
                slots = pool._cache_slots(name, each.blocks, each.start, each.end)
                read = pool._caches[name][1].read(layer, slots)
                parts = read.view(len(read), 2, 2, -1).unbind(1)
                seen.append(tuple(pool.codes[layer].numbers(parts[place], place) for place in range(2)))
                own = pool.rows[pool._slots(each.handle, each.offset, each.end - each.start), pool.columns[name]]
                kept.append(own[:, own.shape[1] // 2 :] == read[:, own.shape[1] // 2 :])

        pool.load = loaded
        prompt = LinkedPrompt("A", prefix=tuple(range(5, 105)))
        linked.ask([(prompt, "naive"), *((each, method) for each in PROMPTS for method in ("legolink:4", "focus:0.3"))])
        check_nothing_is_left(linked.scheduler)
    with engine(llama.name_or_path, **options) as llm:
        for each, found in zip(PROMPTS, whole, strict=True):
            given = {"prompt_token_ids": each.built(linked.documents)[0]}
            alone = answer(llm.generate([given], greedy(8), use_tqdm=False)[0])
            assert difference(found, alone) < 2e-5
        assert exact == answer(llm.generate([{"prompt_token_ids": linked.documents["C"] + [5]}], greedy(8),
                                            use_tqdm=False)[0])  # fmt: skip
    assert all(each.all() for each in kept)  # values to the bit, however often they are linked
    keys, values = seen[0]
    with torch.no_grad():  # of the first layer, which sees tokens alone
        hidden = llama.model.layers[0].input_layernorm(llama.model.embed_tokens(torch.tensor([linked.documents["A"]])))
        own, their = (part(hidden).view(13, 2, -1).transpose(0, 1) for part in (first.k_proj, first.v_proj))
        places = {at: llama.model.rotary_emb(hidden, torch.arange(at, at + 13)[None]) for at in (0, 100)}
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

        turned = {at: apply_rotary_pos_emb(own, own, *place, unsqueeze_dim=1)[0][0] for at, place in places.items()}
    assert near(values, their.transpose(0, 1), dtype, SCALES[1], cut=2)  # vLLM's writer for CPUs
    assert near_rotated(keys, turned[100].transpose(0, 1), dtype)
    assert not near_rotated(keys, turned[0].transpose(0, 1), dtype)  # the control: where it was compiled


def near_rotated(found: Tensor, exact: Tensor, dtype: str) -> bool:
    """A rotation mixes two channels, and with them what was cut off when they were compiled; then it is rounded."""
    size = exact.unflatten(-1, (2, -1)).norm(dim=-2).repeat(1, 1, 2)
    bound = ROUNDING[dtype] * (2 * size + 1.1 * exact.abs()) + 4 * SMALLEST[dtype] * SCALES[0]
    return bool(((found - exact).abs() <= bound).all())


def test_link_tokens_are_written_as_the_cache_has_them(llama: Any, tmp_path: Path) -> None:
    model = adapter(llama, tmp_path)
    with linked_engine(model, "linktokens", link_tokens=tmp_path, kv_cache_dtype="fp8") as linked:
        pool = linked.pool
        rows = pool.rows[pool.num_blocks * pool.block_size :]
        for (name, layer), pair in zip(pool.layers.items(), model.front(torch.float32), strict=True):
            parts = rows[:, pool.columns[name]].view(len(rows), 2, 2, -1).unbind(1)
            for place, (part, given, scale) in enumerate(zip(parts, pair, SCALES, strict=True)):
                assert near(pool.codes[layer].numbers(part, place), given.transpose(0, 1), "fp8", scale)
        assert linked.ask([(PROMPTS[0], "linktokens")])[0][0]

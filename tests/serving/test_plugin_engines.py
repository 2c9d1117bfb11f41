"""The plug-in in other engines: compiled, over two ranks, with a pool in fp8. (Interpreted: tests/interpreted.)"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from comb.backbones.loading import resolve_name
from tests.helpers.adapter_answers import ASKED, PROMPTS, answers_of_the_library, plain_answers
from tests.helpers.engines import Served, answer, engine, served
from tests.helpers.loras import make_lora

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("plugin")]


@pytest.fixture(scope="module")
def compiled_plain(plugin: None) -> list[Any]:
    """The compiled backbone's own answers."""
    with engine(resolve_name("nano"), enforce_eager=False) as llm:
        return plain_answers(Served(llm, None, ()))


@pytest.mark.slow
def test_compiled_without_documents_it_is_plain_vllm_bit_for_bit_and_with_them_the_library(
    compiled_plain: list[Any], nano_comb: Any
) -> None:
    """With torch.compile, as GPUs run it."""
    with served(*nano_comb, enforce_eager=False) as found:
        assert not found.llm.llm_engine.vllm_config.model_config.enforce_eager
        assert plain_answers(found) == compiled_plain
        for (prompt, names), one in zip(ASKED, answers_of_the_library(found, 1e-3), strict=True):
            assert (one[1] == pytest.approx(compiled_plain[PROMPTS.index(prompt)][1], abs=1e-3)) is not bool(names)


@pytest.mark.slow
def test_two_ranks_answer_as_the_library_does(nano_comb: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensor-parallel ranks, each a process with a pool of its own heads."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    with served(*nano_comb, tensor_parallel_size=2) as found:
        assert [pool.layout.kv_heads for pool in found.pools] == [1, 1]
        answers_of_the_library(found, 1e-3)


def test_places_that_the_pool_has_not_end_the_engine(nano_comb: Any) -> None:
    """Signed ones, which only the front can write: an error, and never an answer."""
    with served(*nano_comb) as found, pytest.raises(ValueError, match="but the pool has"):
        found.ask([(PROMPTS[0], "A")], documents=(3, 1, 10**6))


def test_documents_and_lora_in_one_batch(nano_comb: Any, tmp_path: Path) -> None:
    from vllm.lora.request import LoRARequest

    make_lora(tmp_path / "lora", seed=7)
    style = LoRARequest("style", 1, str(tmp_path / "lora"))
    # vLLM 0.32 on CPUs gives requests without a LoRA the one in the last place: that is left free here
    options = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}
    with served(*nano_comb, **options) as found:
        asked = [(prompt, names, with_lora) for prompt, names in ASKED for with_lora in (None, style)]

        def ask(rows: list[Any]) -> list[Any]:
            prompts, parameters = zip(*(found.request(prompt, names) for prompt, names, _ in rows), strict=True)
            found.llm.reset_prefix_cache()
            given = {"lora_request": [with_lora for *_, with_lora in rows], "use_tqdm": False}
            return [answer(output) for output in found.llm.generate(list(prompts), list(parameters), **given)]

        for (prompt, names, with_lora), (ids, logs) in zip(asked, ask(asked), strict=True):
            (alone,) = ask([(prompt, names, with_lora)])
            assert ids == alone[0]
            assert logs == pytest.approx(alone[1], abs=1e-5)
            # a LoRA of the backbone changes what is said over documents too
            assert (logs == pytest.approx(found.reference(prompt, names)[1], abs=1e-3)) is (with_lora is None)


def test_answers_over_a_pool_in_fp8_are_near_the_librarys(nano_comb: Any) -> None:
    prompt = list(range(5, 25))
    with served(*nano_comb, pool_dtype="fp8") as found:
        (pool,) = found.pools
        assert pool.tensor.dtype == torch.float8_e4m3fn
        assert pool.layout.nbytes <= 2**20
        names = ("", "A", "CAB")
        for name, (_, logs) in zip(names, found.ask([(prompt, name) for name in names], tokens=1), strict=True):
            error = abs(logs[0] - found.reference(prompt, name, tokens=1)[1][0])
            assert error < (0.1 if name else 1e-5)
            assert (error > 1e-6) is bool(name)
        assert abs(found.ask([(prompt, "B")], tokens=1)[0][1][0] - found.reference(prompt, "A", tokens=1)[1][0]) > 0.1

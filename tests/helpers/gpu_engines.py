"""How engines are started by the tests of `tests/gpu`, on a GPU or, to see that the tests run, on a CPU."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import pytest
import torch

DEVICE = "COMB_GPU_TESTS_DEVICE"
# of log-probabilities, beside those of the library in float32 on a CPU: vLLM multiplies float32 as TF32 in Triton, and
# the library itself in bfloat16 is up to 0.2 away
TOLERANCES = {("cpu", "float32"): 4e-5, ("cuda", "float32"): 0.02, ("cuda", "bfloat16"): 0.3}
BACKENDS = {"float32": "TRITON_ATTN", "bfloat16": "FLASH_ATTN"}
SHARE = 0.3  # of the GPU's memory, which must be free; models are tiny


@dataclass(frozen=True)
class EngineDevice:
    """cuda or cpu."""

    kind: str

    @classmethod
    def found(cls) -> EngineDevice:
        """What `COMB_GPU_TESTS_DEVICE` names: then nothing is skipped for want of it. Otherwise a GPU, or a skip."""
        named = os.environ.get(DEVICE)
        if named is None and not torch.cuda.is_available():
            pytest.skip("no CUDA device: scripts/test-gpu runs this where there is one")
        assert named in (None, "cuda", "cpu"), f"{DEVICE} is cuda or cpu, not {named!r}"
        return cls(named or "cuda")

    def tolerance(self, dtype: str) -> float:
        """Of log-probabilities beside the library's."""
        return TOLERANCES[self.kind, dtype]

    def options(self, dtype: str = "float32", graphs: str = "NONE", **more: Any) -> dict[str, Any]:
        """Of vLLM's engine. graphs: the name of a `CUDAGraphMode`; with any but NONE the model is compiled, too."""
        found: dict[str, Any] = {"dtype": dtype, "enforce_eager": graphs == "NONE", **more}
        if self.kind == "cpu":
            if graphs != "NONE" or dtype != "float32":
                pytest.skip(f"a CPU has no {graphs} graphs in {dtype}")
            return found
        if graphs != "NONE":
            found["compilation_config"] = {"cudagraph_mode": graphs}
        return {**found, "attention_backend": BACKENDS[dtype], "gpu_memory_utilization": SHARE}

    def flags(self) -> list[str]:
        """Of ``comb serve``, in float32 with vLLM's usual graphs; on a CPU none."""
        if self.kind == "cpu":
            return []
        given = "--no-enforce-eager", "--attention-backend", BACKENDS["float32"]
        return [*given, "--gpu-memory-utilization", str(SHARE)]

    def check_runner(self, llm: Any) -> None:
        """On a GPU vLLM's V2 model runner is what has run, unless `VLLM_USE_V2_MODEL_RUNNER` is 0."""
        if self.kind == "cuda":
            wanted = os.environ.get("VLLM_USE_V2_MODEL_RUNNER") != "0"
            assert llm.llm_engine.vllm_config.use_v2_model_runner is wanted

    def forbid_plain_ways(self, patch: pytest.MonkeyPatch) -> None:
        """On a GPU attention over documents is the kernels': their plain twins fail."""

        def plain(*_: Any, **__: Any) -> None:
            raise AssertionError("the plain way was taken")

        if self.kind == "cuda":
            patch.setattr("comb.kernels.dispatch.attend_plain", plain)


def graphs_of(llm: Any, patch: pytest.MonkeyPatch) -> list[str]:
    """Fills with the kind of graph that each step from now on is given: FULL, PIECEWISE or NONE."""
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    chooser = getattr(runner, "cudagraph_manager", None) or runner.cudagraph_dispatcher  # V2's, V1's
    dispatch, seen = chooser.dispatch, list[str]()

    def noted(*given: Any, **named: Any) -> Any:
        found = dispatch(*given, **named)
        seen.append((found[0] if isinstance(found, tuple) and not hasattr(found, "cg_mode") else found.cg_mode).name)
        return found

    patch.setattr(chooser, "dispatch", noted)
    return seen

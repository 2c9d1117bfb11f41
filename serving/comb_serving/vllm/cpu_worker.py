"""The V1 workers on a CPU; a module of its own, because importing vLLM's CPU worker sets the process up for a CPU."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from comb_serving.vllm.gpu_worker import PoolOwner


class SeededCPUWorker(CPUWorker):
    """vLLM's, of which a request with a `seed` whose prompt is computed in several steps ended the engine."""

    def sample_tokens(self, grammar_output: Any) -> Any:
        """As vLLM's. What it samples behind the first parts of a prompt it discards, and takes the generator back by an
        offset, which a CPU's don't have: they aren't asked (0.32 and 0.33, `GPUModelRunner._bookkeeping_sync`)."""
        if self.use_v2_model_runner:
            return super().sample_tokens(grammar_output)
        batch, discarded = self.model_runner.input_batch, self.model_runner.discard_request_mask.np
        held = {row: each for row, each in batch.generators.items() if discarded[row]}
        for row in held:
            del batch.generators[row]
        try:
            return super().sample_tokens(grammar_output)
        finally:
            batch.generators.update(held)


class CombCPUWorker(PoolOwner, SeededCPUWorker):
    """With cross blocks."""

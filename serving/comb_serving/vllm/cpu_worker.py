"""The V1 worker on a CPU; a module of its own, because importing vLLM's CPU worker sets the process up for a CPU."""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker

from comb_serving.vllm.gpu_worker import PoolOwner


class CombCPUWorker(PoolOwner, CPUWorker):
    """For CPUs."""

"""Greedy answers by vLLM. It is imported when the engine is made, not before.

Prompts are handed over as token ids and answers come back as such: vLLM's tokenizer and the checkpoint's sampling
settings play no part. Its prefix cache shares the documents that questions have in common.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from comb_training.answers.store import StoredAnswer
from comb_training.data.batches import TrainingExample

BATCH_SIZE = 1024
"""Questions handed over at once, and kept on disk together: vLLM batches among them as it sees fit."""
TORCHRUN = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "ROLE_WORLD_SIZE",
    "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE",
)  # fmt: skip


def vllm_installed() -> bool:
    """Whether vLLM is there, without importing it."""
    return importlib.util.find_spec("vllm") is not None


class VllmEngine:
    """An engine of vLLM on one model.

    Args:
        model: folder or Hub id.
        dtype: torch's name of it (float32, bfloat16, ...).
        max_model_len: tokens of the longest prompt and its answer.
        options: more keyword arguments of `vllm.LLM` (`tensor_parallel_size`, `gpu_memory_utilization`, ...).
    """

    def __init__(
        self,
        model: str,
        stops: Sequence[int],
        max_new_tokens: int,
        *,
        dtype: str,
        max_model_len: int,
        revision: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        import vllm

        self.name = f"vllm {vllm.__version__}"
        self.batch_size = BATCH_SIZE
        arguments: dict[str, Any] = {
            "dtype": dtype,
            "revision": revision,
            "max_model_len": max_model_len,
            "enable_prefix_caching": True,
            "skip_tokenizer_init": True,
            "generation_config": "vllm",  # greedy is greedy, whatever the checkpoint would sample with
            "seed": 0,
        }
        # vLLM tries out the chat template, and prints a traceback where it has no tokenizer; here it needs neither
        renderers = logging.getLogger("vllm.renderers.base")
        renderers.addFilter(lambda record: "Chat template warmup failed" not in str(record.msg))
        with alone():
            self._llm = vllm.LLM(model=model, **{**arguments, **(options or {})})
        self._parameters = vllm.SamplingParams(
            temperature=0.0,
            max_tokens=max_new_tokens,
            stop_token_ids=list(stops),
            ignore_eos=True,  # `stops` is all there is
            detokenize=False,
        )
        self._stops = frozenset(stops)

    def __call__(self, examples: Sequence[TrainingExample]) -> list[StoredAnswer]:
        """The answers to one batch, in its order."""
        prompts: Any = [{"prompt_token_ids": list(example.prompt.flat)} for example in examples]
        outputs = self._llm.generate(prompts, self._parameters, use_tqdm=False)
        ids = [tuple(map(int, output.outputs[0].token_ids)) for output in outputs]
        return [StoredAnswer(tokens, finished=bool(tokens) and tokens[-1] in self._stops) for tokens in ids]

    def close(self) -> None:
        """Ends the engine's processes and gives its memory back."""
        core = getattr(getattr(self._llm, "llm_engine", None), "engine_core", None)
        if core is not None:
            core.shutdown()


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Hides torchrun from an engine: each rank has one of its own, on its own GPU."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield
        return
    hidden = {name: os.environ.pop(name) for name in TORCHRUN if name in os.environ}
    device = _device(int(hidden.get("LOCAL_RANK", "0")))
    if device is not None:  # stays: the engine may make workers later
        os.environ["CUDA_VISIBLE_DEVICES"] = device
    try:
        yield
    finally:
        os.environ.update(hidden)


def _device(local_rank: int) -> str | None:
    """The name of the GPU for this rank, as CUDA_VISIBLE_DEVICES has it; None without GPUs."""
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count()))))
    names = [name for name in visible.split(",") if name.strip()]
    return names[local_rank % len(names)] if names else None

"""Requests of the server's own to vLLM's engine: documents to compile, the checks at start, audits."""

from __future__ import annotations

from typing import Any


async def greedy(client: Any, prompt: list[int], salt: str, name: str, **parameters: Any) -> Any:
    """The likeliest answer (vLLM's `CompletionOutput`), when it has ended.

    Args:
        salt: of the prefix cache; empty for none.
        name: of the request.
        parameters: of vLLM's `SamplingParams`.
    """
    from vllm import SamplingParams
    from vllm.inputs import tokens_input

    asked = tokens_input(prompt, cache_salt=salt or None)
    outputs = [output async for output in client.generate(asked, SamplingParams(temperature=0, **parameters), name)]
    return outputs[-1].outputs[0]

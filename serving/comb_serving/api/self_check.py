"""At start: a made-up document must change what the engine says to a made-up prompt, on the way that requests take.

What a request meets is what is checked: encoder, pool, admission, scheduler, worker, and graphs for prompts and for
single tokens. In each step the worker itself sees to it that all cross blocks run (`vllm.rows.RequestDocuments.end`).
"""

from __future__ import annotations

import logging
import random
import secrets
from pathlib import Path
from typing import Any

from comb.backbones.loading import resolve_name
from comb.documents.catalog import KeyedSegment
from comb_serving.api.choice import ENCODER
from comb_serving.api.preprocessor import PreprocessedRequest, Preprocessor, salted
from comb_serving.encoding.asking import greedy
from comb_serving.pool.capability import KEY, MARK

logger = logging.getLogger(__name__)

TENANT = "comb-self-check"
_DOCUMENT, _PROMPT, _ANSWER = 16, 8, 3  # tokens, at most


async def check_engine(preprocessor: Preprocessor, engine: Any, secret: bytes, checkpoint: str) -> None:
    """Asks vLLM's engine with and without a document.

    Raises:
        RuntimeError: if the document changes nothing, although the adapter would have it so.
    """
    manager, draw = preprocessor.manager, random.Random(0)
    assert manager is not None
    known = await manager.encoders.identity()
    size = min(len(preprocessor.builder.tokenizer), known.vocab_size)
    room = manager.layout.num_blocks * manager.layout.block_size
    document = tuple(draw.randrange(size) for _ in range(min(_DOCUMENT, known.max_document_tokens, room)))
    prompt = [draw.randrange(size) for _ in range(_PROMPT)]
    (key,) = await preprocessor.keys([document], TENANT, True)
    segments = (KeyedSegment("self-check", document, key),)
    request = PreprocessedRequest(
        salted({}, TENANT, [key], MARK), ENCODER, {}, segments, prompts=(prompt,),
        behind=() if preprocessor.placing is None else ((1,),),
    )  # fmt: skip
    lease = await preprocessor.acquire(segments, TENANT)
    try:
        token = request.signed(lease, "", secret)
        read = await likely(engine, prompt, request.body["cache_salt"], {KEY: token})
    finally:
        lease.release()
    manager.remove(key)
    plain, again = [await likely(engine, prompt, secrets.token_hex(16), None) for _ in range(2)]
    effect, noise = _effect(read, plain), _effect(again, plain)
    if effect > 10 * noise:
        return
    if _closed(checkpoint):
        logger.warning("all gates of %s are closed: documents change nothing. Is it trained?", checkpoint)
        return
    raise RuntimeError(f"a document changes log-probabilities by {effect:.2g}, which is {noise:.2g} without one")


async def likely(engine: Any, prompt: list[int], salt: str, extra: dict[str, Any] | None) -> dict[int, float]:
    """Log-probabilities of the likeliest first tokens, of an answer with several."""
    options = {"max_tokens": _ANSWER, "ignore_eos": True, "logprobs": 5, "extra_args": extra}
    answer = await greedy(engine, prompt, salt, f"check-{salt[-8:]}", **options)
    if len(answer.token_ids) != _ANSWER:
        raise RuntimeError(f"the engine ended with {answer.finish_reason!r}")
    return {token: found.logprob for token, found in answer.logprobs[0].items()}


def distance(one: dict[int, float], other: dict[int, float]) -> float:
    """The largest difference in log-probability of tokens that are likely in both; infinite without any."""
    return max((abs(one[token] - other[token]) for token in one.keys() & other.keys()), default=float("inf"))


def _effect(one: dict[int, float], other: dict[int, float]) -> float:
    """As `distance`, and 1 where other tokens are likely."""
    found = distance(one, other)
    return found if found == float("inf") or one.keys() == other.keys() else 1.0


def _closed(checkpoint: str) -> bool:
    """Whether no gate of the adapter is open, as before training."""
    from safetensors import safe_open

    files = sorted(Path(resolve_name(checkpoint)).glob("*.safetensors"))
    gates = []
    for file in files:
        with safe_open(file, "pt") as opened:
            gates += [opened.get_tensor(name) for name in opened.keys() if name.endswith("_gate")]  # noqa: SIM118
    return bool(gates) and all(not gate.any() for gate in gates)

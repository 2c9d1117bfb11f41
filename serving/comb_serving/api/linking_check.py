"""At start, for a plain model: documents linked on the way that requests take must give what linking can't change.

Two made-up documents stand in front of a made-up query. The first is at position zero, where its keys and values are
exact, and the second is computed again whole; so the answer is plain vLLM's, although the first comes from the pool and
the second is a seam. Then both come from the pool: that something does at all, the engine itself has to say. Where
states are linked, the first document's interior comes from the pool, and the second is no longer than its seams. What
was compiled behind tokens stands behind them here, which makes the first one exact; seams are as long as the second.
"""

from __future__ import annotations

import random
import secrets
from typing import Any

from comb.documents.catalog import KeyedSegment
from comb_serving.api.preprocessor import PreprocessedRequest, Preprocessor
from comb_serving.api.self_check import TENANT, distance, likely
from comb_serving.linking.layout import LinkingLayout
from comb_serving.linking.methods import LinkMethod
from comb_serving.linking.reports import ReportReceiver, name_of
from comb_serving.pool.capability import KEY

_DOCUMENT, _QUERY = 20, 8  # tokens
BOUNDS = {"float32": 1e-3}  # of log-probabilities; rows of other lengths are summed in another order
BOUND = 0.25  # in half precision


async def check_linking(preprocessor: Preprocessor, engine: Any, secret: bytes, reports: ReportReceiver) -> None:
    """Asks vLLM's engine with documents linked and without.

    Raises:
        RuntimeError: if they aren't linked as they must be.
    """
    manager, method, draw = preprocessor.manager, preprocessor.choice.started, random.Random(0)
    assert manager is not None
    known = await manager.encoders.identity()
    size = min(len(preprocessor.builder.tokenizer), known.vocab_size)
    layout = manager.layout
    assert isinstance(layout, LinkingLayout)
    room = layout.num_blocks // 2 * layout.block_size - layout.state_rows
    front = list(layout.front)
    half = min(room, (known.max_document_tokens - len(front) - 2 * _QUERY) // 2)
    seams = sum(layout.seams(method)) if method.states else 0
    if half < 2 + seams:
        raise RuntimeError(
            f"there is no room to try linking two documents: the pool has {layout.num_blocks} blocks of "
            f"{layout.block_size} tokens, and a prompt at most {known.max_document_tokens + 1} tokens"
        )
    lengths = [min(_DOCUMENT + seams, half), seams or min(_DOCUMENT, half) - 1]
    documents = [tuple(draw.randrange(size) for _ in range(length)) for length in lengths]
    prompt = [*front, *documents[0], *documents[1], *(draw.randrange(size) for _ in range(_QUERY))]
    keys = await preprocessor.keys(documents, TENANT, True)
    segments = tuple(KeyedSegment("self-check", ids, key) for ids, key in zip(documents, keys, strict=True))
    spans = ((len(front), lengths[0]), (len(front) + lengths[0], lengths[1]))
    lease = await preprocessor.acquire(segments, TENANT)

    async def linked(method: LinkMethod, tokens: int) -> dict[int, float]:
        """Log-probabilities; raises RuntimeError unless `tokens` tokens came from the pool."""
        salt = secrets.token_hex(16)
        request = PreprocessedRequest({"cache_salt": salt}, method, {}, segments, (prompt,), (spans,))
        token = request.signed(lease, "", secret)
        found = await likely(engine, prompt, salt, {KEY: token})
        report = reports.take(name_of(token))
        if report is None or report.linked_tokens != tokens:
            said = "nothing" if report is None else f"{report.linked_tokens}"
            raise RuntimeError(f"{method.name}: {tokens} tokens must come from the pool, the engine says {said}")
        return found

    try:
        if not layout.given:  # plain vLLM computes nothing that stands behind what an adapter has learned
            exact, loaded = method, lengths[0] - seams
            if not method.states:
                exact = LinkMethod.parse(f"legolink:{lengths[1]},front={method.front}")
                loaded = lengths[0] - (lengths[1] if front else 0)
            found = await linked(exact, loaded)
            plain, again = [await likely(engine, prompt, secrets.token_hex(16), None) for _ in range(2)]
            error, noise = distance(found, plain), distance(again, plain)
            if error > max(BOUNDS.get(known.dtype, BOUND), 10 * noise):
                raise RuntimeError(
                    f"linked documents change log-probabilities by {error:.2g} where they must change nothing (two "
                    f"plain runs differ by {noise:.2g})"
                )
        if not method.states:
            await linked(LinkMethod.parse(f"naive,front={method.front}"), sum(lengths))
    finally:
        lease.release()
    for key in keys:
        manager.remove(key)

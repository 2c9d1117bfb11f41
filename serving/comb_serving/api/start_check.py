"""At start: made-up documents must do to an answer what they have to, on the way that requests take.

What a request meets is what is checked: who compiles, pool, admission, scheduler, worker, and graphs for prompts and
for single tokens.

An adapter's document must change what the engine says. In each step the worker itself sees to it that all cross blocks
run (`vllm.rows.RequestDocuments.end`).

In a plain model two documents are linked where that can change nothing. The first is at position zero, where its keys
and values are exact, and the second is computed again whole; so the answer is plain vLLM's, although the first comes
from the pool and the second is a seam. Then both come from the pool: that something does at all, the engine itself has
to say. Where states are linked, the first document's interior comes from the pool, and the second is no longer than its
seams. What was compiled behind tokens stands behind them here, which makes the first one exact; seams are as long as
the second.
"""

from __future__ import annotations

import logging
import random
import re
import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from comb.backbones.loading import resolve_name
from comb.documents.catalog import KeyedSegment
from comb_serving.api.preprocessor import PreprocessedRequest, Preprocessor, salted
from comb_serving.encoding.compiler import greedy
from comb_serving.linking.layout import LinkingLayout
from comb_serving.linking.methods import LinkMethod
from comb_serving.linking.reports import ReportReceiver, name_of
from comb_serving.pool.capability import KEY, MARK

logger = logging.getLogger(__name__)

TENANT = "comb-start-check"
_DOCUMENT, _QUERY, _ANSWER = 20, 8, 3  # tokens, at most
BOUNDS = {"float32": 1e-3}  # of log-probabilities; rows of other lengths are summed in another order
BOUND = 0.25  # in half precision

LogProbabilities = dict[int, float]  # of the likeliest first tokens


async def check_start(
    preprocessor: Preprocessor, engine: Any, secret: bytes, checkpoint: str, reports: ReportReceiver | None = None
) -> None:
    """Asks vLLM's engine with and without documents.

    Args:
        reports: of an engine that links documents in a plain model.

    Raises:
        RuntimeError: if documents don't do what they must.
    """
    manager, started, draw = preprocessor.manager, preprocessor.choice.started, random.Random(0)
    assert manager is not None
    known, layout = await manager.encoders.identity(), manager.layout
    size = min(len(preprocessor.builder.tokenizer), known.vocab_size)
    linking, front = isinstance(layout, LinkingLayout), list[int]()
    if isinstance(layout, LinkingLayout):
        front = list(layout.front)
        lengths = _linked_lengths(started, layout, known.max_document_tokens, len(front))
    else:
        lengths = [min(_DOCUMENT, known.max_document_tokens, layout.num_blocks * layout.block_size)]
    documents = [tuple(draw.randrange(size) for _ in range(length)) for length in lengths]
    prompt = [draw.randrange(size) for _ in range(_QUERY)]
    spans: tuple[Any, ...] = ()
    if linking:
        prompt = [*front, *documents[0], *documents[1], *prompt]
        spans = (((len(front), lengths[0]), (len(front) + lengths[0], lengths[1])),)
    keys = await preprocessor.keys(documents, TENANT, True)
    segments = tuple(KeyedSegment("start-check", ids, key) for ids, key in zip(documents, keys, strict=True))
    lease = await preprocessor.acquire(segments, TENANT)

    async def over(method: LinkMethod, tokens: int) -> LogProbabilities:
        """Over the documents; raises RuntimeError unless `tokens` tokens were linked from the pool."""
        body = {"cache_salt": secrets.token_hex(16)} if linking else salted({}, TENANT, keys, MARK)
        request = PreprocessedRequest(body, method, {}, segments, (prompt,), spans)
        token = request.signed(lease, "", secret)
        found = await likely(engine, prompt, body["cache_salt"], {KEY: token})
        report = None if reports is None else reports.take(name_of(token))
        if linking and (report is None or report.linked_tokens != tokens):
            said = "nothing" if report is None else f"{report.linked_tokens}"
            raise RuntimeError(f"{method.name}: {tokens} tokens must come from the pool, the engine says {said}")
        return found

    async def plain() -> list[LogProbabilities]:
        """Without documents, twice."""
        return [await likely(engine, prompt, secrets.token_hex(16), None) for _ in range(2)]

    try:
        if isinstance(layout, LinkingLayout):
            again = sum(layout.seams(started)) if started.states else lengths[1] if front else 0
            bound = None if layout.given else BOUNDS.get(known.dtype, BOUND)
            await _check_linked(over, plain, started, lengths, again, bound)
        else:
            await _check_read(over, plain, started, checkpoint)
    finally:
        lease.release()
    for key in keys:
        manager.remove(key)


Over = Callable[[LinkMethod, int], Awaitable[LogProbabilities]]
Plain = Callable[[], Awaitable[list[LogProbabilities]]]


async def _check_read(over: Over, plain: Plain, method: LinkMethod, checkpoint: str) -> None:
    read, (without, again) = await over(method, 0), await plain()
    effect, noise = _effect(read, without), _effect(again, without)
    if effect > 10 * noise:
        return
    if _closed(checkpoint):
        logger.warning("all gates of %s are closed: documents change nothing. Is it trained?", checkpoint)
        return
    raise RuntimeError(f"a document changes log-probabilities by {effect:.2g}, which is {noise:.2g} without one")


async def _check_linked(
    over: Over, plain: Plain, method: LinkMethod, lengths: list[int], seams: int, bound: float | None
) -> None:
    """`seams`: tokens of the first document that are computed again where linking must change nothing.

    `bound` is None where it must change something: plain vLLM computes nothing behind what an adapter has learned.
    """
    first, second = lengths
    if bound is not None:
        exact = method if method.states else LinkMethod.parse(f"legolink:{second},front={method.front}")
        linked, (without, again) = await over(exact, first - seams), await plain()
        error, noise = distance(linked, without), distance(again, without)
        if error > max(bound, 10 * noise):
            raise RuntimeError(
                f"linked documents change log-probabilities by {error:.2g} where they must change nothing (two plain "
                f"runs differ by {noise:.2g})"
            )
        if method.rule.by_query:  # nothing but what begins the prompt is left of whatever it looks at
            (everything,) = method.rule.everything.values()
            whole = LinkMethod.parse(f"{re.split('[:,]', method.name)[0]}:{everything},front={method.front}")
            error = distance(await over(whole, 0 if seams else first), without)
            if error > max(bound, 10 * noise):
                raise RuntimeError(
                    f"{whole.name} recomputes all that isn't in its place, and changes log-probabilities by {error:.2g}"
                )
    if not method.states:
        await over(LinkMethod.parse(f"naive,front={method.front}"), first + second)


def _linked_lengths(method: LinkMethod, layout: LinkingLayout, most: int, front: int) -> list[int]:
    """Tokens of two documents. Raises RuntimeError where there is no room for them, or for a prompt over them."""
    room = layout.num_blocks // 2 * layout.block_size - layout.state_rows
    half, seams = min(room, (most - front - 2 * _QUERY) // 2), sum(layout.seams(method)) if method.states else 0
    if half < 2 + seams:
        raise RuntimeError(
            f"there is no room to try linking two documents: the pool has {layout.num_blocks} blocks of "
            f"{layout.block_size} tokens, and a prompt at most {most + 1} tokens"
        )
    return [min(_DOCUMENT + seams, half), seams or min(_DOCUMENT, half) - 1]


async def likely(engine: Any, prompt: list[int], salt: str, extra: dict[str, Any] | None) -> LogProbabilities:
    """Of an answer with several tokens, so that graphs for single ones are met too."""
    options = {"max_tokens": _ANSWER, "ignore_eos": True, "logprobs": 5, "extra_args": extra}
    answer = await greedy(engine, prompt, salt, f"check-{salt[-8:]}", **options)
    if len(answer.token_ids) != _ANSWER:
        raise RuntimeError(f"the engine ended with {answer.finish_reason!r}")
    return {token: found.logprob for token, found in answer.logprobs[0].items()}


def distance(one: LogProbabilities, other: LogProbabilities) -> float:
    """The largest difference over tokens that are likely in both; infinite without any."""
    return max((abs(one[token] - other[token]) for token in one.keys() & other.keys()), default=float("inf"))


def _effect(one: LogProbabilities, other: LogProbabilities) -> float:
    """As `distance`, and 1 where other tokens are likely."""
    found = distance(one, other)
    return found if found == float("inf") or one.keys() == other.keys() else 1.0


def _closed(checkpoint: str) -> bool:
    """Whether no gate of the adapter is open, as before training."""
    from safetensors import safe_open

    gates = []
    for file in sorted(Path(resolve_name(checkpoint)).glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            gates += [opened.get_tensor(name) for name in opened.keys() if name.endswith("_gate")]  # noqa: SIM118
    return bool(gates) and all(not gate.any() for gate in gates)

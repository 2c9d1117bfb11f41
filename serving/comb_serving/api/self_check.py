"""Whether documents do to an answer what they have to, asked of the engine itself: at start, and of some requests.

At start made-up documents go the way that requests take: who compiles, pool, scheduler, worker, and graphs for prompts
and for single tokens. An adapter's document must change what the engine says. In a plain model two documents are linked
where that can change nothing. The first is at position zero, where its keys and values are exact, and the second is
computed again whole; so the answer is plain vLLM's, although the first comes from the pool and the second is a seam.
Then both come from the pool: that something does at all, the engine itself has to say. Where states are linked, the
first document's interior comes from the pool, and the second is no longer than its seams. What was compiled behind
tokens stands behind them here, which makes the first one exact; seams are as long as the second.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
import secrets
from collections.abc import Awaitable, Callable
from itertools import takewhile
from pathlib import Path
from typing import Any

from comb.backbones.loading import resolve_name
from comb.documents.catalog import KeyedSegment
from comb_serving.api.preprocessor import PreprocessedRequest, Preprocessor, salted
from comb_serving.encoding.compiler import greedy
from comb_serving.linking.layout import LinkingLayout
from comb_serving.linking.methods import LinkMethod
from comb_serving.manager.manager import NO_PLACE
from comb_serving.pool.capability import KEY, MARK, LinkReport, ReportReceiver, name_of

logger = logging.getLogger(__name__)

TENANT = "comb-start-check"
_DOCUMENT, _QUERY, _ANSWER = 20, 8, 3  # tokens, at most
_AUDITED = 32  # tokens of each answer, at most

LogProbabilities = dict[int, float]  # of the likeliest first tokens
Over = Callable[[LinkMethod, int], Awaitable[LogProbabilities]]
Plain = Callable[[], Awaitable[list[LogProbabilities]]]


async def check_start(
    preprocessor: Preprocessor, engine: Any, secret: bytes, checkpoint: str, reports: ReportReceiver | None = None
) -> None:
    """Asks vLLM's engine with and without documents; one that links them in a plain model has `reports`.

    Raises:
        RuntimeError: if documents don't do what they must, or there is no room to try.
    """
    manager, method, draw = preprocessor.manager, preprocessor.choice.started, random.Random(0)
    assert manager is not None
    known, layout = await manager.encoders.identity(), manager.layout
    most = known.max_document_tokens
    front, seams = list[int](), 0
    if isinstance(layout, LinkingLayout):
        front = list(layout.front)
        seams = sum(layout.seams(method)) if method.states else 0
        room = layout.num_blocks // 2 * layout.block_size - layout.state_rows
        half = min(room, (most - 2 * _QUERY) // 2)  # of what the front leaves
        if half < 2 + seams:
            raise RuntimeError(
                f"there is no room to try linking two documents: the pool has {layout.num_blocks} blocks of "
                f"{layout.block_size} tokens, and a document at most {most}: raise --comb-pool-bytes or --max-model-len"
            )
        lengths = [min(_DOCUMENT + seams, half), seams or min(_DOCUMENT, half) - 1]
    else:
        lengths = [min(_DOCUMENT, most, layout.num_blocks * layout.block_size)]
    size = min(len(preprocessor.builder.tokenizer), known.vocab_size)
    documents = [tuple(draw.randrange(size) for _ in range(length)) for length in lengths]
    prompt, spans = [draw.randrange(size) for _ in range(_QUERY)], tuple[Any, ...]()
    if isinstance(layout, LinkingLayout):
        prompt = [*front, *documents[0], *documents[1], *prompt]
        spans = (((len(front), lengths[0]), (len(front) + lengths[0], lengths[1])),)
    keys = await preprocessor.keys(documents, TENANT, True)
    segments = tuple(KeyedSegment("start-check", ids, key) for ids, key in zip(documents, keys, strict=True))
    lease = await preprocessor.acquire(segments, TENANT)

    async def likely(salt: str, extra: dict[str, Any] | None) -> LogProbabilities:
        """Of an answer with several tokens, so that graphs for single ones are met too."""
        options: dict[str, Any] = {"max_tokens": _ANSWER, "ignore_eos": True, "logprobs": 5, "extra_args": extra}
        answer = await greedy(engine, prompt, salt, f"check-{salt[-8:]}", **options)
        if len(answer.token_ids) != _ANSWER:
            raise RuntimeError(f"the engine ended with {answer.finish_reason!r}")
        return {token: found.logprob for token, found in answer.logprobs[0].items()}

    async def over(method: LinkMethod, tokens: int) -> LogProbabilities:
        """Over the documents; raises RuntimeError unless `tokens` tokens were linked from the pool."""
        body = {"cache_salt": secrets.token_hex(16)} if spans else salted({}, TENANT, keys, MARK)
        token = PreprocessedRequest(body, method, {}, segments, (prompt,), spans).signed(lease, "", secret)
        found = await likely(body["cache_salt"], {KEY: token})
        report = None if reports is None else reports.take(name_of(token))
        if spans and (report is None or report.linked_tokens != tokens):
            said = "nothing" if report is None else f"{report.linked_tokens}"
            raise RuntimeError(f"{method.name}: {tokens} tokens must come from the pool, the engine says {said}")
        return found

    async def plain() -> list[LogProbabilities]:
        """Without documents, twice."""
        return [await likely(secrets.token_hex(16), None) for _ in range(2)]

    try:
        if isinstance(layout, LinkingLayout):
            # rows of other lengths are summed in another order
            bound = 1e-3 if known.dtype == "float32" else 0.25
            again = seams if method.states else lengths[1] if front else 0
            await _check_linked(over, plain, method, lengths, again, None if layout.given else bound)
        else:
            await _check_read(over, plain, method, checkpoint)
    finally:
        lease.release()
    for key in keys:
        manager.remove(key)


async def _check_read(over: Over, plain: Plain, method: LinkMethod, checkpoint: str) -> None:
    """An adapter's document must change something; that all cross blocks run, the worker sees to in each step."""

    def effect(one: LogProbabilities, other: LogProbabilities) -> float:
        found = distance(one, other)
        return found if found == float("inf") or one.keys() == other.keys() else 1.0

    read, (without, again) = await over(method, 0), await plain()
    changed, noise = effect(read, without), effect(again, without)
    if changed > 10 * noise:
        return
    from safetensors import safe_open

    gates = []
    for file in sorted(Path(resolve_name(checkpoint)).glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            gates += [opened.get_tensor(name) for name in opened.keys() if name.endswith("_gate")]  # noqa: SIM118
    if not gates or any(gate.any() for gate in gates):
        raise RuntimeError(f"a document changes log-probabilities by {changed:.2g}, which is {noise:.2g} without one")
    logger.warning("all gates of %s are closed: documents change nothing. Is it trained?", checkpoint)


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


def distance(one: LogProbabilities, other: LogProbabilities) -> float:
    """The largest difference over tokens that are likely in both; infinite without any."""
    return max((abs(one[token] - other[token]) for token in one.keys() & other.keys()), default=float("inf"))


class Audit:
    """How often linked documents lead to the words of a full recompute: a share of requests is asked both ways again.

    Linking is approximate, and how much that matters depends on the model and on what it is asked: so it is measured on
    the requests that come. Both answers are greedy and begin where the client's did; nobody waits for them, and there
    is never more than one such pair under way.
    """

    def __init__(
        self, share: float, preprocessor: Preprocessor, secret: bytes, draw: Callable[[], float] = random.random
    ) -> None:
        self.share, self._preprocessor, self._secret, self._draw = share, preprocessor, secret, draw
        self._running: asyncio.Task[None] | None = None

    def consider(self, request: PreprocessedRequest, link: LinkReport | None, tenant: str, engine: Any) -> None:
        """Asks one of the share again, if the engine has linked anything for it; returns at once."""
        busy = self._running is not None and not self._running.done()
        if engine is None or busy or link is None or not link.linked_tokens or self._draw() >= self.share:
            return
        self._running = asyncio.create_task(self._compare(request, tenant, engine))

    def stop(self) -> None:
        """Ends what is under way."""
        if self._running is not None:
            self._running.cancel()

    async def _compare(self, request: PreprocessedRequest, tenant: str, engine: Any) -> None:
        try:
            lease = await self._preprocessor.acquire(request.segments, tenant, request.compiled_with)
        except NO_PLACE:
            return  # when it is that full, clients come first
        answers = []
        try:
            linked = request.salt, {KEY: request.signed(lease, "", self._secret)}
            full = secrets.token_hex(16), None  # what clients find in the prefix cache doesn't depend on audits
            lora = self._preprocessor.loras.known.get(request.lora)
            for salt, extra in (linked, full):
                options: dict[str, Any] = {"max_tokens": _AUDITED, "detokenize": False, "extra_args": extra}
                name = f"audit-{secrets.token_hex(8)}"
                answer = await greedy(engine, request.prompts[0], salt, name, lora, **options)
                if answer.finish_reason not in ("length", "stop"):
                    raise RuntimeError(f"the engine ended with {answer.finish_reason!r}")
                answers.append(list(answer.token_ids))
        except Exception:
            logger.exception("a request could not be compared with its full recompute")
            return
        finally:
            lease.release()
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(*answers, strict=False)))
        label = self._preprocessor.choice.label(request.method)
        self._preprocessor.counters.count_audit(label, same, max(map(len, answers)))

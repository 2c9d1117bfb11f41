"""vLLM's scheduler, which takes no request whose documents were lost, swapped or made up on the way to it.

It is the one place in the engine that sees a request's salt, its prompt and its documents together, before anything
of it is looked up in the prefix cache. What the front refuses doesn't come here; this holds for all that it overlooks.
"""

from __future__ import annotations

import copy
import logging
import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, hash_block_tokens
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import FinishReason

from comb_serving.pool.capability import MARK, Capability
from comb_serving.vllm.decoder_pool import capability_of, token_of

if TYPE_CHECKING:  # what it is mixed into
    from vllm.v1.core.sched.scheduler import Scheduler as SchedulerClass
else:
    SchedulerClass = object

logger = logging.getLogger(__name__)


def make_scheduler(vllm_config: Any, **options: Any) -> Scheduler:
    """In place of a ``--scheduler-cls``: the one that vLLM would take for this configuration, with the check."""
    return mixed_into_vllms(CheckedScheduler, vllm_config, options)


def mixed_into_vllms(ours: type[CheckedScheduler], vllm_config: Any, options: dict[str, Any]) -> Scheduler:
    """Our scheduler in front of vLLM's own, which makes its steps ahead or not."""
    base = AsyncScheduler if vllm_config.scheduler_config.async_scheduling else Scheduler
    made: Scheduler = type(f"Comb{base.__name__}", (ours, base), {})(vllm_config=vllm_config, **options)
    return made


class CheckedScheduler(SchedulerClass):
    """Comes first among the bases; a request that fails the check ends with an error, and no other is touched."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._refused: set[str] = set()
        self._hash = get_hash_fn_by_name(self.vllm_config.cache_config.prefix_caching_hash_algo)

    def add_request(self, request: Any) -> None:
        """Takes a request; a wrong one is made to compute one token that nobody sees, over nothing that is shared."""
        try:
            self.admit(request)
        except ValueError as error:
            logger.warning("request %s is refused: %s", request.request_id, error)
            # made one that computes a token over nothing that is shared
            request.cache_salt, request.block_hashes = secrets.token_hex(16), []
            request.update_block_hashes()
            if request.sampling_params is not None:
                # a copy: inside of one process several requests may have the same
                request.sampling_params = parameters = copy.copy(request.sampling_params)
                parameters.extra_args, parameters.min_tokens, parameters.max_tokens, request.max_tokens = None, 0, 1, 1
            self._refused = {request.request_id, *(self._refused & self.requests.keys())}
        super().add_request(request)

    def admit(self, request: Any) -> Capability | None:
        """What a request brings; the prefix of its prompt, which reads no documents, is found whatever they are.

        Raises ValueError for a request that is to be refused.
        """
        capability = check_request(request)
        prefix = 0 if capability is None else capability.prefix_of(request.prompt_token_ids)
        if capability is None or prefix < self.hash_block_size:
            return capability
        salt, of_prefix = ("cache_salt", request.cache_salt), ("cache_salt", capability.prefix_salt)

        def extra(plain: tuple[Any, ...], start: int, end: int) -> tuple[Any, ...]:
            keys = tuple(key for key in plain if key != salt)
            if not start and capability.prefix_salt:
                keys = (*keys, of_prefix)
            # each block's hash goes on from the one in front of it: one block says whose documents all that follow read
            return (*keys, salt) if start <= prefix < end else keys

        self.rehash(request, extra)
        return capability

    def rehash(self, request: Any, extra: Callable[[tuple[Any, ...], int, int], tuple[Any, ...]]) -> None:
        """Has a request's blocks known by other hashes.

        Args:
            extra: what belongs to the hash of tokens [start, end) beside them, from what vLLM takes.
        """

        def hasher(request: Any) -> list[Any]:
            size, known = self.hash_block_size, list(request.block_hashes)
            for start in range(len(known) * size, request.num_tokens - size + 1, size):
                plain, _ = generate_block_hash_extra_keys(request, start, start + size, 0)
                tokens, more = request.all_token_ids[start : start + size], extra(plain or (), start, start + size)
                known.append(hash_block_tokens(self._hash, known[-1] if known else None, tokens, more or None))
            return known[len(request.block_hashes) :]

        if request._block_hasher is not None:
            request._block_hasher = hasher
            request.block_hashes.clear()
            request.update_block_hashes()

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]:
        """What clients get of a step."""
        found: dict[int, Any] = super().update_from_output(scheduler_output, model_runner_output)
        if self._refused:
            for output in (output for group in found.values() for output in group.outputs):
                if output.request_id in self._refused:
                    output.new_token_ids, output.new_logprobs = [], None
                    output.new_prompt_logprobs_tensors = None
                    output.finish_reason = FinishReason.ERROR
        return found


def check_request(request: Any) -> Capability | None:
    """What a request brings. Raises ValueError unless its salt and documents belong together, and both to it."""
    token = token_of(request)
    if token is not None:
        capability = capability_of(token)
        capability.check(request.request_id, request.cache_salt, request.prompt_token_ids)
        return capability
    if (request.cache_salt or "").startswith(MARK):
        raise ValueError("its documents were lost inside vLLM")
    return None

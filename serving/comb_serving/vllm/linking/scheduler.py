"""vLLM's scheduler with documents: the seams of what is linked are rows of a step like any others.

A request computes its query in the same step if all of its seams fit in beside, and waits for them otherwise.

A seam's row is announced to the worker as a new request with the blocks of the request that it belongs to. Its prompt
is that of the request up to one token behind the seam, so that nothing is sampled from it, and with the next step the
worker is told that it has ended. To this scheduler it doesn't exist.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler

from comb_serving.linking.layout import LinkPlan
from comb_serving.pool.capability import Capability
from comb_serving.vllm.linking.connector import LinkingConnector, SeamJob, SeamRoom
from comb_serving.vllm.linking.links import LookCommand, link_of
from comb_serving.vllm.scheduler import CheckedScheduler, mixed_into_vllms

SEAM = "comb-seam-"


def make_scheduler(vllm_config: Any, **options: Any) -> Scheduler:
    """In place of a ``--scheduler-cls``: the one that vLLM would take for this configuration, with linking."""
    return mixed_into_vllms(LinkingScheduler, vllm_config, options)


class LinkingScheduler(CheckedScheduler):
    """Comes first among the bases."""

    connector: LinkingConnector
    max_num_scheduled_tokens: int
    max_num_active_reqs: int

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.connector.requests = self.requests
        self._numbers = itertools.count()

    def admit(self, request: Any) -> Capability | None:
        """Beside the check of all requests: what it links, and under which hashes its blocks are kept."""
        capability = super().admit(request)
        if capability is None or not capability.method:
            return capability
        link = link_of(request, capability, self.connector.layout, self.connector.started)
        self.connector.links[request.request_id] = link
        if capability.found:
            # by the hashes of plain prompts, which it still has
            _, exact, _ = self.kv_cache_manager.get_computed_blocks(request)
            link.go_behind(exact)
        if link.method is not None:
            # blocks in front of the first document keep the hashes of plain prompts, and are shared with them; what has
            # approximate keys and values never has an exact prompt's hash
            self.rehash(request, lambda plain, start, end: (*plain, *link.hash_extra(start, end)))
            _, link.exact, _ = self.kv_cache_manager.get_computed_blocks(request)
        return capability

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """A step of vLLM's, and the seams that it has room for."""
        limit, active, jobs = self.max_num_scheduled_tokens, self.max_num_active_reqs, self.connector.jobs.values()
        # who links doesn't starve, nor does who comes behind: half of a step, but of a single row all
        tokens = limit - min(sum(job.tokens for job in jobs), limit // 2)
        rows = active - min(sum(job.rows for job in jobs), (active + 1) // 2)
        room = self.connector.room = self._room(tokens, rows)
        self.max_num_scheduled_tokens, self.max_num_active_reqs = tokens - room.tokens, rows - room.rows
        try:
            output = super().schedule(throttle_prefills)
        finally:
            self.max_num_scheduled_tokens, self.max_num_active_reqs = limit, active
            self.connector.room = SeamRoom()
        self._add_seams(output, limit - output.total_num_scheduled_tokens)
        if output.kv_connector_metadata.looks:
            looking = (name for name, job in self.connector.jobs.items() if job.looks is not None)
            output.kv_connector_metadata.looking = tuple(looking)
        if output.kv_connector_metadata.before_step:
            output.has_sync_kv_loads = True  # for requests that wait for seams too
        return output

    def _room(self, tokens: int, rows: int) -> SeamRoom:
        """For the seams of those who begin in this step, in order, as far as its tokens and rows go for all of each.

        Nobody in front gives anything up for it: where prompts aren't cut, the first in line could wait for ever.
        """
        room = SeamRoom()
        if self.connector.started.states or not self.connector.links:
            return room
        for request in itertools.chain(self.running, self.kv_holding_waiting):
            if request.request_id not in self.connector.jobs:
                tokens -= request.num_tokens_with_spec + request.num_output_placeholders - request.num_computed_tokens
                rows -= 1
        for request in self.waiting:
            link = self.connector.links.get(request.request_id)
            left = LinkPlan((), (), 0)
            if link is not None and link.method is not None and not link.looks:
                left = link.plan.behind(link.exact)
            tokens, rows = tokens - (request.num_tokens - left.query) - left.seam_tokens, rows - 1 - len(left.seams)
            if tokens < 0 or rows < 0:
                break
            room.tokens, room.rows = room.tokens + left.seam_tokens, room.rows + len(left.seams)
        return room

    def _reserve_prefill_lookahead(self, request: Any, num_computed_tokens: int, num_new_tokens: int) -> int:
        """The one place where vLLM asks for a chunk's end; here steps also end where states are captured."""
        count: int = super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)
        return self.connector.chunk(request.request_id, num_computed_tokens, count)

    def _add_seams(self, output: SchedulerOutput, tokens: int) -> None:
        """Rows for the seams of waiting requests, first come, first served, as far as tokens and rows allow."""
        if not self.connector.jobs:
            return
        rows, metadata = self.max_num_running_reqs - len(self.running), output.kv_connector_metadata
        present = (self.requests[name].lora_request for name in output.num_scheduled_tokens)
        loras = {lora.lora_int_id for lora in present if lora is not None}
        # first those whose request is in this step
        for name, job in sorted(self.connector.jobs.items(), key=lambda item: not item[1].beside):
            if (lora := job.request.lora_request) is not None and lora.lora_int_id not in loras:
                if len(loras) == self.lora_config.max_loras:  # vLLM's, for the requests of a step
                    continue
                loras.add(lora.lora_int_id)
            while job.ranges and tokens > 0 and rows > 0:
                start, end = job.ranges.popleft()
                if (interior := job.interiors.pop(start, None)) is not None:
                    metadata.composes.append(interior)
                count = min(end - start, tokens)
                row = self._row(job, start, start + count)
                output.scheduled_new_reqs.append(row)
                output.num_scheduled_tokens[row.req_id] = count
                output.total_num_scheduled_tokens += count
                self.finished_req_ids.add(row.req_id)  # told with the next step
                tokens, rows, job.tokens = tokens - count, rows - 1, job.tokens - count
                if start + count < end:
                    job.ranges.appendleft((start + count, end))
                if job.looks is not None and start >= job.looks:
                    link = self.connector.links[name]
                    assert link.method is not None
                    look = LookCommand(
                        name, start, start + count, job.blocks, link.length, link.spans, link.method.name
                    )
                    metadata.looks.append(look)
                if job.interiors:
                    break
            assert not (job.ranges and job.beside), f"{name} would be answered without its seams"
            if not job.ranges and job.looks is None:
                if job.interiors:  # it comes before the request's own first step
                    (self.connector.behind_seams[name],) = job.interiors.values()
                del self.connector.jobs[name]
                if not job.beside:
                    self.finished_recving_kv_req_ids.add(name)  # its own first step comes behind this one

    def _row(self, job: SeamJob, start: int, end: int) -> NewRequestData:
        tokens: Any = job.token_ids[: end + 1]
        return NewRequestData(
            req_id=f"{SEAM}{next(self._numbers)}",
            prompt_token_ids=tokens,
            mm_features=[],
            sampling_params=SamplingParams(max_tokens=1, temperature=0.0),
            pooling_params=None,
            block_ids=job.blocks,
            num_computed_tokens=start,
            lora_request=job.request.lora_request,
            prefill_token_ids=tokens if self.use_v2_model_runner else None,
        )

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: Any) -> list[Any]:
        """Who leaves before its seams are computed gives its blocks back at once: no step will write to them."""
        names = [request_ids] if isinstance(request_ids, str) else request_ids
        names = list(self.requests) if names is None else list(names)
        for name in names:
            if self.connector.jobs.pop(name, None) is not None:
                self.finished_recving_kv_req_ids.add(name)
        found: list[Any] = super().finish_requests(names, finished_status)
        return found

"""The KV connector: in the scheduler it says what comes from the pool, in the worker it copies that.

vLLM makes one object for each side; they share only `LinkingMetadata`.
"""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass, field
from typing import Any, cast

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole, SupportsHMA

from comb_serving.config.serve_options import instance_dir
from comb_serving.linking.layout import LinkingLayout, LinkPlan
from comb_serving.linking.methods import LinkMethod, Range
from comb_serving.pool.capability import LinkReport, ReportSender
from comb_serving.vllm.linking.document_pool import DocumentPool
from comb_serving.vllm.linking.links import (
    Blocks,
    CaptureCommand,
    ChosenTokens,
    ComposeCommand,
    LinkingMetadata,
    LoadCommand,
    RequestLink,
    SaveCommand,
)
from comb_serving.vllm.linking.setup import check_groups, method_of


@dataclass
class SeamJob:
    """A request whose seams are still to be computed.

    Args:
        token_ids: of its prompt, packed: every row that computes a seam gets a copy of all in front of it, which as
            Python's numbers would take a client's many small documents seconds.
        interiors: with linear layers, whose state can't be ahead of itself: what is put between its seams, by where it
            ends. Each has to be there before the tokens behind it are computed, and so there is one seam in a step.
        looks: where its question begins, which is computed behind `ranges` and looks at the documents first; None where
            it doesn't, or has.
    """

    request: Any
    token_ids: array[int]
    blocks: Blocks  # of the request
    ranges: deque[Range]  # of its prompt, that are left
    interiors: dict[int, ComposeCommand]
    beside: bool  # its own first step is the one that computes them; else it waits until they are there
    looks: int | None = None
    cached: int = 0  # tokens of its prompt that were there
    looked: int = field(init=False)  # that were computed for the look
    tokens: int = field(init=False)  # in `ranges`

    def __post_init__(self) -> None:
        self.tokens = sum(end - start for start, end in self.ranges)
        self.looked = 0 if self.looks is None else self.tokens

    @property
    def rows(self) -> int:
        """Of a step, that it can do with; one while nobody knows yet what its question has chosen."""
        return 1 if self.interiors else max(1, len(self.ranges))


@dataclass
class SeamRoom:
    """What a step keeps for the seams of requests that begin in it: tokens, and rows of its batch."""

    tokens: int = 0
    rows: int = 0


class LinkingConnector(KVConnectorBase_V1, SupportsHMA):
    """Both sides; the scheduler's has `links`, `jobs` and no pool, the worker's a pool and nothing else."""

    pool: DocumentPool | None = None  # the worker brings it (`pool_worker`)
    requests: dict[str, Any]  # the scheduler's

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.started: LinkMethod = method_of(vllm_config)
        check_groups(kv_cache_config, self.started)
        if role == KVConnectorRole.SCHEDULER:
            self.layout = LinkingLayout.read(instance_dir())
            self.reports = ReportSender(instance_dir())
        self.links: dict[str, RequestLink] = {}
        self.jobs: dict[str, SeamJob] = {}
        self.room = SeamRoom()
        self._matched: dict[str, tuple[int, LinkPlan, bool]] = {}
        self._loads: list[LoadCommand] = []
        self.behind_seams: dict[str, ComposeCommand] = {}  # by request: what is between its last seam and its query

    # ---- in the scheduler ----

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Everything in front of the query comes from elsewhere; with seams that the step has no room for, later."""
        link = self.links.get(request.request_id)
        if link is None:
            return 0, False
        left = link.plan.behind(num_computed_tokens)
        # rows of one step see each other's keys and values; a state is there only behind the step that computes it
        fits = left.seam_tokens <= self.room.tokens and len(left.seams) <= self.room.rows
        beside = fits and not self.started.states and not link.looks
        self._matched[request.request_id] = num_computed_tokens, left, beside
        if num_computed_tokens >= link.plan.query:
            return 0, False
        if link.looks:  # the question's rows need blocks as well, before its own step
            return link.length - num_computed_tokens, True
        return link.plan.query - num_computed_tokens, bool(left.seams) and not beside

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Now it has its blocks."""
        matched = self._matched.pop(request.request_id, None)
        if matched is None:  # a second call, behind its seams
            return
        link, (cached, left, beside) = self.links[request.request_id], matched
        linked = left.loaded_tokens if num_external_tokens else 0
        looks = link.looks and bool(num_external_tokens)
        if link.method is not None and not request.num_preemptions and not looks:
            exact = link.snapshot if linked else 0
            each = left.loaded_of(len(link.handles))[bool(link.snapshot) :] if linked else ()
            report = LinkReport(cached + exact, linked - exact, link.length - cached - linked, each)
            self.reports.send(link.report, report)
        if not num_external_tokens:
            return
        ids = blocks.get_block_ids()
        front = 0 if link.method is None else len(self.layout.front)
        interiors = {}
        # what a request that compiles a document loads are an adapter's link tokens
        sources = [self.layout.front_handle] if link.method is None else link.handles
        for load in left.loads:
            handle, fresh = sources[load.document], bool(link.snapshot) and not load.document
            self._loads.append(LoadCommand(handle, load.offset, load.start, load.end, ids, 0 if fresh else front))
            if self.started.states:
                fresh |= link.method is None
                interiors[load.end] = ComposeCommand(handle, load.end - load.start, ids, fresh)
        if looks or left.seams:
            tokens, ranges = array("i", request.prompt_token_ids), deque(left.seams)
            if looks:  # the row that ends with the question's last token is told one more, or it would be sampled from
                tokens.append(0)
                ranges.append((left.query, link.length))
            begins = left.query if looks else None
            job = SeamJob(request, tokens, ids, ranges, interiors, beside, begins, cached)
            self.jobs[request.request_id] = job
            if beside:
                self.room.tokens -= left.seam_tokens
                self.room.rows -= len(left.seams)
        elif interiors:  # a prompt's beginning, and nothing behind it
            (self.behind_seams[request.request_id],) = interiors.values()

    def update_connector_output(self, connector_output: Any) -> None:
        """Questions have looked: now it is known what their requests wait for."""
        found = connector_output.kv_connector_worker_meta
        for name, chosen in found.positions.items() if isinstance(found, ChosenTokens) else ():
            if (job := self.jobs.get(name)) is None or job.looks is None:  # it has left
                continue
            link = self.links[name]
            link.choose(chosen)
            left = link.plan.behind(job.cached)
            ranges = [*left.seams, (left.query, link.length - 1)]  # its last token is left for its own step
            job.looks, job.ranges = None, deque((start, end) for start, end in ranges if start < end)
            job.tokens = sum(end - start for start, end in job.ranges)
            if not job.request.num_preemptions:
                computed = link.length - job.cached - left.loaded_tokens + job.looked
                each = left.loaded_of(len(link.handles))
                self.reports.send(link.report, LinkReport(job.cached, left.loaded_tokens, computed, each))

    def chunk(self, name: str, computed: int, count: int) -> int:
        """Of `count` tokens, how many a request may compute in a step: one that captures states stops at both ends.

        Never one alone in between, which is computed as if decoded, where no scan is heard; 0: it waits for more room.
        """
        link = self.links.get(name)
        if link is None or link.interior is None or computed >= link.interior[1]:
            return count
        start, end = link.interior
        if computed < start:
            return min(count, start - computed)
        count = min(count, end - computed)
        if end - computed - count == 1:
            count -= 1
        return count if count > 1 else 0

    def build_connector_meta(self, scheduler_output: Any) -> LinkingMetadata:
        """Loads of requests that were admitted in this step, and documents whose last token it computes."""
        loads, self._loads = self._loads, []
        composes, self.behind_seams = list(self.behind_seams.values()), {}
        captures, saves = [], []
        for name, count in scheduler_output.num_scheduled_tokens.items():
            link = self.links.get(name)
            if link is None or link.method is not None:
                continue
            blocks = scheduler_output.kv_connector_block_state.resolve_block_ids(name)
            blocks, end = tuple(map(list, blocks)), self.requests[name].num_computed_tokens + count
            if link.interior is not None and link.interior[0] <= end and end - count < link.interior[1]:
                begins, ends = end == link.interior[0], end == link.interior[1]
                captures.append(CaptureCommand(link.handles[0], blocks, begins, ends))
            if end >= link.length:
                if link.snapshot:
                    captures.append(CaptureCommand(link.handles[0], blocks, begins=False, ends=True, whole=True))
                stateless = link.interior is None and not link.snapshot
                saves.append(SaveCommand(link.key, link.handles[0], link.spans[0][0], blocks, stateless))
        return LinkingMetadata(loads, composes, captures, saves)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """None: blocks are to be treated like those of any other request."""
        return ()

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forgets a request; its blocks are free at once, as everything that writes to them is a step of the engine."""
        for found in (self.links, self.jobs, self._matched, self.behind_seams):
            found.pop(request.request_id, None)
        return False, None

    # ---- in the worker ----

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Documents go into the blocks of requests."""
        if self.pool is not None:  # there is none while vLLM tries its model
            self.pool.before_step(cast(LinkingMetadata, self._get_connector_metadata()))

    def wait_for_save(self) -> None:
        """What was computed goes into the pool."""
        if self.pool is not None:
            self.pool.after_step(cast(LinkingMetadata, self._get_connector_metadata()))

    def build_connector_worker_meta(self) -> ChosenTokens | None:
        """What the questions of the step have chosen."""
        chosen = {} if self.pool is None else self.pool.chosen()
        return ChosenTokens(chosen) if chosen else None

    def wait_for_layer_load(self, layer_name: str) -> None:
        """All layers were loaded before the step."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """All layers are saved behind the step."""

"""The server's own series on vLLM's /metrics, which shows what is in prometheus_client's registry."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from comb_serving.api.preprocessor import Preprocessor
from comb_serving.config.serve_options import ServeOptions
from comb_serving.encoding.compiler import EngineCompiler
from comb_serving.encoding.supervisor import EncoderProcess
from comb_serving.manager.counters import STATES

PREFIX = "comb:"


class CombCollector:
    """Reads counters and sizes when /metrics is asked for.

    vLLM answers that in a thread, so everything here is read in single steps or from copies.
    """

    def __init__(
        self, preprocessor: Preprocessor, encoders: EncoderProcess | EngineCompiler | None, options: ServeOptions
    ) -> None:
        self.preprocessor, self.encoders, self.options = preprocessor, encoders, options

    def collect(self) -> Iterator[Metric]:
        counters, manager, options = self.preprocessor.counters, self.preprocessor.manager, self.options
        for name, text, counted in (
            ("documents", "documents of requests and ways into the pool", counters.documents),
            ("document_tokens", "tokens of these documents", counters.tokens),
        ):
            yield _labelled(CounterMetricFamily, name, text, ["state"], {(state,): counted[state] for state in STATES})
        plain = options.method is not None
        if plain:
            text, current = "1 for the method of requests that name none", self.preprocessor.choice.current.name
            yield _labelled(GaugeMetricFamily, "method", text, ["method"], {(current,): 1})
            for name, text, labels, parts in (
                ("prompt_tokens", "of prompts with linked documents, by origin", ["method", "origin"],
                 counters.prompt_tokens),
                ("found", "segments that nobody has marked, and their tokens", ["of", "state"], counters.found),
                ("audit_tokens", "of audited answers, before and after they part from full recompute",
                 ["method", "as"], counters.audits),
            ):  # fmt: skip
                yield _labelled(CounterMetricFamily, name, text, labels, dict(sorted(parts.copy().items())))
        else:
            text = "1 if documents are encoded, 0 if they go into the prompt"
            yield _gauge("encoder_enabled", text, self.preprocessor.linking)
        if manager is None:
            return
        seconds = counters.encode_seconds
        name, text = ("compile", "until vLLM has compiled a document") if plain else ("encode", "in an encoder process")
        text = f"time per document {text}"
        yield HistogramMetricFamily(f"{PREFIX}{name}_seconds", text, seconds.buckets, seconds.total)
        yield _counter("evictions", "documents that made room in the pool", manager.pool.counts["evictions"])
        yield _counter("expired", "documents dropped after their time to live", manager.index.expired)
        yield _counter("requests_refused", "requests refused (429) for lack of room, or of a share", counters.refused)
        yield _gauge("pool_documents", "documents in the pool", len(manager.pool.entries))
        yield _gauge("references", "references of requests under way to documents", manager.references)
        waiting = {("encoding",): manager.waiting, ("room",): len(manager.queue)}
        yield _labelled(GaugeMetricFamily, "requests_waiting", "requests waiting for documents", ["reason"], waiting)
        blocks = {(state,): count for state, count in manager.blocks_by_state().items()}
        yield _labelled(GaugeMetricFamily, "pool_blocks", "blocks of the pool, per rank", ["state"], blocks)
        tenants = dict[tuple[str, str], int]()
        for tenant in sorted({*manager.owners.copy().values()}):
            held, pinned = manager.blocks_of(tenant)
            tenants |= {(tenant[:8], "held"): held, (tenant[:8], "pinned"): pinned}
        yield _labelled(GaugeMetricFamily, "tenant_blocks", "blocks by tenant, per rank", ["tenant", "state"], tenants)

        used = {("device",): manager.used_bytes * options.ranks}
        sizes = {("device",): manager.layout.nbytes * options.ranks}
        kept = {} if self.encoders is None else self.encoders.kept_bytes
        if options.has_tiers:  # beside a disk there is memory for a longest document, whatever the option says
            used["host",], sizes["host",] = kept.get("host", 0), kept.get("host_size", 0)
        if options.disk_path is not None:
            used["disk",] = kept.get("disk", 0)
            if options.disk_bytes is not None:
                sizes["disk",] = options.disk_bytes
        text = "bytes of documents, by tier, of all ranks"
        yield _labelled(GaugeMetricFamily, "pool_used_bytes", text, ["tier"], used)
        text = "size of each tier; none for an unbounded one"
        yield _labelled(GaugeMetricFamily, "pool_bytes", text, ["tier"], sizes)
        if self.encoders is not None and not isinstance(self.encoders, EngineCompiler):
            yield _gauge("encoder_queue_documents", "documents that encoders have yet to answer", self.encoders.waiting)
            yield _counter("encoder_restarts", "encoder processes that ended", self.encoders.restarts)


def _labelled(kind: Any, name: str, text: str, labels: list[str], values: Mapping[Any, int]) -> Metric:
    family: Metric = kind(PREFIX + name, text, labels=labels)
    for given, value in values.items():
        family.add_metric(given, value)
    return family


def _counter(name: str, text: str, value: int) -> Metric:
    return CounterMetricFamily(PREFIX + name, text, value)


def _gauge(name: str, text: str, value: int) -> Metric:
    return GaugeMetricFamily(PREFIX + name, text, value)

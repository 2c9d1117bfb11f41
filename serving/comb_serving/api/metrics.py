"""The server's own series on vLLM's /metrics, which shows what is in prometheus_client's registry."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from comb_serving.config.serve_options import ServeOptions
from comb_serving.encoding.compiler import EngineCompiler
from comb_serving.manager.counters import STATES

if TYPE_CHECKING:
    from comb_serving.api.preprocessor import Preprocessor
    from comb_serving.encoding.supervisor import EncoderProcesses

PREFIX = "comb:"


class CombCollector:
    """Reads counters and sizes when /metrics is asked for.

    vLLM answers that in a thread, so everything here is read in single steps or from copies.
    """

    def __init__(
        self, preprocessor: Preprocessor, encoders: EncoderProcesses | EngineCompiler | None, options: ServeOptions
    ) -> None:
        self.preprocessor, self.encoders, self.options = preprocessor, encoders, options

    def collect(self) -> Iterator[Metric]:
        """All series."""
        counters, manager = self.preprocessor.counters, self.preprocessor.manager
        for name, text, counted in (
            ("documents", "documents of requests and ways into the pool", counters.documents),
            ("document_tokens", "tokens of these documents", counters.tokens),
        ):
            yield _labelled(CounterMetricFamily, name, text, ["state"], {(state,): counted[state] for state in STATES})
        plain = self.options.method is not None
        if plain:
            yield from self._methods()
        else:
            yield _gauge(
                "encoder_enabled", "1 if documents are encoded, 0 if they go into the prompt", self.preprocessor.linking
            )
        if manager is None:
            return
        seconds = counters.encode_seconds
        name, text = ("compile", "until vLLM has compiled a document") if plain else ("encode", "in an encoder process")
        yield HistogramMetricFamily(
            f"{PREFIX}{name}_seconds", f"time per document {text}", seconds.buckets, seconds.total
        )
        yield _counter("evictions", "documents that made room in the pool", manager.pool.counts["evictions"])
        yield _counter("expired", "documents dropped after their time to live", manager.index.expired)
        yield _counter("requests_refused", "requests refused for lack of room in the pool", counters.refused)
        yield _gauge("pool_documents", "documents in the pool", len(manager.pool.entries))
        yield _gauge("references", "references of requests under way to documents", manager.references)
        waiting = {("encoding",): manager.waiting, ("room",): len(manager.queue)}
        yield _labelled(GaugeMetricFamily, "requests_waiting", "requests waiting for documents", ["reason"], waiting)
        blocks = {(state,): count for state, count in manager.blocks_by_state().items()}
        yield _labelled(GaugeMetricFamily, "pool_blocks", "blocks of the pool, per rank", ["state"], blocks)
        tenants = {
            (tenant[:8], state): count
            for tenant in sorted({*manager.owners.copy().values()})
            for state, count in zip(("held", "pinned"), manager.blocks_of(tenant), strict=True)
        }
        yield _labelled(GaugeMetricFamily, "tenant_blocks", "blocks by tenant, per rank", ["tenant", "state"], tenants)
        yield from self._bytes()
        if self.encoders is not None and not isinstance(self.encoders, EngineCompiler):
            yield _gauge("encoder_queue_documents", "documents that encoders have yet to answer", self.encoders.waiting)
            yield _counter("encoder_restarts", "encoder processes that ended", self.encoders.restarts)

    def _methods(self) -> Iterator[Metric]:
        counters, current = self.preprocessor.counters, self.preprocessor.choice.current.name
        text = "1 for the method of requests that name none"
        yield _labelled(GaugeMetricFamily, "method", text, ["method"], {(current,): 1})
        origins, parts = (
            dict(sorted(counters.prompt_tokens.copy().items())),
            dict(sorted(counters.audits.copy().items())),
        )
        text = "of prompts with linked documents, by origin"
        yield _labelled(CounterMetricFamily, "prompt_tokens", text, ["method", "origin"], origins)
        text = "segments that nobody has marked, and their tokens"
        found = dict(sorted(counters.found.copy().items()))
        yield _labelled(CounterMetricFamily, "found", text, ["of", "state"], found)
        text = "of audited answers, before and after they part from full recompute"
        yield _labelled(CounterMetricFamily, "audit_tokens", text, ["method", "as"], parts)

    def _bytes(self) -> Iterator[Metric]:
        manager, options = self.preprocessor.manager, self.options
        assert manager is not None
        used = {"device": manager.used_bytes * options.ranks}
        sizes: dict[str, int | None] = {"device": manager.layout.nbytes * options.ranks}
        kept = {} if self.encoders is None else self.encoders.kept_bytes
        if options.host_bytes:
            used["host"], sizes["host"] = kept.get("host", 0), options.host_bytes * options.encoders
        if options.disk_path is not None:
            used["disk"], sizes["disk"] = kept.get("disk", 0), options.disk_bytes
        for name, text, values in (
            ("pool_used_bytes", "bytes of documents, by tier, of all ranks", used),
            ("pool_bytes", "size of each tier; none for an unbounded one", sizes),
        ):
            known = {(tier,): value for tier, value in values.items() if value is not None}
            yield _labelled(GaugeMetricFamily, name, text, ["tier"], known)


def _labelled(kind: Any, name: str, text: str, labels: list[str], values: Mapping[Any, int]) -> Metric:
    family: Metric = kind(PREFIX + name, text, labels=labels)
    for given, value in values.items():
        family.add_metric(given, value)
    return family


def _counter(name: str, text: str, value: int) -> Metric:
    return CounterMetricFamily(PREFIX + name, text, value)


def _gauge(name: str, text: str, value: int) -> Metric:
    return GaugeMetricFamily(PREFIX + name, text, value)

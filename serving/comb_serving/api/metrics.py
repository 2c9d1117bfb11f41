"""The server's own series on vLLM's /metrics, which shows what is in prometheus_client's registry."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from comb_serving.config.options import ServeOptions
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
        yield _by_state("documents", "documents of requests and ways into the pool", counters.documents)
        yield _by_state("document_tokens", "tokens of these documents", counters.tokens)
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
        waiting = GaugeMetricFamily(f"{PREFIX}requests_waiting", "requests waiting for documents", labels=["reason"])
        waiting.add_metric(["encoding"], manager.waiting)
        waiting.add_metric(["room"], len(manager.queue))
        yield waiting
        blocks = GaugeMetricFamily(f"{PREFIX}pool_blocks", "blocks of the pool, per rank", labels=["state"])
        for state, count in manager.blocks_by_state().items():
            blocks.add_metric([state], count)
        yield blocks
        tenants = GaugeMetricFamily(f"{PREFIX}tenant_blocks", "blocks by tenant, per rank", labels=["tenant", "state"])
        for tenant in sorted({*manager.owners.copy().values()}):
            for state, count in zip(("held", "pinned"), manager.blocks_of(tenant), strict=True):
                tenants.add_metric([tenant[:8], state], count)
        yield tenants
        yield from self._bytes()
        if self.encoders is not None and not isinstance(self.encoders, EngineCompiler):
            yield _gauge("encoder_queue_documents", "documents that encoders have yet to answer", self.encoders.waiting)
            yield _counter("encoder_restarts", "encoder processes that ended", self.encoders.restarts)

    def _methods(self) -> Iterator[Metric]:
        current = GaugeMetricFamily(f"{PREFIX}method", "1 for the method of requests that name none", labels=["method"])
        current.add_metric([self.preprocessor.choice.current.name], 1)
        yield current
        counters = self.preprocessor.counters
        for name, text, label, counted in (
            ("prompt_tokens", "of prompts with linked documents, by origin", "origin", counters.prompt_tokens),
            (
                "audit_tokens",
                "of audited answers, before and after they part from full recompute",
                "as",
                counters.audits,
            ),
        ):
            tokens = CounterMetricFamily(PREFIX + name, text, labels=["method", label])
            for labels, count in sorted(counted.copy().items()):
                tokens.add_metric(labels, count)
            yield tokens

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
            family = GaugeMetricFamily(PREFIX + name, text, labels=["tier"])
            for tier, value in values.items():
                if value is not None:
                    family.add_metric([tier], value)
            yield family


def _by_state(name: str, text: str, values: dict[str, int]) -> Metric:
    family = CounterMetricFamily(PREFIX + name, text, labels=["state"])
    for state in STATES:
        family.add_metric([state], values[state])
    return family


def _counter(name: str, text: str, value: int) -> Metric:
    return CounterMetricFamily(PREFIX + name, text, value)


def _gauge(name: str, text: str, value: int) -> Metric:
    return GaugeMetricFamily(PREFIX + name, text, value)

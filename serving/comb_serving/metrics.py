"""Counters in Prometheus' text format, appended to what vLLM's own /metrics says."""

from __future__ import annotations

from comb_serving.manager import PICManager


def render(manager: PICManager, *, restarts: int = 0) -> bytes:
    """All metrics of the manager; names begin with ``comb_``."""
    counters = manager.counters
    rows = [
        ("document_hits_total", "counter", "documents found in the pool", counters.hits),
        ("document_misses_total", "counter", "documents not found in the pool", counters.misses),
        ("document_encoded_total", "counter", "documents encoded", counters.encoded),
        ("document_copied_total", "counter", "documents copied back from a lower tier", counters.copied),
        ("document_evictions_total", "counter", "documents that made room", counters.evictions),
        ("document_expired_total", "counter", "documents dropped after their time to live", counters.expired),
        ("document_failures_total", "counter", "documents that could not be encoded", counters.failures),
        ("requests_refused_total", "counter", "requests refused for lack of room", counters.refused),
        ("encode_seconds_total", "counter", "time spent on documents in encoder processes", counters.encode_seconds),
        ("encoder_restarts_total", "counter", "encoder processes that ended", restarts),
        ("pool_used_bytes", "gauge", "bytes of taken blocks, per rank", manager.used_bytes),
        ("pool_bytes", "gauge", "bytes of the pool, per rank", manager.layout.nbytes),
        ("pool_documents", "gauge", "documents in the pool", manager.documents),
        ("pool_references", "gauge", "references of requests under way", manager.references),
        ("requests_waiting", "gauge", "requests waiting for documents", manager.waiting),
    ]
    lines = [
        f"# HELP comb_{name} {text}\n# TYPE comb_{name} {kind}\ncomb_{name} {value}\n"
        for name, kind, text, value in rows
    ]
    return "".join(lines).encode()

"""What the ingress's process knows of the replicas: for Ray's routing, which runs there too, and for its /metrics.

Not in `routing`: Ray Serve sends that module to other processes by value, where this would be another object.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from comb_serving.replicas.affinity import RoutedDocument, preferred


@dataclass(eq=False)  # hashable, for prometheus_client
class RouterState:
    """By name of a replica: its address while it gets requests, requests under way, and totals since the start."""

    up: dict[str, str] = field(default_factory=dict)
    under_way: Counter[str] = field(default_factory=Counter)
    requests: Counter[str] = field(default_factory=Counter)
    spilled: Counter[str] = field(default_factory=Counter)
    lost: Counter[str] = field(default_factory=Counter)

    @contextmanager
    def counted(self, replica: str, documents: Sequence[RoutedDocument]) -> Iterator[None]:
        """While a replica has a request."""
        self.requests[replica] += 1
        self.spilled[replica] += preferred(documents, self.up) not in (None, replica)
        self.under_way[replica] += 1
        try:
            yield
        finally:
            self.under_way[replica] -= 1

    def collect(self) -> Iterator[Metric]:
        """All series; called by prometheus_client."""
        names = sorted(self.up.keys() | self.requests.keys() | self.lost.keys())
        up = GaugeMetricFamily("comb_router_replica_up", "1 if it gets requests", labels=["replica", "address"])
        for name in names:
            up.add_metric([name, self.up.get(name, "")], name in self.up)
        yield up
        families = (
            (GaugeMetricFamily, "requests_under_way", "requests that a replica has", self.under_way),
            (CounterMetricFamily, "requests", "requests sent to a replica", self.requests),
            (CounterMetricFamily, "spilled", "of them, those whose documents are at home elsewhere", self.spilled),
            (CounterMetricFamily, "lost", "times that a replica could not be reached or broke off", self.lost),
        )
        for kind, name, text, values in families:
            family = kind(f"comb_router_{name}", text, labels=["replica"])
            for replica in names:
                family.add_metric([replica], values[replica])
            yield family


STATE, REGISTRY = RouterState(), CollectorRegistry()  # not the default registry, in which Ray shows its own
REGISTRY.register(STATE)

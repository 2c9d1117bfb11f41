"""Ray Serve's routing with an order of its own: replicas ranked by a request's documents (`affinity.ranked`).

What else routing needs is Ray's: replicas that are full, dead or not there yet, and the queue in front of them.
"""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from comb_serving.replicas import state
from comb_serving.replicas.affinity import LoadBound, ranked


class DocumentRequestRouter(RequestRouter):
    """Calls carry ``documents`` (`RoutedDocument`) and ``avoid``, names of replicas that have just failed them.

    Replicas say their name and address in `record_replica_metadata`.
    """

    def initialize_state(self, load_factor: float, load_floor: int) -> None:
        """Called by Ray with the settings."""
        self._bound = LoadBound(load_factor, load_floor)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """All candidates, the best first; Ray takes the first that isn't full."""
        given: dict[str, Any] = {}
        if pending_request is not None:
            given = pending_request.kwargs
            pending_request.routing_context.should_backoff = True  # all may be full: not again at once
        replicas = {_name(replica): replica for replica in candidate_replicas}
        # those that are just being sent are counted by Ray only
        sent = {name: self.replica_queue_len_cache.get(each.replica_id) or 0 for name, each in replicas.items()}
        loads = {name: max(count, state.STATE.under_way[name]) for name, count in sent.items()}
        order = ranked(given.get("documents", ()), loads, self._bound)
        return [[replicas[name]] for name in sorted(order, key=lambda name: name in given.get("avoid", ()))]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Called by Ray when replicas have come or gone."""
        super().update_replicas(replicas)
        state.STATE.up = {_name(replica): replica.replica_metadata["address"] for replica in replicas}


def _name(replica: RunningReplica) -> str:
    name: str = replica.replica_metadata["name"]
    return name

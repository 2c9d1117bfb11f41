"""Ray Serve's routing with an order of its own: replicas ranked by a request's documents (`affinity.ranked`).

What else routing needs is Ray's: replicas that are full, dead or not there yet, and the queue in front of them.
"""

from __future__ import annotations

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from comb_serving.replicas.affinity import ranked


class DocumentRequestRouter(RequestRouter):
    """Calls carry ``documents`` (`RoutedDocument`); replicas say their name in `record_replica_metadata`."""

    def initialize_state(self, load_factor: float, load_floor: int) -> None:
        """Called by Ray with the settings."""
        self._factor, self._floor = load_factor, load_floor

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """All candidates, the best first; Ray takes the first that isn't full."""
        documents = ()
        if pending_request is not None:
            documents = pending_request.kwargs.get("documents", ())
            pending_request.routing_context.should_backoff = True  # all may be full: not again at once
        replicas = {replica.replica_metadata["name"]: replica for replica in candidate_replicas}
        loads = {name: self.replica_queue_len_cache.get(each.replica_id) or 0 for name, each in replicas.items()}
        return [[replicas[name]] for name in ranked(documents, loads, factor=self._factor, floor=self._floor)]

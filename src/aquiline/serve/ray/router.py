"""Ray Serve's side of `serve/routing.py`: a router that runs where the HTTP interface does, and asks no other process."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from aquiline.serve.routing import Affinity, EngineReport, Routed


def packed(report: EngineReport) -> dict[str, Any]:
    """A report as the figures that Ray hands from a replica to the routers."""
    return report._asdict() | {"pages": array("q", report.pages).tobytes()}


def unpacked(stats: dict[str, Any]) -> EngineReport | None:
    """What `packed` made; None of a replica that has told nothing yet."""
    if not stats:
        return None
    pages = array("q")
    pages.frombytes(stats["pages"])
    return EngineReport(**{**stats, "pages": frozenset(pages)})


class PrefixRouter(RequestRouter):
    """Routes requests to engines that have their prompts' pages. Its tables are local; after a restart they are as good
    as the replicas' next reports. A replica that drains is no candidate any more: Ray takes it out of the list."""

    def initialize_state(self, **kwargs: Any) -> None:
        """Begin without knowledge."""
        self.affinity = Affinity[ReplicaID](random.Random())

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Replicas came, went or reported."""
        self.affinity.update({replica.replica_id: unpacked(replica.routing_stats) for replica in replicas})
        super().update_replicas(replicas)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """A replica is gone, which the controller may not know yet."""
        self.affinity.records.pop(replica_id, None)
        super().on_replica_actor_died(replica_id)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Replicas for a request, the best first; any for a call that is no request."""
        routed = _routed(pending_request)
        if pending_request is None or routed is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # wait before another try where all are full
        known = {replica.replica_id: replica for replica in candidate_replicas}
        return [[known[name] for name in names if name in known] for names in self.affinity.rank(routed)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """A replica has taken a request."""
        record, routed = self.affinity.records.get(replica_id), _routed(pending_request)
        if record is not None and routed is not None:
            record.begin(pending_request.metadata.internal_request_id, routed)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """A request has ended, or its replica has refused it."""
        if (record := self.affinity.records.get(replica_id)) is not None:
            record.end(internal_request_id)


def _routed(pending: PendingRequest | None) -> Routed | None:
    args: Sequence[Any] = () if pending is None else pending.args
    return args[0] if args and isinstance(args[0], Routed) else None

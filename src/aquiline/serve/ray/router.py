"""Ray Serve's side of `serve/routing.py`: a router that runs where HTTP is spoken, and asks no other process."""

from __future__ import annotations

import asyncio
import random
from array import array
from collections.abc import Sequence
from functools import partial
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


class PrefixRouter(RequestRouter):  # type: ignore[misc]
    """Routes requests to engines that have their prompts' pages. Its tables are local; after a restart they are as good
    as the replicas' next reports. A replica that drains is no candidate any more: Ray takes it out of the list."""

    def initialize_state(self, *, num_slots: int) -> None:
        """Begin without knowledge of engines that have num_slots slots each."""
        self.affinity = Affinity[ReplicaID](num_slots, random.Random())

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
        """Replicas for a request, the best first; any for a call that is no request. The request counts at the best one
        from now on, so that others that come at once go elsewhere."""
        routed = _routed(pending_request)
        if pending_request is None or routed is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # wait before another try where all are full
        known = {replica.replica_id: replica for replica in candidate_replicas}
        ranks = [[known[name] for name in names if name in known] for names in self.affinity.rank(routed)]
        name = pending_request.metadata.internal_request_id
        for best in ranks[0]:
            self.affinity.place(name, routed, best.replica_id)
            pending_request.future.add_done_callback(partial(self._left, name))
        return ranks

    def _left(self, name: str, future: asyncio.Future[RunningReplica]) -> None:
        if future.cancelled():
            self.affinity.withdraw(name)

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """A replica has taken a request."""
        if (routed := _routed(pending_request)) is not None:
            self.affinity.place(pending_request.metadata.internal_request_id, routed, replica_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """A request has ended, or its replica has refused it."""
        if (record := self.affinity.records.get(replica_id)) is not None:
            record.end(internal_request_id)


def _routed(pending: PendingRequest | None) -> Routed | None:
    args: Sequence[Any] = () if pending is None else pending.args
    return args[0] if args and isinstance(args[0], Routed) else None

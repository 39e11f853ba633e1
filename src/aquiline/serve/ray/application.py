"""The application that Ray Serve runs: the HTTP interface in one deployment, engines in another."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from aquiline.checks import check_fields
from aquiline.config import ChatConfig, EngineConfig, PairConfig, check
from aquiline.models.known_pairs import checkpoints
from aquiline.serve.app import make_app
from aquiline.serve.logs import set_up
from aquiline.serve.ray.replica import EngineReplica
from aquiline.serve.ray.replicas import ReplicaClient
from aquiline.serve.ray.router import PrefixRouter
from aquiline.serve.server import open_service
from aquiline.serve.server_config import Limits, ServerConfig
from aquiline.serve.wire import Opening
from aquiline.spec.adaptive import Adaptive
from aquiline.spec.drafting import Drafting, NoDraft

REPORT_S = 1.0
"""Seconds between two reports of a replica to the routers."""

LONGEST_WAIT_S = 0.05
"""Seconds after which a request that found every replica full looks for room again."""

OTHERS = 256
"""Calls of an HTTP replica beside those that generate: health, figures, the page."""


@dataclass(frozen=True)
class Scale:
    """How many engines there are, and what each of them takes.

    max_replicas above min_replicas: Ray adds engines while more requests than an engine has slots wait or run for each,
    and takes them away again. autoscaling: other fields of Ray's AutoscalingConfig, as {"downscale_delay_s": 60}.
    num_cpus: cores of an engine, which are its threads unless AQUILINE_THREADS says otherwise. actor_options: other
    options of Ray's actors, as {"resources": {...}}. num_http: processes that speak HTTP; stored responses are known to
    the one that stored them."""

    min_replicas: int = 1
    max_replicas: int = 1
    autoscaling: dict[str, object] = field(default_factory=dict)
    num_cpus: int = 1
    num_gpus: float = 0.0
    actor_options: dict[str, object] = field(default_factory=dict)
    num_http: int = 1

    def __post_init__(self) -> None:
        check_fields(self)
        check(self.min_replicas >= 1, "min_replicas", self.min_replicas, "must be at least 1")
        ok, fix = self.max_replicas >= self.min_replicas, f"must be at least min_replicas={self.min_replicas}"
        check(ok, "max_replicas", self.max_replicas, fix)
        check(self.num_cpus >= 1, "num_cpus", self.num_cpus, "must be at least 1")
        check(self.num_http >= 1, "num_http", self.num_http, "must be at least 1")


def app(
    pair: PairConfig | None = None,
    engine: EngineConfig | None = None,
    server: ServerConfig | None = None,
    *,
    drafting: Drafting | None = None,
    limits: Limits | None = None,
    chat: ChatConfig | None = None,
    scale: Scale | None = None,
) -> serve.Application:
    """What `ray.serve.run` takes. Settings mean what they do for `aquiline serve`; where Ray listens is Ray's to know
    (`ray.serve.start`), so host and port have no effect.

    drafting: adaptive by default, and none where the pair has no draft."""
    pair, engine, server = pair or PairConfig(), engine or EngineConfig(), server or ServerConfig()
    limits, scale = limits or Limits(), scale or Scale()
    if drafting is None:
        drafting = NoDraft() if checkpoints(pair.target, pair.draft).draft is None else Adaptive()
    engines = _engines(engine, server, scale).bind(
        Opening(pair, engine, drafting), server.stream_interval, server.log_level, scale.num_cpus
    )
    most = engine.max_batch * scale.max_replicas + limits.max_waiting
    http = serve.deployment(serve.ingress()(Http)).options(
        name="http", num_replicas=scale.num_http, max_ongoing_requests=most + OTHERS,
        graceful_shutdown_timeout_s=server.drain_s,
    )  # fmt: skip
    return http.bind(
        engines, pair=pair, engine=engine, drafting=drafting, config=server, limits=limits, chat=chat or ChatConfig(),
        max_replicas=scale.max_replicas,
    )  # fmt: skip


def _engines(engine: EngineConfig, server: ServerConfig, scale: Scale) -> serve.Deployment:
    """The deployment of engines. A replica holds as many requests again as it has slots, so that no slot waits for the
    way here; the others wait where they can still go to any engine."""
    slots = engine.max_batch
    growth = {"target_ongoing_requests": slots, **scale.autoscaling}
    growth |= {"min_replicas": scale.min_replicas, "max_replicas": scale.max_replicas}
    return serve.deployment(EngineReplica).options(
        name="engines",
        max_ongoing_requests=2 * slots,
        autoscaling_config=growth,
        graceful_shutdown_timeout_s=server.drain_s,
        ray_actor_options={"num_cpus": scale.num_cpus, "num_gpus": scale.num_gpus, **scale.actor_options},
        request_router_config=RequestRouterConfig(
            request_router_class=PrefixRouter,
            request_router_kwargs={"num_slots": slots},
            request_routing_stats_period_s=REPORT_S,
            max_backoff_s=LONGEST_WAIT_S,
        ),
    )


class Http:
    """The HTTP interface: the server's own application over its own service."""

    def __init__(self, engines: DeploymentHandle[Any], max_replicas: int, **settings: Any) -> None:
        set_up(settings["config"].log_level)
        client_of = partial(ReplicaClient, handle=engines, max_replicas=max_replicas)
        self.service = open_service(**settings, client_of=client_of)
        self.service.on_failure = lambda: os._exit(1)  # Ray begins another one, which asks the engines again

    def __serve_build_asgi_app__(self) -> FastAPI:
        return make_app(self.service)

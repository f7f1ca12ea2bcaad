"""The Ray Serve application: replicas of the server behind an ingress."""

import math
from typing import Any

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from engine.config import EngineConfig
from server.commands.ray.config import RayConfig, bundle_of, replica_settings
from server.commands.ray.ingress import Ingress
from server.commands.ray.replica import END_SECONDS, ReplicaServer
from server.commands.ray.request_router import PrefixRouter
from server.commands.ray.scaling import replicas_for
from server.config import ServerConfig

UNLIMITED = 1 << 20  # requests that a replica takes: its own queue is bounded (--max-queued-requests)
HEALTH_SECONDS = 5.0
METRICS_SECONDS = 1.0
# Ray Serve would move each chunk from a thread to another, and each choice of a replica to a third and back.
ONE_LOOP = {"RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0", "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0"}
QUIET = {"enable_access_log": False}


class Replica(ReplicaServer):
    async def __init__(self, settings: dict[str, Any]) -> None:  # type: ignore[misc]  # Ray Serve awaits it
        super().__init__(settings, ray.util.get_node_ip_address())
        await self.start()

    async def __del__(self) -> None:  # Ray Serve awaits it at the end of a replica
        await self.stop()


class QueuedTokensPolicy:
    """Ray Serve's autoscaling policy: asks for replicas by queued tokens."""

    def __init__(self, queued_tokens_per_replica: int) -> None:
        self._queued_tokens_per_replica = queued_tokens_per_replica

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        metrics = context.aggregated_metrics or {}
        queued, usage = (metrics.get(name, {}).values() for name in ("queued_tokens", "kv_usage"))
        return max(1, replicas_for(queued, usage, self._queued_tokens_per_replica)), {}


class IngressServer:
    """Ray Serve's HTTP proxies call the app that this class builds."""

    def __init__(self, replicas: Any, max_body_bytes: int) -> None:
        self._app = Ingress(replicas, max_body_bytes)

    def __serve_build_asgi_app__(self) -> Any:
        return self._app


def build(engine_config: EngineConfig, server_config: ServerConfig, ray_config: RayConfig) -> Any:
    """The application, ready for `serve.run`. The same name with other settings updates it, replica by replica."""
    bundle = bundle_of(engine_config, ray_config)
    stop_seconds = math.ceil(server_config.drain_timeout + END_SECONDS)
    replicas = serve.deployment(
        Replica,
        name="Replica",
        max_ongoing_requests=UNLIMITED,
        ray_actor_options={"num_cpus": bundle["CPU"], "num_gpus": bundle.get("GPU", 0)},
        **_placement(bundle),
        autoscaling_config=_autoscaling(ray_config),
        request_router_config=RequestRouterConfig(request_router_class=PrefixRouter),
        health_check_period_s=HEALTH_SECONDS,
        graceful_shutdown_timeout_s=2 * stop_seconds,  # Ray waits for requests, then the server drains
        logging_config=QUIET,
    ).bind(replica_settings(engine_config, server_config))
    ingress = serve.deployment(
        serve.ingress()(IngressServer),
        name="Ingress",
        num_replicas=ray_config.ingress_replicas,
        max_ongoing_requests=UNLIMITED,
        ray_actor_options={"num_cpus": 0.1, "runtime_env": {"env_vars": ONE_LOOP}},
        graceful_shutdown_timeout_s=stop_seconds,
        logging_config=QUIET,
    )
    return ingress.bind(replicas, server_config.max_body_bytes)


def _placement(bundle: dict[str, float]) -> dict[str, Any]:
    """A placement group for a replica of several ranks. Ray Serve spreads replicas of one over the nodes by itself."""
    if max(bundle.values()) <= 1:
        return {}
    return {"placement_group_bundles": [bundle], "placement_group_strategy": "STRICT_PACK"}


def _autoscaling(config: RayConfig) -> AutoscalingConfig:
    policy = AutoscalingPolicy(
        policy_function=QueuedTokensPolicy,
        policy_kwargs={"queued_tokens_per_replica": config.queued_tokens_per_replica},
    )
    return AutoscalingConfig(
        min_replicas=config.min_replicas,
        max_replicas=config.max_replicas,
        upscale_delay_s=config.upscale_delay,
        downscale_delay_s=config.downscale_delay,
        metrics_interval_s=METRICS_SECONDS,
        look_back_period_s=5 * METRICS_SECONDS,
        policy=policy,
    )

"""RayConfig: the settings of `pageserve ray` beside those of `pageserve serve`, and what a replica is started with."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.settings import check_config, option
from server.config import ServerConfig

PATHS = ("model", "tokenizer", "api_key_file", "disk_cache")


@dataclass(frozen=True)
class RayConfig:
    """Ray settings: the cluster, the number of replicas, and the resources of each."""

    ray_address: str | None = option(
        None, "address of a running Ray cluster, such as auto or 10.0.0.7:6379; default: RAY_ADDRESS, else a local one"
    )
    ray_app: str = option("pageserve", "name of the application in Ray Serve; the same name again updates it")
    detach: bool = option(False, "deploy and return; default: stay, and delete the application on SIGINT or SIGTERM")
    min_replicas: int = option(1, "fewest replicas", minimum=1)
    max_replicas: int = option(1, "most replicas", minimum=1)
    queued_tokens_per_replica: int = option(
        8192, "prompt tokens that may wait per replica before another replica starts", minimum=1
    )
    upscale_delay: float = option(10.0, "seconds that the load must call for more replicas", minimum=0)
    downscale_delay: float = option(300.0, "seconds that the load must call for fewer replicas", minimum=0)
    ingress_replicas: int = option(1, "processes that accept requests and pass them to replicas", minimum=1)
    replica_cpus: float = option(1.0, "CPUs that Ray reserves for each GPU, or for each rank on a CPU", above=0)
    replica_gpus: int | None = option(
        None, "GPUs of a replica, all on one node; default: tensor_parallel_size, or 0 with --device cpu", minimum=0
    )

    def __post_init__(self) -> None:
        check_config(self)
        if self.min_replicas > self.max_replicas:
            raise ConfigError(
                f"min_replicas must be at most max_replicas, but {self.min_replicas} is more than {self.max_replicas}."
            )


def replica_settings(engine_config: EngineConfig, server_config: ServerConfig) -> dict[str, Any]:
    """The settings of a replica: those that differ from the defaults, as `pageserve serve --config` reads them.

    The replica listens on the address of its node, on a port of its own. The keys are its own check; without keys,
    the network of the Ray cluster must keep strangers out, as Ray itself needs it.
    """
    settings: dict[str, Any] = {"allow_unauthenticated": True}
    for config in (engine_config, server_config):
        for field in dataclasses.fields(config):
            value = getattr(config, field.name)
            if value != field.default and field.name not in ("host", "port"):
                settings[field.name] = list(value) if isinstance(value, tuple) else value
    if "models" in settings:
        settings["models"] = [_entry(each) for each in settings["models"]]
    return _with_absolute_paths(settings)


def _entry(model: Any) -> dict[str, Any]:
    """An entry of the setting `models` as a mapping with absolute paths."""
    if isinstance(model, str):
        name, _, place = model.partition("=")
        model = {"name": name, "model": place}
    return _with_absolute_paths(model)


def _with_absolute_paths(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with absolute paths: a replica has another working directory."""
    changed = {name: settings[name] for name in PATHS if settings.get(name)}
    return {**settings, **{name: str(Path(path).absolute()) for name, path in changed.items() if Path(path).exists()}}


def bundle_of(engine_config: EngineConfig, ray_config: RayConfig) -> dict[str, float]:
    """The resources of a replica: one bundle, because the ranks of a replica share a node and a process tree."""
    ranks = engine_config.num_processes
    gpus = ray_config.replica_gpus
    if gpus is None:
        gpus = 0 if engine_config.device == "cpu" else ranks
    bundle = {"CPU": ray_config.replica_cpus * ranks}
    return bundle | {"GPU": float(gpus)} if gpus else bundle

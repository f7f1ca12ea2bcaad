"""RayConfig: the settings of `pageserve ray` beside those of `pageserve serve`, and what a replica is started with."""

import dataclasses
import os.path
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config import NGRAM, EngineConfig
from engine.errors import ConfigError
from engine.settings import check_config, option
from server.config import ServerConfig

PATHS = ("model", "tokenizer", "api_key_file", "chat_template")  # each may be something else than a path
FOLDERS = ("disk_cache", "lora_root")  # which may not exist yet


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
    absolute = _with_absolute_paths(settings)
    if absolute.get("model") != settings.get("model"):  # the name in the API is the path as given
        absolute.setdefault("served_model_name", [settings["model"]])
    return absolute


def _entry(model: Any) -> dict[str, Any]:
    """An entry of the setting `models` as a mapping with absolute paths."""
    if isinstance(model, str):
        name, _, place = model.partition("=")
        model = {"name": name, "model": place}
    return _with_absolute_paths({name.replace("-", "_"): value for name, value in model.items()})


def _with_absolute_paths(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with absolute paths: a replica has another working directory."""
    changed: dict[str, Any] = {name: _absolute(settings[name]) for name in PATHS if settings.get(name)}
    changed |= {name: str(Path(settings[name]).absolute()) for name in FOLDERS if settings.get(name)}
    if adapters := settings.get("lora"):
        pairs = (entry.partition("=") for entry in ([adapters] if isinstance(adapters, str) else adapters))
        changed["lora"] = [f"{name}={_absolute(folder)}" for name, _, folder in pairs]
    if speculative := settings.get("speculative"):
        method, _, number = speculative.rpartition(":")
        changed["speculative"] = f"{method if method == NGRAM else _absolute(method)}:{number}"
    return {**settings, **changed}


def _absolute(path: str) -> str:
    """The absolute path of a file or folder; any other text, such as a hub id, as it is."""
    return str(Path(path).absolute()) if os.path.exists(path) else path


def bundle_of(engine_config: EngineConfig, ray_config: RayConfig) -> dict[str, float]:
    """The resources of a replica: one bundle, because the ranks of a replica share a node and a process tree."""
    ranks = engine_config.num_processes
    gpus = ray_config.replica_gpus
    if gpus is None:
        gpus = 0 if engine_config.device == "cpu" else ranks
    bundle = {"CPU": ray_config.replica_cpus * ranks}
    return bundle | {"GPU": float(gpus)} if gpus else bundle

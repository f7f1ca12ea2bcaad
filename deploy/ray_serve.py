"""The application for Ray's own tools.

`serve run deploy.ray_serve:app model=DIR max_replicas=4`, or a Serve config file
(`serve deploy`, KubeRay's RayService) with import_path deploy.ray_serve:app and the settings under args.

The settings are those of `pageserve ray` by their names in YAML. `pageserve ray` deploys the same application.
"""

import dataclasses
from typing import Any

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.settings import settings_of
from server.commands.ray.config import RayConfig
from server.commands.ray.deployments import build
from server.config import ServerConfig, resolve_files


def app(settings: dict[str, Any]) -> Any:
    """The Ray Serve application of these settings. Texts, as `serve run` passes them, are parsed like flags."""
    configs = []
    for kind in (EngineConfig, ServerConfig, RayConfig):
        known = settings_of(kind)
        given = {name: settings[name] for name in known if name in settings}
        parsed = {name: known[name].parse(value) if isinstance(value, str) else value for name, value in given.items()}
        configs.append(kind(**parsed))
    names = {field.name for config in configs for field in dataclasses.fields(config)}
    if unknown := sorted(settings.keys() - names):
        raise ConfigError(f"unknown settings: {', '.join(unknown)}.")
    engine_config, server_config, ray_config = configs
    return build(engine_config, resolve_files(server_config), ray_config)

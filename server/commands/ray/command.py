"""The command line of `pageserve ray`."""

import logging
import os
import signal
import threading
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from engine.command_line import Parser
from engine.config import EngineConfig
from engine.errors import ConfigError, EngineError
from engine.settings import add_flags, load_settings
from server.commands.ray.config import RayConfig
from server.config import ServerConfig, resolve_files
from server.model_settings import merge_model_flags, model_settings
from server.serve import check_exposed

OBJECT_STORE_BYTES = 128 << 20  # Ray's least is 75 MB; answers do not pass through the store


def main(arguments: Sequence[str]) -> int:
    """Deploy replicas on Ray, and stay until a signal comes. Raises ConfigError, and EngineError from Ray."""
    parser = Parser(
        "ray",
        "[MODEL]",
        "Serve a model with replicas on a Ray cluster (docs/operating.md). Takes all options of `pageserve serve`.",
    )
    parser.add_argument("positional_model", nargs="?", metavar="MODEL", help="the same as --model")
    add_flags(parser, EngineConfig, ServerConfig, RayConfig, repeated=("model",))
    flags = parser.read(arguments)
    merge_model_flags(flags)
    engine_config, server_config, ray_config = load_settings((EngineConfig, ServerConfig, RayConfig), flags, os.environ)
    server_config = resolve_files(server_config)
    model_settings(engine_config, server_config)  # a mistake is told here, not in the log of a replica
    check_exposed(server_config)
    if server_config.port == 0:
        raise ConfigError("port: every node of the cluster listens on the same port; name one for pageserve ray.")
    if find_spec("ray") is None or find_spec("aiohttp") is None:
        raise ConfigError("Ray Serve is not installed: pip install '.[ray]' in pageserve's folder.")
    logging.basicConfig(level=server_config.log_level.upper())
    return _run(engine_config, server_config, ray_config)


def _run(engine_config: EngineConfig, server_config: ServerConfig, ray_config: RayConfig) -> int:
    address = ray_config.ray_address or os.environ.get("RAY_ADDRESS")
    if address is None:  # HAProxy takes half the time of Ray's own proxy per chunk
        os.environ.setdefault("RAY_SERVE_ENABLE_HA_PROXY", "1")
    import ray
    from ray import serve

    from server.commands.ray.deployments import build

    local: dict[str, Any] = {"include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
    try:
        ray.init(address=address, log_to_driver=True, **({} if address else local))
        serve.start(http_options={"host": server_config.host, "port": server_config.port})
        serve.run(build(engine_config, server_config, ray_config), name=ray_config.ray_app)
        print(f"pageserve is ready at http://{server_config.host}:{server_config.port}", flush=True)
        if not ray_config.detach:
            _wait_for_signal()
            serve.delete(ray_config.ray_app)
    except (RuntimeError, ConnectionError) as error:
        raise EngineError(f"Ray: {error}") from error
    finally:
        if address is None and not ray_config.detach:
            serve.shutdown()
        ray.shutdown()
    return 0


def _wait_for_signal() -> None:
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    ended.wait()

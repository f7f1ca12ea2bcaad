"""ReplicaServer: one replica in Ray Serve. It owns a `pageserve serve` process and answers Ray's questions about it."""

import asyncio
import contextlib
import json
import logging
import os
import re
import secrets
import socket
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import httpx

from engine.errors import EngineError
from server.commands.ray.disk_folders import DiskFolders

logger = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parents[3]
POLL_SECONDS = 0.1
PROBE_SECONDS = 5.0
END_SECONDS = 15.0  # from the end of the drain to the kill
# Autoscaling reads these: the metric, and how the values of several models become one.
GAUGES: dict[str, tuple[str, Callable[[Iterable[float]], float]]] = {
    "queued_tokens": ("pageserve:num_tokens_waiting", sum),
    "kv_usage": ("vllm:kv_cache_usage_perc", max),
}


def free_port(host: str) -> int:
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        port: int = listener.getsockname()[1]
        return port


def gauges_of(page: str) -> dict[str, float]:
    """The values that autoscaling reads from a page of /metrics; 0 for those that it lacks."""
    values = {}
    for name, (metric, combine) in GAUGES.items():
        found = re.findall(rf"^{re.escape(metric)}(?:\{{.*\}})? (\S+)$", page, re.MULTILINE)
        values[name] = combine(map(float, found)) if found else 0.0
    return values


def with_key(settings: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The settings, and a key of theirs to read /metrics with; "" if the server has no keys.

    A key is added only where none of `api_key` can be sent: beside a second key, an only key would lose its rights.
    """
    keys = list(settings.get("api_key", ()))
    if not keys and not settings.get("api_key_file"):
        return settings, ""
    for key in keys:
        if key.isascii() and not key.startswith("sha256:"):
            return settings, key
    own = secrets.token_urlsafe(32)
    return settings | {"api_key": [*keys, own]}, own


class ReplicaServer:
    """The names of the public methods are Ray Serve's, where Ray Serve calls them."""

    def __init__(self, settings: dict[str, Any], host: str) -> None:
        """`settings`: those of `pageserve serve`. `host`: the address of this node."""
        self._host = host
        self._drain_seconds = float(settings.get("drain_timeout", 30.0))
        self._settings, key = with_key(settings)
        self._headers = {"authorization": f"Bearer {key}"} if key else {}

    async def start(self) -> None:
        """Start the process and return when it is ready. Raises ConfigError, and EngineError if it ends before."""
        self._address = f"{self._host}:{free_port(self._host)}"
        self._http = httpx.AsyncClient(base_url=f"http://{self._address}", headers=self._headers, timeout=PROBE_SECONDS)
        self._folders = DiskFolders(self._settings)
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:  # readable by this user alone: it may hold keys
            json.dump(self._folders.settings, file)
            file.flush()
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "server.commands.ray.child", "--config", file.name),
                *("--host", self._host, "--port", self._address.rpartition(":")[2]),
                env=_environment(),
                stdin=asyncio.subprocess.DEVNULL,
            )
            while not await self._answers("/ready"):
                if self._process.returncode is not None:
                    raise EngineError(f"the server ended with status {self._process.returncode}; the log has the cause")
                await asyncio.sleep(POLL_SECONDS)
        self._watch = asyncio.create_task(self._end_with_the_process())

    async def _end_with_the_process(self) -> None:
        """End this actor when the server ends, so that Ray replaces it without waiting for a health check."""
        status = await self._process.wait()
        logger.error("the server ended with status %s", status)
        os._exit(1)

    def record_replica_metadata(self) -> dict[str, str]:
        """The address, for routers."""
        return {"address": self._address}

    async def address(self) -> str:
        """The address of the server: host:port."""
        return self._address

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Tokens that wait and the share of KV blocks in use, from the server's own metrics."""
        return gauges_of((await self._http.get("/metrics")).text)

    async def check_health(self) -> None:
        """Raises EngineError if this replica must be replaced."""
        if not await self._answers("/health"):
            raise EngineError("the server is not healthy")

    async def stop(self) -> None:
        """Let running requests finish and end the server."""
        self._watch.cancel()
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        try:
            await asyncio.wait_for(self._process.wait(), self._drain_seconds + END_SECONDS)
        except asyncio.TimeoutError:
            self._process.kill()
            await self._process.wait()
        self._folders.close()
        await self._http.aclose()

    async def _answers(self, path: str) -> bool:
        try:
            return (await self._http.get(path)).status_code == 200
        except httpx.HTTPError:
            return False


def _environment() -> dict[str, str]:
    """The environment of the server: all of its settings come from the file."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PAGESERVE_")}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return kept | {"PYTHONPATH": path, "PAGESERVE_RAY_PARENT": str(os.getpid())}

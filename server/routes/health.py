"""GET /health (restart me?), /ready (send me requests?) and /version."""

import json
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from engine.driver import SLEEP_PHASES
from server.context import Served, package_version
from server.errors import ApiError, error_object
from server.http.body import encode_json


async def get_health(http: HttpRequest, served: Served) -> Response:
    """200 while the engine serves or replaces a dead Worker, however full the queue is; else 503."""
    reason = served.driver.health()
    if reason is None:
        return _status({"status": "ok"}, 200)
    error = ApiError(503, f"Not healthy: {reason}.", type="server_error", code="unhealthy")
    return _status({"status": "unhealthy", "error": error_object(error)}, 503)


async def get_ready(http: HttpRequest, served: Served) -> Response:
    """200 when requests are accepted; 503 with the phase while loading, draining, restarting or stopped.

    A model that sleeps is ready, or a load balancer would send no request to wake it.
    """
    phase = served.driver.phase
    if phase == "ready" or phase in SLEEP_PHASES:
        return _status({"status": "ready", "phase": phase}, 200)
    error = ApiError(503, f"Not ready: {phase}.", type="server_error", code="not_ready")
    return _status({"status": "not ready", "phase": phase, "error": error_object(error)}, 503)


async def version(http: HttpRequest, served: Served) -> Response:
    """The version of the server."""
    return Response(encode_json({"version": package_version()}), media_type="application/json")


def _status(content: dict[str, Any], status: int) -> Response:
    headers = {"cache-control": "no-store"} | ({"retry-after": "1"} if status == 503 else {})
    return Response(json.dumps(content), status, headers, "application/json")

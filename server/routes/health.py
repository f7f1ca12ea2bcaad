"""GET /health (restart me?), /ready (send me requests?) and /version."""

import json
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from engine.driver import SLEEP_PHASES
from server.context import Served, package_version
from server.errors import ApiError, error_object
from server.http.body import encode_json

READY_PHASES = ("ready", *SLEEP_PHASES)


async def get_health(http: HttpRequest, served: Served) -> Response:
    """200 while a model serves or replaces a dead Worker, however full the queue is; else 503.

    With several models the process goes on while one of them serves; `models` tells the state of each.
    """
    drivers = served.models.drivers
    reasons = [driver.health() for driver in drivers]
    if None in reasons:
        return _status({"status": "ok", **_states(served)}, 200)
    error = ApiError(503, f"Not healthy: {reasons[0]}.", type="server_error", code="unhealthy")
    return _status({"status": "unhealthy", "error": error_object(error), **_states(served)}, 503)


async def get_ready(http: HttpRequest, served: Served) -> Response:
    """200 when requests are accepted; 503 with the phase while loading, draining, restarting or stopped.

    A model that sleeps is ready, or a load balancer would send no request to wake it. Each of several models must have
    loaded and one must be ready.
    """
    phases = [driver.phase for driver in served.models.drivers]
    ready = [phase for phase in phases if phase in READY_PHASES]
    waited_for = [phase for phase in phases if phase not in (*READY_PHASES, "restarting", "stopped")]
    if ready and not waited_for:
        return _status({"status": "ready", "phase": ready[0], **_states(served)}, 200)
    phase = (waited_for or phases)[0]
    error = ApiError(503, f"Not ready: {phase}.", type="server_error", code="not_ready")
    return _status({"status": "not ready", "phase": phase, "error": error_object(error), **_states(served)}, 503)


def _states(served: Served) -> dict[str, Any]:
    """The phase of each of several models; nothing for one model."""
    models = served.models
    return {"models": {one.names[0]: one.driver.phase for one in models}} if len(models) > 1 else {}


async def version(http: HttpRequest, served: Served) -> Response:
    """The version of the server."""
    return Response(encode_json({"version": package_version()}), media_type="application/json")


def _status(content: dict[str, Any], status: int) -> Response:
    headers = {"cache-control": "no-store"} | ({"retry-after": "1"} if status == 503 else {})
    return Response(json.dumps(content), status, headers, "application/json")

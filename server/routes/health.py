"""GET /health (restart me?) and /ready (send me requests?)."""

import json
from typing import Any

from starlette.responses import Response

from engine.driver import Driver
from server.errors import ApiError, error_object


def health(driver: Driver) -> Response:
    """200 while the engine serves or puts a new Worker in place of a dead one, however full the queue is; else 503."""
    reason = driver.health()
    if reason is None:
        return _json({"status": "ok"}, 200)
    error = ApiError(503, f"Not healthy: {reason}.", type="server_error", code="unhealthy")
    return _json({"status": "unhealthy", "error": error_object(error)}, 503)


def ready(driver: Driver) -> Response:
    """200 when requests are accepted; 503 with the phase while loading, draining, restarting or stopped."""
    if driver.phase == "ready":
        return _json({"status": "ready", "phase": "ready"}, 200)
    error = ApiError(503, f"Not ready: {driver.phase}.", type="server_error", code="not_ready")
    return _json({"status": "not ready", "phase": driver.phase, "error": error_object(error)}, 503)


def _json(content: dict[str, Any], status: int) -> Response:
    headers = {"cache-control": "no-store"} | ({"retry-after": "1"} if status == 503 else {})
    return Response(json.dumps(content), status, headers, "application/json")

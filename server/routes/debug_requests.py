"""GET /debug/requests/{id}: why a request was slow, by the id that its answer carries."""

import dataclasses
from itertools import count
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Scope

from engine.driver import Driver
from engine.telemetry.request_log import MAX_FINISHED
from server.context import tenant_of
from server.errors import ApiError
from server.output.sse import encode_json
from server.protocol import GenerationRequest
from server.protocol.sampling_extras import SamplingExtras


def timings(driver: Driver, scope: Scope, response_id: str) -> list[dict[str, Any]]:
    """Reports on the engine requests behind one answer, one per prompt; those of other tenants do not exist."""
    reports = (driver.request_report(f"{response_id}-{i}", tenant_of(scope)) for i in count())
    found: list[dict[str, Any]] = []
    for report in reports:
        if report is None:
            return found
        found.append(dataclasses.asdict(report))
    return found


def asked_timings(
    driver: Driver, scope: Scope, request: GenerationRequest | SamplingExtras, response_id: str
) -> list[dict[str, Any]] | None:
    """`timings` for a request that has return_timings set, else None."""
    return timings(driver, scope, response_id) if request.return_timings else None


def debug_request(http: HttpRequest, driver: Driver, response_id: str) -> Response:
    found = timings(driver, http.scope, response_id)
    if not found:
        message = (
            f"No request {response_id[:128]!r} is known: only those that run or wait and the last {MAX_FINISHED} "
            "prompts that ended. Take the id from the answer or its first chunk."
        )
        raise ApiError(404, message, code="request_not_found")
    content = {"id": response_id, "object": "request.timings", "timings": found}
    return Response(encode_json(content), media_type="application/json", headers={"cache-control": "no-store"})

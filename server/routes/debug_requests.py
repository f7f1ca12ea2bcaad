"""GET /debug/requests/{id}: why a request was slow, by the id that its answer carries."""

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from engine.driver import Driver
from engine.telemetry.request_log import MAX_FINISHED
from server.errors import ApiError
from server.http.body import encode_json
from server.output.timings import timings


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

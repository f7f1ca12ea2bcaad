"""GET /debug/requests/{id}: why a request was slow. The id is the id of the answer."""

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from engine.telemetry.request_log import MAX_FINISHED
from server.context import Served
from server.errors import ApiError
from server.http.body import encode_json
from server.output.timings import find_timings


async def debug_requests(http: HttpRequest, served: Served) -> Response:
    """The timings of the engine's requests behind one answer; 404 for an unknown id."""
    response_id = http.path_params["id"]
    tenant = http.state.caller.tenant
    timings = next(filter(None, (find_timings(driver, tenant, response_id) for driver in served.models.drivers)), None)
    if not timings:
        message = (
            f"No request {response_id[:128]!r} is known: only those that run or wait and the last {MAX_FINISHED} "
            "prompts that ended. Take the id from the answer or its first chunk."
        )
        raise ApiError(404, message, code="request_not_found")
    content = {"id": response_id, "object": "request.timings", "timings": timings}
    return Response(encode_json(content), media_type="application/json", headers={"cache-control": "no-store"})

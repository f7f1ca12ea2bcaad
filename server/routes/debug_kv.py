"""GET /debug/kv and /debug/steps: the content of every KV block and the last steps, for the page and dashboards."""

import time
from collections.abc import Callable

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from server.config import ServerConfig
from server.context import Served
from server.errors import ApiError, invalid
from server.http.body import encode_json

MIN_AGE = 0.05  # seconds for which one view answers all clients
COST_FACTOR = 20  # a view lives 20 times as long as it took to make: views use a 20th of the event loop at most


def debug_kv_enabled(config: ServerConfig) -> bool:
    """True if the config turns the routes on. The default is on, unless there are several API keys or a key file.

    The views show how long every running prompt and answer is and when it grows. A single tenant sees only its own
    requests; several tenants must not watch each other, and must not share cached prefixes either.
    """
    alone = len(config.api_key) <= 1 and config.api_key_file is None
    return alone if config.debug_kv is None else config.debug_kv


class Window:
    """Answers with a view that is at most MIN_AGE, or COST_FACTOR times its own cost, old."""

    def __init__(
        self,
        path: str,
        make_view: Callable[[], object],
        enabled: bool,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._path = path
        self._make_view = make_view
        self._enabled = enabled
        self._clock = clock
        self._body = b""
        self._good_until = float("-inf")

    def response(self) -> Response:
        """The view as JSON. Raises ApiError 404 where the route is off, UnavailableError before there is a pool."""
        if not self._enabled:
            raise ApiError(404, f"{self._path} is off on this server; --debug-kv turns it on.", code="not_found")
        started = self._clock()
        if started >= self._good_until:
            self._body = encode_json(self._make_view())
            now = self._clock()
            self._good_until = now + max(MIN_AGE, COST_FACTOR * (now - started))
        return Response(self._body, headers={"cache-control": "no-store"}, media_type="application/json")


def _kv_windows(served: Served) -> list[Window]:
    enabled = debug_kv_enabled(served.config)
    return [Window("/debug/kv", replica.kv_view, enabled) for replica in served.driver.replicas]


def _steps_windows(served: Served) -> list[Window]:
    enabled = debug_kv_enabled(served.config)
    return [Window("/debug/steps", replica.steps_view, enabled) for replica in served.driver.replicas]


def _asked(http: HttpRequest, windows: list[Window]) -> Window:
    """The window of the replica `?engine=`, the first by default. Raises ApiError 400."""
    number = http.query_params.get("engine", "0")
    if number not in map(str, range(len(windows))):
        raise invalid(f"engine must be the number of a replica, from 0 to {len(windows) - 1}.", "engine")
    return windows[int(number)]


async def debug_kv(http: HttpRequest, served: Served) -> Response:
    """The holder of every KV block of the first model, or of that of `?model=`; with replicas, of one of them:
    `?engine=1`. The event loop makes the view between two steps."""
    return _asked(http, (served.models.named(http) or served).once(_kv_windows)).response()


async def debug_steps(http: HttpRequest, served: Served) -> Response:
    """The last steps of the first model, or that of `?model=`; with replicas, of one of them: `?engine=1`."""
    return _asked(http, (served.models.named(http) or served).once(_steps_windows)).response()

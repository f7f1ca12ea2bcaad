"""GET /debug/kv, /debug/steps: what every KV block holds, what the last steps did; for the page and dashboards."""

import time
from collections.abc import Callable

from fastapi import FastAPI
from starlette.responses import Response

from server.config import ServerConfig
from server.context import Served
from server.errors import ApiError
from server.http.body import encode_json

MIN_AGE = 0.05  # seconds for which one view answers everybody
COST_FACTOR = 20  # at least as many times what it took to make: a 20th of the event loop at most, for any pool


def debug_kv_enabled(config: ServerConfig) -> bool:
    """As configured; else on, unless there are several API keys, or a file that several may be put into at any time.

    Block by block one sees how long every running prompt and answer is and when it grows. Who may use the API alone
    sees only what is his own; several tenants must not watch each other, as they must not share cached prefixes.
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
        """200 with the view as JSON; ApiError 404 where it is switched off, UnavailableError before there is a pool."""
        if not self._enabled:
            raise ApiError(404, f"{self._path} is off on this server; --debug-kv turns it on.", code="not_found")
        started = self._clock()
        if started >= self._good_until:
            self._body = encode_json(self._make_view())
            now = self._clock()
            self._good_until = now + max(MIN_AGE, COST_FACTOR * (now - started))
        return Response(self._body, headers={"cache-control": "no-store"}, media_type="application/json")


def add_debug_routes(app: FastAPI, served: Served) -> None:
    enabled = debug_kv_enabled(served.config)
    blocks = Window("/debug/kv", served.driver.kv_view, enabled)
    steps = Window("/debug/steps", served.driver.steps_view, enabled)

    async def debug_kv() -> Response:  # on the event loop, between steps
        return blocks.response()

    async def debug_steps() -> Response:
        return steps.response()

    app.add_api_route("/debug/kv", debug_kv, response_class=Response, include_in_schema=enabled)
    app.add_api_route("/debug/steps", debug_steps, response_class=Response, include_in_schema=enabled)

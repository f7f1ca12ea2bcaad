"""Deadlines: ends requests whose own `timeout` is over."""

import asyncio
from collections.abc import Callable

from engine.errors import DeadlineError


class Deadlines:
    """A timer for each live request with a timeout; other requests cost one look into an empty dict at their end."""

    def __init__(self, expire: Callable[[str, DeadlineError], None]) -> None:
        """`expire` is called with the id of a request whose time is over, and the error for its reader."""
        self._expire = expire
        self._timers: dict[str, asyncio.TimerHandle] = {}

    @property
    def request_ids(self) -> set[str]:
        """The requests whose time runs."""
        return set(self._timers)

    def start(self, request_id: str, seconds: float, end: float | None = None) -> None:
        """Start the timer of a request. `end`: when it ends, by the loop's clock; None: in `seconds` from now."""
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds if end is None else end
        self._timers[request_id] = loop.call_at(end, self._on_time, request_id, seconds)

    def end_of(self, request_id: str) -> float | None:
        """When the time of a request is over, by the loop's clock; None if it has no timer."""
        timer = self._timers.get(request_id)
        return None if timer is None else timer.when()

    def clear(self, request_id: str) -> None:
        """Cancel the timer of a request that has ended; harmless if it has none."""
        if self._timers and (timer := self._timers.pop(request_id, None)) is not None:
            timer.cancel()

    def _on_time(self, request_id: str, seconds: float) -> None:
        self._expire(
            request_id, DeadlineError(f"The request was not finished within its timeout of {seconds:g} s.", "timeout")
        )

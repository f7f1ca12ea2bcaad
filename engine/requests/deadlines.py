"""Deadlines: requests that nobody waits for any more once their `timeout` is over."""

import asyncio
from collections.abc import Callable

from engine.errors import DeadlineError


class Deadlines:
    """A timer for each live request that has a timeout; the others cost one look into an empty dict when they end."""

    def __init__(self, expire: Callable[[str, DeadlineError], None]) -> None:
        """`expire` is called with the id of a request whose time is over."""
        self._expire = expire
        self._timers: dict[str, asyncio.TimerHandle] = {}

    @property
    def request_ids(self) -> set[str]:
        """The requests whose time runs."""
        return set(self._timers)

    def start(self, request_id: str, seconds: float) -> None:
        """Count from now on."""
        loop = asyncio.get_running_loop()
        self._timers[request_id] = loop.call_later(seconds, self._on_time, request_id, seconds)

    def clear(self, request_id: str) -> None:
        """The request has ended; harmless where it has no deadline."""
        if self._timers and (timer := self._timers.pop(request_id, None)) is not None:
            timer.cancel()

    def _on_time(self, request_id: str, seconds: float) -> None:
        self._expire(
            request_id, DeadlineError(f"The request was not finished within its timeout of {seconds:g} s.", "timeout")
        )

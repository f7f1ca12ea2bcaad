"""What follows from the death of a Worker: who is suspected, how long to wait before the next one, when to give up.

Decisions only: no process, no loop, the clock is given. The Driver acts on them (Driver._restart).

A request that the Worker was computing when it died may have killed it. One that was there at two deaths, without a new
token in between, runs alone next. Then there is no doubt: either it gets its token and is a request like any other, or
the Worker dies a third time and this request alone is guilty. A token clears, because a fault that follows from the
tokens strikes at the same token again. A death that came from outside (kill -9, SIGSTOP) is nobody's fault: the Driver
names no request then.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable

from engine.errors import EngineError, PageserveError

SUSPECT_AT, GUILTY_AT = 2, 3  # deaths since the last token; between the two the request runs alone
FIRST_BACKOFF, MAX_BACKOFF = 0.5, 30.0  # seconds before the second start in a row, and before any


class Recovery:
    """At most `max_restarts` in any `window` seconds. Requests are known by their ids."""

    def __init__(self, max_restarts: int, window: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_restarts = max_restarts
        self._window = window
        self._clock = clock
        self._deaths: deque[float] = deque()
        self._strikes: dict[str, int] = {}  # deaths of each request since its last token, in order of the first

    def record_death(self, in_flight: Iterable[str]) -> list[str]:
        """A Worker died while it computed these requests; returns those that are guilty of it: one, or none."""
        self._deaths.append(self._clock())
        for request_id in in_flight:
            self._strikes[request_id] = self._strikes.get(request_id, 0) + 1
        return [request_id for request_id, strikes in self._strikes.items() if strikes >= GUILTY_AT]

    def backoff(self, cause: PageserveError) -> float:
        """Seconds to wait before the next start: none after a first death, then twice as long each time.

        Raises EngineError, with the `cause` of the last death, when the budget is spent.
        """
        while self._deaths and self._clock() - self._deaths[0] > self._window:
            self._deaths.popleft()
        if len(self._deaths) > self._max_restarts:
            raise EngineError(
                f"{cause}; this is death number {len(self._deaths)} of a Worker within {self._window:g} s, and "
                f"max_worker_restarts is {self._max_restarts}"
            )
        doublings = len(self._deaths) - 2
        return 0.0 if doublings < 0 else min(MAX_BACKOFF, FIRST_BACKOFF * 2**doublings)

    @property
    def suspects_nobody(self) -> bool:
        """Whether no request has a death held against it: there is nothing to clear."""
        return not self._strikes

    @property
    def suspect(self) -> str | None:
        """The request that must run alone now; the longest under suspicion first."""
        if not self._strikes:
            return None
        return next((request_id for request_id, strikes in self._strikes.items() if strikes >= SUSPECT_AT), None)

    def clear(self, request_id: str) -> None:
        """The request got a token, or ended."""
        self._strikes.pop(request_id, None)

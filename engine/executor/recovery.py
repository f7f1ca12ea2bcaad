"""Recovery: decides after the death of a Worker which request is suspect, when the next Worker starts, when to give up.

It only decides: it owns no process and no loop, and the clock is given. The Supervisor and the Driver act.

A request that the Worker was computing when it died may have killed it. A request that was computed at two deaths,
without a new token in between, runs alone next. That removes the doubt: either it gets its token and is a request like
any other, or the Worker dies a third time and this request alone is guilty. A token clears a request, because a fault
that follows from its tokens strikes at the same token again. No request is named for a death that came from outside
(kill -9, SIGSTOP).
"""

import time
from collections import deque
from collections.abc import Callable, Iterable

from engine.errors import PageserveError, RestartsSpentError

SUSPECT_AT, GUILTY_AT = 2, 3  # deaths since the last token; between the two the request runs alone
FIRST_BACKOFF, MAX_BACKOFF = 0.5, 30.0  # seconds before the second start in a row, and before any


class Recovery:
    """Allows at most `max_restarts` in any `window` seconds. Requests are known by their ids."""

    def __init__(self, max_restarts: int, window: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_restarts = max_restarts
        self._window = window
        self._clock = clock
        self._deaths: deque[float] = deque()
        self._strikes: dict[str, int] = {}  # deaths of each request since its last token, in order of the first

    def record_death(self, in_flight: Iterable[str]) -> list[str]:
        """A Worker died while it computed these requests. Returns the guilty requests: one, or none."""
        self._deaths.append(self._clock())
        for request_id in in_flight:
            self._strikes[request_id] = self._strikes.get(request_id, 0) + 1
        return [request_id for request_id, strikes in self._strikes.items() if strikes >= GUILTY_AT]

    def backoff(self, cause: PageserveError) -> float:
        """Return the seconds to wait before the next start: none after a first death, then twice as long each time.

        Raises RestartsSpentError, with the `cause` of the last death, when the budget is spent.
        """
        while self._deaths and self._clock() - self._deaths[0] > self._window:
            self._deaths.popleft()
        if len(self._deaths) > self._max_restarts:
            raise RestartsSpentError(
                f"{cause}; a Worker has died {len(self._deaths)} times within {self._window:g} s, "
                f"and max_worker_restarts is {self._max_restarts}"
            )
        doublings = len(self._deaths) - 2
        return 0.0 if doublings < 0 else min(MAX_BACKOFF, FIRST_BACKOFF * 2**doublings)

    @property
    def suspects_nobody(self) -> bool:
        """True if no death is held against any request: there is nothing to clear."""
        return not self._strikes

    @property
    def suspect(self) -> str | None:
        """The request that must run alone now: the one that has been suspect for the longest time, or None."""
        if not self._strikes:
            return None
        return next((request_id for request_id, strikes in self._strikes.items() if strikes >= SUSPECT_AT), None)

    def strikes(self, request_id: str) -> int:
        """The deaths that are held against a request."""
        return self._strikes.get(request_id, 0)

    def is_suspect(self, request_id: str) -> bool:
        """True if the request must run alone."""
        return self.strikes(request_id) >= SUSPECT_AT

    def take_over(self, request_id: str, strikes: int) -> None:
        """Hold deaths of another replica's Workers against a request that goes on here."""
        if strikes:
            self._strikes[request_id] = strikes

    def clear(self, request_id: str) -> None:
        """The request got a token, or ended."""
        self._strikes.pop(request_id, None)

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
from engine.executor.step import StepPlan
from engine.executor.step_durations import StepDurations

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


class StepWatch:
    """Notices that a Worker hangs: plans are under way and no result came in the time that such a step may take, or
    none is, and a heartbeat was not answered within HEARTBEAT_SECONDS.

    A step may take as long as those of its kind say (engine/executor/step_durations.py), and never more than `timeout`
    seconds. That limit alone holds where nothing is known: for a step of a new kind and the next few, which may compile
    kernels, too. The first steps of a Worker get five times as long, up to FIRST_STEPS_SECONDS; so does an answer until
    then, for graphs are recorded in idle time. Those of a Worker that follows another get AGAIN_SECONDS at least: what
    it needs is compiled already.

    Whoever owns it calls `tick` every `interval` seconds, and sends a heartbeat whenever one is then due. Ticks are
    counted, not time: if this very process stood still (a paused container, a blocked loop), a result may just not have
    been read yet.
    """

    TICKS = 10  # in `timeout`, at least; a heartbeat is due after as much idle time as `timeout` has in one of them
    TICK_SECONDS = 1.0  # at most
    HEARTBEAT_SECONDS = 30.0
    FIRST_STEPS = 8
    FIRST_STEPS_SECONDS = 300.0
    AGAIN_SECONDS = 60.0
    STEPS_OF_A_NEW_KIND = 4

    def __init__(
        self, timeout: float, durations: StepDurations | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.interval = min(timeout / self.TICKS, self.TICK_SECONDS)
        self._timeout = timeout
        self._durations = durations or StepDurations()
        self._clock = clock
        self._first_factor = max(1.0, min(5.0, self.FIRST_STEPS_SECONDS / timeout))
        self._heartbeat_limit = min(timeout, self.HEARTBEAT_SECONDS)
        self._awaits_heartbeat = False
        self._pending: deque[tuple[StepPlan, bool]] = deque()  # and whether what it needs is known
        self._num_results = 0
        self._num_new_steps = 0  # to come, of a kind that is new or behind one that is
        self._since = 0.0  # by the clock: when there was last something to wait for anew
        self._silent_ticks = 0
        self._idle_ticks = 0

    @property
    def silence(self) -> float:
        """Seconds, as ticks tell them, since an answer or since there was something to wait for."""
        return self._silent_ticks * self.interval

    @property
    def idle(self) -> bool:
        """Whether there is no answer to wait for."""
        return not (self._pending or self._awaits_heartbeat)

    @property
    def heartbeat_due(self) -> bool:
        return self.idle and self._idle_ticks * self.interval >= self._timeout / self.TICKS

    @property
    def awaits_heartbeat(self) -> bool:
        """Then the Worker has not begun with any plan: those that are under way were sent after the heartbeat."""
        return self._awaits_heartbeat

    @property
    def is_over_ceiling(self) -> bool:
        """Whether the silence is longer than any step may take, whatever its kind."""
        return self.silence > self._ceiling

    def sent_heartbeat(self) -> None:
        self._awaits_heartbeat = True

    def received_heartbeat(self) -> None:
        self._awaits_heartbeat = False
        self._calm()

    def sent(self, plan: StepPlan) -> None:
        if not self._pending:
            self._since = self._clock()
        if not self._durations.knows(plan):
            self._num_new_steps = self.STEPS_OF_A_NEW_KIND
        self._pending.append((plan, self._num_new_steps == 0))
        self._num_new_steps = max(0, self._num_new_steps - 1)

    def received(self) -> None:
        plan, _ = self._pending.popleft()
        # The clock went on while this process stood still, ticks did not.
        seconds = min(self._clock() - self._since, (self._silent_ticks + 1) * self.interval)
        self._durations.add(plan, seconds)
        self._num_results += 1
        self._calm()

    def tick(self) -> bool:
        """Whether the Worker hangs."""
        self._silent_ticks = 0 if self.idle else self._silent_ticks + 1
        self._idle_ticks = self._idle_ticks + 1 if self.idle else 0
        return not self.idle and self.silence > self._limit

    def _calm(self) -> None:
        self._silent_ticks = 0
        self._since = self._clock()

    @property
    def _is_first(self) -> bool:
        return self._num_results < self.FIRST_STEPS

    @property
    def _ceiling(self) -> float:
        return self._timeout * (self._first_factor if self._is_first else 1.0)

    @property
    def _limit(self) -> float:
        """Seconds that the answer which is awaited may take."""
        if self._awaits_heartbeat:
            return self._heartbeat_limit * (self._first_factor if self._is_first else 1.0)
        plan, known = self._pending[0]
        if not known:
            return self._ceiling
        least = self.AGAIN_SECONDS if self._is_first else 0.0
        return min(self._ceiling, max(least, self._durations.limit(plan)))

"""StepWatch: when a Worker counts as hung."""

import time
from collections import deque
from collections.abc import Callable

from engine.executor.step import StepPlan
from engine.executor.step_durations import StepDurations


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

"""StepWatch: decides when a Worker counts as hung."""

import time
from collections import deque
from collections.abc import Callable

from engine.executor.step import StepPlan
from engine.executor.step_durations import StepDurations


class StepWatch:
    """A Worker hangs if a plan is under way and its result does not come in the time that such a step may take, or if
    no plan is under way and the Worker does not answer a heartbeat within HEARTBEAT_SECONDS.

    The limit of a step follows from steps of the same kind (engine/executor/step_durations.py), and is never more than
    `timeout` seconds. A step of a new kind, and the few steps after it, have the limit `timeout`: they may compile
    kernels. The first steps of a Worker get five times `timeout`, up to FIRST_STEPS_SECONDS, and so do heartbeats until
    then, because graphs are recorded in idle time. The first steps of a Worker that replaces another get AGAIN_SECONDS
    at least: their code is compiled already. The way to sleep has SLEEP_SECONDS: the weights of a large model move to
    host memory, or a pool to a slow disk.

    The owner calls `tick` every `interval` seconds, and then sends a heartbeat if one is due. Ticks are counted, not
    seconds: if our own process stood still (a paused container, a blocked loop), a result may wait unread.
    """

    TICKS = 10  # per `timeout`, at least; a heartbeat is due after timeout / TICKS of idle time
    TICK_SECONDS = 1.0  # the longest interval
    HEARTBEAT_SECONDS = 30.0
    SLEEP_SECONDS = 300.0
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
        self._awaits_heartbeat = self._awaits_sleep = False
        self._pending: deque[tuple[StepPlan, bool]] = deque()  # plan, and whether its kind of step is known
        self._num_results = 0
        self._num_new_steps = 0  # steps to come that count as new: of a new kind, or soon after one
        self._since = 0.0  # by the clock: when the present wait began
        self._silent_ticks = 0
        self._idle_ticks = 0

    @property
    def silence(self) -> float:
        """Seconds, by ticks, since the present wait began: with an answer, or with the first plan after idle time."""
        return self._silent_ticks * self.interval

    @property
    def idle(self) -> bool:
        """True if no answer is awaited."""
        return not (self._pending or self._awaits_heartbeat or self._awaits_sleep)

    @property
    def heartbeat_due(self) -> bool:
        return self.idle and self._idle_ticks * self.interval >= self._timeout / self.TICKS

    @property
    def awaits_heartbeat(self) -> bool:
        """True if a heartbeat is unanswered. Then the Worker has begun no plan: all were sent after the heartbeat."""
        return self._awaits_heartbeat

    @property
    def awaits_step(self) -> bool:
        """True if the result of a plan is awaited, and nothing else before it."""
        return bool(self._pending) and not self._awaits_heartbeat

    @property
    def is_over_ceiling(self) -> bool:
        """True if the silence is longer than a step of any kind may take."""
        return self.silence > self._ceiling

    def sent_heartbeat(self) -> None:
        """A heartbeat was sent."""
        self._awaits_heartbeat = True

    def received_heartbeat(self) -> None:
        """A heartbeat was answered."""
        self._awaits_heartbeat = False
        self._calm()

    def sent_sleep(self) -> None:
        """The Worker was told to sleep, with no plan under way. The watch ends with its answer."""
        self._awaits_sleep = True

    def sent(self, plan: StepPlan) -> None:
        """A plan was sent."""
        if not self._pending:
            self._since = self._clock()
        if not self._durations.knows(plan):
            self._num_new_steps = self.STEPS_OF_A_NEW_KIND
        self._pending.append((plan, self._num_new_steps == 0))
        self._num_new_steps = max(0, self._num_new_steps - 1)

    def received(self) -> None:
        """The result of the first pending plan came: learn how long it took."""
        plan, _ = self._pending.popleft()
        # While our own process stood still, the clock went on, but ticks did not.
        seconds = min(self._clock() - self._since, (self._silent_ticks + 1) * self.interval)
        self._durations.add(plan, seconds)
        self._num_results += 1
        self._calm()

    def tick(self) -> bool:
        """Count a tick. True if the Worker hangs."""
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
        """Seconds that the awaited answer may take."""
        if self._awaits_heartbeat:
            return self._heartbeat_limit * (self._first_factor if self._is_first else 1.0)
        if self._awaits_sleep:
            return self.SLEEP_SECONDS
        plan, known = self._pending[0]
        if not known:
            return self._ceiling
        least = self.AGAIN_SECONDS if self._is_first else 0.0
        return min(self._ceiling, max(least, self._durations.limit(plan)))

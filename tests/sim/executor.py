"""SimExecutor: the real Executor, whose process is a SimWorker and whose socket is a method call."""

import asyncio
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

from engine.executor.executor import STACK_DUMP_SECONDS, Executor
from engine.executor.process_state import STOPPED_LOOKS
from engine.executor.step import (
    FetchBlocks,
    FetchedBlocks,
    LoadAdapter,
    SleepWorker,
    StartWorker,
    StepPlan,
    StepResult,
    UnloadAdapter,
    WakeWorker,
    WorkerReady,
    encode_frame,
)
from engine.executor.step_durations import LIMIT_FACTOR, MIN_LIMIT, StepDurations, features_of, kind_of
from engine.executor.step_watch import StepWatch
from tests.sim.monitor import Monitor
from tests.sim.swarm import SimConfig
from tests.sim.violation import fail, require
from tests.sim.worker import SimWorker

# The engine has shorter times, which make many more turns of the loop.
LOOK_SECONDS = 2.0
TICK_SECONDS = 3.0
ROUNDING = 1e-6  # seconds: sums of times differ in their last bits


class SimWriter:
    """The part of asyncio.StreamWriter that the Executor uses."""

    def __init__(self, worker: SimWorker) -> None:
        self._worker = worker
        self.transport = SimpleNamespace(abort=self.close)

    def write(self, frame: bytes) -> None:
        self._worker.feed(frame)

    def close(self) -> None:
        self._worker.hang_up()


class SimExecutor(Executor):
    """Checks the watch: it kills only what stands still, and that in time."""

    def __init__(
        self,
        config: SimConfig,
        monitor: Monitor,
        folder: Path | None,
        worker_command: tuple[str, ...],
        durations: StepDurations,
    ) -> None:
        super().__init__(worker_command, durations)
        self._config, self._monitor, self._folder = config, monitor, folder
        self._pending: deque[tuple[StepPlan, bool]] = deque()  # and whether the Workers have done such before
        self._num_answered, self._num_known = 0, StepWatch.STEPS_OF_A_NEW_KIND
        self._gave_up = False
        self._told_to_sleep = False
        self._quiet_since = 0.0  # since when nothing came, although something should

    async def start(self, message: StartWorker) -> None:
        self._step_timeout = message.config.step_timeout
        self._reader = asyncio.StreamReader()
        number, self._monitor.num_workers = self._monitor.num_workers, self._monitor.num_workers + 1
        self.worker = self._process = SimWorker(self._config, self._monitor, self._reader, number, self._folder)
        self._writer = SimWriter(self.worker)
        self._monitor.workers[number] = self.worker
        self._begin_stop_watch(number)
        self._writer.write(encode_frame(message))

    async def wait_ready(self, on_progress: Callable[[str], None]) -> WorkerReady:
        ready = await super().wait_ready(on_progress)
        self._monitor.executor = self
        return ready

    def wake(self) -> None:
        super().wake()
        self._told_to_sleep = False
        self._num_answered, self._num_known = 0, StepWatch.STEPS_OF_A_NEW_KIND  # a watch of its own begins

    def send(self, message: StepPlan | FetchBlocks) -> None:
        super().send(message)
        if isinstance(message, SleepWorker):
            self._told_to_sleep, self._quiet_since = True, asyncio.get_running_loop().time()
        if isinstance(message, SleepWorker | WakeWorker | LoadAdapter | UnloadAdapter):
            return
        if isinstance(message, FetchBlocks):
            if self.worker.alive:
                self._monitor.device.memory.fetching.update(message.slots)
            return
        if not self._pending:
            self._quiet_since = asyncio.get_running_loop().time()
        kinds = {kind_of(message), *map(features_of, message.new)}
        self._num_known = self._num_known + 1 if kinds <= self._monitor.slowest.keys() else 0
        self._pending.append((message, self._num_known >= StepWatch.STEPS_OF_A_NEW_KIND))
        self._monitor.blow(message)

    async def receive(self) -> StepResult | FetchedBlocks:
        message = await super().receive()
        if isinstance(message, StepResult):
            self._answered(self._pending.popleft()[0], asyncio.get_running_loop().time())
        return message

    def _answered(self, plan: StepPlan, now: float) -> None:
        slowest, seconds = self._monitor.slowest, now - self._quiet_since
        for kind in (kind_of(plan), *map(features_of, plan.new)):
            slowest[kind] = max(slowest.get(kind, 0.0), seconds)
        self._num_answered += 1
        self._quiet_since = now

    def _give_up(self) -> None:
        self._gave_up = True
        super()._give_up()

    def _kill_unless_back(self) -> None:
        super()._kill_unless_back()
        if self.worker.alive:
            self._gave_up = False

    def _kill(self) -> None:
        worker = self.worker
        if not (worker.hung or worker.stopped or worker.was_stopped):
            fail("false-alarm", "the watch kills a Worker that computes")
        now = asyncio.get_running_loop().time()
        if self._gave_up:
            self._check_patience(worker, now)
            stopped = now - worker.still_since if worker.stopped else 0.0
            most = STOPPED_LOOKS * LOOK_SECONDS + STACK_DUMP_SECONDS
            require(stopped <= most or worker.hung, "watch", f"it was stopped for {stopped:.1f} s")
        else:
            require(worker.stopped, "false-alarm", "a Worker that is not stopped is killed as if it were")
            self._check_stop(worker, now - worker.still_since)
        how = "stopped" if worker.stopped else "hung"
        self._monitor.saw(f"{how} Worker killed by the watch")
        if worker.asked_at is not None:
            self._monitor.saw(f"{how} Worker killed while idle")
        super()._kill()

    def _check_stop(self, worker: SimWorker, seconds: float) -> None:
        if worker.hung:  # perhaps while it was stopped
            return
        least, most = (STOPPED_LOOKS - 1) * LOOK_SECONDS, STOPPED_LOOKS * LOOK_SECONDS
        in_time = least - ROUNDING <= seconds <= most + ROUNDING
        require(in_time, "watch", f"killed when it was stopped for {seconds:.1f} s")

    def _check_patience(self, worker: SimWorker, now: float) -> None:
        timeout, interval = self._config.step_timeout, self.watch.interval
        first = self._num_answered < StepWatch.FIRST_STEPS
        least = most = min(5 * timeout, max(timeout, StepWatch.FIRST_STEPS_SECONDS)) if first else timeout
        since = max(self._quiet_since, worker.answered_at)
        if worker.asked_at is not None:
            factor = min(1.0, StepWatch.HEARTBEAT_SECONDS / timeout)
            least, most, since = factor * least, factor * most, worker.asked_at
            still = now - worker.still_since
            bound = most + 3 * interval + timeout / StepWatch.TICKS + STACK_DUMP_SECONDS
            require(still <= bound, "watch", f"an idle Worker stood still for {still:.1f} s, {bound:.1f} s are allowed")
        elif self._told_to_sleep:
            least = most = StepWatch.SLEEP_SECONDS
        elif self._pending[0][1]:
            least = min(least, StepWatch.AGAIN_SECONDS if first else MIN_LIMIT)
            most = min(most, max(least, LIMIT_FACTOR * self._monitor.slowest[kind_of(self._pending[0][0])]))
        seconds, bound = now - since, most + 2 * interval + STACK_DUMP_SECONDS
        early = least - interval > seconds
        require(not early and seconds <= bound, "watch", f"killed after {seconds:.1f} s, {most:.1f} s are allowed")

"""The second level: the real Driver on a VirtualLoop, with clients, and a Worker that is a coroutine away."""

import asyncio
import logging
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import engine.driver
import engine.request_timings
from engine.config import EngineConfig
from engine.driver import Driver
from engine.outputs import FinishReason
from engine.recovery import Recovery
from tests.checkpoints import save_fake_checkpoint
from tests.sim.clients import Clients
from tests.sim.coverage import Coverage
from tests.sim.executor import SLOW_STEP_SECONDS, STEP_SECONDS, SimExecutor
from tests.sim.monitor import Monitor, left_over
from tests.sim.swarm import Abort, Arrival, Crash, Drain, Event, SimConfig
from tests.sim.violation import Violation, require
from tests.sim.virtual_time import VirtualLoop
from tests.sim.watched import WatchedBlockManager, WatchedScheduler, states_of


class DriverRun:
    """Plays events; `run` raises Violation."""

    def __init__(self, config: SimConfig, events: list[Event], coverage: Coverage) -> None:
        self.config = config
        self.events = events
        arrivals = [event for event in events if isinstance(event, Arrival)]
        self.monitor = Monitor(config, coverage, arrivals)
        self.loop = VirtualLoop()
        self.loop.clock.check = self.monitor.raise_violation
        longest = sum(arrival.max_num_tokens * arrival.params.n for arrival in arrivals)
        last = events[-1].at if events else 0.0
        self.loop.clock.deadline = (last + 1000 + 10 * longest) * SLOW_STEP_SECONDS + 500 * len(events)

    def run(self) -> None:
        with _patched(self.config, self.monitor, self.loop), _errors_of_the_driver(self.monitor):
            try:
                self.loop.run_until_complete(self._play())
            except Violation as violation:
                raise self.monitor.violation or violation from violation
            finally:
                try:
                    self._end_tasks()
                finally:
                    self.loop.close()
        self.monitor.raise_violation()

    def _end_tasks(self) -> None:
        """What a violation left behind; the engine loop may have ended with it, which nobody else will look at."""
        engine_loop = getattr(getattr(self, "driver", None), "_task", None)
        if engine_loop is not None and engine_loop.done() and not engine_loop.cancelled():
            engine_loop.exception()
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self.loop.clock.deadline, self.loop.clock.check = float("inf"), lambda: None
            self.loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))

    async def _play(self) -> None:
        self.driver = Driver(
            EngineConfig(
                model=str(_checkpoint()),
                load_format="dummy",
                block_size=self.config.block_size,
                watermark=self.config.watermark,
                enable_prefix_caching=self.config.prefix_caching,
                async_scheduling=self.config.depth > 1,
                max_worker_restarts=10_000,
            ),
            max_queued_requests=self.config.max_queued_requests,
        )
        await self.driver.start()
        await self.driver.wait_ready()
        self.clients = Clients(self.driver, self.monitor)
        background = []
        for event in self.events:
            await asyncio.sleep(max(0.0, event.at * STEP_SECONDS - self.loop.time()))
            if isinstance(event, Arrival):
                background += self.clients.arrive(event)
            elif isinstance(event, Abort):
                self._abort(event)
            elif isinstance(event, Crash):
                self._crash()
            else:
                background.append(asyncio.create_task(self._drain(event)))
        await asyncio.gather(*background)
        await self._check_idle()

    def _abort(self, abort: Abort) -> None:
        fits = [
            name
            for name, client in self.clients.by_name.items()
            if abort.target == "any" or any(abort.target in states_of(seq) for seq in client.stream.sequences())
        ]
        if fits:
            client = self.clients.by_name[fits[abort.pick % len(fits)]]
            if client.stream.finished:
                self.monitor.saw("abort after the end")
            else:
                client.aborted = True
            self.driver.abort(client.stream.request.request_id)

    def _crash(self) -> None:
        """Somebody kills the Worker, if one runs."""
        executor = self.monitor.executor
        if executor.ready:
            self.monitor.saw("Worker killed with plans under way" if self.driver._in_flight else "idle Worker killed")
            if any(seq.num_generated_tokens for seq in self.driver.scheduler.running):
                self.monitor.saw("Worker killed amid generation")
            if self.driver.scheduler._forks:
                self.monitor.saw("Worker killed while samples wait to fork")
            executor.kill(from_outside=True)
        else:
            self.monitor.saw("nobody to kill: the Worker is being started again")

    async def _drain(self, event: Drain) -> None:
        self.clients.draining = True
        live = list(self.driver._live)
        finished = await self.driver.drain(event.timeout)
        self.monitor.saw("drain finished" if finished else "drain timed out")
        self.monitor.record("drained", live, finished)
        self.clients.drain_timed_out = self.clients.drain_timed_out or not finished

    async def _check_idle(self) -> None:
        driver = self.driver
        await asyncio.sleep(120)  # tokens of what was aborted are on their way, or the Worker is started again
        require(driver.health() is None, "health", f"idle, and health says {driver.health()}")
        self.monitor.check_idle()
        left = left_over(driver, but=("eos_token_ids",))
        left |= left_over(driver._recovery, but=()) | left_over(driver._prefetcher, but=())
        require(not left, "leftovers", f"the Driver still has {left}")
        driver.stats_snapshot()
        gauges = driver.stats.num_requests_running.value, driver.stats.num_requests_waiting.value
        require(gauges == (0, 0), "leftovers", f"gauges of an idle engine: {gauges}")
        ends = sum(driver.stats.request_success.values.values())
        require(ends == len(self.clients.by_name), "leftovers", f"{ends} ends of {len(self.clients.by_name)} requests")
        errors = driver.stats.request_success.values[(FinishReason.ERROR.value,)]
        self.monitor.record("ends", ends, errors, self.loop.time())
        await driver.stop()


@cache
def _checkpoint() -> Path:
    folder = tempfile.TemporaryDirectory(prefix="pageserve-sim-")
    _KEPT.append(folder)
    return save_fake_checkpoint(Path(folder.name) / "model")


_KEPT: list[tempfile.TemporaryDirectory[str]] = []  # removed when the process ends


@contextmanager
def _patched(config: SimConfig, monitor: Monitor, loop: VirtualLoop) -> Iterator[None]:
    """The Driver's module sees the watched classes, the simulated Worker and the loop's clock."""
    clock = SimpleNamespace(monotonic=loop.time)
    with ExitStack() as stack:
        for module, name, value in (
            (engine.driver, "Scheduler", partial(WatchedScheduler, monitor, clock=loop.time)),
            (engine.driver, "BlockManager", partial(WatchedBlockManager, monitor)),
            (engine.driver, "Recovery", partial(Recovery, clock=loop.time)),
            (engine.driver, "Executor", partial(SimExecutor, config, monitor)),
            (engine.driver, "time", clock),
            (engine.request_timings, "time", clock),
        ):
            stack.enter_context(mock.patch.object(module, name, value))
        yield


class _Errors(logging.Handler):
    def __init__(self, monitor: Monitor) -> None:
        super().__init__(logging.ERROR)
        self._monitor = monitor

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        restarts = error is None and record.name == "engine.driver"  # it says so, and goes on
        if self._monitor.violation is None and not restarts:
            detail = f"{record.getMessage()} ({type(error).__name__}: {error})"
            self._monitor.violation = error if isinstance(error, Violation) else Violation("engine-error", detail)


@contextmanager
def _errors_of_the_driver(monitor: Monitor) -> Iterator[None]:
    """An error that the Driver or asyncio logs is a violation: the Driver survives many, the run must not."""
    handler = _Errors(monitor)
    loggers = [logging.getLogger("engine.driver"), logging.getLogger("asyncio")]
    for logger in loggers:
        logger.addHandler(handler)
        logger.propagate = False
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
            logger.propagate = True

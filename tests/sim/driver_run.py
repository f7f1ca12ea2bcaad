"""The second level: the real Driver on a VirtualLoop, with clients, and a Worker that is a coroutine away."""

import asyncio
import logging
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import engine.checkpoint.checkpoint
import engine.driver
import engine.executor.executor
import engine.executor.process_state
import engine.executor.supervisor
import engine.requests.loaded
import engine.requests.new_scheduler
import engine.telemetry.request_timings
import engine.worker.cache.disk_cache
from engine.config import EngineConfig
from engine.driver import Driver
from engine.errors import EngineError, InvalidRequestError, UnavailableError
from engine.executor.executor import FLUSH_SECONDS
from engine.executor.recovery import Recovery
from engine.executor.step_watch import StepWatch
from engine.outputs import FinishReason
from tests.checkpoints import save_fake_checkpoint
from tests.sim.clients import Clients
from tests.sim.coverage import Coverage
from tests.sim.disk import IDENTITY, damage
from tests.sim.executor import LOOK_SECONDS, TICK_SECONDS, SimExecutor
from tests.sim.model import mix
from tests.sim.monitor import Monitor, left_over
from tests.sim.prefetch import WatchedPrefetcher
from tests.sim.swarm import (
    BAD,
    FOR_GOOD,
    MAX_ADAPTERS,
    VERSIONS,
    Abort,
    Arrival,
    ChangeAdapter,
    Crash,
    Damage,
    Drain,
    Event,
    Pause,
    SimConfig,
    Sleep,
)
from tests.sim.violation import Violation, require
from tests.sim.virtual_time import VirtualLoop
from tests.sim.watched import WatchedBlockManager, WatchedScheduler, states_of
from tests.sim.worker import SLOW_STEP_SECONDS, STEP_SECONDS

HITCH_SECONDS = 3000  # for a Worker that hangs, three times over, or is stopped
COMPILING_SECONDS = 3000  # for steps of new kinds
IDLE_SECONDS = 1000
RESTARTING = "engine.driver", "engine.executor.supervisor"  # loggers that tell of a restart
MAX_QUEUED_WRITES = 5
SECOND_LIFE = 15  # requests that a server on the same disk is asked for again


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
        num_hitches = sum(isinstance(event, Pause) or bool(getattr(event, "deadly", "")) for event in events)
        num_hitches += sum(getattr(event, "again", 0) + isinstance(event, Sleep) for event in events)
        self.loop.clock.deadline = (last + 1000 + 10 * longest) * SLOW_STEP_SECONDS + 500 * len(events)
        self.loop.clock.deadline += HITCH_SECONDS * num_hitches + COMPILING_SECONDS
        self._folder = Path(tempfile.mkdtemp(prefix="pageserve-sim-disk-")) if config.disk_blocks else None

    def run(self) -> None:
        with _patched(self, self.loop), _errors_of_the_driver(self.monitor):
            try:
                self.loop.run_until_complete(self._play())
            except Violation as violation:
                raise self.monitor.violation or violation from violation
            finally:
                try:
                    self._end_tasks()
                finally:
                    self.loop.close()
                    if self._folder is not None:
                        shutil.rmtree(self._folder)
        self.monitor.raise_violation()

    def _end_tasks(self) -> None:
        """Cancel all tasks that a violation left behind, and read the exception of an engine loop that it ended."""
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
        await self._live(self.events)
        if self._folder is not None:
            if self.config.damage_rate:
                self._damage(mix(self.config.seed, 4) & ~3)
            again = [event for event in self.events if isinstance(event, Arrival)][:SECOND_LIFE]
            arrivals = [replace(arrival, at=i, leave_after=None, deadly="") for i, arrival in enumerate(again)]
            self.monitor.expect(arrivals)
            self.loop.clock.deadline += self.loop.time()
            start = self.loop.time() / STEP_SECONDS
            await self._live([replace(arrival, at=start + arrival.at) for arrival in arrivals])

    async def _live(self, events: list[Event]) -> None:
        """A server from start to stop."""
        self.driver = self._new_driver()
        await self._begin()
        await self._play_events(events)
        await self._check_idle()
        await self._stop()

    def _new_driver(self) -> Driver:
        config, with_disk = self.config, self._folder is not None
        return Driver(
            EngineConfig(
                model=str(_checkpoint()),
                load_format="dummy",
                block_size=config.block_size,
                watermark=config.watermark,
                admission=config.admission,
                fair_step_seconds=config.step_seconds,
                itl_target=config.itl_target,
                enable_prefix_caching=config.prefix_caching,
                async_scheduling=config.depth > 1,
                max_worker_restarts=10_000,
                step_timeout=config.step_timeout,
                swap_space=1.0 if with_disk else 0.0,
                disk_cache=str(self._folder) if with_disk else None,
                **self._adapters(),
            ),
            max_queued_requests=config.max_queued_requests,
        )

    def _adapters(self) -> dict[str, Any]:
        """The settings of a server with adapters: the first version of each is there from the start."""
        if not self.config.num_adapters:
            return {}
        root, names = _adapter_root(), [f"a{i}" for i in range(self.config.num_adapters)]
        first = tuple(f"{name}={root / f'{name}-{VERSIONS[0]}'}" for name in names)
        return {
            "lora": first, "max_loras": self.config.max_loras, "allow_runtime_lora": True, "lora_root": str(root)
        }  # fmt: skip

    async def _begin(self) -> None:
        self.clients = Clients(self.driver, self.monitor)
        await self.driver.start()
        await self.driver.wait_ready()
        tier = self.driver.scheduler.block_manager.host_tier
        if tier is not None and tier.on_disk:
            self.monitor.saw("restarted server finds blocks on the disk")

    async def _play_events(self, events: list[Event]) -> None:
        background = []
        for event in events:
            await asyncio.sleep(max(0.0, event.at * STEP_SECONDS - self.loop.time()))
            if isinstance(event, Arrival):
                background += self.clients.arrive(event)
            elif isinstance(event, Abort):
                self._abort(event)
            elif isinstance(event, Crash):
                self._crash(event)
            elif isinstance(event, Pause):
                self._pause(event)
            elif isinstance(event, Damage):
                self._damage(event.pick)
            elif isinstance(event, Sleep):
                background.append(asyncio.create_task(self._sleep(event)))
            elif isinstance(event, ChangeAdapter):
                background.append(asyncio.create_task(self._change_adapter(event)))
            else:
                background.append(asyncio.create_task(self._drain(event)))
        await asyncio.gather(*background)

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
                if client.arrival.beam is not None:
                    self.monitor.saw("beam search aborted")
            self.driver.abort(client.stream.request.request_id)

    def _crash(self, event: Crash) -> None:
        """Somebody kills the Worker, if one runs."""
        executor = self.monitor.executor
        if executor.ready and executor.worker.alive:
            self.monitor.saw(
                "Worker killed with plans under way" if self.driver.num_in_flight else "idle Worker killed"
            )
            if any(seq.num_generated_tokens for seq in self.driver.scheduler.running):
                self.monitor.saw("Worker killed amid generation")
            if self.driver.scheduler._forks:
                self.monitor.saw("Worker killed while samples wait to fork")
            executor.worker.kill()
            self._besiege("kill", event.again)
        else:
            self.monitor.saw("nobody to kill: the Worker is being started again")

    async def _sleep(self, event: Sleep) -> None:
        driver = self.driver
        with suppress(UnavailableError):  # it drains
            await driver.sleep(event.level)
            if driver.sleep_level:
                self.monitor.saw("model sleeps with live requests" if driver.num_live_requests else "idle model sleeps")
            await asyncio.sleep(event.seconds)
            if not driver.sleep_level:
                self.monitor.saw("model woken by a request, or awake before it slept")
            await driver.wake()

    async def _change_adapter(self, event: ChangeAdapter) -> None:
        driver, saw = self.driver, self.monitor.saw
        try:
            if event.name in driver.adapters:
                used = any(seq.adapter and seq.adapter.name == event.name for seq in self.monitor.live_sequences())
                driver.unload_adapter(event.name)
                saw("adapter unloaded amid its requests" if used else "adapter unloaded")
            if event.weights:
                await driver.load_adapter(event.name, event.weights)
                saw("adapter loaded while the server runs")
        except UnavailableError:
            require(self.clients.draining, "refusal", f"{event} was refused")
        except InvalidRequestError as error:
            refused = error.param == "lora_path"
            require(refused == event.weights.endswith(BAD) or not refused, "refusal", f"{event}: {error}")
            saw("adapter that is not served refused" if refused else "adapter loaded while its name is being loaded")
        except EngineError as error:
            if "The Worker dies while it reads" in str(error):  # of a deadly request, twice
                return
            require(self.clients.draining, "refusal", f"{event} failed")
            saw("load of an adapter ended by the end of the server")

    def _damage(self, pick: int) -> None:
        if self._folder is not None and damage(self._folder, self.config, pick):
            self.monitor.saw("block on the disk damaged")

    def _pause(self, event: Pause) -> None:
        executor = self.monitor.executor
        if not executor.ready or not executor.worker.alive or executor.worker.stopped:
            return
        busy = self.driver.num_in_flight > 0
        if event.hangs:
            if not busy:
                self.monitor.saw("idle Worker hung")
                executor.worker.hang()
            return
        self.monitor.saw("Worker stopped with plans under way" if busy else "idle Worker stopped")
        executor.worker.stop(event.seconds)
        if event.seconds == FOR_GOOD:
            self._besiege("stop", event.again)

    def _besiege(self, blow: str, again: int) -> None:
        """The Worker was hit; the next ones will be. `again` is 0 where it is the only one."""
        self.monitor.blows = [blow] * again
        self.monitor.hit(self.driver._in_flight)

    async def _drain(self, event: Drain) -> None:
        self.clients.draining = True
        live = [request.request_id for request in self.driver.live_requests]
        finished = await self.driver.drain(event.timeout)
        self.monitor.saw("drain finished" if finished else "drain timed out")
        self.monitor.record("drained", live, finished)
        self.clients.drain_timed_out = self.clients.drain_timed_out or not finished

    async def _check_idle(self) -> None:
        driver = self.driver
        await asyncio.sleep(IDLE_SECONDS)  # tokens of what was aborted are on their way, or a Worker is started again
        require(driver.health() is None, "health", f"idle, and health says {driver.health()}")
        executor = self.monitor.executor
        still = executor.ready and (executor.worker.stopped or executor.worker.hung)
        require(not still, "heartbeat", "an idle Worker stands still, and nobody has noticed")
        self.monitor.check_idle()
        driver.check_invariants()
        loaded, left = driver._loaded, left_over(driver, but=("eos_token_ids",)) | left_over(driver.recovery, but=())
        for part in (loaded.live, loaded.prefetcher):
            left |= {} if part is None else left_over(part, but=("_eos_token_ids",))
        require(not left, "leftovers", f"the Driver still has {left}")
        names = sorted(Path(path).name for path in driver.adapters.values())
        require(sorted(self.monitor.adapters.values()) == names, "leftovers", f"{self.monitor.adapters} of {names}")
        driver.stats_snapshot()
        gauges = driver.stats.num_requests_running.value, driver.stats.num_requests_waiting.value
        require(gauges == (0, 0), "leftovers", f"gauges of an idle engine: {gauges}")
        ends = sum(driver.stats.request_success.values.values())
        require(ends == len(self.clients.by_name), "leftovers", f"{ends} ends of {len(self.clients.by_name)} requests")
        errors = driver.stats.request_success.values[(FinishReason.ERROR.value,)]
        self.monitor.record("ends", ends, errors, self.loop.time())

    async def _stop(self) -> None:
        """The Worker is gone, and that soon, in whatever state it was."""
        worker, started = self.monitor.executor.worker, self.loop.time()
        if worker.alive and mix(self.config.seed, 5) % 4 == 0:
            worker.stop(FOR_GOOD)
            self.monitor.saw("stopped Worker killed at the end of the server")
        await self.driver.stop()
        require(not worker.alive, "stop", "the server has stopped, its Worker has not")
        seconds = self.loop.time() - started
        require(seconds <= FLUSH_SECONDS + 1, "stop", f"to stop took {seconds} s")


@cache
def _checkpoint() -> Path:
    folder = tempfile.TemporaryDirectory(prefix="pageserve-sim-")
    _KEPT.append(folder)
    return save_fake_checkpoint(Path(folder.name) / "model")


@cache
def _adapter_root() -> Path:
    """Folders for all versions of all adapters; nothing reads what is in them."""
    folder = tempfile.TemporaryDirectory(prefix="pageserve-sim-")
    _KEPT.append(folder)
    for i in range(MAX_ADAPTERS):
        for version in VERSIONS:
            (Path(folder.name).resolve() / f"a{i}-{version}").mkdir()
    return Path(folder.name).resolve()


_KEPT: list[tempfile.TemporaryDirectory[str]] = []  # removed when the process ends


@contextmanager
def _patched(run: DriverRun, loop: VirtualLoop) -> Iterator[None]:
    """The Driver's modules see the watched classes, the simulated Worker, its disk, and the loop's clock."""
    config, monitor = run.config, run.monitor
    clock = SimpleNamespace(monotonic=loop.time, time=loop.time)
    no_thread = SimpleNamespace(start=lambda: None)
    with ExitStack() as stack:
        for module, name, value in (
            (engine.requests.new_scheduler, "Scheduler", partial(WatchedScheduler, monitor, clock=loop.time)),
            (engine.requests.new_scheduler, "BlockManager", partial(WatchedBlockManager, monitor)),
            (engine.executor.supervisor, "Recovery", partial(Recovery, clock=loop.time)),
            (engine.executor.supervisor, "Executor", partial(SimExecutor, config, monitor, run._folder)),
            (engine.requests.loaded, "Prefetcher", partial(WatchedPrefetcher, monitor)),
            (engine.checkpoint.checkpoint, "model_identity", lambda *_: IDENTITY),
            (engine.executor.process_state, "stopped_at", lambda pid: monitor.workers[pid].stopped_at),
            (engine.executor.process_state, "LOOK_SECONDS", LOOK_SECONDS),
            (StepWatch, "TICK_SECONDS", TICK_SECONDS),
            (engine.executor.executor, "stopped_at", lambda pid: monitor.workers[pid].stopped_at),
            (engine.executor.executor, "is_traced", lambda _: False),
            (engine.executor.process_state, "count_oom_kills", lambda: 0),
            (engine.worker.cache.disk_cache, "os", monitor.faults),
            (engine.worker.cache.disk_cache, "threading", SimpleNamespace(Thread=lambda **_: no_thread)),
            (engine.worker.cache.disk_cache, "MAX_QUEUED_WRITES", MAX_QUEUED_WRITES),
            (engine.driver, "time", clock),
            (engine.telemetry.request_timings, "time", clock),
        ):
            stack.enter_context(mock.patch.object(module, name, value))
        yield


class _Errors(logging.Handler):
    def __init__(self, monitor: Monitor) -> None:
        super().__init__(logging.ERROR)
        self._monitor = monitor

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        restarts = error is None and record.name in RESTARTING  # reported, and survived
        if self._monitor.violation is None and not restarts:
            detail = f"{record.getMessage()} ({type(error).__name__}: {error})"
            self._monitor.violation = error if isinstance(error, Violation) else Violation("engine-error", detail)


@contextmanager
def _errors_of_the_driver(monitor: Monitor) -> Iterator[None]:
    """An error that the Driver or asyncio logs is a violation: the Driver survives many, the run must not."""
    handler = _Errors(monitor)
    names = *RESTARTING, "engine.executor.executor", "engine.worker.cache.disk_cache", "asyncio"
    loggers = [logging.getLogger(name) for name in names]
    for logger in loggers:
        logger.addHandler(handler)
        logger.propagate = False
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
            logger.propagate = True

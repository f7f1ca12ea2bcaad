"""The server is stopped in some turn of the event loop, in the midst of whatever that is."""

import asyncio

from engine.driver import SERVING_PHASES
from engine.errors import UnavailableError
from engine.executor.executor import FLUSH_SECONDS
from engine.request import Request
from engine.sampling_params import SamplingParams
from tests.sim.coverage import Coverage
from tests.sim.driver_run import DriverRun
from tests.sim.model import mix
from tests.sim.swarm import VERSIONS, ChangeAdapter, Event, SimConfig, StopAt
from tests.sim.violation import fail, require

LONGEST_STOP = FLUSH_SECONDS + 1 + 2  # seconds; the last are those after which a Worker that stands still is killed


class SuddenStop(DriverRun):
    """Stopped in the `when.turn`-th turn after so many Workers were started, if the events are not over by then."""

    def __init__(self, config: SimConfig, events: list[Event], coverage: Coverage, when: StopAt) -> None:
        super().__init__(config, events, coverage)
        self._num_workers, self._turns_left = when.num_workers, when.turn
        self.in_time = True  # the turn came

    async def _play(self) -> None:
        self.driver = self._new_driver()
        self._now = self.loop.create_future()
        self.loop.clock.check = self._count
        life = asyncio.create_task(self._life())
        await asyncio.wait([life, self._now], return_when=asyncio.FIRST_COMPLETED)
        self.in_time = self._now.done()
        life.cancel()
        await self._stop()
        [outcome] = await asyncio.gather(life, return_exceptions=True)
        if isinstance(outcome, Exception):
            raise outcome
        rest = asyncio.all_tasks(self.loop) - {asyncio.current_task()}
        await asyncio.gather(*rest, return_exceptions=True)
        self._check_end()

    def _count(self) -> None:
        self.monitor.raise_violation()
        if self.monitor.num_workers >= self._num_workers:
            self._turns_left -= 1
            if self._turns_left == 0:
                self._now.set_result(None)

    async def _life(self) -> None:
        await self._begin()
        await self._play_events(self.events)

    async def _stop(self) -> None:
        driver, started = self.driver, self.loop.time()
        self.monitor.saw(f"server stopped while {driver.phase}")
        if hasattr(self, "clients"):
            await self._ask_for_an_adapter()
            self.clients.draining = self.clients.drain_timed_out = True  # from here on refused; what runs may fail
        await driver.stop()
        seconds = self.loop.time() - started
        require(seconds <= LONGEST_STOP, "stop", f"to stop took {seconds} s")

    async def _ask_for_an_adapter(self) -> None:
        """Its loading, in whatever state, ends with the server."""
        if self.config.num_adapters and self.driver.phase in SERVING_PHASES:
            load = ChangeAdapter(0, "late", f"a0-{VERSIONS[1]}")
            self._late = asyncio.create_task(self._change_adapter(load))
            for _ in range(mix(self.config.seed, 6) % 6):
                await asyncio.sleep(0)

    def _check_end(self) -> None:
        driver = self.driver
        worker = driver.supervisor.executor._process
        require(worker is None or not worker.alive, "stop", "the server has stopped, its Worker has not")
        live = [request.request_id for request in driver.live_requests]
        require(not live, "stop", f"it still has {live}")
        driver.check_invariants()
        try:
            driver.generate(Request("late", [97], SamplingParams()))
        except UnavailableError:
            return
        fail("refusal", "a server that has stopped accepted a request")

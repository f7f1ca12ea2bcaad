"""Supervisor: keeps one Worker running, and starts the next one when it dies."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable

from engine.errors import PageserveError, WorkerDiedError
from engine.executor.child_process import kill_children
from engine.executor.executor import WORKER_COMMAND, Executor, NoRoomError
from engine.executor.recovery import Recovery
from engine.executor.step import DriverMessage, StartWorker, WorkerReady
from engine.executor.step_durations import StepDurations
from engine.executor.timeouts import with_timeout

NO_ROOM_SECONDS = 1.0  # between two tries to start a Worker while the system lacks descriptors, processes or memory
# A new Worker that takes longer to load than this, and than RELOAD_FACTOR times the first one's time, is dead.
MIN_RELOAD_SECONDS = 60.0
RELOAD_FACTOR = 10

logger = logging.getLogger(__name__)


class Supervisor:
    """Owns the Executor of the present Worker, and the knowledge that outlives it: `recovery` and step durations."""

    def __init__(
        self,
        worker_command: tuple[str, ...] | None,
        max_restarts: int,
        restart_window: float,
        on_restart: Callable[[], None],
    ) -> None:
        """`worker_command` None starts the real Worker. `on_restart` is called whenever a next Worker is started."""
        self.recovery = Recovery(max_restarts, restart_window)
        self.load_timeout = MIN_RELOAD_SECONDS  # seconds
        self._worker_command = worker_command or WORKER_COMMAND
        self._on_restart = on_restart
        self._durations = StepDurations()
        self._rests = False  # the present Worker sleeps at level 1
        self.executor = Executor(self._worker_command, self._durations)

    @staticmethod
    def kill_all() -> None:
        """Kill every child process of this process at once, from any thread."""
        kill_children()

    def send(self, message: DriverMessage) -> None:
        """Send to the present Worker; never blocks."""
        self.executor.send(message)

    async def start(self, message: StartWorker) -> None:
        """Start the first Worker. `message` also starts every Worker after it. Raises WorkerDiedError, NoRoomError."""
        self._start_message = message
        await self.executor.start(message)

    async def wait_loaded(self, on_progress: Callable[[str], None]) -> WorkerReady:
        """Wait until the first Worker has loaded; replace it if it is killed or stopped from outside meanwhile.

        Any other death while loading would come again. Raises PageserveError.
        """
        clock = asyncio.get_running_loop().time
        started = clock()
        while True:
            try:
                ready = await self.executor.wait_ready(on_progress)
                break
            except WorkerDiedError as death:
                await self.start_again(death)
        self.load_timeout = max(MIN_RELOAD_SECONDS, RELOAD_FACTOR * (clock() - started))
        return ready

    async def start_again(self, death: WorkerDiedError) -> None:
        """Start another first Worker in the place of one that was killed or stopped from outside before it served.
        Raises `death` if it is of another kind, and EngineError when the budget of restarts is spent."""
        if not death.from_outside:
            raise death
        self.recovery.record_death([])
        await self._bury(death, num_waiting=0)
        await self._start_next()

    def record_death(self, death: PageserveError, request_ids: Iterable[str]) -> list[str]:
        """Hold a death against the requests that the Worker computed; returns those that are guilty: one, or none.

        No request is guilty of a death that came from outside.
        """
        from_outside = isinstance(death, WorkerDiedError) and death.from_outside
        return self.recovery.record_death([] if from_outside else request_ids)

    async def restart(self, death: PageserveError, num_live: Callable[[], int]) -> WorkerReady:
        """Replace a Worker whose death is recorded. `num_live` counts the requests that wait for the next one.

        Raises EngineError when the budget of restarts is spent.
        """
        while True:
            await self._bury(death, num_live())
            try:
                return await self._start_when_there_is_room(self._start_next)
            except PageserveError as error:  # the next Worker died while it loaded, or reports that it cannot load now
                death = error
                self.recovery.record_death([])

    async def rest(self, level: int) -> None:
        """The Worker has left its device (WorkerAsleep): keep its process at level 1, end it at level 2."""
        self._rests = level == 1
        if self._rests:
            self.executor.rest()
        else:
            await self.executor.stop()

    async def wake(self, num_live: Callable[[], int]) -> WorkerReady:
        """Wake the Worker that rests, or start the next one in the place of one that ended in order.

        A failure counts as a death, so `restart` goes on from there. Raises EngineError when its budget is spent.
        """
        try:
            if not self._rests:
                return await self._start_when_there_is_room(self._start_executor)
            self._rests = False
            self.executor.wake()
            return await self._wait_reloaded()
        except PageserveError as error:
            self.recovery.record_death([])
            return await self.restart(error, num_live)

    async def _bury(self, death: PageserveError, num_waiting: int) -> None:
        """End the rest of a dead Worker, and wait until the next one may start. Raises EngineError."""
        await self.executor.stop(grace=0)
        delay = self.recovery.backoff(death)
        logger.error("%s; starting it again in %g s, %d requests wait", death, delay, num_waiting)
        await asyncio.sleep(delay)

    async def _start_when_there_is_room(self, start: Callable[[], Awaitable[None]]) -> WorkerReady:
        """A lack of descriptors or memory kills no Worker: it is waited out, and does not count as a death."""
        while True:
            try:
                await start()
                return await self._wait_reloaded()
            except NoRoomError as error:
                logger.error("%s; trying again in %g s", error, NO_ROOM_SECONDS)
                await self.executor.stop(grace=0)
                await asyncio.sleep(NO_ROOM_SECONDS)

    async def _start_next(self) -> None:
        self._on_restart()
        await self._start_executor()

    async def _start_executor(self) -> None:
        self.executor = Executor(self._worker_command, self._durations)
        await self.executor.start(self._start_message)

    async def _wait_reloaded(self) -> WorkerReady:
        try:
            return await with_timeout(self.load_timeout, self.executor.wait_ready(lambda phase: None))
        except asyncio.TimeoutError:
            raise WorkerDiedError(f"the new Worker did not load within {self.load_timeout:.0f} s") from None

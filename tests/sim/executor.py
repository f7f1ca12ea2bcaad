"""SimExecutor: what the Driver sees of a Worker, in virtual time; it may die at any moment."""

import asyncio
from collections.abc import Callable

from engine.executor import WorkerDiedError
from engine.step import FetchBlocks, StartWorker, StepPlan, StepResult, WorkerReady
from tests.sim.model import VOCAB_SIZE, mix
from tests.sim.monitor import Monitor
from tests.sim.swarm import SimConfig
from tests.sim.violation import fail

STEP_SECONDS = 1.0
SLOW_STEP_SECONDS = 6.0


class SimExecutor:
    """Plans in, results out in order, each after its time. A plan with a deadly request in it kills the Worker."""

    def __init__(self, config: SimConfig, monitor: Monitor, worker_command: tuple[str, ...]) -> None:
        self._config, self._monitor = config, monitor
        self._answers: asyncio.Queue[StepResult | WorkerDiedError] = asyncio.Queue()
        self._free_at = 0.0  # when the Worker is done with all that was sent
        self._timers: list[asyncio.TimerHandle] = []
        self.ready = False

    async def start(self, message: StartWorker) -> None:
        await asyncio.sleep(1)

    async def wait_ready(self, on_progress: Callable[[str], None]) -> WorkerReady:
        on_progress("loading weights")
        await asyncio.sleep(1)
        config = self._config
        self._monitor.executor = self
        self.ready = True
        return WorkerReady(
            num_blocks=config.num_blocks,
            max_model_len=config.max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            vocab_size=VOCAB_SIZE,
            device="fake",
            dtype="none",
            memory={},
            num_host_blocks=config.num_host_blocks,
            cache_costs=config.cache_costs,
        )

    def send(self, plan: StepPlan | FetchBlocks) -> None:
        if not self.ready or not isinstance(plan, StepPlan):
            fail("worker-rows", f"{type(plan).__name__} was sent to a Worker that does not expect it")
        loop = asyncio.get_running_loop()
        slow_every = self._config.slow_every
        slow = slow_every > 0 and mix(self._config.seed, plan.step_id) % slow_every == 0
        self._free_at = max(loop.time(), self._free_at) + (SLOW_STEP_SECONDS if slow else STEP_SECONDS)
        self._timers.append(loop.call_at(self._free_at, self._finish, plan))

    def _finish(self, plan: StepPlan) -> None:
        if any(self._monitor.is_deadly(step.seq_id) for step in plan.steps):
            self._monitor.saw("Worker killed by a deadly request")
            return self.kill(from_outside=False)
        self._answers.put_nowait(self._monitor.results.pop(plan.step_id))

    def kill(self, from_outside: bool) -> None:
        """It dies: what it had not answered is lost, what it had is still read."""
        if self.ready:
            self.ready = False
            for timer in self._timers:
                timer.cancel()
            self._answers.put_nowait(WorkerDiedError("the simulated Worker died", from_outside=from_outside))

    async def receive(self) -> StepResult:
        answer = await self._answers.get()
        if isinstance(answer, WorkerDiedError):
            raise answer
        return answer

    async def stop(self, grace: float = 0.0) -> None:
        self.ready = False
        await asyncio.sleep(0)

"""SimWorker: the process at the other end of the socket, in virtual time. It may die, hang, or be stopped."""

import asyncio
import signal
import subprocess
from collections import deque
from pathlib import Path

from engine.executor.frames import FRAME_HEADER
from engine.executor.step import (
    AdapterLoaded,
    CacheCosts,
    DriverMessage,
    FetchBlocks,
    FetchedBlocks,
    Heartbeat,
    LoadAdapter,
    LoadProgress,
    SleepWorker,
    StartWorker,
    StepPlan,
    UnloadAdapter,
    WakeWorker,
    WorkerAsleep,
    WorkerMessage,
    WorkerReady,
    decode_driver_message,
    encode_frame,
)
from engine.executor.step_durations import kind_of
from tests.sim.device import KvMemory
from tests.sim.disk import SimHost
from tests.sim.model import VOCAB_SIZE, mix
from tests.sim.monitor import Monitor
from tests.sim.swarm import BAD, SimConfig
from tests.sim.violation import fail, require

STEP_SECONDS = 1.0
SLOW_STEP_SECONDS = 6.0
SLOW_LOAD_SECONDS = 50.0  # enough for others to come meanwhile
SLOW_ANSWER_EVERY = 4  # one heartbeat in so many comes while something takes up the idle time
COMPILED_EVERY = 8  # one kind of step in so many takes COMPILING times the step timeout when it comes first
COMPILING = 0.9
POOL_FACTORS = (0.25, 0.5, 0.8, 1.0, 1.5, 3.0)


class SimWorker:
    """Also what subprocess.Popen shows of it. `number` counts the Workers of a run; the first one always loads."""

    def __init__(
        self, config: SimConfig, monitor: Monitor, reader: asyncio.StreamReader, number: int, folder: Path | None
    ) -> None:
        self.pid = number
        self.returncode: int | None = None
        self.ready = self.stopped = self.hung = False
        self._leaving = False  # on its way to sleep: it reads no message before the one that wakes it
        self.was_stopped = False  # since it last finished a step
        self.still_since = 0.0  # when it hung or was stopped last
        self._num_continued = 0
        self.asked_at: float | None = None  # for the heartbeat that it has not answered
        self.answered_at = 0.0  # the last one
        self._num_heartbeats = 0
        self._kinds = monitor.compiled  # by this Worker or one before: what is compiled is kept on the disk
        self._config, self._monitor, self._reader, self._folder = config, monitor, reader, folder
        self._host: SimHost | None = None
        self._memory: KvMemory | None = None  # since it first loaded
        self._plans: deque[StepPlan] = deque()
        self._fetches: deque[FetchBlocks] = deque()  # that came while it was stopped
        self._sleep: SleepWorker | None = None
        self._num_reads = 0  # adapters that a thread reads
        self._read: list[LoadAdapter] = []  # whose answers wait while it is stopped
        monitor.adapters.clear()
        self._timer: asyncio.TimerHandle | None = None
        loop = asyncio.get_running_loop()
        self._later, self._now = loop.call_later, loop.time

    @property
    def alive(self) -> bool:
        return self.returncode is None

    # Calls of the Driver's side.

    def poll(self) -> int | None:
        return self.returncode

    def feed(self, frame: bytes) -> None:
        message: DriverMessage = decode_driver_message(frame[FRAME_HEADER.size :])
        if not self.alive:
            return
        if isinstance(message, StartWorker):
            self._timer = self._later(1, self._load)
        elif isinstance(message, StepPlan):
            if self.asked_at is not None:
                self._monitor.saw("plan sent to a Worker that has not answered")
            self._plans.append(message)
            self._go_on()
        elif isinstance(message, Heartbeat):
            if self._plans or self.asked_at is not None:
                fail("heartbeat", "a Worker is asked although an answer of it is due")
            if not self.ready:  # it sleeps, which the Driver has not read
                return
            self.asked_at = self._now()
            self._num_heartbeats += 1
            self._go_on()
        elif isinstance(message, SleepWorker):
            if self._plans or self._fetches:
                fail("sleep", "a Worker is to sleep before it has done its plans and fetches")
            self._sleep = message
            self._go_on()
        elif isinstance(message, WakeWorker):
            self._timer = self._later(1, self._become_ready)
        elif isinstance(message, LoadAdapter | UnloadAdapter):
            if self.ready and not self._leaving:
                self._take_adapter(message)
            else:
                self._monitor.saw("adapter named to a Worker that sleeps")
        else:
            self._fetches.append(message)
            self._fetch()

    def hang_up(self) -> None:
        """The Driver closed its end: it goes, unless it is stopped."""
        if not self.stopped:
            self.die(0)

    def wait(self, timeout: float) -> int:
        if self.returncode is None:
            raise subprocess.TimeoutExpired("the simulated Worker", timeout)
        return self.returncode

    def kill(self) -> None:
        self.die(-signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        if number != signal.SIGUSR1:
            fail("signal", f"the Worker got signal {number}")

    @property
    def stopped_at(self) -> int | None:
        """As engine.executor.process_state: it uses processor time each time that it goes on."""
        return self._num_continued if self.stopped else None

    # Accidents.

    def stop(self, seconds: float) -> None:
        """SIGSTOP, and SIGCONT after that time."""
        self.stopped = self.was_stopped = True
        self.still_since = self._now()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._host is not None:
            self._host.disk.pause(True)
        self._later(seconds, self._continue)

    def hang(self) -> None:
        """In what it does in its idle time."""
        self.hung = True
        self.still_since = self._now()
        if self._timer is not None:
            self._timer.cancel()

    def _continue(self) -> None:
        if self.alive:
            self._monitor.saw("Worker stopped for a while and went on")
            self.stopped = False
            self._num_continued += 1
            if self._host is not None:
                self._host.disk.pause(False)
            self._fetch()
            for message in self._read:
                self._answer_adapter(message)
            self._read.clear()
            self._go_on()

    def die(self, code: int) -> None:
        """Answers that it had not sent are lost, those that it had sent are still read."""
        if not self.alive:
            return
        self.returncode = code
        if self._timer is not None:
            self._timer.cancel()
        if self._monitor.memory is not None and self._monitor.memory.fetching:
            self._monitor.saw("Worker lost with a fetch under way")
        if self._num_reads:
            self._monitor.saw("Worker lost while it reads an adapter")
        if self._host is not None:
            self._host.disk.die()
        self._reader.feed_eof()

    # Its work.

    def _load(self) -> None:
        config, number = self._config, self.pid
        self._timer = None
        self._answer(LoadProgress("loading weights"))
        if number and config.reload_fault_every and mix(config.seed, number) % config.reload_fault_every == 0:
            if mix(config.seed, number) & 512:
                self._monitor.saw("new Worker died while it loaded")
                self.die(1)
            else:
                self._monitor.saw("new Worker never finished loading")
                self.hung = True
            return
        if self._folder is not None:
            monitor = self._monitor
            self._host = SimHost(config, self._folder, monitor.faults, monitor.saw, monitor.content_of_digest)
        slow = number > 0 and mix(config.seed, number) & 1024 > 0
        self._timer = self._later(SLOW_LOAD_SECONDS if slow else 1, self._become_ready)

    def _become_ready(self) -> None:
        self._timer = None
        self.ready = True
        config, (num_blocks, num_host_blocks) = self._config, self._sizes()
        if self._memory is not None:
            num_host_blocks = len(self._memory.host)
        if self._host is not None:
            memory = self._host.allocate(num_blocks, num_host_blocks)
            if self._host.digests and self.pid:
                self._monitor.saw("restarted Worker finds blocks on the disk")
        else:
            memory = KvMemory(num_blocks, num_host_blocks, config.block_size)
        if self._memory is not None and num_host_blocks:
            memory.host[:] = self._memory.host
            self._monitor.saw("host tier outlives a sleep")
        self._monitor.memory = self._memory = memory
        costs: CacheCosts | None = config.cache_costs
        self._answer(
            WorkerReady(
                num_blocks=num_blocks,
                max_model_len=config.max_model_len,
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
                vocab_size=VOCAB_SIZE,
                device="fake",
                dtype="none",
                memory={},
                num_host_blocks=num_host_blocks,
                cache_costs=costs,
                disk_digests=self._host.digests if self._host is not None else [],
                num_disk_blocks=self._config.disk_blocks,
            )
        )

    def _sizes(self) -> tuple[int, int]:
        """Blocks of the pool and of the host tier."""
        config = self._config
        if not (self.pid and config.resizes):
            return config.num_blocks, config.num_host_blocks
        drawn = mix(config.seed, 31 * self.pid)
        factor = POOL_FACTORS[drawn % len(POOL_FACTORS)]
        return max(2, min(500, int(config.num_blocks * factor))), config.num_host_blocks * (drawn >> 20) % 3

    def _go_on(self) -> None:
        if self._timer is not None or self.stopped or self.hung or not self.alive:
            return
        if self.asked_at is not None:
            if mix(self._config.seed, self._num_heartbeats) % SLOW_ANSWER_EVERY:
                self._answer_heartbeat()
            else:
                self._timer = self._later(SLOW_STEP_SECONDS, self._answer_heartbeat)
        elif self._plans:
            self._timer = self._later(self._seconds_of(self._plans[0]), self._finish)
        elif self._sleep is not None and self._num_reads:
            self._monitor.saw("adapter read before the model sleeps")
        elif self._sleep is not None:
            self._leaving = True
            self._timer = self._later(STEP_SECONDS, self._fall_asleep)

    def _fall_asleep(self) -> None:
        """At level 1 it keeps its host tier and waits to be woken."""
        self._timer = None
        sleep, self._sleep = self._sleep, None
        if sleep.flush is not None and self._host is not None:
            self._host.keep(sleep.flush.offloads, flush=True)
        self._answer(WorkerAsleep())
        self.ready, self._leaving, self.asked_at = False, False, None
        self._monitor.adapters.clear()
        if sleep.level == 2:
            self.die(0)

    def _take_adapter(self, message: LoadAdapter | UnloadAdapter) -> None:
        """Messages come in order: a plan behind this one may use the adapter, or not any more."""
        monitor, adapter_id = self._monitor, message.adapter_id
        if isinstance(message, UnloadAdapter):
            require(adapter_id in monitor.adapters, "adapter", f"the Worker is to drop adapter {adapter_id} again")
            users = [seq for seq in monitor.live_sequences() if seq.adapter and seq.adapter.adapter_id == adapter_id]
            require(not users, "adapter", f"the Worker is to drop adapter {adapter_id}, which {users} use")
            del monitor.adapters[adapter_id]
            return
        require(adapter_id not in monitor.adapters, "adapter", f"adapter {adapter_id} is loaded twice")
        folder = Path(message.path).name
        require(message.digest in (b"", folder.encode()), "adapter", f"{message} for the files of {folder}")
        monitor.adapters[adapter_id] = folder
        self._num_reads += 1
        seconds = STEP_SECONDS, SLOW_STEP_SECONDS, SLOW_LOAD_SECONDS
        self._later(seconds[mix(self._config.seed, adapter_id) % 3], self._adapter_read, message)

    def _adapter_read(self, message: LoadAdapter) -> None:
        if self.stopped or self.hung:
            self._read.append(message)
        else:
            self._answer_adapter(message)

    def _answer_adapter(self, message: LoadAdapter) -> None:
        folder = Path(message.path).name
        self._num_reads -= 1
        if folder.endswith(BAD):
            self._answer(AdapterLoaded(message.adapter_id, error="it is not served"))
        else:
            self._answer(AdapterLoaded(message.adapter_id, folder.encode(), num_bytes=1))
        self._go_on()

    def _seconds_of(self, plan: StepPlan) -> float:
        kind = kind_of(plan)
        if kind not in self._kinds:
            self._kinds.add(kind)
            if mix(self._config.seed, hash(kind)) % COMPILED_EVERY == 0:
                self._monitor.saw("step of a new kind compiles first")
                return COMPILING * self._config.step_timeout
        every = self._config.slow_every
        slow = every > 0 and mix(self._config.seed, plan.step_id) % every == 0
        return SLOW_STEP_SECONDS if slow else STEP_SECONDS

    def _answer_heartbeat(self) -> None:
        self._timer = None
        self.asked_at, self.answered_at = None, self._now()
        self._answer(Heartbeat())
        self._go_on()

    def _finish(self) -> None:
        self._timer = None
        plan = self._plans.popleft()
        effect = self._monitor.how_deadly(plan)
        if effect == "crash":
            self._monitor.saw("Worker killed by a deadly request")
            return self.die(-signal.SIGSEGV)
        if effect == "hang":
            self._monitor.saw("Worker hung by a request")
            self.hang()
            return
        if self._host is not None:
            self._host.keep(plan.offloads, flush=not plan.steps)
        self.was_stopped = False
        self._answer(self._monitor.results.pop(plan.step_id))
        self._go_on()

    def _fetch(self) -> None:
        """Beside the steps, as soon as it is read."""
        while self._fetches and not (self.stopped or self.hung):
            message = self._fetches.popleft()
            if self._host is None:
                fail("worker-rows", "blocks are to be fetched by a Worker without a disk tier")
            if any(move.digest and move.slot in message.slots for plan in self._plans for move in plan.offloads):
                self._monitor.saw("slot given to a fetch before its block was kept")
            self._host.fetch(message, self._fetched)

    def _fetched(self, answer: FetchedBlocks) -> None:
        self._answer(answer)

    def _answer(self, message: WorkerMessage) -> None:
        if self.alive:
            self._reader.feed_data(encode_frame(message))

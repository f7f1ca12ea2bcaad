"""Executor: the Worker process as the Driver sees it. Starts it, sends plans, reads answers, notices its death.

With tensor_parallel_size, a Worker is a group of processes. The one here is its first rank, which answers; the others
(engine/executor/other_ranks.py) get the same bytes, and the end of one is the end of all.
"""

import asyncio
import contextlib
import errno
import logging
import signal
import subprocess
import sys
from collections.abc import Callable

import msgspec

from engine.errors import EngineError, PageserveError, WorkerDiedError
from engine.executor.child_process import connect, spawn
from engine.executor.frames import FrameError, read_frame
from engine.executor.other_ranks import OtherRanks, how_it_ended
from engine.executor.process_state import OomKills, is_traced, stopped_at, wait_until_stopped
from engine.executor.step import (
    Answer,
    DriverMessage,
    Heartbeat,
    LoadProgress,
    SideAnswer,
    SleepWorker,
    StartWorker,
    StepPlan,
    StepResult,
    WakeWorker,
    WorkerFailed,
    WorkerMessage,
    WorkerReady,
    decode_worker_message,
    encode_frame,
    named_error,
)
from engine.executor.step_durations import StepDurations
from engine.executor.step_watch import StepWatch
from engine.executor.timeouts import with_timeout

FLUSH_SECONDS = 5.0  # a slow disk is not awaited for longer

WORKER_COMMAND = (sys.executable, "-m", "engine.worker.worker")
KILL_AFTER_SECONDS = 2.0
REAP_SECONDS = 10.0  # for the kernel to end a killed process
STACK_DUMP_SECONDS = 0.5  # for a Worker that hangs to write its stacks
CPU_STEP_TIMEOUT = 300.0  # a full step of a 7B model takes over a minute on two cores
GPU_STEP_TIMEOUT = 60.0
HEARTBEAT = encode_frame(Heartbeat())

LACKING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)

logger = logging.getLogger(__name__)


class NoRoomError(EngineError):
    """The system has no descriptor, process or memory left for a Worker. No Worker died, and the lack may pass."""


class Executor:
    """One Worker, whose process has one end of a socket pair and nothing else (engine/executor/child_process.py).

    An Executor lives as long as its Worker: the next Worker has the next Executor.
    """

    def __init__(self, worker_command: tuple[str, ...], durations: StepDurations) -> None:
        """`durations` knows the times of steps of earlier Workers."""
        self._command = worker_command
        self._durations = durations
        self.ready = False  # True while plans may be sent
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._step_timeout: float | None = None
        self.watch = StepWatch(GPU_STEP_TIMEOUT)
        self._timer: asyncio.TimerHandle | None = None
        self._stop_watch: asyncio.Task[None] | None = None
        self._oom_kills = OomKills()
        self._killed: PageserveError | None = None  # the reason why we kill it
        self._others: OtherRanks | None = None
        self._num_heartbeats_due = 0  # answers to the last heartbeat that are still awaited

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def pids(self) -> list[int]:
        """The process ids of all ranks."""
        first = [] if self._process is None else [self._process.pid]
        return first if self._others is None else first + self._others.pids

    async def start(self, message: StartWorker) -> None:
        """Spawn the Worker and send it the message that tells what to load; `wait_ready` awaits loading. Raises
        WorkerDiedError, NoRoomError."""
        self._step_timeout = message.config.step_timeout
        try:
            if (size := message.config.tensor_parallel_size) > 1:
                self._others = OtherRanks(size, self._end_group, self._received_heartbeat)
                await self._others.start(self._command, message)
                message = self._others.message_for(message, rank=0)
            self._process, ours = spawn(self._command)
            self._reader, self._writer = await connect(ours)
            # uvloop would send at the end of the loop's turn; above this mark it sends at once, as asyncio always does.
            self._writer.transport.set_write_buffer_limits(high=0)
        except OSError as error:
            kind = NoRoomError if error.errno in LACKING else WorkerDiedError
            raise kind(f"the Worker process could not be started: {error}") from None
        self._begin_stop_watch(self._process.pid)
        self._writer.write(encode_frame(message))

    async def wait_ready(self, on_progress: Callable[[str], None]) -> WorkerReady:
        """Wait until the model is loaded. Raises the error that the Worker names (ModelError, ConfigError ...), or
        WorkerDiedError if it ends without one."""
        while True:
            message = await self._receive()
            if isinstance(message, LoadProgress):
                on_progress(message.phase)
            elif isinstance(message, WorkerReady):
                if self._others is not None:
                    message = await self._others.wait_ready(message)
                self._begin_watch(message.device)
                self.ready = True
                return message
            elif isinstance(message, WorkerFailed):
                raise self._killed or self._rank_killed() or named_error(message)
            else:
                raise WorkerDiedError("the Worker sent a step result before it was ready")

    def send(self, message: DriverMessage) -> None:
        """Send a message; never blocks. A Worker that does not read lets the buffer grow by a few plans at most."""
        assert self._writer is not None, "start() comes first"
        frame = encode_frame(message)
        self._writer.write(frame)
        if self._others is not None:
            self._others.write(frame)
        if isinstance(message, StepPlan):
            self.watch.sent(message)
        elif isinstance(message, SleepWorker):
            self.watch.sent_sleep()

    async def receive(self) -> Answer:
        """The next result, in the order of the plans, or the next answer to another message. Raises WorkerDiedError."""
        while isinstance(message := await self._receive(), Heartbeat):
            self._received_heartbeat()
        if isinstance(message, SideAnswer):
            return message if self._others is None else await self._others.join(message)
        if not isinstance(message, StepResult):
            raise WorkerDiedError(f"the Worker sent {type(message).__name__} in place of a step result")
        self.watch.received()
        return message

    def rest(self) -> None:
        """The Worker sleeps at level 1: it gets no plan and no heartbeat until `wake`."""
        self._end_watch()

    def wake(self) -> None:
        """Let a Worker that sleeps at level 1 load again; `wait_ready` awaits loading."""
        assert self._process is not None
        self._begin_stop_watch(self._process.pid)
        self.send(WakeWorker())
        if self._others is not None:
            self._others.wake()

    async def flush(self, plan: StepPlan, num_in_flight: int) -> None:
        """Send a last plan and wait for its result, behind `num_in_flight` others; gives up after FLUSH_SECONDS."""
        self.send(plan)
        num_results = num_in_flight + 1
        loop = asyncio.get_running_loop()
        deadline = loop.time() + FLUSH_SECONDS
        with contextlib.suppress(asyncio.TimeoutError, WorkerDiedError):
            while num_results:
                message = await with_timeout(deadline - loop.time(), self.receive())
                num_results -= isinstance(message, StepResult)

    async def stop(self, grace: float = KILL_AFTER_SECONDS) -> None:
        """End the Worker. It ends itself when its socket closes; it is killed if that takes longer than `grace` s."""
        self._end_watch()
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
        if self._others is not None:
            await self._others.stop(grace)
        if self._process is None or await self._gone_within(grace):
            return
        self._process.kill()
        if writer is not None:
            writer.transport.abort()  # unread plans would keep the socket open
        if not await self._gone_within(REAP_SECONDS):
            logger.error("the Worker process %d was killed and does not end: a device may hold it", self._process.pid)

    async def _gone_within(self, seconds: float) -> bool:
        assert self._process is not None
        try:
            await asyncio.to_thread(self._process.wait, seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    # The watch for a Worker that a signal has stopped: it runs from the start on.

    def _begin_stop_watch(self, pid: int) -> None:
        self._stop_watch = asyncio.create_task(self._kill_when_stopped(pid), name="stop-watch")

    async def _kill_when_stopped(self, pid: int) -> None:
        await wait_until_stopped(pid)
        self._killed = self._killed or WorkerDiedError("the Worker process was stopped (SIGSTOP)", from_outside=True)
        self._kill()

    def _end_group(self, cause: PageserveError) -> None:
        """Another rank ended, hangs or cannot load: end the first rank, too."""
        self._killed = self._killed or self._rank_killed() or cause
        if self._process is not None:
            self._kill()

    def _rank_killed(self) -> WorkerDiedError | None:
        """The end of the rank that a signal has ended, whose peers fail because of it; None if there is no such rank,
        or only one rank."""
        if self._others is None:
            return None
        subjects = [(self._process, "the Worker process"), (self._others.killed_process(), "another rank")]
        for process, subject in subjects:
            if process is not None and (process.poll() or 0) < 0:
                cause, killed = how_it_ended(process, subject, self._oom_kills.number)
                return WorkerDiedError(cause, from_outside=killed)
        return None

    # The watch for a Worker that hangs: it runs once the model is loaded.

    def _begin_watch(self, device: str) -> None:
        default = CPU_STEP_TIMEOUT if device == "cpu" else GPU_STEP_TIMEOUT
        self.watch = StepWatch(self._step_timeout or default, self._durations, asyncio.get_running_loop().time)
        self._tick_later()

    def _tick_later(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self.watch.interval, self._tick)

    def _tick(self) -> None:
        assert self._process is not None and self._writer is not None, "stop() ends the ticks"
        if self.watch.tick() and (self.watch.is_over_ceiling or not self._is_traced()):
            return self._give_up()
        if self.watch.heartbeat_due:
            self._writer.write(HEARTBEAT)
            self._num_heartbeats_due = 1
            if self._others is not None:
                self._others.write(HEARTBEAT)
                self._num_heartbeats_due = 2
            self.watch.sent_heartbeat()
        self._tick_later()

    def _received_heartbeat(self) -> None:
        """The first rank, or the last of the others, answered."""
        self._num_heartbeats_due -= 1
        if not self._num_heartbeats_due:
            self.watch.received_heartbeat()

    def _is_traced(self) -> bool:
        assert self._process is not None
        return is_traced(self._process.pid) or (self._others is not None and self._others.is_traced())

    def _give_up(self) -> None:
        assert self._process is not None
        pid, idle = self._process.pid, not self.watch.awaits_step
        held = is_traced(pid) or stopped_at(pid) is not None
        held = held or (self._others is not None and self._others.is_held())
        cause = f"the Worker did not {'answer' if idle else 'finish a step'} within {self.watch.silence:.3g} s"
        self._killed = WorkerDiedError(cause + (": it was stopped" if held else ""), from_outside=held or idle)
        self._process.send_signal(signal.SIGUSR1)  # the Worker writes its stacks to the log, if it can
        if self._others is not None:
            self._others.dump_stacks()
        self._timer = asyncio.get_running_loop().call_later(STACK_DUMP_SECONDS, self._kill_unless_back)

    def _kill_unless_back(self) -> None:
        """Kill the Worker, unless it answered while it wrote its stacks: then it works again."""
        if self.watch.silence > 0.0:
            return self._kill()
        self._killed = None
        self._tick_later()

    def _kill(self) -> None:
        """Kill the Worker, also if it is stopped, and give up its socket, in case the process does not end at all."""
        assert self._process is not None
        if self._timer is not None:
            self._timer.cancel()
        self._process.kill()
        if self._writer is not None:
            self._writer.transport.abort()

    def _end_watch(self) -> None:
        self.ready = False
        if self._timer is not None:
            self._timer.cancel()
        if self._stop_watch is not None:
            self._stop_watch.cancel()

    async def _receive(self) -> WorkerMessage:
        assert self._reader is not None, "start() comes first"
        try:
            message: WorkerMessage = decode_worker_message(await read_frame(self._reader))
            return message
        except (asyncio.IncompleteReadError, ConnectionError):
            self._end_watch()
            raise self._killed or await self._cause_of_death() from None
        except (FrameError, msgspec.MsgspecError) as error:
            raise WorkerDiedError(f"the Worker sent bytes that are not a message: {error}") from None

    async def _cause_of_death(self) -> WorkerDiedError:
        cause, killed = await self._how_it_ended()
        if (death := self._rank_killed()) is not None:
            return death
        return WorkerDiedError(cause, from_outside=killed or self.watch.awaits_heartbeat)

    async def _how_it_ended(self) -> tuple[str, bool]:
        """The cause for the log, and True if a signal from outside killed the process."""
        assert self._process is not None
        await self._gone_within(1.0)  # the socket closes a moment before the process can be reaped
        return how_it_ended(self._process, "the Worker process", self._oom_kills.number)

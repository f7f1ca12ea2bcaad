"""OtherRanks: the Worker processes of a tensor-parallel group beside the first one, which alone answers plans.

Every rank gets the same bytes. A rank that ends, hangs or cannot load ends the group: the Executor kills the first rank
with the cause, and the Supervisor starts all of them again.
"""

import asyncio
import contextlib
import signal
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from engine.errors import PageserveError, WorkerDiedError
from engine.executor.child_process import connect, spawn
from engine.executor.frames import FrameError, read_frame
from engine.executor.process_state import OomKills, is_traced, stopped_at, wait_until_stopped
from engine.executor.step import (
    AdapterLoaded,
    FetchedBlocks,
    GrammarPrepared,
    Heartbeat,
    SideAnswer,
    StartWorker,
    WorkerAsleep,
    WorkerFailed,
    WorkerReady,
    decode_worker_message,
    encode_frame,
    named_error,
)

ASLEEP = b""  # no digest
REAP_SECONDS = 1.0  # the socket closes a moment before the process can be reaped


class OtherRanks:
    """Ranks 1 to size - 1. `on_end` gets the reason why the group must end; `on_heartbeat` is called when the last of
    these ranks has answered a heartbeat."""

    def __init__(self, size: int, on_end: Callable[[PageserveError], None], on_heartbeat: Callable[[], None]) -> None:
        self._size, self._on_end, self._on_heartbeat = size, on_end, on_heartbeat
        self._folder = tempfile.TemporaryDirectory(prefix="pageserve-ranks-")  # mode 0700
        self._processes: list[subprocess.Popen[bytes]] = []
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._ready: list[WorkerReady] = []
        self._num_heartbeats = 0
        self._answers: dict[int | bytes | str, list[SideAnswer]] = {}  # by `_key`: those of these ranks
        self._asleep = False  # a rank that sleeps may end (level 2)
        self._news = asyncio.Event()  # a rank is ready, has answered or has ended
        self._ended: PageserveError | None = None

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def message_for(self, message: StartWorker, rank: int) -> StartWorker:
        """The start message of a rank: its number, and the file at which the ranks meet."""
        place = msgspec.structs.replace(message.place, rank=rank, size=self._size, rendezvous=self._file)
        return msgspec.structs.replace(message, place=place)

    @property
    def _file(self) -> str:
        return str(Path(self._folder.name) / "rendezvous")

    async def start(self, command: tuple[str, ...], message: StartWorker) -> None:
        """Start the processes. Raises OSError."""
        for rank in range(1, self._size):
            process, ours = spawn(command)
            self._processes.append(process)
            reader, writer = await connect(ours)
            writer.transport.set_write_buffer_limits(high=0)  # as the Executor's own
            self._writers.append(writer)
            self._tasks.append(asyncio.create_task(self._read(rank, reader), name=f"rank-{rank}"))
            self._tasks.append(asyncio.create_task(self._end_when_stopped(rank), name=f"rank-{rank}-stop-watch"))
            writer.write(encode_frame(self.message_for(message, rank)))

    def write(self, frame: bytes) -> None:
        """Send a frame to every rank; never blocks."""
        for writer in self._writers:
            writer.write(frame)

    async def wait_ready(self, first: WorkerReady) -> WorkerReady:
        """Wait until all ranks have loaded; returns the message of the first rank for all of them: a block is on disk
        if every rank has its part there."""
        await self._until(lambda: len(self._ready) == self._size - 1)
        for ready in self._ready:
            held = set(ready.disk_digests)
            kept = [digest for digest in first.disk_digests if digest in held]
            num_blocks = min(first.num_disk_blocks, ready.num_disk_blocks)
            first = msgspec.structs.replace(first, disk_digests=kept, num_disk_blocks=num_blocks)
        return first

    def wake(self) -> None:
        """The ranks are told to load again. If one has ended in its sleep, the others would wait for it."""
        self._asleep = False
        self._ready.clear()
        if self._ended is not None:
            self._on_end(self._ended)

    async def join(self, answer: SideAnswer) -> SideAnswer:
        """The answer of the whole group, once all ranks have given theirs: the fewest blocks, the first error."""
        key = _key(answer)
        await self._until(lambda: len(self._answers.get(key, ())) == self._size - 1)
        answers = [answer, *self._answers.pop(key)]
        if isinstance(answer, FetchedBlocks):
            return min((a for a in answers if isinstance(a, FetchedBlocks)), key=lambda a: a.num_blocks)
        return next((a for a in answers if isinstance(a, GrammarPrepared | AdapterLoaded) and a.error), answer)

    def is_traced(self) -> bool:
        """True if a debugger holds one of the ranks."""
        return any(map(is_traced, self.pids))

    def is_held(self) -> bool:
        """True if a debugger or a signal holds one of the ranks."""
        return self.is_traced() or any(stopped_at(pid) is not None for pid in self.pids)

    def dump_stacks(self) -> None:
        """Every rank writes its stacks to the log, if it can."""
        for process in self._processes:
            process.send_signal(signal.SIGUSR1)

    def killed_process(self) -> subprocess.Popen[bytes] | None:
        """The first of the processes that a signal has ended: the others fail because of it."""
        return next((p for p in self._processes if (p.poll() or 0) < 0), None)

    async def stop(self, grace: float) -> None:
        """End the processes, as Executor.stop does."""
        for task in self._tasks:
            task.cancel()
        for writer in self._writers:
            writer.close()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + grace
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(process.wait, max(0.0, deadline - loop.time()))
            process.kill()
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(process.wait, REAP_SECONDS)
        self._folder.cleanup()

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            if self._ended is not None:
                raise self._ended
            self._news.clear()
            await self._news.wait()

    async def _read(self, rank: int, reader: asyncio.StreamReader) -> None:
        oom_kills = OomKills()
        try:
            while True:
                self._take(decode_worker_message(await read_frame(reader)))
        except (asyncio.IncompleteReadError, ConnectionError):
            process = self._processes[rank - 1]
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(process.wait, REAP_SECONDS)
            cause, killed = how_it_ended(process, f"rank {rank}", oom_kills.number)
            self._end(WorkerDiedError(cause, from_outside=killed))
        except (FrameError, msgspec.MsgspecError) as error:
            self._end(WorkerDiedError(f"rank {rank} sent bytes that are not a message: {error}"))

    def _take(self, message: object) -> None:
        if isinstance(message, WorkerReady):
            self._ready.append(message)
        elif isinstance(message, WorkerFailed):
            self._end(named_error(message))
        elif isinstance(message, SideAnswer):
            self._asleep = self._asleep or isinstance(message, WorkerAsleep)
            self._answers.setdefault(_key(message), []).append(message)
        elif isinstance(message, Heartbeat):
            self._num_heartbeats += 1
            if self._num_heartbeats == self._size - 1:
                self._num_heartbeats = 0
                self._on_heartbeat()
        else:  # LoadProgress and StepResult: the first rank speaks for all
            return
        self._news.set()

    async def _end_when_stopped(self, rank: int) -> None:
        await wait_until_stopped(self._processes[rank - 1].pid)
        self._end(WorkerDiedError(f"rank {rank} was stopped (SIGSTOP)", from_outside=True))

    def _end(self, cause: PageserveError) -> None:
        if self._ended is None:
            self._ended = cause
            self._news.set()
            if not self._asleep:
                self._on_end(cause)


def how_it_ended(process: subprocess.Popen[bytes], subject: str, num_oom_kills: int | None) -> tuple[str, bool]:
    """The cause for the log, and True if a signal from outside killed the process, whose name is `subject`.
    num_oom_kills: the kernel's kills for lack of memory since the process started; None if unknown."""
    code = process.poll()
    if code is None:
        return f"{subject} closed its socket", False
    if code >= 0:
        return f"{subject} exited with status {code}; its log says why", False
    known = {number.value: number.name for number in signal.Signals}
    # SIGKILL is never a crash: either the kernel lacked memory, or the signal came from outside.
    killed = -code == signal.SIGKILL and num_oom_kills == 0
    return f"{subject} was ended by {known.get(-code, f'signal {-code}')}", killed


def _key(answer: SideAnswer) -> int | bytes | str:
    if isinstance(answer, FetchedBlocks):
        return answer.fetch_id
    if isinstance(answer, AdapterLoaded):
        return f"adapter {answer.adapter_id}"
    return answer.digest if isinstance(answer, GrammarPrepared) else ASLEEP

"""Executor: the Worker process, seen from the Driver: start it, send it plans, read its answers, notice its death."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import engine.errors
from engine.errors import EngineError, PageserveError
from engine.step import (
    FRAME_HEADER,
    MAX_FRAME_BYTES,
    LoadProgress,
    StartWorker,
    StepPlan,
    StepResult,
    WorkerFailed,
    WorkerMessage,
    WorkerReady,
    decode_worker_message,
    encode_frame,
)

WORKER_COMMAND = (sys.executable, "-m", "engine.worker.worker")
KILL_AFTER_SECONDS = 2.0


class WorkerDiedError(EngineError):
    """The Worker process ended, or broke the protocol."""


class Executor:
    """One Worker process, started with one end of a socket pair and nothing else: no fork, no pickle, no port.

    `worker_command` gets the number of the inherited socket as its last argument.
    """

    def __init__(self, worker_command: tuple[str, ...] = WORKER_COMMAND) -> None:
        self._command = worker_command
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    async def start(self, message: StartWorker) -> None:
        """Spawn the Worker and tell it what to load. Loading is awaited by `wait_ready`."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = self._spawn(theirs)
        self._reader, self._writer = await asyncio.open_unix_connection(sock=ours, limit=1 << 20)
        self._writer.write(encode_frame(message))

    async def wait_ready(self, on_progress: Callable[[str], None]) -> WorkerReady:
        """Raises the error that the Worker names (ModelError, ConfigError ...), WorkerDiedError when it just ends."""
        while True:
            message = await self._receive()
            if isinstance(message, LoadProgress):
                on_progress(message.phase)
            elif isinstance(message, WorkerReady):
                return message
            elif isinstance(message, WorkerFailed):
                raise _named_error(message)
            else:
                raise WorkerDiedError("the Worker sent a step result before it was ready")

    def send(self, plan: StepPlan) -> None:
        """Hand over a plan; never blocks (a Worker that does not read lets the buffer grow by a few plans at most)."""
        assert self._writer is not None, "start() comes first"
        self._writer.write(encode_frame(plan))

    async def receive(self) -> StepResult:
        """The next result, in the order of the plans. Raises WorkerDiedError."""
        message = await self._receive()
        if not isinstance(message, StepResult):
            raise WorkerDiedError(f"the Worker sent {type(message).__name__} in place of a step result")
        return message

    async def stop(self) -> None:
        """End the Worker: closing the socket is its sign to go; a kill follows where that is not heeded."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if self._process is None:
            return
        try:
            await asyncio.to_thread(self._process.wait, KILL_AFTER_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)

    def _spawn(self, channel: socket.socket) -> "subprocess.Popen[bytes]":
        # The Worker imports this very source tree, wherever the caller's working directory is.
        root = str(Path(__file__).resolve().parent.parent)
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        return subprocess.Popen(
            [*self._command, str(channel.fileno())],
            pass_fds=[channel.fileno()],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path},
        )

    async def _receive(self) -> WorkerMessage:
        assert self._reader is not None, "start() comes first"
        try:
            (length,) = FRAME_HEADER.unpack(await self._reader.readexactly(FRAME_HEADER.size))
            if length > MAX_FRAME_BYTES:
                raise WorkerDiedError(f"the Worker announced a frame of {length} bytes")
            message: WorkerMessage = decode_worker_message(await self._reader.readexactly(length))
            return message
        except (asyncio.IncompleteReadError, ConnectionError):
            raise WorkerDiedError(await self._cause_of_death()) from None

    async def _cause_of_death(self) -> str:
        assert self._process is not None
        try:  # the socket closes a moment before the process can be reaped
            code = await asyncio.to_thread(self._process.wait, 1.0)
        except subprocess.TimeoutExpired:
            return "the Worker process closed its socket"
        if code < 0:
            return f"the Worker process was ended by {signal.Signals(-code).name}"
        return f"the Worker process exited with status {code}; its log says why"


def _named_error(message: WorkerFailed) -> PageserveError:
    kind = getattr(engine.errors, message.kind, EngineError)
    error = kind(message.message)
    assert isinstance(error, PageserveError)
    return error

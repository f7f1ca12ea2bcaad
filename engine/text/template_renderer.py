"""TemplateRenderer: renders chat templates in helper processes, which can be killed, with limits of time and memory.

A template that never ends or needs a gigabyte fails its own request only. A helper that is at its limit, stopped or
dead is replaced. No tenant holds all helpers at the same time.
"""

import contextlib
import marshal
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from engine.errors import STOPPED, EngineError, InvalidRequestError, UnavailableError
from engine.executor.child_process import spawn
from engine.executor.frames import FRAME_HEADER, FrameError, FrameSocket
from engine.executor.process_state import LOOK_SECONDS, StoppedLooks, stopped_at
from engine.text.chat_template import TemplateLimitError
from engine.text.template_helper import BEYOND_LIMIT, REFUSED, RENDERED
from engine.text.text_threads import FairThreads

T = TypeVar("T")
HELPER_COMMAND = (sys.executable, "-m", "engine.text.template_helper")
NUM_HELPERS = 3  # at most; the next one starts when all running ones are busy
CPU_SECONDS = 2.0
# The time limit counts processor time: a busy machine must not make it fail. A helper without an answer after this many
# times the limit, in wall-clock time, is killed.
WALL_CLOCK_FACTOR = 20.0
MAX_ATTEMPTS = 3
IDLE_SECONDS = 1.0  # a helper that was idle for longer may be stopped: check before the next request
LARGE_BYTES = 8 << 20  # a helper is replaced after a conversation of this size: it would keep the memory
SHORT_BYTES = 1 << 13  # if a conversation below this size reaches a limit, the template is at fault


class HelperDiedError(Exception):
    """The helper was killed from outside, or by this process because it did not answer."""


class TimeLimitError(Exception):
    """The kernel killed the helper at its limit of processor time."""


class TemplateHelper:
    """One rendering process, for one thread at a time; starts at first use and is replaced when it dies."""

    def __init__(self, cpu_seconds: float) -> None:
        self._cpu_seconds = cpu_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._closed = False
        self._answered = time.monotonic()
        self._lock = threading.Lock()  # another thread calls `close`
        self._in_use = threading.Lock()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def start(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        """Start the process if none runs; returns it and the parent's end of its socket. EngineError if it fails,
        UnavailableError after `close`: another server may render the request, which has not begun here."""
        with self._lock:
            if self._closed:
                raise UnavailableError(STOPPED)
            if self._process is None or self._socket is None:
                try:
                    self._process, self._socket = spawn(HELPER_COMMAND, str(self._cpu_seconds))
                except OSError as error:
                    raise EngineError(f"the process that renders chat templates does not start: {error}") from None
                self._socket.settimeout(LOOK_SECONDS)
            return self._process, self._socket

    def render(self, source: str, variables: Mapping[str, Any]) -> str:
        """Render a template; blocks. Raises InvalidRequestError if the template refuses the variables, fails, or
        exceeds a limit; EngineError if it exceeds a limit with a conversation below SHORT_BYTES.

        If the process dies of anything but its time limit, the request is sent to a new process: something outside may
        have killed or stopped the old one.
        """
        request = marshal.dumps((source, dict(variables)))
        size = len(request) - len(source)
        with self._in_use:
            try:
                outcome, text = self._ask_with_retries(request)
                if outcome == BEYOND_LIMIT or size + len(text) > LARGE_BYTES:
                    self._kill()
                    self.start()  # the next conversation does not wait for the start
            finally:
                if self._closed:
                    self._kill()
        if outcome == RENDERED:
            return text
        if outcome == REFUSED:
            raise InvalidRequestError(text, "messages")
        if size >= SHORT_BYTES:
            raise TemplateLimitError(text, "messages")
        raise EngineError(f"the chat template is at fault: it reached a limit with a short conversation. {text}")

    def close(self) -> None:
        """Kill the process for good; a thread that waits for its answer gets an UnavailableError."""
        with self._lock:
            self._closed = True
            process = self._process
        if self._in_use.acquire(blocking=False):
            self._kill()
            self._in_use.release()
        elif process is not None:
            process.kill()  # the thread in `render` cleans up

    def _ask_with_retries(self, request: bytes) -> tuple[int, str]:
        """(outcome, the rendered text or an error message) of a request, in at most MAX_ATTEMPTS processes."""
        for _ in range(MAX_ATTEMPTS):
            try:
                outcome, answer = self._ask(request)
                return outcome, answer.decode("utf-8", "surrogatepass")
            except HelperDiedError:
                self._kill()
            except TimeLimitError:
                limit = f"{self._cpu_seconds:g} s of processor time"
                return BEYOND_LIMIT, f"The chat template takes more than {limit} for these messages: shorten them."
        raise EngineError("The process that renders chat templates died again and again over this request.")

    def _ask(self, request: bytes) -> tuple[int, bytes]:
        process, sock = self.start()
        idle = time.monotonic() - self._answered
        if idle > IDLE_SECONDS and stopped_at(process.pid) is not None:  # the check costs half a conversation
            raise HelperDiedError
        watch = _Watch(process.pid, WALL_CLOCK_FACTOR * self._cpu_seconds)
        try:
            for part in (FRAME_HEADER.pack(len(request)), request):
                _send(sock, part, watch)
            if (answer := FrameSocket(sock, watch.look).read_frame()) is None:
                raise EOFError
            self._answered = time.monotonic()
            return answer[0], bytes(answer[1:])
        except (OSError, EOFError, FrameError):
            with contextlib.suppress(subprocess.TimeoutExpired):  # the socket closes before the process can be reaped
                if process.wait(LOOK_SECONDS) == -signal.SIGPROF:
                    raise TimeLimitError from None
            raise HelperDiedError from None

    def _kill(self) -> None:
        """Kill the process if there is one. It has no state to save."""
        with self._lock:
            process, sock, self._process, self._socket = self._process, self._socket, None, None
        if process is not None:
            process.kill()
            process.wait()
        if sock is not None:
            sock.close()


class _Watch:
    """Checks a helper that does not answer."""

    def __init__(self, pid: int, seconds: float) -> None:
        self._looks, self._deadline = StoppedLooks(pid), time.monotonic() + seconds

    def look(self) -> None:
        """Raises HelperDiedError if the helper is stopped or out of wall-clock time."""
        if self._looks.look() or time.monotonic() > self._deadline:
            raise HelperDiedError


def _send(sock: socket.socket, data: bytes, watch: _Watch) -> None:
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[sock.send(rest) :]
        except TimeoutError:
            watch.look()


class TemplateRenderer:
    """The helpers and the threads that wait for them. The first process starts at first use, or by `start`."""

    def __init__(self, cpu_seconds: float) -> None:
        self._threads = FairThreads(NUM_HELPERS, "chat-template", per_tenant=NUM_HELPERS - 1)
        self._helpers = [TemplateHelper(cpu_seconds) for _ in range(NUM_HELPERS)]
        self._idle = self._helpers[::-1]  # a stack: the last helpers start only if all others are busy

    async def run(self, tenant: str, function: Callable[..., T], *args: Any) -> T:
        """Call `function(helper, *args)` in a thread with an idle helper. Tenants take turns."""
        return await self._threads.run(tenant, self._with_helper, function, args)

    @property
    def helper_pids(self) -> list[int]:
        return [helper.pid for helper in self._helpers if helper.pid is not None]

    def start(self) -> None:
        """Start the first helper, so that the first request does not wait for it. Optional. Blocks for a few ms."""
        with contextlib.suppress(EngineError, UnavailableError):  # the first request reports the error
            self._helpers[0].start()

    def close(self) -> None:
        for helper in self._helpers:
            helper.close()
        self._threads.close()

    def _with_helper(self, function: Callable[..., T], args: tuple[Any, ...]) -> T:
        helper = self._idle.pop()  # never empty: there are as many helpers as threads
        try:
            return function(helper, *args)
        finally:
            self._idle.append(helper)

"""The Worker process: `python -m engine.worker.worker FD`, where FD is one end of a socket pair with the Driver.

The Worker reads StartWorker, loads the model, answers WorkerReady or WorkerFailed, then answers each StepPlan with a
StepResult, in order. The Driver ends the Worker: by closing the socket, by dying, or by a kill; the Worker ignores
signals from a terminal. The socket carries frames only; logs and tracebacks go to the inherited stderr. Exit status: 0
after the Driver left, 1 after loading failed (the Driver was told why), 2 after a step failed as a whole.
"""

import ctypes
import faulthandler
import logging
import os
import select
import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.errors import PageserveError
from engine.executor.frames import FrameSocket
from engine.executor.step import (
    DriverMessage,
    Heartbeat,
    LoadProgress,
    SideMessage,
    SleepWorker,
    StartWorker,
    StepPlan,
    WakeWorker,
    WorkerAsleep,
    WorkerFailed,
    WorkerMessage,
    decode_driver_message,
    encode_frame,
)
from engine.garbage_collector import settle_garbage_collector
from engine.worker.device.host import limit_primitive_caches, set_threads

if TYPE_CHECKING:
    from engine.worker.encoder_runner import EncoderRunner
    from engine.worker.load import Resident
    from engine.worker.model_runner import LaunchedStep, ModelRunner

    Runner = ModelRunner | EncoderRunner

logger = logging.getLogger(__name__)

EXIT_GRACE_SECONDS = 0.2
PR_SET_PDEATHSIG = 1
LOOK_SECONDS = 5e-5  # between two looks at the device, while a plan may come; Linux adds another 50 us
# Python's switch interval: how long a thread that reads the disk or compiles a grammar may keep the GIL from the step
# loop. Python's default of 5 ms is longer than many a step.
SWITCH_SECONDS = 0.0005


class Channel:
    """Messages over the socket. Blocking; one thread receives, any may send."""

    def __init__(self, sock: socket.socket) -> None:
        """The descriptor of `sock` must be below 1024, for select()."""
        self._socket = sock
        self._frames = FrameSocket(sock)
        self._sending = threading.Lock()

    def send(self, message: WorkerMessage) -> None:
        with self._sending:
            self._socket.sendall(encode_frame(message))

    def receive(self) -> DriverMessage | None:
        """The next message; None once the Driver closed its end. ValueError for bytes that are not a frame."""
        if (body := self._frames.read_frame()) is None:
            return None
        message: DriverMessage = decode_driver_message(body)
        return message

    def has_data(self) -> bool:
        """True if a message has begun to arrive."""
        return self.wait_for_data(0.0)

    def wait_for_data(self, seconds: float) -> bool:
        """Wait until a message begins to arrive, for at most `seconds`; True if one did."""
        # select() counts its timeout in microseconds, poll() in milliseconds.
        return self._frames.has_received or bool(select.select([self._socket], [], [], seconds)[0])


def load(channel: Channel, start: StartWorker) -> "Resident | None":
    """Load the model and send WorkerReady; returns None after WorkerFailed was sent."""

    def work() -> "Resident":
        channel.send(LoadProgress("importing"))
        set_threads(start.config.cpu_threads, start.config.num_processes)
        limit_primitive_caches()
        from engine.worker.load import load_resident  # imports torch

        return load_resident(
            start.config,
            Path(start.model_dir),
            start.eos_token_ids,
            lambda phase: channel.send(LoadProgress(phase)),
            start.model_identity,
            start.place,
            Path(start.draft_dir) if start.draft_dir else None,
        )

    resident = _report(channel, work)
    if resident is not None and resident.ready.device == "cpu":
        from engine.worker.device.kernel_compiler import compile_in_background  # imports torch

        compile_in_background()
    return resident


def wake(channel: Channel, resident: "Resident") -> "Resident | None":
    """Load a model that sleeps at level 1 again and send WorkerReady; returns None after WorkerFailed was sent."""

    def work() -> "Resident":
        resident.wake(lambda phase: channel.send(LoadProgress(phase)))
        return resident

    return _report(channel, work)


def _report(channel: Channel, work: "Callable[[], Resident]") -> "Resident | None":
    try:
        resident = work()
    except PageserveError as error:
        known = next(kind for kind in type(error).__mro__ if kind.__module__ == PageserveError.__module__)
        channel.send(WorkerFailed(known.__name__, str(error)))
        return None
    except (BrokenPipeError, ConnectionResetError):
        raise
    except Exception as error:
        logger.exception("loading failed")
        channel.send(WorkerFailed("EngineError", f"loading failed: {type(error).__name__}: {error}"))
        return None
    settle_garbage_collector()
    channel.send(resident.ready)
    return resident


def main(load_model: "Callable[[Channel, StartWorker], Resident | None]" = load) -> int:
    """Serve the Driver at the other end of the socket whose number is the last argument.

    `load_model` loads the model and sends WorkerReady, as `load` does.
    """
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # the Driver sends this before it kills a hanging Worker
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s worker: %(message)s", stream=sys.stderr)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.setswitchinterval(SWITCH_SECONDS)
    sock = _with_low_descriptor(socket.socket(fileno=int(sys.argv[-1])))
    sock.setblocking(True)
    _end_with_driver(sock)
    channel = Channel(sock)
    try:
        message = channel.receive()
        if message is None:
            return 0
        if not isinstance(message, StartWorker):
            raise ValueError(f"the Driver sent {type(message).__name__} before StartWorker")
        resident = load_model(channel, message)
        while resident is not None:
            if not serve_and_sleep(channel, resident):
                return 0
            resident = wake(channel, resident)
        return 1
    except (BrokenPipeError, ConnectionResetError):  # the Driver left during a send
        return 0
    except Exception:
        logger.exception("the Worker cannot go on")
        return 2


def serve_and_sleep(channel: Channel, resident: "Resident") -> bool:
    """Serve, then sleep. Returns True for a wake; False when the process is to end: the Driver has closed its end, or
    the model sleeps at level 2."""
    runner = resident.take_runner()
    level = serve(channel, runner)
    if level is None:
        return False
    runner.close()
    del runner
    if level == 1:
        resident.sleep()
    channel.send(WorkerAsleep())
    return level == 1 and _wakes(channel)


def _wakes(channel: Channel) -> bool:
    """Wait for WakeWorker; False if the Driver closed its end. Messages that the Driver sent before it read
    WorkerAsleep get no answer: it sends them again to a Worker that woke."""
    while not isinstance(message := channel.receive(), WakeWorker):
        if message is None:
            return False
    return True


def serve(channel: Channel, runner: "Runner") -> int | None:
    """Run the step loop until the Driver closes its end (None) or lets the model sleep (the level).

    A GPU computes a launched step while the loop goes on: the loop waits for the result of the oldest step and for the
    next plan at once, so that a plan is launched as soon as it arrives and the device never runs dry. With
    `runner.max_in_flight` steps launched, no plan can come, and the loop waits for the result alone. On a CPU a step is
    done once it is launched, and its result is sent at once. Idle time goes to the runner in short pieces, so that a
    heartbeat is answered soon. This loop answers heartbeats itself, after a check of the device: a heartbeat must show
    that neither of the two hangs.
    """
    launched: deque[Any] = deque()
    while True:
        if launched and (len(launched) == runner.max_in_flight or _done_first(launched[0], channel)):
            channel.send(runner.result(launched.popleft()))
            continue
        if not launched and not channel.has_data() and runner.use_idle_time():
            continue
        message = channel.receive()
        if message is None:
            return None
        if isinstance(message, Heartbeat):
            if not launched:  # a device that hangs in a step is noticed by the time that the step takes
                runner.check_device()
            channel.send(message)
            continue
        if isinstance(message, SideMessage):
            runner.handle_message(message, channel.send)
            continue
        if isinstance(message, SleepWorker):
            if message.flush is not None:
                step: Any = runner.launch(message.flush)
                runner.result(step)
            return message.level
        if not isinstance(message, StepPlan):
            raise ValueError(f"the Driver sent {type(message).__name__} in place of a plan")
        launched.append(runner.launch(message))


def _done_first(step: "LaunchedStep", channel: Channel) -> bool:
    """Wait for the device or the Driver: True once the step is done, False once a message has begun to arrive."""
    while not step.done():
        if channel.wait_for_data(LOOK_SECONDS):
            return False
    return not channel.has_data()


def _with_low_descriptor(sock: socket.socket) -> socket.socket:
    """The same socket with the lowest descriptor that is free: select() refuses those above 1023, which the socket of a
    Driver with many clients may have."""
    with sock:
        return sock.dup()


def _end_with_driver(sock: socket.socket) -> None:
    """Make sure that the Worker never outlives the Driver, not even inside a long computation.

    The kernel kills the Worker when the thread that started it ends; a thread here ends the Worker when the last copy
    of the Driver's end of the socket is closed.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_exit_on_hang_up, args=(sock.fileno(),), name="hang-up", daemon=True).start()


def _exit_on_hang_up(fd: int) -> None:
    poll = select.poll()
    poll.register(fd, getattr(select, "POLLRDHUP", select.POLLHUP))
    poll.poll()
    threading.Event().wait(EXIT_GRACE_SECONDS)  # gives the main thread time to leave by itself
    os._exit(0)


def _exit(status: int) -> None:
    """End the process without tearing down torch's threads and caches: the kernel does that faster."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    _exit(main())

"""The Worker process, with a log of the device's idle time: python -m benchmarks.watched_worker LOG FD.

When the Driver leaves, the Worker writes a JSON list of WatchedStep, as arrays, to the file LOG.
"""

import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from engine.executor.step import StartWorker, StepPlan, StepResult
from engine.worker import worker
from engine.worker.worker import Channel

if TYPE_CHECKING:
    from engine.worker.model_runner import LaunchedStep, ModelRunner


class WatchedStep(msgspec.Struct, array_like=True):
    """One step. `launched` is when its launch began, by time.perf_counter(), which Linux processes share."""

    launched: float
    launch_seconds: float
    num_tokens: int
    num_chunks: int
    idle_seconds: float = 0.0  # the device did nothing for so long before the step


class StepWatcher:
    """Logs the steps of a runner. It takes the place of the runner's `launch` and `result`.

    On a CUDA device a step begins without a pause if its launch is over before the step before it is done. Any other
    step begins somewhere in its launch. All of that launch counts as idle time, because a recorded graph begins at its
    end. On a CPU a step is computed in its launch.
    """

    def __init__(self, runner: "ModelRunner", steps: list[WatchedStep]) -> None:
        self.steps = steps
        self._launch, self._result = runner.launch, runner.result
        self._on_gpu = runner.device.type == "cuda"
        self._last_end: Any = None  # end of the step launched last: a CUDA event, or seconds
        self._in_flight: deque[tuple[WatchedStep, Callable[[], float]]] = deque()  # and how to read the idle seconds
        runner.launch, runner.result = self.launch, self.result  # type: ignore[method-assign]

    def launch(self, plan: StepPlan) -> "LaunchedStep":
        last_end, launched = self._last_end, time.perf_counter()
        start = _cuda_event() if self._on_gpu else None
        step = self._launch(plan)
        ended = time.perf_counter()
        watched = WatchedStep(launched, ended - launched, plan.num_tokens, len(plan.chunks))
        self.steps.append(watched)
        if last_end is None or (self._on_gpu and not last_end.query()):
            self._in_flight.append((watched, lambda: 0.0))
        elif self._on_gpu:
            self._in_flight.append((watched, lambda: last_end.elapsed_time(start) / 1e3 + ended - launched))
        else:
            self._in_flight.append((watched, lambda: launched - last_end))
        self._last_end = _cuda_event() if self._on_gpu else ended
        return step

    def result(self, step: "LaunchedStep") -> StepResult:
        result = self._result(step)
        watched, idle_seconds = self._in_flight.popleft()
        watched.idle_seconds = idle_seconds()
        return result


def _cuda_event() -> Any:
    """A place in the current stream, with its time."""
    import torch

    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def main() -> int:
    """Be the Worker at the other end of the socket FD."""
    steps: list[WatchedStep] = []

    def load(channel: Channel, message: StartWorker) -> Any:
        resident = worker.load(channel, message)
        if resident is not None:
            StepWatcher(resident.runner, steps)
        return resident

    status = worker.main(load)
    Path(sys.argv[1]).write_bytes(msgspec.json.encode(steps))
    return status


if __name__ == "__main__":
    sys.exit(main())

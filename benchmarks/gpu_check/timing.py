"""Times of calls on a device: CUDA events around cold runs, the median of many. On a CPU the clock."""

import statistics
import time
from collections.abc import Callable

import torch

FLUSH_BYTES = 512 << 20  # read before every run: more than any L2, and long enough for the host to queue the call
SLEEP_CYCLES = 500_000  # some 300 microseconds more, in which the host gets ahead: a dozen launches of Triton's
MIN_RUNS, MAX_RUNS = 12, 200


def pick_device(tiny: bool) -> torch.device:
    """The GPU; a CPU for --tiny. RuntimeError where there is no GPU."""
    if tiny:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise RuntimeError(f"torch {torch.__version__} finds no CUDA GPU")
    return torch.device("cuda", torch.cuda.current_device())


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def flush_buffer(device: torch.device) -> torch.Tensor:
    """Reading this tensor leaves nothing else in the device's cache."""
    return torch.ones(FLUSH_BYTES // 4, device=device)


class Stopwatch:
    """Median seconds of a call whose inputs are in memory, not in the cache."""

    def __init__(self, device: torch.device, seconds: float = 0.3) -> None:
        """`seconds`: what one measurement may take, beyond its least number of runs."""
        self._device, self._seconds = device, seconds
        self._cold = flush_buffer(device) if device.type == "cuda" else None

    def median(self, call: Callable[[], object]) -> float:
        """Three runs to compile and warm up, then as many as fit."""
        for _ in range(3):
            call()
        synchronize(self._device)
        times: list[float] = []
        started = time.perf_counter()
        while len(times) < MIN_RUNS or (time.perf_counter() - started < self._seconds and len(times) < MAX_RUNS):
            times += self._cold_runs(call) if self._cold is not None else [self._run(call)]
            if self._device.type == "cpu" and len(times) >= 3:
                break
        return statistics.median(times)

    def _run(self, call: Callable[[], object]) -> float:
        started = time.perf_counter()
        call()
        return time.perf_counter() - started

    def _cold_runs(self, call: Callable[[], object], count: int = 4) -> list[float]:
        """Queued together, so that the device waits for the host in none: reading the buffer leaves no dirty lines."""
        assert self._cold is not None
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
        for begin, end in events:
            self._cold.sum()
            torch.cuda._sleep(SLEEP_CYCLES)
            begin.record()
            call()
            end.record()
        torch.cuda.synchronize(self._device)
        return [begin.elapsed_time(end) * 1e-3 for begin, end in events]

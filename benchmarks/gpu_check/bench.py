"""Bench: how the time of a kernel is taken and written down."""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from benchmarks.gpu_check.bounds import Limits
from benchmarks.gpu_check.record import Goal, Recorder
from benchmarks.gpu_check.timing import Stopwatch
from benchmarks.kernel_speed import Case


class Bench:
    """Times cases and records them as shares of the limit that binds them."""

    def __init__(self, recorder: Recorder, device: torch.device, watch: Stopwatch, limits: Limits) -> None:
        self.recorder, self.device, self.watch, self.limits = recorder, device, watch, limits

    def series(
        self, name: str, cases: Iterator[Case], goal: Callable[[Case], Goal | None] | None = None, by: str = ""
    ) -> None:
        """Cases that are made one by one; if making one fails, those after it are lost. goal: of a case."""
        try:
            for case in cases:
                measure = partial(self.time, case, goal(case) if goal else None, by)
                self.recorder.case(f"{case.kernel} {case.size}", measure, seconds=30)
        except Exception as error:
            self.recorder.case(f"{name}: the rest", partial(_reraise, error))

    def time(self, case: Case, goal: Goal | None = None, by: str = "", times_rate: float = 1.0) -> float:
        """Record microseconds, GB/s, TFLOP/s and the larger of the two shares; returns the seconds. times_rate: the
        card's rate of these products, as a multiple of that in bf16."""
        seconds = self.watch.median(case.call)
        memory = case.num_bytes / seconds / self.limits.bandwidth
        matrix = case.flops / seconds / (self.limits.rate * times_rate)
        self.recorder.figure(
            f"{case.kernel} {case.size}",
            seconds * 1e6,
            "us",
            share=max(memory, matrix),
            of="memory" if memory >= matrix else "matmul",
            goal=goal,
            gigabytes_per_second=case.num_bytes / seconds / 1e9,
            teraflops=case.flops / seconds / 1e12,
            bytes=case.num_bytes,
            flops=case.flops,
            by=by or "ours",
        )
        return seconds


def _reraise(error: Exception) -> None:
    raise error

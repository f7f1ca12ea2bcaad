"""Measures the limits of the card: every other figure is a share of them."""

from functools import partial

import torch

from benchmarks.gpu_check.datasheets import keep_limits
from benchmarks.gpu_check.parts import Setting
from benchmarks.gpu_check.record import Recorder
from benchmarks.gpu_check.timing import Stopwatch, pick_device

NUM_BYTES = 4 << 30
SIZE = 8192
TINY_BYTES, TINY_SIZE = 1 << 22, 256
SECONDS = 60  # the first case also waits for torch's libraries


def run(recorder: Recorder, setting: Setting) -> None:
    """Figures for people, and limits.json for the other parts; one case each, so that a fault costs one limit."""
    device = pick_device(setting.tiny)
    num_bytes, size = (TINY_BYTES, TINY_SIZE) if setting.tiny else (NUM_BYTES, SIZE)
    watch = Stopwatch(device, seconds=0.5)

    def copy() -> None:
        rate = copy_bandwidth(device, watch, num_bytes)
        recorder.figure("copy, device to device", rate / 1e9, "GB/s", bytes=num_bytes)
        keep_limits(setting, bandwidth=rate, copy=rate)

    def read() -> None:
        rate = read_bandwidth(device, watch, num_bytes)
        recorder.figure("read only", rate / 1e9, "GB/s", bytes=num_bytes)
        keep_limits(setting, bandwidth=rate)

    def multiply() -> None:
        rate = matmul_rate(device, watch, size)
        recorder.figure(f"matmul bf16 {size}^3", rate / 1e12, "TFLOP/s")
        keep_limits(setting, rate=rate)

    for name, measure in (("copy", copy), ("read", read), ("matmul", multiply)):
        recorder.case(f"limits: {name}", measure, seconds=SECONDS)


def copy_bandwidth(device: torch.device, watch: Stopwatch, num_bytes: int) -> float:
    """Bytes per second, read and written."""
    source = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / watch.median(lambda: target.copy_(source))


def read_bandwidth(device: torch.device, watch: Stopwatch, num_bytes: int) -> float:
    """Bytes per second of a maximum, which writes nothing: the ceiling of weights and keys, which are only read.

    The fastest of three widths of elements, because torch's reduction is not equally fast for all.
    """
    source = torch.ones(num_bytes // 8, dtype=torch.float64, device=device)
    views = (source, source.view(torch.float32), source.view(torch.bfloat16))
    return num_bytes / min(watch.median(partial(torch.amax, view)) for view in views)


def matmul_rate(device: torch.device, watch: Stopwatch, size: int) -> float:
    """FLOP/s on random numbers (zeros run faster)."""
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / watch.median(lambda: torch.mm(a, b, out=out))

"""Measures the limits of the card: every other figure is a share of them."""

import json

import torch

from benchmarks.gpu_check.parts import Setting
from benchmarks.gpu_check.record import Recorder
from benchmarks.gpu_check.timing import Stopwatch, pick_device

COPY_BYTES = 4 << 30
SIZE = 8192
TINY_COPY_BYTES, TINY_SIZE = 1 << 22, 256


def run(recorder: Recorder, setting: Setting) -> None:
    """Figures for people, and limits.json for the other parts."""
    device = pick_device(setting.tiny)
    watch = Stopwatch(device, seconds=1.0)

    def measure() -> None:
        bandwidth = copy_bandwidth(device, watch, TINY_COPY_BYTES if setting.tiny else COPY_BYTES)
        recorder.figure("copy, device to device", bandwidth / 1e9, "GB/s", bytes=COPY_BYTES)
        rate = matmul_rate(device, watch, TINY_SIZE if setting.tiny else SIZE)
        recorder.figure(f"matmul bf16 {SIZE}^3", rate / 1e12, "TFLOP/s")
        limits = {"bandwidth": bandwidth, "rate": rate}
        (setting.folder / "limits.json").write_text(json.dumps(limits), encoding="utf-8")

    recorder.case("limits", measure, seconds=100)


def copy_bandwidth(device: torch.device, watch: Stopwatch, num_bytes: int) -> float:
    """Bytes per second, read and written."""
    source = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / watch.median(lambda: target.copy_(source))


def matmul_rate(device: torch.device, watch: Stopwatch, size: int) -> float:
    """FLOP/s on random numbers (zeros run faster)."""
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / watch.median(lambda: torch.mm(a, b, out=out))

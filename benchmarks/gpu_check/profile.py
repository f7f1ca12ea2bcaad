"""Shows how a step spends its time on the device: kernels by kind, the longest by name, and gaps between them."""

import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu_check.timing import synchronize

STEPS, LONGEST = 4, 8
DEVICE_EVENTS = ("kernel", "gpu_memcpy", "gpu_memset")
# Kind of a kernel, by its name; the first match counts.
KINDS = (
    ("attention", r"attention|reduce_chunks|work_map|flash|fmha"),
    ("cache writes", r"and_cache|copy_blocks|pack_blocks"),
    ("GEMM", r"gemm|gemv|cutlass|nvjet|xmma|wgmma|splitK|cublas|matmul|gate_up_kernel|down_kernel"),
    ("copies", r"Memcpy|Memset"),
)


@dataclass(frozen=True, slots=True)
class Row:
    """Microseconds per step and their share of the step."""

    name: str
    microseconds: float
    share: float
    launches: float


def profile_steps(run: Callable[[int], object], device: torch.device) -> list[Row]:
    """Profile `run(STEPS)`, a few steps one after the other. Empty where the profiler sees no device events."""
    run(2)
    synchronize(device)
    activities = [ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU]
    with profile(activities=activities) as profiler:
        run(STEPS)
        synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return summarize(events, DEVICE_EVENTS if device.type == "cuda" else ("cpu_op",), STEPS)


def summarize(events: Iterable[dict[str, Any]], categories: Iterable[str], num_steps: int) -> list[Row]:
    """Chrome trace events (ts and dur in microseconds) -> rows: each kind, the gaps, the longest kernels."""
    wanted = set(categories)
    spans = sorted((e["ts"], e["ts"] + e["dur"], e["name"]) for e in events if e.get("cat") in wanted and "dur" in e)
    if not spans:
        return []
    total = max(end for _, end, _ in spans) - spans[0][0]
    kinds: dict[str, list[float]] = defaultdict(list)
    names: dict[str, list[float]] = defaultdict(list)
    for begin, end, name in spans:
        kinds[kind(name)].append(end - begin)
        names[short(name)].append(end - begin)
    rows = [_row(label, times, total, num_steps) for label, times in sorted(kinds.items(), key=lambda x: -sum(x[1]))]
    rows.append(_row("gaps, device idle", [total - _busy(spans)], total, num_steps))
    longest = sorted(names.items(), key=lambda x: -sum(x[1]))[:LONGEST]
    return rows + [_row(f"kernel {name}", times, total, num_steps) for name, times in longest]


def kind(name: str) -> str:
    """The kind of kernel that has this name."""
    return next((label for label, pattern in KINDS if re.search(pattern, name, re.IGNORECASE)), "other")


def short(name: str) -> str:
    """A C++ name without its arguments and namespaces, at most 40 characters."""
    plain = re.sub(r"<.*", "", name.removeprefix("void ")).split("(")[0]
    return (plain.split("::")[-1] or name)[:40]


def _row(name: str, times: list[float], total: float, num_steps: int) -> Row:
    return Row(name, sum(times) / num_steps, sum(times) / total if total else 0.0, len(times) / num_steps)


def _busy(spans: list[tuple[float, float, str]]) -> float:
    """Microseconds in which at least one span runs; spans are sorted by their begin."""
    busy, reached = 0.0, spans[0][0]
    for begin, end, _ in spans:
        if end > reached:
            busy += end - max(begin, reached)
            reached = end
    return busy

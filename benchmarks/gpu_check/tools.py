"""NVIDIA's own tools on our kernels, where they are installed: counters by ncu, memory errors by compute-sanitizer."""

import csv
import io
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from benchmarks.gpu_check.parts import Setting
from benchmarks.gpu_check.probe import GROUPS
from benchmarks.gpu_check.record import Recorder, at_most

ROOT = Path(__file__).resolve().parents[2]
OURS = "regex:.*(attention|splits|cache|norm|silu|gated|rotary|rope|logits|draw|cut|linear|gemv).*"
METRICS = {
    "gpu__time_duration.sum": "us",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "% of memory",
    "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active": "% of tensor pipes",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "% of warps",
}
TO_MICROSECONDS = {"nsecond": 1e-3, "ns": 1e-3, "usecond": 1.0, "us": 1.0, "msecond": 1e3, "ms": 1e3}
SECONDS, MAX_KERNELS = 100.0, 40
TOOLS_OF_SANITIZER = ("memcheck", "racecheck", "initcheck")


def run_ncu(recorder: Recorder, setting: Setting) -> None:
    """Counters of each of our kernels. The card's clocks stay as they are."""
    if not _found(recorder, setting, "ncu"):
        return
    for group in GROUPS:
        recorder.case(f"ncu {group}", partial(count, recorder, group), seconds=SECONDS + 10)


def run_sanitizer(recorder: Recorder, setting: Setting) -> None:
    """memcheck, racecheck and initcheck over small launches of every kernel."""
    if not _found(recorder, setting, "compute-sanitizer"):
        return
    for tool in TOOLS_OF_SANITIZER:
        for group in GROUPS:
            recorder.case(f"{tool} {group}", partial(sanitize, recorder, tool, group), seconds=SECONDS + 10)


def _found(recorder: Recorder, setting: Setting, program: str) -> bool:
    if setting.tiny or shutil.which(program) is None:
        recorder.skip(program, "a CPU has no kernels of a card" if setting.tiny else "it is not installed here")
        return False
    return True


def probe(group: str) -> list[str]:
    return [sys.executable, "-m", "benchmarks.gpu_check.probe", group]


def count(recorder: Recorder, group: str) -> None:
    """One figure per kernel: microseconds; the other counters are its details."""
    command = ["ncu", "--clock-control", "none", "--csv", "--metrics", ",".join(METRICS), "--kernel-name", OURS,
               "--launch-count", str(MAX_KERNELS), *probe(group)]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)
    print(done.stdout[-4000:], done.stderr[-2000:], flush=True)
    found = kernels_of(done.stdout.splitlines())
    if not found:
        raise RuntimeError(f"ncu reported no kernel (status {done.returncode}); the log has its output")
    for name, metrics in found.items():
        duration = metrics.pop("us", 0.0)
        recorder.figure(f"ncu {group}: {name}", duration, "us", share=metrics.get("% of memory", 0.0) / 100,
                        of="memory", **metrics)  # fmt: skip


def kernels_of(lines: Iterable[str]) -> dict[str, dict[str, float]]:
    """ncu's CSV -> {kernel: {unit: value}} of each kernel's last launch. Lines of the program are passed over."""
    rows = [line for line in lines if line.startswith('"')]
    found: dict[str, dict[str, float]] = {}
    for row in csv.DictReader(io.StringIO("\n".join(rows))):
        label = METRICS.get(row.get("Metric Name", ""))
        if label is None:
            continue
        try:
            value = float(row["Metric Value"].replace(",", ""))
        except ValueError:
            continue
        if label == "us":
            value *= TO_MICROSECONDS.get(row.get("Metric Unit", "us"), 1.0)
        found.setdefault(row["Kernel Name"].split("(")[0][:40], {})[label] = value
    return found


def sanitize(recorder: Recorder, tool: str, group: str) -> None:
    """Errors that the tool counted."""
    command = ["compute-sanitizer", "--tool", tool, "--kernel-name", OURS, "--print-limit", "10", *probe(group)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)
    print(done.stdout[-6000:], done.stderr[-2000:], flush=True)
    errors = errors_of(done.stdout + done.stderr)
    if errors is None:
        raise RuntimeError(f"compute-sanitizer printed no summary (status {done.returncode}); the log has its output")
    recorder.figure(f"{tool} {group}: errors", errors, "", goal=at_most(0.5, text="none"))
    if errors:
        raise AssertionError(f"{errors} errors; the log has the first ones")


def errors_of(output: str) -> int | None:
    """The count of a summary such as "ERROR SUMMARY: 0 errors" or "RACECHECK SUMMARY: 2 hazards displayed"."""
    found = re.findall(r"SUMMARY: (\d+) (?:error|hazard)", output)
    return max(map(int, found)) if found else None

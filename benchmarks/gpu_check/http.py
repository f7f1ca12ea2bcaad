"""100 requests at once over HTTP, by the project's own load generator against its own server in another process."""

import json
import shlex
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.names import QWEN
from benchmarks.gpu_check.parts import Setting
from benchmarks.gpu_check.record import Recorder
from benchmarks.gpu_check.shapes import model_config, write_model
from benchmarks.gpu_check.timing import pick_device

ROOT = Path(__file__).resolve().parents[2]
REQUESTS, TINY_REQUESTS = 100, 4
SECONDS, START_SECONDS = 60.0, 45.0
# Their names in the JSON of benchmarks/serve.py, and ours.
FIGURES = {
    "out_tok_s": ("throughput", "tok/s"),
    "ttft_p50": ("first token P50", "ms"),
    "ttft_p99": ("first token P99", "ms"),
    "itl_p50": ("between chunks P50", "ms"),
    "itl_p99": ("between chunks P99", "ms"),
    "e2e_p50": ("whole request P50", "ms"),
    "e2e_p99": ("whole request P99", "ms"),
}


def run(recorder: Recorder, setting: Setting) -> None:
    device = pick_device(setting.tiny).type
    recorder.case(f"{QWEN}: over HTTP", partial(_measure, recorder, setting, device), seconds=SECONDS)


def _measure(recorder: Recorder, setting: Setting, device: str) -> None:
    folder = write_model(QWEN, setting.folder, setting.tiny)
    report = setting.folder / "http.json"
    sizes = " --num-blocks 256 --max-num-seqs 8" if setting.tiny else ""
    server = (
        f"{shlex.quote(sys.executable)} -m server.cli serve --model {shlex.quote(str(folder))} --load-format dummy"
        f" --dtype bfloat16 --device {device} --host 127.0.0.1 --port {{port}}{sizes}"
    )
    count = TINY_REQUESTS if setting.tiny else REQUESTS
    largest = min(7999, model_config(QWEN, setting.tiny)["vocab_size"] - 1)
    start_seconds = START_SECONDS * setting.patience
    command = [
        *(sys.executable, "benchmarks/serve.py", "--command", server, "--workload", "uniform", "--n", str(count)),
        *("--repeats", "1", "--start-timeout", str(start_seconds), "--max-token-id", str(largest)),
        *("--json", str(report), "--log-dir", str(setting.folder)),
    ]
    status = run_for(command, (SECONDS - 5) * setting.patience)
    if status != 0:
        raise RuntimeError(f"benchmarks/serve.py ended with status {status}; the log says why")
    record_figures(recorder, json.loads(report.read_text(encoding="utf-8"))["runs"][0], count)


def run_for(command: list[str], seconds: float) -> int:
    """The exit status. One that takes longer is asked to end, so that it stops the server that it started."""
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.terminate()
        process.wait()
        raise


def record_figures(recorder: Recorder, figures: dict[str, Any], count: int) -> None:
    """The figures of one run of benchmarks/serve.py."""
    for key, (name, unit) in FIGURES.items():
        recorder.figure(f"HTTP, {count} requests: {name}", float(figures[key]), unit)

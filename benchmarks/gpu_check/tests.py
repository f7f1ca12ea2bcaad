"""The project's own tests on the device, with pytest, in several processes where pytest-xdist is there."""

import importlib.util
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.parts import Setting
from benchmarks.gpu_check.record import Recorder, at_least, read_record
from benchmarks.gpu_check.timing import pick_device

ROOT = Path(__file__).resolve().parents[2]
# Tests that run on a device. test_*.py run on a CPU, where pytest does not collect these other names. The tests of
# Triton kernels need a GPU or the interpreter: on a CPU only the file remains that calls every kernel as the models do.
KERNEL_FILES, CPU_KERNEL_FILES, ENGINE_FILES = ("*_cases.py", "triton_*.py"), ("device_cases.py",), "device_cases.py"
GROUPS = {"kernels": "tests/kernels/", "models": "tests/engine/models/", "engine": "tests/engine/device"}
TEST_SECONDS, MAX_PROCESSES = 80, 14  # most of their time is that of the compiler
SPARE_SECONDS = 8.0  # kept of the part's time to write the results
FAILURES_SHOWN = 12
TINY_SELECTION = (
    "logprobs_and_seeds or (llama_tied and bfloat16) or (test_layer_norm and bfloat16) or "
    "(test_cache_writes and bfloat16)"
)


def run(recorder: Recorder, setting: Setting) -> None:
    """One session for all, whole models first; what is not reached in time is missing from the figures, what passed
    stays."""
    patterns = CPU_KERNEL_FILES if pick_device(setting.tiny).type == "cpu" else KERNEL_FILES
    kernels = {path for pattern in patterns for path in (ROOT / "tests/kernels").glob(pattern)}
    files = [*sorted((ROOT / "tests/engine").rglob(ENGINE_FILES)), *sorted(kernels)]
    recorder.case("tests on the device", partial(run_tests, files, recorder, setting), seconds=setting.seconds)


def run_features(recorder: Recorder, setting: Setting) -> None:
    """Every feature of the engine with the bundled model: each case starts an engine, which compiles for itself."""
    files = [ROOT / "tests/engine/device_feature_cases.py"]
    measure = partial(run_tests, files, recorder, setting, "features")
    recorder.case("features on the device", measure, seconds=setting.seconds)


def run_tests(files: list[Path], recorder: Recorder, setting: Setting, part: str = "tests") -> None:
    """A figure of how many passed in each group, and a line for each that did not."""
    results = setting.folder / f"{part}-results.jsonl"
    environment = {**os.environ, "GPU_CHECK_RESULTS": str(results), "PYTHONPATH": _python_path()}
    environment.pop("PYTEST_XDIST_WORKER", None)  # set if this code runs inside pytest
    ended, seconds = "", max(1.0, setting.seconds - SPARE_SECONDS)
    try:
        done = subprocess.run(pytest_command(files, setting), cwd=ROOT, env=environment, timeout=seconds)
        if done.returncode not in (0, 1):
            ended = f"pytest ended with status {done.returncode}; the log says why"
    except subprocess.TimeoutExpired:
        ended = f"the tests were not done within {seconds:.0f} s"
    lines = read_record(results)
    outcomes = by_test(line for line in lines if "test" in line)
    for name, prefix in GROUPS.items():
        chosen = {test: found for test, found in outcomes.items() if test.startswith(prefix)}
        if chosen or part == "tests":
            report(name, chosen, recorder, part)
    if not ended and not any("exitstatus" in line for line in lines):
        ended = "pytest was cut short; the log says where"
    if ended:
        raise RuntimeError(ended)


def report(name: str, outcomes: dict[str, dict[str, Any]], recorder: Recorder, part: str = "tests") -> None:
    """One row, and a line for each of the first failures; the JSON has them all."""
    counts = Counter(outcome["outcome"] for outcome in outcomes.values())
    failures = {test: outcome["message"] for test, outcome in outcomes.items() if outcome["outcome"] == "failed"}
    total = counts["passed"] + counts["failed"]
    if not total:
        recorder.skip(f"{part}: {name}", "none was run")
        return
    recorder.figure(f"{part}: {name}", counts["passed"], "passed", share=counts["passed"] / total, of=f"of {total}",
                    goal=at_least(1.0, "share", "all"), skipped=counts["skipped"], failures=failures)  # fmt: skip
    for test, message in list(failures.items())[:FAILURES_SHOWN]:
        recorder.skip(f"FAILED {test}", message)


def by_test(results: Iterable[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Passed only if setup, call and teardown passed; the message of the first that did not."""
    outcomes: dict[str, dict[str, Any]] = {}
    for result in results:
        before = outcomes.setdefault(result["test"], result)
        if before["outcome"] == "passed":
            outcomes[result["test"]] = result
    return outcomes


def pytest_command(files: list[Path], setting: Setting) -> list[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", str(ROOT / "tests/device.ini"),
               f"--rootdir={ROOT}", "-p", "benchmarks.gpu_check.pytest_plugin"]  # fmt: skip
    processes = min(MAX_PROCESSES, (os.cpu_count() or 2) - 2)
    several = importlib.util.find_spec("xdist") is not None and processes > 1 and not setting.tiny
    if several:
        command += ["-n", str(processes), "--dist", "worksteal"]
    if importlib.util.find_spec("pytest_timeout") is not None:  # "thread" ends the process, which xdist replaces
        command += [
            f"--timeout={TEST_SECONDS * setting.patience}",
            f"--timeout-method={'thread' if several else 'signal'}",
        ]
    if setting.tiny:
        command += ["-k", TINY_SELECTION]
    return [*command, *(str(path.relative_to(ROOT)) for path in files)]


def _python_path() -> str:
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))

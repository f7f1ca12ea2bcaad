"""benchmarks.json_ends, run as its users do."""

import json
import subprocess
import sys

from benchmarks.json_ends import ANSWERS


def test_json_ends_prints_a_line_for_each_answer_and_spare(tmp_path):
    path = tmp_path / "ends.json"
    command = [sys.executable, "-m", "benchmarks.json_ends", "--spare", "3,500", "--repeats", "1", "--json", path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    runs = json.loads(path.read_text(encoding="utf-8"))["runs"]
    assert [(run["answer"], run["spare"]) for run in runs] == [(name, spare) for name in ANSWERS for spare in (3, 500)]
    assert all(0 < run["dearest_ms"] < run["ms"] for run in runs)
    assert all(f"{run['answer']:14}{run['tokens']:8}{run['spare']:8}" in done.stdout for run in runs)

"""How long a start takes, what it costs in memory, and how fast an idle server answers.

    python -m benchmarks.startup [--repeats 5] [--json PATH] [-- any `pageserve serve` option]

Starts `pageserve serve` that often. Reports seconds until /ready, then over ten chat requests the milliseconds from
sending a request to the first text, and the memory of all processes together: resident (shared pages counted in each)
and proportional (counted once).
"""

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

import httpx

from server.commands.bench.report import describe, machine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("serve_options", nargs="*")
    options = parser.parse_args()
    runs = [measure(options.serve_options) for _ in range(options.repeats)]
    facts = machine()
    print(describe(facts))
    print(f"{'':24}{'median':>10}{'min':>10}{'max':>10}")
    for name in runs[0]:
        values = [run[name] for run in runs]
        print(f"{name:24}{statistics.median(values):10.2f}{min(values):10.2f}{max(values):10.2f}")
    if options.json:
        options.json.write_text(json.dumps({"machine": facts, "runs": runs}, indent=1) + "\n")


def measure(serve_options: list[str]) -> dict[str, float]:
    port = free_port()
    command = [sys.executable, "-m", "server.cli", "serve", "--port", str(port), *serve_options]
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            ready = wait_ready(client, process) - started
            first_text = [time_to_first_text(client) for _ in range(10)]
            resident, proportional = memory_mib(process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)
    return {
        "ready s": ready,
        "first text ms, first": first_text[0] * 1e3,
        "first text ms, median": statistics.median(first_text) * 1e3,
        "resident MiB": resident,
        "proportional MiB": proportional,
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_ready(client: httpx.Client, process: subprocess.Popen) -> float:
    while process.poll() is None:
        try:
            if client.get("/ready").status_code == 200:
                return time.perf_counter()
        except httpx.TransportError:
            pass  # the port is not bound yet
        time.sleep(0.01)
    raise SystemExit(f"the server ended with status {process.returncode} before it was ready")


def time_to_first_text(client: httpx.Client) -> float:
    model = client.get("/v1/models").json()["data"][0]["id"]
    body = {"model": model, "stream": True, "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 16}
    started = time.perf_counter()
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        for line in response.iter_lines():
            if line.startswith("data: {") and json.loads(line[6:])["choices"][0]["delta"].get("content"):
                return time.perf_counter() - started
    raise SystemExit("the stream ended without text")


def memory_mib(pid: int) -> tuple[float, float]:
    """(resident, proportional) of a process and all below it."""
    fields: dict[str, float] = {"Rss:": 0.0, "Pss:": 0.0}
    for member in [pid, *descendants(pid)]:
        for line in Path(f"/proc/{member}/smaps_rollup").read_text().splitlines():
            name, *rest = line.split()
            if name in fields:
                fields[name] += int(rest[0]) / 1024
    return fields["Rss:"], fields["Pss:"]


def descendants(pid: int) -> list[int]:
    found = []
    for task in os.listdir(f"/proc/{pid}/task"):
        for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split():
            found += [int(child), *descendants(int(child))]
    return found


if __name__ == "__main__":
    main()

"""`pageserve serve` as a user starts it, in a process of its own; the bundled model, unless options name another."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from benchmarks.startup import free_port
from tests.mortal import MORTAL

ROOT = Path(__file__).parents[2]
STOP_SECONDS = 60


@contextmanager
def serving_process(*options: str) -> Iterator[tuple[str, "subprocess.Popen[bytes]"]]:
    """(URL, process) of a server with these options, once it is ready; it must end in good order."""
    port = free_port()
    command = [*MORTAL, sys.executable, "-m", "server.cli", "serve", "--port", str(port), *options]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        with httpx.Client(base_url=url, timeout=60) as client:
            wait_until_ready(client, process)
        yield url, process
    finally:
        process.send_signal(signal.SIGTERM)
        status = process.wait(STOP_SECONDS)
    assert status == 0


def wait_until_ready(client: httpx.Client, process: "subprocess.Popen[bytes]", seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None:
        try:
            if client.get("/ready").status_code == 200:
                return
        except httpx.TransportError:  # it does not listen yet
            pass
        time.sleep(0.05)
    raise AssertionError("the server did not become ready")

import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = """
import subprocess, time
from tests.mortal import MORTAL
print(subprocess.Popen([*MORTAL, "sleep", "60"]).pid, flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other kernels tell nobody that a parent has ended")
def test_a_server_ends_with_the_test_run_that_started_it():
    with subprocess.Popen([sys.executable, "-c", SCRIPT], cwd=ROOT, stdout=subprocess.PIPE, text=True) as run:
        pid = int(run.stdout.readline())
        command = Path(f"/proc/{pid}/cmdline")
        wait_until(lambda: command.read_bytes().startswith(b"sleep"))
        run.kill()
    wait_until(lambda: not command.exists() or not command.read_bytes())  # nobody may be there to reap it


def wait_until(holds) -> None:
    end = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)

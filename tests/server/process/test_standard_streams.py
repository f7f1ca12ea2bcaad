"""stdout and stderr of a server: not read, full, or closed, they stop nothing; and what was written comes in order."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from benchmarks.startup import free_port
from tests.mortal import MORTAL
from tests.server.serving import wait_until_ready
from tests.server.streams import GRAMMARS, WORKER, children_of

ROOT = Path(__file__).resolve().parents[3]
PREAMBLE = """
import os, subprocess, sys, time
from server.process import standard_streams
from server.process.standard_streams import StandardStreams, lines_dropped, open_missing_streams
"""
NOTICE = re.compile(rb"\S+ \S+ WARNING server.process.standard_streams: (\d+) lines are missing here: (.*)\n")


def start(script, **streams):
    command = [sys.executable, "-c", PREAMBLE + script]
    return subprocess.Popen(command, cwd=ROOT, **({"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | streams))


def test_lines_of_all_writers_come_in_order():
    script = """
with StandardStreams():
    for i in range(2000):
        print("line", i)
    sys.stdout.flush()
    subprocess.run(["sh", "-c", "echo of a child; echo its error >&2; printf 'no end of a line'"])
    os.write(1, b"\\n" + b"x" * 300_000 + b"\\nlast")
    raise SystemExit(3)
"""
    process = start(script)
    out, errors = process.communicate(timeout=60)
    expected = b"".join(b"line %d\n" % i for i in range(2000))
    assert out == expected + b"of a child\nno end of a line\n" + b"x" * 300_000 + b"\nlast"
    assert errors == b"its error\n" and process.returncode == 3


def test_a_traceback_at_the_end_is_not_lost():
    process = start("with StandardStreams():\n    raise ValueError('what went wrong')\n")
    _, errors = process.communicate(timeout=60)
    assert errors.endswith(b"ValueError: what went wrong\n") and process.returncode == 1


def test_a_pipe_without_a_reader_blocks_nothing_and_a_notice_stands_for_the_dropped_lines():
    script = """
standard_streams.MAX_BYTES, standard_streams.RESUME_BYTES = 100_000, 50_000
with StandardStreams():
    for i in range(30_000):
        print("line", i, file=sys.stderr)
    print("done", flush=True)
    sys.stdin.readline()
    time.sleep(0.5)  # until the reader has taken enough for the next line to be kept
    print("after", file=sys.stderr)
    time.sleep(0.2)
    print(lines_dropped["stderr"], flush=True)
"""
    process = start(script, stdin=subprocess.PIPE)
    assert process.stdout.readline() == b"done\n", "it went on, though nobody read"
    read = []
    reader = threading.Thread(target=lambda: read.extend(process.stderr))
    reader.start()
    process.stdin.write(b"go on\n")
    process.stdin.flush()
    num_dropped = int(process.stdout.readline())
    reader.join(20)
    process.communicate(timeout=20)
    assert process.returncode == 0 and num_dropped > 10_000
    expected, found = 0, 0
    for line in read:
        if match := NOTICE.fullmatch(line):
            found += int(match[1])
            expected += int(match[1])
            assert match[2] == b"not read in time"
        elif line != b"after\n":
            assert line == b"line %d\n" % expected, "the notice stands where lines are missing, and says how many"
            expected += 1
    assert (expected, found, read[-1]) == (30_000, num_dropped, b"after\n")


def test_the_end_does_not_wait_for_a_reader_that_never_comes():
    reader, full = full_pipe()
    script = """
standard_streams.CLOSE_SECONDS = 0.3
with StandardStreams():
    print("nobody reads this")
    print("nor this", file=sys.stderr)
print("nor what comes behind it", flush=True)
"""
    started = time.monotonic()
    process = start(script, stdout=full, stderr=full)
    assert process.wait(30) == 0 and time.monotonic() - started < 15
    os.close(reader)
    os.close(full)


def full_pipe():
    """(read end, write end), with no room for another byte."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    try:
        while True:
            os.write(writer, b"x" * 4096)
    except BlockingIOError:
        os.set_blocking(writer, True)
    return reader, writer


@pytest.mark.parametrize("kind", ["full device", "reader left", "closed"])
def test_a_stream_that_takes_nothing_is_no_reason_to_end(kind):
    script = """
open_missing_streams()
with StandardStreams():
    print("to nobody")
    print("to stderr", file=sys.stderr)
    sys.stdout.flush()
    time.sleep(0.1)
    dropped = lines_dropped["stdout"]
    held = {os.readlink(f"/proc/self/fd/{fd}") for fd in (0, 1, 2)}
    open(sys.argv[1], "w").write(f"{dropped} {os.readlink('/proc/self/fd/0')}")
"""
    path = Path(os.environ.get("TMPDIR", "/tmp")) / f"streams-{os.getpid()}-{kind.replace(' ', '-')}"
    command = [sys.executable, "-c", PREAMBLE + script, str(path)]
    try:
        if kind == "closed":
            done = subprocess.run(["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *command], cwd=ROOT, timeout=60)
            assert done.returncode == 0 and path.read_text() == "0 /dev/null"
        else:
            reader, writer = os.pipe()
            os.close(reader)
            full = os.open("/dev/full", os.O_WRONLY)
            done = subprocess.run(command, stdout=full if kind == "full device" else writer, cwd=ROOT, timeout=60)
            os.close(writer)
            os.close(full)
            assert done.returncode == 0 and path.read_text().split()[0] == "1"
    finally:
        path.unlink(missing_ok=True)


@pytest.fixture
def unread_server():
    """(URL, process) of `pageserve serve` whose stdout is full and whose stderr nobody reads, with secrets about."""
    reader, writer = full_pipe()
    port = free_port()
    options = ["--port", str(port), "--device", "cpu", "--max-model-len", "256", "--num-blocks", "64"]
    command = [*MORTAL, sys.executable, "-m", "server.cli", "serve", *options]
    environment = {**os.environ, **SECRETS, "TOKENIZERS_PARALLELISM": "false"}
    with open("/dev/full", "w") as full:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=full, stderr=writer)
    url = f"http://127.0.0.1:{port}"
    try:
        with httpx.Client(base_url=url, timeout=60) as client:
            wait_until_ready(client, process)
        yield url, process
    finally:
        process.kill()
        process.wait()
        os.close(reader)
        os.close(writer)


KEY = "sk-of-this-test"
SECRETS = {
    "PAGESERVE_API_KEY": KEY,
    "HF_TOKEN": "hf_secret",
    "AWS_SECRET_ACCESS_KEY": "aws-of-this-test",
    "DB_PASSWORD": "db-of-this-test",
}


def test_a_server_without_a_reader_of_its_output_serves_and_ends_in_good_order(unread_server):
    url, process = unread_server
    children = children_of(process)
    body = {"model": "bundled", "prompt": "Once", "max_tokens": 8}
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 20, "model": "bundled"}
    chat["response_format"] = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    with httpx.Client(base_url=url, timeout=60, headers={"authorization": f"Bearer {KEY}"}) as client:
        body["model"] = chat["model"] = client.get("/v1/models").json()["data"][0]["id"]
        for _ in range(20):
            os.kill(children[WORKER], signal.SIGUSR1)  # it writes its stacks to stderr
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGHUP)  # there is no key file to read anew
        assert client.post("/v1/completions", json=body).status_code == 200
        assert client.post("/v1/chat/completions", json=chat).status_code == 200
        found = client.get("/metrics").text
    assert int(float(re.search(r'log_lines_dropped_total{stream="stdout"} (\S+)', found)[1])) >= 3
    children = children_of(process)
    assert {WORKER, GRAMMARS} <= set(children)
    for name, pid in children.items():
        environment = Path(f"/proc/{pid}/environ").read_bytes()
        assert not [secret for secret in SECRETS.values() if secret.encode() in environment], name
        assert b"TOKENIZERS_PARALLELISM=false" in environment
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0


HANG_UP_AT_THE_START = """
import os, signal, sys
import engine.settings
from server import cli

load_settings = engine.settings.load_settings

def interrupted(*given):
    os.kill(os.getpid(), signal.SIGHUP)
    return load_settings(*given)

cli.load_settings = interrupted
sys.exit(cli.main(["serve", "--port", "0", "--load-format", "dummy", "--api-key-file", sys.argv[1]]))
"""


def test_a_hang_up_before_the_event_loop_runs_reads_the_keys_again(tmp_path):
    """As of `systemctl reload` right after a start."""
    keys = tmp_path / "keys"
    keys.write_text("sk-a-key-of-this-test\n")
    keys.chmod(0o600)
    command = [*MORTAL, sys.executable, "-c", HANG_UP_AT_THE_START, str(keys)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        lines = iter(process.stderr.readline, "")
        assert any("1 API keys are in use" in line for line in lines), f"status {process.wait(10)}"
        process.terminate()
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
        process.stderr.close()

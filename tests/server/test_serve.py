"""The life of the process: bind, load, serve, drain, stop; signals and exit statuses."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from tests.mortal import MORTAL
from tests.server.live import completion_body, events, expected_text

ROOT = Path(__file__).resolve().parents[2]


class Process:
    """A server process; `lines` are what it printed, as they come."""

    def __init__(self, folder, *worker_options: str, port: int = 0, drain_timeout: float = 20, **engine) -> None:
        command = [*MORTAL, sys.executable, "-m", "tests.server.launch", str(folder), str(port), str(drain_timeout)]
        self.process = subprocess.Popen(
            [*command, json.dumps(engine), *worker_options],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.out: list[str] = []
        self.errors = ""
        self._reader = threading.Thread(target=lambda: self.out.extend(self.process.stdout), daemon=True)
        self._error_reader = threading.Thread(target=self._read_errors, daemon=True)
        self._reader.start()
        self._error_reader.start()

    def _read_errors(self) -> None:
        for line in self.process.stderr:
            self.errors += line

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *_) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        self._reader.join(10)
        self._error_reader.join(10)
        self.process.stdout.close()
        self.process.stderr.close()

    def wait_ready(self) -> str:
        """The URL, from what the server prints when it is ready."""
        self.wait_for(lambda: any("curl" in line for line in self.out), "ready")
        return re.search(r"http://\S+", self.out[0])[0]

    def wait_for(self, condition, what: str, seconds: float = 30) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end and self.process.poll() is None, f"not {what}: {self.errors}"
            time.sleep(0.01)

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def exit_status(self, seconds: float = 60) -> int:
        return self.process.wait(seconds)

    def children(self) -> list[str]:
        """The children of all its threads."""
        tasks = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        return [pid for task in tasks for pid in task.read_text().split()]

    def workers(self) -> list[str]:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [pid for pid in children if b"fake_worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def body(**fields) -> dict:
    return completion_body(model="fake") | fields


class Reader(threading.Thread):
    """Reads one stream to its end."""

    def __init__(self, url: str, **fields) -> None:
        super().__init__(daemon=True)
        self.url, self.fields, self.text, self.begun = url, fields, "", threading.Event()
        self.start()
        assert self.begun.wait(10)

    def run(self) -> None:
        with httpx.Client(base_url=self.url, timeout=30) as client:
            with client.stream("POST", "/v1/completions", json=body(stream=True, **self.fields)) as response:
                for piece in response.iter_text():
                    self.text += piece
                    self.begun.set()


def test_ready_is_announced_once_with_a_curl_line_that_works(folder):
    with Process(folder) as server:
        url = server.wait_ready()
        assert len(server.out) == 3 and "fake" in server.out[0] and "512" in server.out[0]
        command = server.out[2].strip()
        assert command.startswith("curl ") and url in command
        done = subprocess.run(
            command.replace("curl", "curl -s", 1), shell=True, capture_output=True, text=True, timeout=20
        )
        *chunks, last = events(done.stdout)
        assert last == "[DONE]" and chunks[-1]["choices"][0]["finish_reason"] == "length"
        assert chunks[0]["object"] == "chat.completion.chunk"
        server.send(signal.SIGTERM)
        assert server.exit_status() == 0
        assert len(server.out) == 3
    assert "Traceback" not in server.errors


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_streams_finish_and_refuses_new_ones(folder, number):
    with Process(folder, "--step-seconds", "0.01") as server:
        url = server.wait_ready()
        (worker,) = server.workers()
        reader = Reader(url, max_tokens=120)
        with httpx.Client(base_url=url) as client:
            assert client.get("/ready").status_code == 200  # a connection that is kept open
            server.send(number)
            server.wait_for(lambda: client.get("/ready").status_code == 503, "draining")
            assert client.get("/ready").json()["phase"] == "draining"
            response = client.post("/v1/completions", json=body())
            assert response.status_code == 503 and response.headers["connection"] == "close"
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        assert server.exit_status() == 0
        reader.join(10)
        *chunks, done = events(reader.text)
        assert done == "[DONE]"
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected_text(b"hello", 1, 120)
        assert not Path(f"/proc/{worker}").exists(), "the Worker has ended, too"


def test_what_outlasts_the_drain_gets_an_error_event_and_the_status_is_still_0(folder):
    with Process(folder, "--step-seconds", "0.02", drain_timeout=0.3) as server:
        reader = Reader(server.wait_ready(), max_tokens=400)
        start = time.monotonic()
        server.send(signal.SIGTERM)
        assert server.exit_status() == 0
        assert time.monotonic() - start < 4
        reader.join(10)
        assert "error" in events(reader.text)[-1]


@pytest.mark.parametrize("stream", [False, True])
def test_what_still_waits_at_the_end_of_the_drain_may_be_sent_to_another_server(folder, stream):
    with Process(folder, "--step-seconds", "0.05", drain_timeout=0.5, max_num_seqs=1) as server:
        url = server.wait_ready()
        runs = Reader(url, max_tokens=400)
        answers = []

        def ask():
            with httpx.Client(base_url=url, timeout=30) as client:
                answers.append(client.post("/v1/completions", json=body(max_tokens=4, stream=stream)))

        waits = threading.Thread(target=ask)
        waits.start()
        time.sleep(0.5)
        server.send(signal.SIGTERM)
        waits.join(20)
        runs.join(20)
        assert server.exit_status() == 0
    assert events(runs.text)[-1]["error"]["code"] == "engine_error", "its client has tokens"
    [answer] = answers
    [error] = [event["error"] for event in events(answer.text)] if stream else [answer.json()["error"]]
    assert answer.status_code == (200 if stream else 503) and error["code"] == "service_unavailable"
    assert error["message"] == "The engine ended before this request began. Send it again."


def test_a_second_signal_ends_it_at_once_with_another_status(folder):
    with Process(folder, "--step-seconds", "0.02") as server:
        reader = Reader(server.wait_ready(), max_tokens=400)
        server.send(signal.SIGTERM)
        time.sleep(0.3)
        assert server.process.poll() is None
        start = time.monotonic()
        server.send(signal.SIGTERM)
        assert server.exit_status() == 128 + signal.SIGTERM
        assert time.monotonic() - start < 4
        reader.join(10)
    assert "Traceback" not in server.errors


BUSY = """
import threading, time
import engine.text.tokenizer as tokenizer

def spin(self, *_):
    end = time.monotonic() + 30
    while time.monotonic() < end:  # in Python: no C call that a signal interrupts
        pass

tokenizer.Tokenizer.%s = spin
"""


@pytest.mark.parametrize("busy", ["encode_part", "whole_texts"], ids=["a thread", "the event loop"])
def test_a_second_signal_ends_it_whatever_works(folder, tmp_path, monkeypatch, busy):
    """With its processes."""
    (tmp_path / "sitecustomize.py").write_text(BUSY % busy)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    with Process(folder) as server, httpx.Client(base_url=server.wait_ready()) as client:
        children = server.children()
        assert len(children) == 2, "the Worker and the process of the chat template"
        with pytest.raises(httpx.ReadTimeout):
            client.post("/v1/completions", json=body(max_tokens=1), timeout=0.5)
        server.send(signal.SIGINT)  # Python handles the smaller number first if a busy machine lets both wait
        time.sleep(0.3)
        start = time.monotonic()
        server.send(signal.SIGTERM)
        assert server.exit_status() == 128 + signal.SIGTERM
        assert time.monotonic() - start < 2
        for _ in range(100):
            if not any(is_alive(pid) for pid in children):
                return
            time.sleep(0.01)
    raise AssertionError("it left processes behind")


def is_alive(pid: str) -> bool:
    """A process that has ended has no command line, even if nobody reaps it."""
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:
        return False


def test_a_signal_while_loading_ends_it_soon_with_status_0(folder):
    with Process(folder, "--load-seconds", "30") as server:
        server.wait_for(lambda: server.workers(), "loading")
        (worker,) = server.workers()
        start = time.monotonic()
        server.send(signal.SIGTERM)
        assert server.exit_status() == 0
        assert time.monotonic() - start < 5
        assert not Path(f"/proc/{worker}").exists()
    assert "Traceback" not in server.errors and server.out == []


def test_a_port_in_use_is_said_before_anything_is_loaded(folder):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with Process(folder, "--load-seconds", "30", port=port) as server:
            assert server.exit_status() == 2
    assert server.errors.count("\n") == 1 and str(port) in server.errors and "--port" in server.errors


def test_probes_answer_while_it_loads_on_the_port_it_was_given(folder):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with Process(folder, "--load-seconds", "30", port=port) as server, httpx.Client() as client:

        def answers() -> bool:
            try:
                return client.get(f"http://127.0.0.1:{port}/ready").json()["phase"] == "loading weights"
            except httpx.ConnectError:
                return False

        server.wait_for(answers, "loading")
        assert client.get(f"http://127.0.0.1:{port}/health").status_code == 200
        server.send(signal.SIGTERM)
        assert server.exit_status() == 0


def test_a_model_that_cannot_be_loaded_is_one_line_and_a_status(folder):
    with Process(folder, "--fail-loading", "the weights are damaged") as server:
        assert server.exit_status() == 2
    assert server.errors.splitlines() == ["error: the weights are damaged"]
    assert server.out == []


def test_a_server_whose_worker_dies_too_often_ends_with_a_status_and_the_cause(folder):
    with Process(folder, "--die-at-step", "3", max_worker_restarts=2) as server:
        url = server.wait_ready()
        reader = Reader(url, max_tokens=100)
        assert server.exit_status() == 1
        reader.join(10)
        *chunks, last = events(reader.text)
        assert "error" in last
        text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
        assert text == expected_text(b"hello", 1, len(text)) and len(text) >= 3, "what came was right"
    assert "exited with status 3" in server.errors and "max_worker_restarts is 2" in server.errors
    assert "Traceback" not in server.errors


def test_a_signal_during_a_restart_ends_it_in_good_order(folder):
    with Process(folder, "--load-seconds", "0.5", "--step-seconds", "0.01") as server:
        url = server.wait_ready()
        reader = Reader(url, max_tokens=60)
        os.kill(int(server.workers()[0]), signal.SIGKILL)
        with httpx.Client(base_url=url) as client:
            server.wait_for(lambda: client.get("/ready").json()["phase"] == "restarting", "restarting")
        server.send(signal.SIGTERM)
        assert server.exit_status() == 0
        reader.join(10)
        *chunks, done = events(reader.text)
        assert done == "[DONE]"
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected_text(b"hello", 1, 60)
    assert "Traceback" not in server.errors


def test_replies_on_the_fast_loop_are_the_same(folder):
    """The other tests run on asyncio's own loop, this process on uvloop."""
    with Process(folder) as server, httpx.Client(base_url=server.wait_ready(), timeout=30) as client:
        answer = client.post("/v1/completions", json=body()).json()
        assert answer["choices"][0]["text"] == expected_text(b"hello", 1, 8)
        big = json.dumps(body(prediction={"content": "x" * 1_000_000})).encode()
        response = client.post("/v1/completions", content=big, headers={"content-type": "application/json"})
        assert response.status_code == 200


@pytest.mark.parametrize(
    "raw, status",
    [
        (b"\x16\x03\x01 this is TLS\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n", 200),
    ],
)
def test_what_is_no_request_of_ours_is_answered_and_not_logged(folder, raw, status):
    """Else whoever reaches the port fills the disk, with advice to install a WebSocket library."""
    with Process(folder) as server:
        host, port = server.wait_ready().removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=30) as connection:
            connection.sendall(raw)
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 %d" % status)
        server.send(signal.SIGTERM)
        assert server.exit_status() == 0
    assert server.errors == ""


def test_a_server_that_is_stopped_with_its_worker_goes_on_with_it(folder):
    """Ctrl-Z in a terminal, and `fg`."""
    with Process(folder, "--step-seconds", "0.02", step_timeout=1.0) as server:
        url = server.wait_ready()
        reader = Reader(url, max_tokens=60)
        os.killpg(server.process.pid, signal.SIGSTOP)
        time.sleep(4)
        os.killpg(server.process.pid, signal.SIGCONT)
        reader.join(20)
        *chunks, done = events(reader.text)
        assert done == "[DONE]"
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected_text(b"hello", 1, 60)
        with httpx.Client(base_url=url) as client:
            assert 'pageserve:worker_restarts_total{engine="0",model_name="fake"} 0.0' in client.get("/metrics").text
        server.send(signal.SIGTERM)
        assert server.exit_status() == 0
    assert "starting it again" not in server.errors

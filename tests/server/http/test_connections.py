"""How many connections there may be, which go first, and what becomes of those that nobody reads from."""

import asyncio
import json
import os
import resource
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from server.http import connections
from server.http.connections import Connections, backlog, room_for_connections
from tests.server.live import LiveServer, assert_error, chat_body, client_address, completion_body

ROOT = Path(__file__).parents[3]
KEY = {"authorization": "Bearer a"}


class Fake:
    """A connection, and whether it was cut."""

    def __init__(self, address: str = "", is_idle: bool = True) -> None:
        self.address, self.is_idle, self.was_cut = address, is_idle, False

    def cut(self) -> None:
        self.was_cut = True

    def cut_if_stalled(self) -> None:
        pass


def test_strangers_go_first_the_longest_silent_before_others():
    held, (a, b, c, d, known) = Connections(3), (Fake() for _ in range(5))
    assert all(map(held.open, (known, a, b)))
    held.recognise(known)
    held.begin(a)
    assert held.open(c) and b.was_cut and not a.was_cut
    assert held.open(d) and a.was_cut and not known.was_cut and len(held) == 3


def test_known_ones_go_only_where_they_idle():
    held, busy, idle, new, last = Connections(2), Fake(is_idle=False), Fake(), Fake(), Fake()
    for one in (busy, idle):
        held.open(one)
        held.recognise(one)
    assert held.open(new) and idle.was_cut and not busy.was_cut
    held.recognise(new)
    new.is_idle = False
    assert not held.open(last) and not new.was_cut
    for one in (busy, idle, new, last, last):
        held.close(one)
    assert not len(held) and not held.num_addresses


def test_an_address_has_a_limit_of_its_own():
    held = Connections(10, most_per_address=2)
    first, second, third, other = Fake("x"), Fake("x"), Fake("x"), Fake("y")
    assert held.open(other) and held.open(first) and held.open(second) and held.open(third)
    assert first.was_cut and not other.was_cut


def connect(live: LiveServer) -> socket.socket:
    connection = socket.create_connection(live.listener.getsockname())
    connection.settimeout(10)
    return connection


def ask_health(connection: socket.socket) -> bytes:
    connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
    received = b""
    while not received.endswith(b"}"):
        if not (piece := connection.recv(65536)):
            return received
        received += piece
    return received


def test_connections_without_a_key_give_way_to_one_with_a_key(folder):
    with LiveServer(folder, api_key=("a",), max_connections=20) as live, live.client(headers=KEY) as client:
        with client.stream("GET", "/v1/models") as first:
            mine = client_address(first)
            assert first.status_code == 200 and first.read()
        strangers = [connect(live) for _ in range(60)]
        for stranger in strangers[-10:]:
            assert b" 200 OK" in ask_health(stranger)
        assert live.connections() <= 20
        with client.stream("POST", "/v1/completions", json=completion_body()) as again:
            assert client_address(again) == mine, "the same connection still"
            assert again.status_code == 200 and again.read()
        with live.client(headers=KEY) as another:
            assert another.post("/v1/completions", json=completion_body()).status_code == 200
        for stranger in strangers:
            stranger.close()


def test_with_nobody_to_give_way_a_new_one_is_told_so(folder):
    with LiveServer(folder, "--step-seconds", "0.05", max_connections=1) as live, live.client() as client:
        body = completion_body(stream=True, max_tokens=100)
        with client.stream("POST", "/v1/completions", json=body) as stream:
            chunks = stream.iter_bytes()  # which, let go, would close the connection
            next(chunks)
            with connect(live) as late:
                received = b""
                while piece := late.recv(65536):
                    received += piece
        assert received.startswith(b"HTTP/1.1 503 ") and b"\r\nretry-after: 1\r\n" in received
        assert json.loads(received.partition(b"\r\n\r\n")[2])["error"]["code"] == "service_unavailable"


def unread(live: LiveServer, raw: bytes) -> socket.socket:
    """A connection with a small window, on which something was asked."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(live.listener.getsockname())
    connection.settimeout(10)
    connection.sendall(raw)
    return connection


@pytest.mark.parametrize("reads", [False, True])
def test_who_never_reads_an_answer_is_let_go(folder, monkeypatch, reads):
    monkeypatch.setattr("server.http.http_protocol.STALL_SECONDS", 0.4)
    raw = b"GET /openapi.json HTTP/1.1\r\nhost: x\r\n\r\n" * 60
    with LiveServer(folder) as live, unread(live, raw) as connection:
        while not live.connections():
            time.sleep(0.01)
        end = time.monotonic() + (1.2 if reads else 10)
        while time.monotonic() < end and (reads or live.connections()):
            live.call(live.connections_held.sweep)
            if reads:
                connection.recv(1 << 17)
            time.sleep(0.02)
        assert live.connections() == reads


def test_the_limit_of_open_files_leaves_a_reserve():
    num_open = len(os.listdir("/proc/self/fd"))
    for limit in (num_open + 256, 1024 + num_open, 20_000, 1 << 20):
        left = limit - room_for_connections(limit) - backlog(limit) - num_open
        assert left >= connections.RESERVE - 4  # a file more may be open here or there
    assert room_for_connections(1 << 20) == connections.MAX_CONNECTIONS


def test_the_soft_limit_of_open_files_is_raised():
    script = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (256, 512));"
        "from server.http.connections import raise_descriptor_limit as f;"
        "print(f(), *resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    command = [sys.executable, "-c", script]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout == "512 512 512\n"
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 0


def test_pages_of_metrics_that_are_asked_for_together_are_made_once(folder, monkeypatch):
    made = []
    with LiveServer(folder) as live:
        collect = live.driver.stats_snapshot

        def count():
            made.append(1)
            return collect()

        live.driver.stats_snapshot = count

        async def ask():
            async with httpx.AsyncClient(base_url=live.url) as client:
                return await asyncio.gather(*(client.get("/metrics") for _ in range(40)))

        answers = asyncio.run(ask())
    assert all(answer.status_code == 200 and "vllm:" in answer.text for answer in answers)
    assert len(made) < 25


@pytest.mark.parametrize(
    "path, body",
    [
        ("/v1/chat/completions", chat_body(logprobs=True, top_logprobs=20, n=128, max_tokens=400)),
        ("/v1/completions", completion_body(logprobs=5, n=128, prompt=["a"] * 4, max_tokens=400)),
    ],
    ids=["chat", "completion"],
)
def test_generated_logprobs_have_the_limit_of_those_of_prompts(client, path, body):
    name = "top_logprobs" if "messages" in body else "logprobs"
    assert "stream: true" in assert_error(client.post(path, json=body), 400, name)


def test_max_tokens_that_nobody_asked_for_shrink_to_what_may_be_reported(client, monkeypatch):
    monkeypatch.setattr("server.intake.logprob_limits.MAX_REPORTED", 60)
    body = chat_body(logprobs=True, top_logprobs=2, n=2)
    del body["max_tokens"]
    choices = client.post("/v1/chat/completions", json=body).json()["choices"]
    assert [len(choice["logprobs"]["content"]) for choice in choices] == [10, 10]
    assert_error(client.post("/v1/chat/completions", json=body | {"max_tokens": 11}), 400, "top_logprobs")
    assert client.post("/v1/chat/completions", json=body | {"max_tokens": 11, "stream": True}).status_code == 200


def test_an_answer_of_many_logprobs_is_the_same_as_a_small_one(client, monkeypatch):
    body = chat_body(logprobs=True, top_logprobs=3, max_tokens=40)
    small = client.post("/v1/chat/completions", json=body).json()["choices"]
    monkeypatch.setattr("server.context.MANY_LOGPROBS", 10)
    monkeypatch.setattr("server.output.logprobs.PORTION", 7)
    large = client.post("/v1/chat/completions", json=body).json()["choices"]
    assert small == large and len(large[0]["logprobs"]["content"]) == 40

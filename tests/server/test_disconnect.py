"""A client that leaves frees everything it held, whatever its request was doing."""

import asyncio
import contextlib
import gc
import json
import socket
import struct
import threading
import time
import weakref
from urllib.parse import urlsplit

import pytest
from starlette.requests import ClientDisconnect

from server.output.collect import while_connected
from tests.server.live import LiveServer, chat_body, completion_body, expected_text
from tests.server.raw_requests import send_raw, wait_until


@pytest.fixture(scope="module")
def slow(folder):
    """Two sequences run, the rest waits; a request of 400 tokens takes at least 4 s."""
    with LiveServer(folder, "--step-seconds", "0.01", engine={"max_num_seqs": 2}) as live:
        yield live


def reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def half_close(connection: socket.socket) -> None:
    """Our side of the connection only. It counts as leaving: HTTP/1.1 clients keep it open while they wait."""
    connection.shutdown(socket.SHUT_WR)
    connection.settimeout(5)
    while connection.recv(65536):
        pass
    connection.close()


@pytest.mark.parametrize("leave", [socket.socket.close, reset, half_close], ids=["close", "reset", "half-close"])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("route, make", [("completions", completion_body), ("chat/completions", chat_body)])
def test_leaving_while_it_runs(slow, route, make, stream, leave):
    aborts = slow.aborts()
    connection = send_raw(slow, make(max_tokens=400, stream=stream), route)
    wait_until(lambda: slow.usage()["running"] == 1)
    start = time.monotonic()
    leave(connection)
    slow.wait_idle()
    assert time.monotonic() - start < 2.5, "not only when it would have ended anyway, after four seconds"
    assert slow.aborts() == aborts + 1


@pytest.mark.parametrize("at_once", [True, False], ids=["at-once", "later"])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_leaving_while_more_requests_are_pipelined(slow, caplog, stream, at_once):
    """uvicorn tells only the last of them; the one that runs would write on a closed connection."""
    aborts = slow.aborts()
    url, raw = urlsplit(slow.url), json.dumps(completion_body(max_tokens=400, stream=stream)).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}"
    request = head.encode() + b"\r\n\r\n" + raw
    connection = socket.create_connection((url.hostname, url.port))
    connection.sendall(request * 3 if at_once else request)
    wait_until(lambda: slow.usage()["running"] == 1)
    if not at_once:
        connection.sendall(request * 2)
        time.sleep(0.05)
    start = time.monotonic()
    reset(connection)
    slow.wait_idle()
    assert time.monotonic() - start < 2.5, "not only when it would have ended anyway, after four seconds"
    wait_until(lambda: slow.connections() == 0)
    assert slow.aborts() == aborts + 1 and not [r for r in caplog.records if r.levelname == "ERROR"]


def test_garbage_after_a_request_does_not_become_a_part_of_its_response(slow):
    received = b""
    with send_raw(slow, completion_body(max_tokens=400, stream=True)) as connection:
        while b"data: " not in received:
            received += connection.recv(65536)
        connection.sendall(b"\x00\xff" * 100)
        with contextlib.suppress(ConnectionError):
            while piece := connection.recv(65536):
                received += piece
    assert b"HTTP/1.1 400" not in received and b"0\r\n\r\n" not in received
    slow.wait_idle()


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_leaving_while_it_waits(slow, stream):
    aborts = slow.aborts()
    running = [send_raw(slow, completion_body(max_tokens=400, stream=True)) for _ in range(2)]
    wait_until(lambda: slow.usage()["running"] == 2)
    waiting = send_raw(slow, completion_body(max_tokens=400, stream=stream))
    wait_until(lambda: slow.usage()["waiting"] == 1)
    waiting.close()
    wait_until(lambda: slow.usage()["waiting"] == 0)
    assert slow.aborts() == aborts + 1
    assert slow.usage()["running"] == 2, "the others go on"
    for connection in running:
        connection.close()
    slow.wait_idle()


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_leaving_ends_all_prompts_and_samples(slow, stream):
    aborts = slow.aborts()
    body = completion_body(prompt=["a", "b", "c", "d"], n=3, max_tokens=400, stream=stream)
    connection = send_raw(slow, body)
    wait_until(lambda: slow.usage()["running"] == 2 and slow.usage()["live"] == 4)
    connection.close()
    slow.wait_idle()
    assert slow.aborts() == aborts + 4


def test_leaving_in_the_middle_of_the_body(slow):
    url = urlsplit(slow.url)
    with socket.create_connection((url.hostname, url.port)) as connection:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        connection.sendall(head + b"Content-Length: 500\r\n\r\n{")
        time.sleep(0.05)
    assert slow.usage()["live"] == 0


def test_the_neighbours_of_one_that_leaves_notice_nothing(slow):
    answers = {}

    def ask(i: int) -> None:
        with slow.client() as client:
            body = completion_body(prompt=f"neighbour {i}", max_tokens=60, seed=i)
            answers[i] = client.post("/v1/completions", json=body).json()["choices"][0]["text"]

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(10):
        connection = send_raw(slow, completion_body(max_tokens=300, stream=True))
        time.sleep(0.02)
        reset(connection)
    for thread in threads:
        thread.join(20)
    assert answers == {i: expected_text(f"neighbour {i}".encode(), i, 60) for i in range(3)}
    slow.wait_idle()


def test_a_thousand_come_and_go_and_nothing_is_left(folder):
    """Tasks are back at their baseline, too: watchers and pumps end with their request."""
    with LiveServer(folder, "--step-seconds", "0.002", engine={"max_num_seqs": 16}) as live, live.client() as client:

        def tasks() -> float:
            lines = client.get("/metrics").text.splitlines()
            return float(next(line for line in lines if line.startswith("pageserve:asyncio_tasks")).split()[1])

        client.post("/v1/completions", json=completion_body(stream=True))  # starts sse-starlette's one watcher, too
        baseline = tasks()
        for i in range(50):
            make = completion_body if i % 2 else chat_body
            route = "completions" if i % 2 else "chat/completions"
            batch = [send_raw(live, make(max_tokens=100, stream=bool(j % 3), n=1 + j % 2), route) for j in range(20)]
            time.sleep(0.01 * (i % 3))
            for j, connection in enumerate(batch):
                (reset if j % 2 else socket.socket.close)(connection)
        live.wait_idle(20)
        wait_until(lambda: tasks() <= baseline)


def test_a_client_that_reads_nothing_is_let_go(folder, monkeypatch):
    monkeypatch.setattr("server.output.sse.STALL_SECONDS", 0.3)
    live = LiveServer(folder, "--step-seconds", "0.001", keep_alive_interval=0.1, engine={"max_model_len": 4096})
    live.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # connections inherit it
    with live:
        with send_raw(live, completion_body(max_tokens=4000, n=4, stream=True)) as connection:
            wait_until(lambda: live.usage()["live"] == 1)
            live.wait_idle(20)
            assert live.aborts() == 1
            wait_until(lambda: live.connections() == 0)  # the socket, too, although nothing was read
            received = b""
            while piece := connection.recv(65536):
                received += piece
            assert b"[DONE]" not in received


async def test_what_a_client_that_left_had_asked_for_is_freed_at_once():
    """Not only by the garbage collector, whose long rounds are rare: an answer may hold a hundred megabytes."""

    class Answer:
        pass

    async def leave():
        await asyncio.sleep(0)
        return {"type": "http.disconnect"}

    async def ask() -> weakref.ref:
        answer = Answer()

        async def work():
            await asyncio.sleep(60)
            return answer

        with pytest.raises(ClientDisconnect):
            await while_connected(leave, work)
        return weakref.ref(answer)

    gc.disable()
    try:
        left = await ask()
        await asyncio.sleep(0.01)
        assert left() is None
    finally:
        gc.enable()

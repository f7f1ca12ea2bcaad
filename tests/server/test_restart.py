"""Clients and probes while a dead Worker is replaced: streams pause, with comments, and go on."""

import os
import signal
import threading
import time

import pytest

from tests.server.live import LiveServer, assert_error, chat_body, chat_prompt, completion_body, events, expected_text
from tests.server.metrics import value

LOAD_SECONDS = 1.5


@pytest.fixture
def live(folder):
    options = ["--load-seconds", str(LOAD_SECONDS), "--step-seconds", "0.01"]
    with LiveServer(folder, *options, keep_alive_interval=0.2, max_queued_requests=4) as live:
        yield live


def kill_worker(live, client):
    os.kill(live.call(lambda: live.driver.worker_pid), signal.SIGKILL)
    end = time.monotonic() + 5
    while client.get("/ready").status_code == 200:
        assert time.monotonic() < end
        time.sleep(0.005)


def test_a_stream_pauses_with_comments_and_goes_on(live):
    with live.client() as client:
        with client.stream("POST", "/v1/completions", json=completion_body(stream=True, max_tokens=80)) as response:
            pieces = response.iter_text()
            text = "".join(next(pieces) for _ in range(5))
            kill_worker(live, client)
            text += "".join(pieces)
        *found, done = events(text)
        chunks = [event for event in found if isinstance(event, dict)]
        assert done == "[DONE]"
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected_text(b"hello", 1, 80)
        assert found.count(": keep-alive") >= 2, "proxies and clients hear that it is alive"
        assert value(client, "pageserve:worker_restarts") == 1
        assert value(client, "pageserve:recomputed_sequences") == 1
        assert value(client, "pageserve:recomputed_tokens") >= 5
    live.wait_idle()


def test_probes_during_a_restart(live):
    with live.client() as client:
        kill_worker(live, client)
        response = client.get("/ready")
        assert response.status_code == 503 and response.json()["phase"] == "restarting"
        assert response.headers["retry-after"] == "1"
        assert client.get("/health").status_code == 200, "the process needs no restart"
        assert client.get("/v1/models").status_code == 200
        assert client.get("/metrics").status_code == 200
        end = time.monotonic() + 10
        while client.get("/ready").status_code != 200:
            assert time.monotonic() < end
            time.sleep(0.02)
        assert client.get("/health").status_code == 200


def test_requests_that_come_during_a_restart_wait_until_the_queue_is_full(live):
    answers = {}

    def ask(name, path, body):
        with live.client() as client:
            answers[name] = client.post(path, json=body)

    with live.client() as client:
        kill_worker(live, client)
        asks = [
            ("plain", "/v1/completions", completion_body(n=2, prompt=["a", "b"])),
            ("late", "/v1/chat/completions", chat_body()),
        ]
        threads = []
        for arguments in asks:
            threads.append(threading.Thread(target=ask, args=arguments))
            threads[-1].start()
            end = time.monotonic() + 5
            while live.usage()["waiting"] < 4 and time.monotonic() < end:
                time.sleep(0.01)
        for thread in threads:
            thread.join(20)
    assert [choice["text"] for choice in answers["plain"].json()["choices"]] == [
        expected_text(text, 1, 8, index) for text in (b"a", b"b") for index in (0, 1)
    ]
    assert_error(answers["late"], 429, code="rate_limit_exceeded")
    live.wait_idle()


def test_a_request_without_streaming_lives_through_it(live):
    answers = []
    with live.client() as client:
        thread = threading.Thread(target=lambda: answers.append(client.post("/v1/chat/completions", json=body)))
        body = chat_body(max_tokens=60)
        thread.start()
        while live.usage()["running"] == 0:
            time.sleep(0.01)
        with live.client() as other:
            kill_worker(live, other)
        thread.join(20)
    assert answers[0].json()["choices"][0]["message"]["content"] == expected_text(chat_prompt("hello"), 1, 60)


def test_a_client_that_leaves_during_a_restart_leaves_nothing(live):
    with live.client() as client:
        with client.stream("POST", "/v1/completions", json=completion_body(stream=True, max_tokens=400)) as response:
            next(response.iter_text())
            kill_worker(live, client)
        end = time.monotonic() + 5
        while live.usage()["live"]:
            assert time.monotonic() < end
            time.sleep(0.01)
        assert client.get("/ready").json()["phase"] == "restarting", "it was noticed before the Worker was back"
    live.wait_idle()

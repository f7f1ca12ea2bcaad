"""Bodies: JSON bounds that are checked before parsing, and the budget of bytes that the server holds."""

import json
import platform
import random
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from server.http import json_bounds
from server.http.body_budget import SMALL_BYTES, BodyBudget, OverBudgetError
from server.http.json_bounds import JsonBounds, JsonBoundsError, body_bounds
from server.protocol.tools import parse_arguments
from tests.server.live import JSON, LiveServer, assert_error, completion_body

ANY = 10**9
ROOT = Path(__file__).parents[3]


def levels(value) -> int:
    return 1 + max(map(levels, parts(value)), default=0) if isinstance(value, dict | list) else 0


def containers(value) -> int:
    return 1 + sum(map(containers, parts(value))) if isinstance(value, dict | list) else 0


def parts(value) -> list:
    return list(value.values() if isinstance(value, dict) else value)


def random_json(rng: random.Random, depth: int = 0):
    kind = rng.random()
    if depth and (depth > 4 or kind < 0.3):
        return "".join(rng.choice('ab"\\[]{},:é') for _ in range(rng.randrange(12)))
    if kind < 0.65:
        return [random_json(rng, depth + 1) for _ in range(rng.randrange(4))]
    return {f'{i}"\\{{': random_json(rng, depth + 1) for i in range(rng.randrange(4))}


@pytest.mark.parametrize("slice_size", [1, 2, 7, 1 << 18])
def test_levels_and_containers_are_counted_outside_of_strings(monkeypatch, slice_size):
    monkeypatch.setattr(json_bounds, "SLICE", slice_size)
    rng = random.Random(1)
    for _ in range(100 if slice_size < 7 else 400):
        value = [random_json(rng), "[{" * 99]  # a count that takes the strings in tells nothing
        text = json.dumps(value, ensure_ascii=rng.random() < 0.5)
        deep, many = levels(value), containers(value)
        JsonBounds(deep, many, ANY, ANY).check(text)
        JsonBounds(deep, many, ANY, ANY).check(text.encode())
        for bounds in (JsonBounds(deep - 1, many, ANY, ANY), JsonBounds(deep, many - 1, ANY, ANY)):
            with pytest.raises(JsonBoundsError):
                bounds.check(text)


def test_commas_and_colons_are_counted_outside_of_strings():
    text = json.dumps({"a": ",:" * 50, "b": [1, 2, 3]})
    for bounds, wrong in ((JsonBounds(2, 9, 2, 9), "commas"), (JsonBounds(2, 9, 9, 1), "colons")):
        with pytest.raises(JsonBoundsError, match=wrong):
            bounds.check(text)
    JsonBounds(2, 9, 3, 2).check(text)


BRACKETS = "[" * 500 + "]" * 500


@pytest.mark.parametrize(
    "prompt, wrong",
    [
        (f"[{BRACKETS}]", "256 levels"),
        ("[" + "[]," * 140_000 + "[]]", "lists and objects"),
        ("[" + "7," * 530_000 + "7]", "commas"),
        ("{" + '"a":1,' * 140_000 + '"b":1}', "colons"),
    ],
    ids=["deep", "containers", "numbers", "names"],
)
def test_a_body_of_too_many_things_is_refused_before_it_is_parsed(client, prompt, wrong):
    content = f'{{"model":"alias","prompt":{prompt}'  # not JSON: parsing would find another error
    response = client.post("/v1/completions", content=content, headers=JSON)
    assert wrong in assert_error(response, 400, code="invalid_json")


def test_text_full_of_brackets_is_text(client):
    """It is refused for its length, if at all."""
    code = '{"a": [[[{},:\\"]]]}' * 40_000
    assert body_bounds(512).levels < code.count("[")
    response = client.post("/v1/completions", json=completion_body(prompt=code))
    assert_error(response, 400, "prompt", "context_length_exceeded")
    response = client.post("/v1/completions", json=completion_body(prompt="[{:," * 70, max_tokens=1))
    assert response.status_code == 200


def test_arguments_of_a_call_have_bounds_of_their_own():
    assert parse_arguments('{"a": "' + "[" * 100_000 + '"}') == {"a": "[" * 100_000}
    assert parse_arguments('{"a": ' + "[" * 200 + "]" * 200 + "}") is None
    assert parse_arguments('{"a": [' + "[]," * 20_000 + "[]]}") is None


def test_large_bodies_are_parsed_off_the_loop(server, client):
    """... and small ones are not made to wait for a thread."""
    threads = []
    original = json.loads

    def spy(text, **options):
        threads.append(threading.current_thread().name)
        return original(text, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("server.http.body.json.loads", spy)
        for text in ("a", "a b " * 20_000):
            client.post("/v1/completions", json=completion_body(prompt=text))
    names = [name for name in threads if name != threading.current_thread().name]
    assert len(names) == 2 and names[1].startswith("parsing") and not names[0].startswith("parsing")


def test_the_budget_refuses_large_bodies_and_takes_small_ones():
    budget, mb = BodyBudget(of_all=10 << 20, of_a_key=4 << 20), 1 << 20
    budget.add("a", 0, 6 * mb)  # alone, it may be as large as bodies may be
    with pytest.raises(OverBudgetError) as error:
        budget.add("a", 0, mb)
    assert error.value.status == 429 and error.value.headers["retry-after"] == "1"
    budget.add("a", 0, SMALL_BYTES)
    budget.add("b", 0, 3 * mb)
    with pytest.raises(OverBudgetError) as error:
        budget.add("c", 0, mb)
    assert error.value.status == 503
    for tenant, size in (("a", 6 * mb), ("a", SMALL_BYTES), ("b", 3 * mb)):
        budget.give_back(tenant, size)
    budget.add("b", SMALL_BYTES, 10 * mb - SMALL_BYTES)
    with pytest.raises(OverBudgetError):
        budget.add("b", SMALL_BYTES, mb)


def trickle(live: LiveServer, key: str, num_bytes: int) -> socket.socket:
    """A connection with that much of a body that does not end."""
    connection = socket.create_connection(live.listener.getsockname())
    connection.settimeout(10)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\ncontent-length: 3000000\r\n"
    connection.sendall(f"{head}content-type: application/json\r\n\r\n".encode() + b" " * num_bytes)
    return connection


def test_bodies_under_way_have_a_limit_for_each_key_and_for_all(folder, monkeypatch):
    monkeypatch.setattr("server.http.body.DISCARD_SECONDS", 0.1)
    limits = {"max_bytes_in_flight": 4 << 20, "max_bytes_in_flight_per_key": 2 << 20}
    with LiveServer(folder, api_key=("a", "b", "c"), **limits) as live, live.client() as client:

        def ask(key: str, size: int):
            body = completion_body(prompt="hello", prediction={"content": "x" * size})
            return client.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})

        with trickle(live, "a", 1_900_000):
            time.sleep(0.2)
            response = ask("a", 300_000)
            assert_error(response, 429, code="rate_limit_exceeded")
            assert response.headers["retry-after"] == "1" and response.headers["connection"] == "close"
            assert ask("a", 1000).status_code == 200 and ask("b", 300_000).status_code == 200
            with trickle(live, "b", 1_900_000):
                time.sleep(0.2)
                assert_error(ask("c", 500_000), 503, code="service_unavailable")
                assert ask("c", 1000).status_code == 200
        time.sleep(0.2)  # both have left
        assert ask("a", 1_500_000).status_code == ask("c", 1_500_000).status_code == 200
        metrics = client.get("/metrics", headers={"authorization": "Bearer a"}).text
        assert 'requests_refused_total{reason="key_bytes"} 1.0' in metrics
        assert 'requests_refused_total{reason="bytes"} 1.0' in metrics


def test_a_request_that_was_admitted_holds_no_bytes(folder):
    limits = {"max_bytes_in_flight_per_key": 1 << 20}
    with LiveServer(folder, "--step-seconds", "0.05", api_key=("a", "b"), **limits) as live:
        headers = {"authorization": "Bearer a"}
        body = completion_body(stream=True, max_tokens=40, prediction={"content": "x" * 900_000})
        with live.client(headers=headers) as one, one.stream("POST", "/v1/completions", json=body) as stream:
            chunks = stream.iter_bytes()  # which, let go, would close the connection
            next(chunks)
            with live.client(headers=headers) as other:
                assert other.post("/v1/completions", json=body | {"stream": False, "max_tokens": 1}).status_code == 200


TRIM = """
import asyncio, sys, threading
from server.process import memory

memory.PERIOD_SECONDS = 0.05
before, pins = memory.anonymous_bytes(), []

def fill():
    blocks = [bytes(2000) for _ in range(50_000)]
    pins.append(blocks[-1])

async def main():
    if sys.argv[1] == "on":
        memory.set_allocator()
        trimming = asyncio.create_task(memory.keep_trimmed(lambda: True))
        await asyncio.sleep(0)
    for _ in range(3):
        await asyncio.to_thread(fill)
    await asyncio.sleep(0.3)

asyncio.run(main())
print((memory.anonymous_bytes() - before) >> 20)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator")
def test_what_was_freed_goes_back():
    """With as much of it freed between what is still in use, it would not go by itself."""
    left = {}
    for mode in ("off", "on"):
        command = [sys.executable, "-c", TRIM, mode]
        left[mode] = int(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
    assert left["off"] > 50 and left["on"] < 20, left

"""Limits of a key, of the queue, and of a request's own time."""

import hashlib
import json
import threading
import time
from functools import partial

import pytest

from engine.errors import QueueFullError
from engine.requests.queue_limits import QueueLimits
from server.errors import ApiError
from server.http.rate_limits import Limits, RateLimiter, TokenBucket, duration
from tests.server.live import LiveServer, assert_error, chat_body, completion_body, requests_of
from tests.server.metrics import value


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def test_a_bucket_fills_evenly_and_holds_a_minute():
    clock = Clock()
    bucket = TokenBucket(60, clock)
    bucket.consume(60)
    assert bucket.seconds_until(1) == 1.0 and bucket.seconds_until(30) == 30.0
    clock.now += 0.5
    assert bucket.level == 0.5
    clock.now += 600
    assert bucket.level == 60.0
    bucket.consume(90)  # overdrawn
    assert bucket.seconds_until(1) == 31.0 and bucket.seconds_until(1000) == 90.0


def test_retry_after_is_when_the_next_request_passes():
    clock = Clock()
    limiter = RateLimiter(Limits(requests_per_minute=6), clock)
    for _ in range(6):
        limiter.end(limiter.begin())
    with pytest.raises(ApiError) as caught:
        limiter.begin()
    assert caught.value.headers["retry-after"] == "10" and caught.value.status == 429
    clock.now += 9.9
    with pytest.raises(ApiError):
        limiter.begin()
    clock.now += 0.1
    limiter.end(limiter.begin())


def test_other_limits_keep_what_is_in_a_bucket_that_stays():
    clock = Clock()
    limiter = RateLimiter(Limits(requests_per_minute=2, tokens_per_minute=100), clock)
    limiter.end(limiter.begin())
    limiter.set(Limits(requests_per_minute=2))
    assert next(name for name, _ in limiter.headers()) == b"x-ratelimit-limit-requests"
    assert dict(limiter.headers())[b"x-ratelimit-remaining-requests"] == b"1" and len(limiter.headers()) == 3


def test_what_was_used_stays_used_under_other_limits():
    limiter = RateLimiter(Limits(requests_per_minute=3, tokens_per_minute=100), Clock())
    for _ in range(3):
        limiter.begin()
    limiter.use_tokens(150)
    for requests, left in ((4, b"1"), (3, b"0"), (2, b"0"), (10, b"7")):
        limiter.set(Limits(requests_per_minute=requests, tokens_per_minute=120))
        assert dict(limiter.headers())[b"x-ratelimit-remaining-requests"] == left
    with pytest.raises(ApiError, match="16 s") as caught:  # 30 of 120 a minute are overdrawn, and it needs one
        limiter.check_tokens(1)
    assert caught.value.status == 429


@pytest.mark.parametrize(
    "seconds, text", [(0, "0s"), (0.12, "120ms"), (1, "1s"), (59.5, "59.5s"), (60, "1m0s"), (400.25, "6m40.25s")]
)
def test_durations_are_written_as_openai_does(seconds, text):
    assert duration(seconds) == text


def test_requests_per_minute_and_their_headers(folder):
    with LiveServer(folder, requests_per_minute=3) as live, live.client() as client:
        left = []
        for _ in range(3):
            response = client.post("/v1/completions", json=completion_body())
            assert response.status_code == 200
            left.append(response.headers["x-ratelimit-remaining-requests"])
        assert left == ["2", "1", "0"] and response.headers["x-ratelimit-limit-requests"] == "3"
        assert response.headers["x-ratelimit-reset-requests"].endswith("s")
        assert "x-ratelimit-limit-tokens" not in response.headers
        refused = client.post("/v1/completions", json=completion_body())
        assert_error(refused, 429, code="rate_limit_exceeded")
        assert 18 <= int(refused.headers["retry-after"]) <= 20
        assert client.get("/v1/models").status_code == 200, "only what is computed for is counted"
        assert 'requests_refused_total{reason="key_requests"} 1.0' in client.get("/metrics").text


def test_tokens_per_minute_count_prompts_and_answers(folder):
    with LiveServer(folder, tokens_per_minute=60) as live, live.client() as client:
        first = client.post("/v1/completions", json=completion_body(prompt="x" * 30, max_tokens=20, ignore_eos=True))
        assert first.headers["x-ratelimit-remaining-tokens"] == "10"
        second = client.post("/v1/completions", json=completion_body(prompt="x" * 30))
        assert_error(second, 429, code="rate_limit_exceeded")
        assert 18 <= int(second.headers["retry-after"]) <= 20, "30 tokens at one per second, 10 are there"
        third = client.post("/v1/completions", json=completion_body(prompt="x" * 5, max_tokens=60, ignore_eos=True))
        assert third.status_code == 200, "a short prompt may overdraw by its answer"
        assert_error(client.post("/v1/completions", json=completion_body(prompt="x")), 429)


def embedding_body(**fields):
    return {"model": "org/fake-model", "input": "hello"} | fields


def test_tokens_per_minute_count_embedded_texts(folder):
    with LiveServer(folder, tokens_per_minute=60) as live, live.client() as client:
        first = client.post("/v1/embeddings", json=embedding_body(input=["x" * 20, "y" * 25]))
        assert first.status_code == 200 and first.headers["x-ratelimit-remaining-tokens"] == "15"
        refused = client.post("/v1/embeddings", json=embedding_body(input=["x" * 10, "y" * 10]))
        assert_error(refused, 429, code="rate_limit_exceeded")
        assert 4 <= int(refused.headers["retry-after"]) <= 5, "20 tokens at one per second, 15 are there"
        assert client.post("/v1/embeddings", json=embedding_body(input="x" * 15)).status_code == 200


def test_embedded_texts_are_signed_by_their_key(folder, tmp_path):
    """Tenant and weight decide who is served; who may go first is checked before anything is computed."""
    path = tmp_path / "keys"
    path.write_text("plain sk-a weight=3\nother sk-b\n")
    with LiveServer(folder, api_key_file=str(path)) as live, live.client() as client:
        client.headers["authorization"] = "Bearer sk-a"
        assert_error(client.post("/v1/embeddings", json=embedding_body(priority=-1)), 400, "priority")
        generate, seen = live.driver.generate, []
        live.driver.generate = lambda request: seen.append(request) or generate(request)
        assert client.post("/v1/embeddings", json=embedding_body(input=["a", "b"], priority=1)).status_code == 200
        digest = hashlib.sha256(b"sk-a").hexdigest()
        assert [(request.tenant, request.weight) for request in seen] == [(digest, 3.0)] * 2


def test_keys_have_limits_of_their_own(folder, tmp_path):
    path = tmp_path / "keys"
    path.write_text("a sk-a requests-per-minute=1\nb sk-b requests-per-minute=none\nc sk-c\n")
    with LiveServer(folder, api_key_file=str(path), requests_per_minute=2) as live, live.client() as client:

        def statuses(key, count):
            headers = {"authorization": f"Bearer {key}"}
            return [
                client.post("/v1/completions", json=completion_body(), headers=headers).status_code
                for _ in range(count)
            ]

        assert statuses("sk-a", 3) == [200, 429, 429]
        assert statuses("sk-b", 4) == [200] * 4
        assert statuses("sk-c", 3) == [200, 200, 429]


def test_requests_at_a_time_streams_included(folder):
    with LiveServer(folder, "--step-seconds", "0.02", max_concurrent_requests=2) as live, live.client() as client:
        body = completion_body(stream=True, max_tokens=200, ignore_eos=True)
        with client.stream("POST", "/v1/completions", json=body) as one:
            lines = one.iter_lines()
            next(lines)
            with client.stream("POST", "/v1/completions", json=body) as two:
                more_lines = two.iter_lines()
                next(more_lines)
                refused = client.post("/v1/completions", json=completion_body())
                assert_error(refused, 429, code="rate_limit_exceeded")
                assert int(refused.headers["retry-after"]) >= 1
        live.wait_idle()
        deadline = time.monotonic() + 10
        while client.post("/v1/completions", json=completion_body()).status_code != 200:
            assert time.monotonic() < deadline, "a client that left is still counted"
            time.sleep(0.02)


def test_priority_before_others_needs_permission_where_there_are_others(folder, tmp_path):
    path = tmp_path / "keys"
    path.write_text("plain sk-a\nurgent sk-b min-priority=-5\n")
    with LiveServer(folder, api_key_file=str(path)) as live, live.client() as client:

        def ask(key, priority):
            headers = {"authorization": f"Bearer {key}"}
            return client.post("/v1/completions", json=completion_body(priority=priority), headers=headers)

        assert_error(ask("sk-a", -1), 400, "priority")
        assert [ask("sk-a", 0).status_code, ask("sk-a", 7).status_code, ask("sk-b", -5).status_code] == [200] * 3
        assert_error(ask("sk-b", -6), 400, "priority")


def test_the_queue_is_bounded_in_tokens_and_says_when_it_is_worked_off():
    limits = QueueLimits(1000, 5000)
    now = 0.0
    for _ in range(100):  # 2000 tokens per second, half of the time idle
        limits.step_sent(now)
        limits.step_done(200, now + 0.1, False)
        limits.request_done(50)
        now += 0.2
    assert limits.tokens_per_second == pytest.approx(2000)
    limits.check(10, 4900, 100)
    limits.check(0, 0, 9000)  # alone, anything that the model takes
    with pytest.raises(QueueFullError) as caught:
        limits.check(10, 4900, 101)
    assert caught.value.limit == "tokens"
    assert caught.value.retry_after == pytest.approx((4900 + 10 * 50) / 2000, rel=0.01)
    with pytest.raises(QueueFullError) as caught:
        limits.check(1000, 4900, 1)
    assert caught.value.limit == "requests" and caught.value.retry_after == pytest.approx(
        (4900 + 50_000) / 2000, rel=0.01
    )


def test_queued_tokens_are_refused_with_429(folder, monkeypatch):
    options = {"max_queued_tokens": 50, "engine": {"max_num_seqs": 1}}
    with LiveServer(folder, "--step-seconds", "0.05", **options) as live, live.client() as client:
        body = completion_body(prompt="x" * 40, max_tokens=300, ignore_eos=True, stream=True)
        threads, seen = [], requests_of(live, monkeypatch)
        for _ in range(2):
            threads.append(threading.Thread(target=lambda: client.post("/v1/completions", json=body)))
            threads[-1].start()
            deadline = time.monotonic() + 10
            while live.driver.num_live_requests < len(threads) and time.monotonic() < deadline:
                time.sleep(0.01)
        refused = client.post("/v1/completions", json=body)
        assert "40 tokens" in assert_error(refused, 429, code="rate_limit_exceeded")
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert 'requests_refused_total{reason="queue_tokens"} 1.0' in client.get("/metrics").text
        assert value(client, "pageserve:num_tokens_waiting") == 40, "the prompt that waits, not the refused one"
        for request in seen:
            live.call(partial(live.driver.abort, request.request_id))
        for thread in threads:
            thread.join()
        live.wait_idle()
        assert value(client, "pageserve:num_tokens_waiting") == 0


@pytest.fixture(scope="module")
def slow(folder):
    """One row, twenty steps a second."""
    with LiveServer(folder, "--step-seconds", "0.05", engine={"max_num_seqs": 1}) as live:
        yield live


def test_a_request_that_waits_too_long_is_dropped_before_prefill(slow):
    with slow.client() as client:
        before = value(client, "pageserve:requests_expired", state="waiting")
        with client.stream(
            "POST", "/v1/completions", json=completion_body(stream=True, max_tokens=500, ignore_eos=True)
        ) as running:
            lines = running.iter_lines()
            next(lines)
            queries = slow.call(lambda: slow.driver.scheduler.block_manager.num_prefix_queries)
            response = client.post("/v1/completions", json=completion_body(timeout=0.2))
            message = assert_error(response, 408, "timeout", "deadline_exceeded")
            assert "0.2 s" in message and response.headers["x-should-retry"] == "false"
            assert slow.call(lambda: slow.driver.scheduler.block_manager.num_prefix_queries) == queries
        assert value(client, "pageserve:requests_expired", state="waiting") == before + 1
        slow.wait_idle()


@pytest.mark.parametrize("route, body", [("completions", completion_body), ("chat/completions", chat_body)])
def test_a_running_request_ends_with_an_error_when_its_time_is_over(slow, route, body):
    with slow.client() as client:
        fields = {"max_tokens": 400, "ignore_eos": True, "timeout": 0.3}
        assert_error(client.post(f"/v1/{route}", json=body(**fields)), 408, "timeout", "deadline_exceeded")
        streamed = client.post(f"/v1/{route}", json=body(**fields, stream=True))
        assert streamed.status_code == 200 and "[DONE]" not in streamed.text
        last = json.loads(streamed.text.strip().split("data: ")[-1])
        assert last["error"]["code"] == "deadline_exceeded" and last["error"]["param"] == "timeout"
        slow.wait_idle()


def test_embeddings_have_one_deadline_for_all_their_texts(slow):
    with slow.client() as client:
        start = time.monotonic()
        late = client.post("/v1/embeddings", json=embedding_body(input=[f"text {i}" for i in range(200)], timeout=0.4))
        message = assert_error(late, 408, "timeout", "deadline_exceeded")
        assert "0.4 s" in message and time.monotonic() - start < 5.0, "200 steps take ten seconds"
        slow.wait_idle()
        assert client.post("/v1/embeddings", json=embedding_body(input=["a", "b"], timeout=20)).status_code == 200
        assert_error(client.post("/v1/embeddings", json=embedding_body(timeout=0)), 400, "timeout")


def test_a_request_that_is_done_in_time_notices_nothing(slow, caplog):
    with slow.client() as client:
        before = value(client, "pageserve:requests_expired")
        assert client.post("/v1/completions", json=completion_body(max_tokens=2, timeout=1)).status_code == 200
        assert client.post("/v1/embeddings", json=embedding_body(input=["a", "b"], timeout=1)).status_code == 200
        time.sleep(1.1)
        assert value(client, "pageserve:requests_expired") == before
        assert not caplog.records, "a timer that is still set would raise in the loop: its request is gone"

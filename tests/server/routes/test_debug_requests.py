"""GET /debug/requests/{id} and return_timings: what they say of a request in each of its states."""

import json

import pytest

from engine.memory.sequence import Sequence
from engine.outputs import FinishReason
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.telemetry.request_log import MAX_FINISHED, RequestLog, StepMeter
from engine.telemetry.request_timings import RequestTimings
from engine.telemetry.stats import EngineStats
from server.protocol.anthropic.message_answers import AnthropicMessage
from server.protocol.responses.response_answers import ResponseObject
from tests.server.live import MODEL, LiveServer, assert_error, chat_body, completion_body, requests_of

SECONDS = ("queue_seconds", "prefill_seconds", "decode_seconds")


@pytest.fixture(scope="module")
def slow(folder):
    engine = {"max_num_batched_tokens": 32, "max_num_seqs": 2}
    with LiveServer(folder, "--step-seconds", "0.01", engine=engine) as live, live.client() as client:
        yield live, client


def report(client, response_id: str) -> dict:
    response = client.get(f"/debug/requests/{response_id}")
    assert response.status_code == 200 and response.headers["cache-control"] == "no-store"
    [found] = response.json()["timings"]
    return found


def test_a_finished_request_accounts_for_its_time(slow):
    _, client = slow
    prompt = [65 + i % 20 for i in range(70)]
    answer = client.post("/v1/completions", json=completion_body(prompt=prompt, max_tokens=9)).json()
    found = report(client, answer["id"])
    assert (found["state"], found["finish_reason"]) == ("finished", "length")
    assert (found["prompt_tokens"], found["cached_tokens"], found["completion_tokens"]) == (70, 0, 9)
    assert found["prefill_chunks"] == [{"tokens": n, "batch_size": 1} for n in (32, 32, 6)]
    assert (found["num_prefill_chunks"], found["steps"], found["mean_batch_size"]) == (3, 3 + 8, 1.0)
    assert found["preemptions"] == found["worker_restarts"] == 0
    assert sum(found[name] for name in SECONDS) == pytest.approx(found["total_seconds"])
    assert found["prefill_seconds"] >= 0.03 and found["decode_seconds"] >= 0.08
    assert found["time_to_first_token_seconds"] == pytest.approx(found["queue_seconds"] + found["prefill_seconds"])


def test_the_prefix_cache_and_the_company_of_others_show(slow):
    _, client = slow
    body = completion_body(prompt=[99] * 40, max_tokens=20, return_timings=True)
    client.post("/v1/completions", json=body)
    answer = client.post("/v1/completions", json=body | {"n": 2, "temperature": 1.0}).json()
    [found] = answer["timings"]
    assert found == report(client, answer["id"])
    assert found["cached_tokens"] == 39 and found["prefill_chunks"] == [{"tokens": 1, "batch_size": 2}]
    assert (found["completion_tokens"], found["steps"], found["mean_batch_size"]) == (40, 20, 2.0)


def test_the_steps_of_a_beam_search_are_no_chunks_of_its_prompt(slow):
    _, client = slow
    body = completion_body(use_beam_search=True, n=2, temperature=0, max_tokens=6, return_timings=True)
    [found] = client.post("/v1/completions", json=body).json()["timings"]
    assert (found["num_prefill_chunks"], found["completion_tokens"]) == (1, 12)


def test_a_running_request_and_one_that_waits(slow, monkeypatch):
    live, client = slow
    seen = requests_of(live, monkeypatch)
    body = completion_body(max_tokens=400, stream=True)
    with (
        client.stream("POST", "/v1/completions", json=body | {"n": 2, "temperature": 1.0}) as running,
        live.client() as other,
        other.stream("POST", "/v1/completions", json=body) as waiting,
        live.client() as third,
    ):
        lines = running.iter_lines()
        first = json.loads(next(lines).removeprefix("data: "))["id"]
        found = report(third, first)
        assert (found["state"], found["finish_reason"]) == ("running", None)
        assert found["completion_tokens"] > 0 and found["time_to_first_token_seconds"] > 0
        assert [request.request_id for request in seen[:1]] == [f"{first}-0"]
        found = report(third, seen[1].request_id.removesuffix("-0"))
        assert (found["state"], found["prefill_seconds"], found["mean_batch_size"]) == ("waiting", None, None)
        assert found["queue_seconds"] == found["total_seconds"] > 0
        waiting.close()
        running.close()
    live.wait_idle()
    assert report(client, first)["finish_reason"] == "abort"


def test_a_stream_and_a_chat_end_with_their_timings(slow):
    _, client = slow
    for path, body in (("completions", completion_body()), ("chat/completions", chat_body())):
        for options in ({}, {"stream_options": {"include_usage": True}}):
            text = client.post(f"/v1/{path}", json=body | {"stream": True, "return_timings": True} | options).text
            *_, last, done = [line.removeprefix("data: ") for line in text.splitlines() if line]
            assert done == "[DONE]" and json.loads(last)["choices"] == []
            assert json.loads(last)["timings"] == [report(client, json.loads(last)["id"])]
            assert ("usage" in json.loads(last)) == bool(options)
        assert client.post(f"/v1/{path}", json=body | {"return_timings": True}).json()["timings"][0]["steps"] > 0
        assert "timings" not in client.post(f"/v1/{path}", json=body).json()


@pytest.mark.parametrize(
    "path, body, model",
    [
        ("/v1/responses", {"input": "hello", "max_output_tokens": 8}, ResponseObject),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}, AnthropicMessage),
    ],
)
def test_the_other_apis_end_with_their_timings(slow, path, body, model):
    _, client = slow
    body = {"model": MODEL, **body}
    answer = client.post(path, json=body | {"return_timings": True}).json()
    assert answer["timings"] == [report(client, answer["id"])]
    model.model_validate(answer)
    text = client.post(path, json=body | {"return_timings": True, "stream": True}).text
    events = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]
    first = events[0].get("response") or events[0]["message"]
    told = [event.get("response", event).get("timings") for event in events]
    last = -1 if path.endswith("responses") else -2  # message_stop says nothing
    assert told.pop(last) == [report(client, first["id"])] and set(told) == {None}
    assert "timings" not in client.post(path, json=body).json()
    assert '"timings"' not in client.post(path, json=body | {"stream": True}).text
    assert client.post(path, json=body | {"return_timings": 1}).status_code == 400


def test_one_report_for_each_prompt(slow):
    _, client = slow
    answer = client.post("/v1/completions", json=completion_body(prompt=["a", "bc"], return_timings=True)).json()
    assert [found["prompt_tokens"] for found in answer["timings"]] == [1, 2]


@pytest.mark.parametrize("name", ["cmpl-unknown", "..", "x" * 5000, "%00", "cmpl-%C3%A9"])
def test_an_unknown_id(slow, name):
    assert_error(slow[1].get(f"/debug/requests/{name}"), 404)


def test_another_tenant_learns_nothing(folder):
    with LiveServer(folder, api_key=("a", "b")) as live, live.client() as client:
        keys = [{"authorization": f"Bearer {key}"} for key in "ab"]
        answer = client.post("/v1/completions", json=completion_body(), headers=keys[0]).json()
        path = f"/debug/requests/{answer['id']}"
        assert client.get(path, headers=keys[0]).status_code == 200
        assert_error(client.get(path, headers=keys[1]), 404, code="request_not_found")
        assert_error(client.get(path), 401, code="invalid_api_key")


def test_the_oldest_are_forgotten():
    log, timings = RequestLog(), RequestTimings(EngineStats(), StepMeter(), 1)
    seq = Sequence(0, [1], SamplingParams(), seed=0, max_num_tokens=2)
    for i in range(MAX_FINISHED + 1):
        request = Request(str(i), [1], SamplingParams(), tenant="tenant")
        log.add(request, timings.report(str(i), [seq], FinishReason.LENGTH))
    assert log.find("0", "tenant") is None and log.find("1", "tenant").id == "1"
    assert log.find("1", "") is None

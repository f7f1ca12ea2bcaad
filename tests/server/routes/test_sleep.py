"""The routes of sleep and wake, who may use them, and what clients see meanwhile."""

import json

import pytest

from tests.server.live import MODEL, LiveServer, assert_error, completion_body
from tests.server.metrics import value

SLEEP, WAKE = f"/v1/models/{MODEL}/sleep", f"/v1/models/{MODEL}/wake"


@pytest.fixture(scope="module")
def live(folder):
    with LiveServer(folder, "--step-seconds", "0.002", "--load-seconds", "0.1", keep_alive_interval=0.05) as live:
        yield live


def state_of(client):
    listed = client.get("/v1/models").json()["data"]
    return {model["state"] for model in listed}


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_and_wake(live, level):
    with live.client() as client:
        assert client.post(f"{SLEEP}?level={level}").json() == {"state": "sleeping", "level": level}
        assert client.get("/ready").status_code == client.get("/health").status_code == 200
        assert client.get("/ready").json()["phase"] == "sleeping" and state_of(client) == {"sleeping"}
        assert client.get("/is_sleeping").json() == {"is_sleeping": True}
        name = ("weights_offloaded", "discard_all")[level - 1]
        lines = [line for line in client.get("/metrics").text.splitlines() if "engine_sleep_state{" in line]
        assert {line.split('sleep_state="')[1].split('"')[0] for line in lines if line.endswith(" 1.0")} == {name}
        assert client.post(WAKE).json() == {"state": "ready", "level": 0}
        assert client.post("/sleep").json()["level"] == 1 and client.post("/wake_up").json()["state"] == "ready"
        assert client.get("/is_sleeping").json() == {"is_sleeping": False}


@pytest.mark.parametrize("level", [1, 2])
def test_what_ran_waits_in_the_metrics_and_views_while_the_model_sleeps(live, level):
    def gauges(client):
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "pageserve:num_tokens_waiting")
        return [value(client, name) for name in (*names, "vllm:kv_cache_usage_perc")]

    with live.client() as client, live.client() as other:
        body = completion_body(prompt=[65] * 40, max_tokens=200, n=2, temperature=1, stream=True)
        with client.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()
            next(line for line in lines if line.startswith("data: {"))
            assert gauges(other)[0] == 2
            assert other.post(f"{SLEEP}?level={level}").json()["level"] == level
            running, waiting, tokens, usage = gauges(other)
            assert (running, waiting, usage) == (0, 2, 0) and tokens > 80
            blocks, steps = (other.get(f"/debug/{name}").json() for name in ("kv", "steps"))
            assert set(blocks["states"]) == {"."} and blocks["shared"] == blocks["partial"] == {}
            assert blocks["sequences"] == [] and len(blocks["states"]) == blocks["num_blocks"]
            assert {(view["num_running"], view["num_waiting"]) for view in (blocks, steps)} == {(0, 2)}
            assert other.post(WAKE).json()["state"] == "ready"
            assert list(lines)[-2] == "data: [DONE]"
        assert gauges(other) == [0, 0, 0, 0]


def test_a_stream_pauses_with_keep_alive_comments_and_a_request_wakes_it(live):
    with live.client() as client:
        expected = client.post("/v1/completions", json=completion_body(max_tokens=150)).json()["choices"][0]["text"]
        with client.stream("POST", "/v1/completions", json=completion_body(max_tokens=150, stream=True)) as stream:
            lines, text, comments = stream.iter_lines(), "", 0
            for line in lines:
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
                if len(text) > 5:
                    break
            with live.client() as other:
                other.post(f"{SLEEP}?level=2")
                for line in lines:
                    comments += line.startswith(":")
                    if line.startswith("data: {"):
                        text += json.loads(line[6:])["choices"][0]["text"]
                    if comments > 2:
                        break
                assert text and text != expected
                assert other.post("/v1/completions", json=completion_body(max_tokens=4)).status_code == 200
            for line in lines:
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
            assert text == expected


def test_wrong_questions(live):
    with live.client() as client:
        assert_error(client.post(f"{SLEEP}?level=3"), 400, param="level")
        assert_error(client.post("/v1/models/other/sleep"), 404, param="model")
        assert client.get(SLEEP).status_code == 404  # it reads as a model's name


def test_an_administrators_key_is_needed_where_there_are_several(folder, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("plain sk-a\nboss sk-b admin=true\n")
    keys.chmod(0o600)
    with LiveServer(folder, api_key_file=str(keys)) as live, live.client() as client:
        assert client.post(SLEEP).status_code == 401
        assert_error(client.post(SLEEP, headers={"authorization": "Bearer sk-a"}), 403, code="admin_key_required")
        answer = client.post(SLEEP, headers={"authorization": "Bearer sk-b"})
        assert answer.json() == {"state": "sleeping", "level": 1}

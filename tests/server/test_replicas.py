"""A server with two replicas: one model for clients, two engines for metrics and views."""

import re

from tests.server.live import LiveServer, assert_error, completion_body, expected_text


def test_one_model_on_two_workers(folder):
    with LiveServer(folder, engine={"data_parallel_size": 2}) as live, live.client() as client:
        assert len(client.get("/v1/models").json()["data"]) == 2, "a name and an alias"
        for prompt in ("hello", "world", "hello"):
            answer = client.post("/v1/completions", json=completion_body(prompt=prompt)).json()
            assert answer["choices"][0]["text"] == expected_text(prompt.encode(), 1, 8)
        assert len(client.get(f"/debug/requests/{answer['id']}").json()["timings"]) == 1
        page = client.get("/metrics").text
        done = re.findall(r'vllm:request_success_total\{engine="(\d)",finished_reason="length".* (\S+)', page)
        assert [engine for engine, _ in done] == ["0", "1"] and sum(float(n) for _, n in done) == 3
        assert len(re.findall(r'vllm:engine_sleep_state\{engine="\d".*"awake"\} 1', page)) == 2
        for path in ("/debug/kv", "/debug/steps"):
            assert client.get(path).status_code == client.get(f"{path}?engine=1").status_code == 200
            assert_error(client.get(f"{path}?engine=2"), 400, "engine")
        for path in ("/health", "/ready"):
            assert client.get(path).status_code == 200

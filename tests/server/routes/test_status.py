"""Models, probes, metrics, the description of the API, and what a server says that is not ready."""

import time
from collections import Counter

import pytest

from server.routes.metrics import VLLM_NAMES
from tests.server.live import MODEL, LiveServer, assert_error, chat_body, completion_body
from tests.server.metrics import families, value


def test_models_as_openai_and_vllm_give_them(client, server):
    listing = client.get("/v1/models").json()
    assert listing == client.get("/v1/models").json(), "created is constant"
    assert listing["object"] == "list"
    assert [model["id"] for model in listing["data"]] == [MODEL, "alias"]
    model = listing["data"][0]
    assert model["object"] == "model" and isinstance(model["created"], int) and model["owned_by"]
    assert model["max_model_len"] == 512
    assert model["root"] == server.driver.config.model
    assert client.get(f"/v1/models/{MODEL}").json() == model
    assert client.get("/v1/models/org%2Ffake-model").json() == model
    for name in ("nobody/nothing", "org", "org/fake-model/x"):
        assert_error(client.get(f"/v1/models/{name}"), 404, "model", "model_not_found")


def test_every_name_of_the_model_is_served_and_echoed(client):
    for name in (MODEL, "alias"):
        assert client.post("/v1/completions", json=completion_body(model=name)).json()["model"] == name


def test_the_default_name_is_the_model_as_given(folder):
    with LiveServer(folder, served_model_name=()) as live, live.client() as client:
        assert client.get("/v1/models").json()["data"][0]["id"] == str(folder)


def test_a_running_server_is_healthy_and_ready(client):
    assert client.get("/health").json() == {"status": "ok"}
    assert client.get("/ready").json() == {"status": "ready", "phase": "ready"}
    assert client.head("/health").status_code == client.head("/ready").status_code == 200
    assert client.get("/version").json()["version"]


def test_while_loading_only_v1_and_ready_say_503(folder):
    with LiveServer(folder, "--load-seconds", "1.0", wait=False) as live, live.client() as client:
        assert client.get("/health").status_code == 200, "loading is no reason to be restarted"
        deadline = time.monotonic() + 5
        while (found := client.get("/ready").json())["phase"] != "loading weights":
            assert time.monotonic() < deadline
        assert client.get("/ready").status_code == 503
        assert set(found["error"]) == {"message", "type", "param", "code"}
        for response in (
            client.get("/v1/models"),
            client.get(f"/v1/models/{MODEL}"),
            client.post("/v1/completions", json=completion_body()),
            client.post("/v1/chat/completions", json=chat_body(stream=True)),
        ):
            assert "loading weights" in assert_error(response, 503, code="service_unavailable")
            assert int(response.headers["retry-after"]) >= 1
        assert families(client)["pageserve:http_requests"]
        deadline = time.monotonic() + 10
        while client.get("/ready").status_code != 200:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert client.post("/v1/completions", json=completion_body()).status_code == 200


def test_a_hung_engine_is_not_healthy(server, client, monkeypatch):
    monkeypatch.setattr(server.driver, "health", lambda: "no step for 99 s")
    response = client.get("/health")
    assert response.status_code == 503
    assert "99 s" in response.json()["error"]["message"]


def test_while_draining_running_streams_go_on_and_new_ones_go_elsewhere(folder):
    with LiveServer(folder, "--step-seconds", "0.01") as live, live.client() as client:
        with client.stream("POST", "/v1/completions", json=completion_body(stream=True, max_tokens=60)) as running:
            pieces = running.iter_text()
            next(pieces)
            live.call(lambda: setattr(live, "drained", live.loop.create_task(live.driver.drain(20))))
            response = client.get("/ready")
            assert response.status_code == 503 and response.json()["phase"] == "draining"
            assert client.get("/health").status_code == 200
            response = client.post("/v1/completions", json=completion_body())
            assert_error(response, 503, code="service_unavailable")
            assert response.headers["connection"] == "close" and response.headers["retry-after"]
            assert "".join(pieces).endswith("data: [DONE]\n\n")
        live.call(lambda: live.drained)


def test_a_drain_that_runs_out_of_time_is_an_error_event(folder):
    with LiveServer(folder, "--step-seconds", "0.01") as live, live.client() as client:
        with client.stream("POST", "/v1/completions", json=completion_body(stream=True, max_tokens=400)) as running:
            pieces = running.iter_text()
            next(pieces)
            assert live.call(lambda: live.driver.drain(0.1)) is False
            text = "".join(pieces)
        assert '"error"' in text.splitlines()[-2] and "[DONE]" not in text


def test_metrics_carry_vllms_names_and_labels(client):
    client.post("/v1/completions", json=completion_body(n=2, prompt=["a", "b"]))
    found = families(client)
    gauges = {"num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"}
    counters = {"prompt_tokens", "generation_tokens", "num_preemptions", "prefix_cache_queries", "prefix_cache_hits"}
    histograms = {"time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"}
    histograms |= {"request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds"}
    histograms |= {"request_prompt_tokens", "request_generation_tokens", "request_params_n", "iteration_tokens_total"}
    for names, kind in ((gauges, "gauge"), (counters | {"request_success"}, "counter"), (histograms, "histogram")):
        for name in names:
            family = found[f"vllm:{name}"]
            assert family.type == kind and family.documentation
            for sample in family.samples:
                assert sample.labels["model_name"] == MODEL and sample.labels["engine"] == "0"
    assert {s.labels["finished_reason"] for s in found["vllm:request_success"].samples} == {
        "stop",
        "length",
        "abort",
        "error",
    }
    assert {name.removeprefix("vllm:") for name in found if name.startswith("vllm:")} == VLLM_NAMES
    text = client.get("/metrics").text
    assert "pageserve:num_tokens_waiting{" in text
    assert "vllm:prompt_tokens_total{" in text and "_created" not in text


def test_metrics_describe_the_kv_cache(client):
    (sample,) = families(client)["vllm:cache_config_info"].samples
    assert sample.value == 1 and sample.labels["cache_dtype"] == "none"
    assert int(sample.labels["num_gpu_blocks"]) > 0 and int(sample.labels["block_size"]) > 0


def test_metrics_count(client):
    before = {name: value(client, name) for name in ("vllm:generation_tokens", "vllm:prompt_tokens")}
    chats = value(client, "pageserve:http_requests", route="/v1/chat/completions", code="400")
    others = value(client, "pageserve:http_requests", route="other", code="404")
    client.post("/v1/completions", json=completion_body(n=2, max_tokens=5))
    client.post("/v1/chat/completions", json=chat_body(n=0))
    client.get("/a/path/that/a/client/made/up")
    assert value(client, "vllm:generation_tokens") == before["vllm:generation_tokens"] + 10
    assert value(client, "vllm:prompt_tokens") == before["vllm:prompt_tokens"] + 5
    assert value(client, "pageserve:http_requests", route="/v1/chat/completions", code="400") == chats + 1
    assert value(client, "pageserve:http_requests", route="other", code="404") == others + 1


def test_histograms_are_cumulative(client):
    family = families(client)["vllm:time_to_first_token_seconds"]
    buckets = [(float(s.labels["le"]), s.value) for s in family.samples if s.name.endswith("_bucket")]
    counts = [count for _, count in sorted(buckets)]
    total = next(s.value for s in family.samples if s.name.endswith("_count"))
    assert counts == sorted(counts) and buckets[-1][0] == float("inf") and counts[-1] == total > 0


def test_the_api_describes_itself_without_pages(client):
    schema = client.get("/openapi.json").json()
    chat = schema["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert chat == {"$ref": "#/components/schemas/ChatCompletionRequest"}
    fields = schema["components"]["schemas"]["ChatCompletionRequest"]["properties"]
    assert {"model", "messages", "max_completion_tokens", "top_k"} <= set(fields)
    assert "prompt" in schema["components"]["schemas"]["CompletionRequest"]["properties"]

    def references(node):
        if isinstance(node, dict):
            yield from ([node["$ref"]] if "$ref" in node else [])
            node = list(node.values())
        if isinstance(node, list):
            for child in node:
                yield from references(child)

    for reference in references(schema):
        assert reference.rpartition("/")[2] in schema["components"]["schemas"], reference


@pytest.mark.parametrize(
    "given, echoed", [("abc-123", True), ("x" * 128, True), ("x" * 129, False), ("has space", False), ("", False)]
)
def test_a_clients_request_id_is_echoed_when_it_is_sane(client, given, echoed):
    response = client.get("/health", headers={"x-request-id": given})
    assert (response.headers["x-request-id"] == given) is echoed
    assert response.headers["x-request-id"]


def test_one_request_id_for_many_requests_harms_none(server):
    """The engine's ids are the server's own."""
    with server.client() as first, server.client() as second:
        headers = {"x-request-id": "same"}
        with first.stream(
            "POST", "/v1/completions", json=completion_body(stream=True, max_tokens=300), headers=headers
        ) as a:
            response = second.post("/v1/completions", json=completion_body(), headers=headers)
            assert response.status_code == 200 and response.headers["x-request-id"] == "same"
            assert a.read().endswith(b"[DONE]\n\n")


def requests_by_route(client) -> Counter[str]:
    counts = Counter[str]()
    for sample in families(client)["pageserve:http_requests"].samples:
        counts[sample.labels["route"]] += int(sample.value) if sample.name.endswith("_total") else 0
    return counts


def test_metrics_count_every_route_under_its_own_path_and_made_up_ones_together(client):
    before = requests_by_route(client)
    known = ["/version", "/openapi.json", "/v1/models", "/health", "/debug/steps"]
    for path in [*known, "/v1/models/org/fake-model", "/v1/models/x", "/v1/responses/resp_1", "/debug/requests/x"]:
        client.get(path)
    assert [client.get(path).status_code for path in ("/made", "/up", "/v1/completions/")] == [404] * 3
    counts = requests_by_route(client) - before
    assert {path: counts[path] for path in known} == dict.fromkeys(known, 1)
    assert (counts["/v1/models/{model}"], counts["/v1/responses/{response_id}"]) == (2, 1)
    assert (counts["/debug/requests/{id}"], counts["other"]) == (1, 3)

"""Several models on one port: chosen by name, each with its Worker; idle ones sleep for others."""

import json
import os
import re
import signal
import threading
import time

import pytest

from engine.config import EngineConfig
from engine.errors import ConfigError
from server.cli import main
from server.config import ServerConfig
from server.model_settings import merge_model_flags, model_settings
from tests.server.live import LiveServer, assert_error, completion_body, expected_text
from tests.server.metrics import value


def body(model: str, **fields) -> dict:
    return completion_body(model=model, **fields)


def phases(live) -> dict[str, str]:
    return live.call(lambda: {model.names[0]: model.driver.phase for model in live.hosted})


def several(folder, *names, max_loaded=None, options=("--step-seconds", "0.003"), **settings):
    models = tuple(f"{name}={folder}" for name in names)
    return LiveServer(folder, *options, models=models, served_model_name=(), max_loaded=max_loaded, **settings)


@pytest.fixture(scope="module")
def two(folder):
    with several(folder, "first", "org/second", options=()) as live:
        yield live


def test_two_models_by_name_on_one_port(two):
    names = ("first", "org/second")
    with two.client() as client:
        before = [value(client, "vllm:request_success", model_name=name) for name in names]
        listed = client.get("/v1/models").json()["data"]
        assert [(model["id"], model["state"]) for model in listed] == [("first", "ready"), ("org/second", "ready")]
        assert client.get("/v1/models/org/second").json()["id"] == "org/second"
        for name in ("first", "org/second", "first"):
            answer = client.post("/v1/completions", json=body(name)).json()
            assert answer["model"] == name and answer["choices"][0]["text"] == expected_text(b"hello", 1, 8)
        message = assert_error(client.post("/v1/completions", json=body("third")), 404, "model", "model_not_found")
        assert "'first'" in message and "'org/second'" in message
        message = assert_error(client.post("/v1/chat/completions", json={"messages": []}), 400, "model")
        assert message == "model is required; this server has 'first', 'org/second'."
        assert client.get("/v1/models", headers={"anthropic-version": "2023-06-01"}).json()["last_id"] == "org/second"
        done = [value(client, "vllm:request_success", model_name=name) for name in names]
        assert [now - then for now, then in zip(done, before, strict=True)] == [2, 1]
        assert client.get("/metrics").text.count("# HELP vllm:request_success_total") == 1
        for path in ("/health", "/ready"):
            assert client.get(path).json()["models"] == {"first": "ready", "org/second": "ready"}
        assert client.get("/debug/kv?model=org/second").status_code == 200
        assert_error(client.get("/debug/kv?model=other"), 404)
        reports = client.get(f"/debug/requests/{answer['id']}").json()
        assert len(reports["timings"]) == 1
        assert client.post("/tokenize", json={"prompt": "hello"}).json()["count"] == 5


def test_a_dead_worker_of_one_model_does_not_touch_the_other(two):
    first, second = (model.driver for model in two.hosted)
    pid, other = two.call(lambda: (first.worker_pid, second.worker_pid))
    os.kill(pid, signal.SIGKILL)
    with two.client() as client:
        for name in ("org/second", "first"):
            answer = client.post("/v1/completions", json=body(name)).json()
            assert answer["choices"][0]["text"] == expected_text(b"hello", 1, 8)
    assert two.call(lambda: second.worker_pid) == other
    assert two.call(lambda: (first.stats.worker_restarts.values[()], second.stats.worker_restarts.values[()])) == (1, 0)


def test_an_adapter_has_a_name_of_its_own():
    message = "lora: a model or another adapter is called '{}' already"
    with pytest.raises(ConfigError, match=message.format("base")):
        model_settings(EngineConfig(model="x", lora=("base=dir",)), ServerConfig(served_model_name=("base",)))
    with pytest.raises(ConfigError, match=message.format("one")):  # the engine's settings hold for each model
        model_settings(EngineConfig(lora=("one=dir",)), ServerConfig(models=("a=x", "b=y")))


def test_the_server_goes_on_without_a_model_that_has_ended(folder):
    with several(folder, "a", "b", engine={"max_worker_restarts": 0}) as live, live.client() as client:
        os.kill(live.call(lambda: live.hosted[0].driver.worker_pid), signal.SIGKILL)
        end = time.monotonic() + 20
        while phases(live)["a"] != "stopped":
            assert time.monotonic() < end
            time.sleep(0.01)
        assert client.get("/health").json() == {"status": "ok", "models": {"a": "stopped", "b": "ready"}}
        assert client.get("/ready").status_code == 200
        assert_error(client.post("/v1/completions", json=body("a")), 503)
        assert client.post("/v1/completions", json=body("b")).status_code == 200


def test_a_third_model_evicts_the_idle_one_that_was_used_longest_ago(folder):
    with several(folder, "a", "b", "c", max_loaded=2) as live, live.client() as client:
        assert phases(live) == {"a": "ready", "b": "ready", "c": "sleeping"}
        assert client.get("/ready").status_code == 200
        for name, sleeper in (("a", "c"), ("c", "b"), ("b", "a"), ("b", "a"), ("a", "c")):
            answer = client.post("/v1/completions", json=body(name)).json()
            assert answer["choices"][0]["text"] == expected_text(b"hello", 1, 8)
            assert {model for model, phase in phases(live).items() if phase == "sleeping"} == {sleeper}
        states = {model["id"]: model["state"] for model in client.get("/v1/models").json()["data"]}
        assert states == {"a": "ready", "b": "ready", "c": "sleeping"}


def test_no_live_stream_is_lost_to_an_eviction(folder):
    """The request for the other model waits, with keep-alive comments or until its deadline."""
    settings = {"keep_alive_interval": 0.05}
    with several(folder, "a", "b", max_loaded=1, **settings) as live, live.client() as client, live.client() as other:
        with client.stream("POST", "/v1/completions", json=body("a", max_tokens=250, stream=True)) as stream:
            lines = stream.iter_lines()
            text = json.loads(next(line for line in lines if line.startswith("data: {"))[6:])["choices"][0]["text"]
            late = other.post("/v1/completions", json=body("b", timeout=0.1))
            assert_error(late, 408, code="deadline_exceeded")
            found = []

            def read() -> None:
                with other.stream("POST", "/v1/completions", json=body("b", stream=True)) as waiting:
                    found.extend(waiting.iter_lines())

            reader = threading.Thread(target=read)
            reader.start()
            for line in lines:
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
            assert text == expected_text(b"hello", 1, 250)
            reader.join(20)
        pieces = [json.loads(line[6:])["choices"][0]["text"] for line in found if line.startswith("data: {")]
        assert "".join(pieces) == expected_text(b"hello", 1, 8)
        assert any(line.startswith(":") for line in found) and phases(live) == {"a": "sleeping", "b": "ready"}


def test_many_requests_to_more_models_than_may_be_awake(folder):
    with several(folder, "a", "b", "c", max_loaded=1, options=()) as live:
        failed = []

        def ask(number: int) -> None:
            name = "abc"[number % 3]
            with live.client() as client:
                answer = client.post("/v1/completions", json=body(name, prompt=f"hello {number}", max_tokens=20))
                if answer.json()["choices"][0]["text"] != expected_text(f"hello {number}".encode(), 1, 20):
                    failed.append(answer.text)

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(18)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not failed and list(phases(live).values()).count("ready") == 1


# Settings.


def settings_of(engine=None, **server):
    return model_settings(EngineConfig(**(engine or {})), ServerConfig(**server))


def test_one_model_is_as_it_was():
    [one] = settings_of({"model": "dir"})
    assert one.names == ("dir",) and one.engine == EngineConfig(model="dir") and one.server == ServerConfig()


def test_each_model_has_its_own_settings():
    small = {"name": "small", "model": "s", "max-model-len": 512, "memory_share": 0.2, "served_model_name": ["s1"]}
    first, second = settings_of(
        {"disk_cache": "kv", "swap_space": 1.0}, models=("big=org/x", small), max_queued_requests=9
    )
    assert (first.names, first.engine.model, first.engine.memory_share) == (("big",), "org/x", 0.45)
    assert (second.names, second.engine.max_model_len, second.engine.memory_share) == (("small", "s1"), 512, 0.2)
    assert (first.engine.disk_cache, second.engine.disk_cache) == ("kv/big", "kv/small")
    assert second.server.max_queued_requests == 9 and not second.server.models


@pytest.mark.parametrize(
    "engine, server, named",
    [
        ({"model": "x"}, {"models": ("a=x",)}, "model: `models` lists"),
        ({"model": "x"}, {"max_loaded": 2}, "max_loaded: there is one model; give several: --model NAME=DIR, repeated"),
        ({}, {"models": ("a=x", "a=y")}, "two models are named 'a'"),
        ({}, {"models": ("x",)}, "NAME=DIR_OR_ID"),
        ({}, {"models": ({"model": "x"},)}, "a name"),
        ({}, {"models": ({"name": "a", "port": 3},)}, "port is a setting of the whole server"),
        ({}, {"models": ({"name": "a", "max_model_length": 3},)}, "did you mean max_model_len"),
        ({}, {"models": ({"name": "a", "max_model_len": 0},)}, "models, a: max_model_len must be"),
        ({}, {"models": ({"name": "a", "memory_share": 0.8}, "b=x")}, "memory_share: a 0.8 + b 0.45 is 1.25"),
        ({}, {"models": ("a=x",), "served_model_name": ("n",)}, "served_model_name"),
    ],
)
def test_wrong_settings(engine, server, named):
    with pytest.raises(ConfigError, match=re.escape(named)):
        settings_of(engine, **server)


def test_the_command_lists_models(two, tmp_path, capsys):
    assert main(["models", "--base-url", two.url]) == 0
    head, first, second = capsys.readouterr().out.splitlines()
    assert head.split() == ["name", "state", "context", "model"]
    assert first.split()[:3] == ["first", "ready", "512"] and second.split()[0] == "org/second"
    config = tmp_path / "models.yaml"
    config.write_text("max_num_seqs: 7\nmodels:\n  - a=dir\n  - {name: b, model: org/b, max_model_len: 512}\n")
    assert main(["models", "--config", str(config)]) == 0
    _, first, second = capsys.readouterr().out.splitlines()
    assert first.split()[:2] == ["a", "dir"] and second.split()[:2] == ["b", "org/b"] and "max_model_len=512" in second
    assert main(["models", "--base-url", "http://127.0.0.1:9"]) == 1
    assert "no server answers" in capsys.readouterr().err


def test_a_repeated_flag_names_models(tmp_path):
    def merged(*given, positional=None):
        flags = {"model": list(given), "positional_model": positional}
        merge_model_flags(flags)
        return flags

    assert merged("dir") == {"model": "dir"} == merged(positional="dir") == merged("dir", positional="dir")
    assert merged("a=x", "org/b=y") == {"models": ["a=x", "org/b=y"]}
    assert merged("a=x") == {"models": ["a=x"]}
    odd = tmp_path / "a=b"
    odd.mkdir()
    assert merged(str(odd)) == {"model": str(odd)}
    with pytest.raises(ConfigError, match="two models are named"):
        merged("x", positional="y")
    with pytest.raises(ConfigError, match="several models need names"):
        merged("a=x", "y")

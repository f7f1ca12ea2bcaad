"""A server with two replicas: one model for clients, two engines for metrics and views."""

import re

import pytest

from engine.errors import InvalidRequestError, UnavailableError
from server.routes.adapters import load_everywhere, unload_everywhere
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


class Holder:
    """A replica that holds adapters. `refuses`: it loads none; `ended`: it has ended."""

    def __init__(self, *names, refuses=False, ended=False):
        self.names, self._refuses, self._ended = set(names), refuses, ended

    def health(self):
        return "it ended" if self._ended else None

    async def load_adapter(self, name, path):
        if self._refuses or self._ended:
            raise UnavailableError("no")
        self.names.add(name)

    def unload_adapter(self, name):
        if name not in self.names:
            raise InvalidRequestError(f"no adapter {name}", "lora_name")
        self.names.remove(name)


async def test_an_adapter_is_loaded_on_every_living_replica_or_on_none():
    replicas = [Holder(), Holder(ended=True), Holder()]
    await load_everywhere(replicas, "a", "folder")
    assert [replica.names for replica in replicas] == [{"a"}, set(), {"a"}]
    replicas = [Holder("old"), Holder(refuses=True), Holder()]
    with pytest.raises(UnavailableError):
        await load_everywhere(replicas, "a", "folder")
    assert [replica.names for replica in replicas] == [{"old"}, set(), set()]


def test_an_adapter_that_one_replica_has_is_unloaded():
    replicas = [Holder(), Holder("a", "b"), Holder("a")]
    unload_everywhere(replicas, "a")
    assert [replica.names for replica in replicas] == [set(), {"b"}, set()]
    with pytest.raises(InvalidRequestError, match="no adapter a"):
        unload_everywhere(replicas, "a")

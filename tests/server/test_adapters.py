"""LoRA adapters over HTTP with a real Worker and the bundled model: chosen by name, listed, loaded at run time."""

import os
import re
import signal
from pathlib import Path

import httpx
import openai
import pytest
import torch
from transformers import LlamaForCausalLM

from engine.checkpoint.locate import BUNDLED_MODEL
from engine.config import EngineConfig
from server.serve import host_models
from tests.engine.driving import until
from tests.engine.models.adapters.peft_files import write_adapter
from tests.server.live import LiveServer, assert_error
from tests.server.metrics import families

OPERATING = Path(__file__).parents[2] / "docs/operating.md"
PROMPT = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 12}


class RealServer(LiveServer):
    """A LiveServer whose Worker has a real model on a CPU."""

    def __init__(self, engine, **settings):
        super().__init__(BUNDLED_MODEL, served_model_name=("base",), **settings)
        fixed = {"device": "cpu", "dtype": "float32", "max_model_len": 128, "model": str(BUNDLED_MODEL)}
        self.hosted = host_models(EngineConfig(**fixed, **engine), self.config)
        self.driver = self.hosted[0].driver


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    model = LlamaForCausalLM.from_pretrained(BUNDLED_MODEL, dtype=torch.float32)
    root = tmp_path_factory.mktemp("adapters")
    for i in range(2):
        write_adapter(root / str(i), model, seed=i, alpha=16, rank=4)
    write_adapter(root / "large", model, rank=32)
    return root


@pytest.fixture(scope="module")
def server(root, tmp_path_factory):
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("sk-admin admin=true\nsk-plain\n")
    engine = {"lora": (f"start={root / '0'}",), "allow_runtime_lora": True, "lora_root": str(root)}
    with RealServer(engine, api_key_file=str(keys)) as live:
        yield live


@pytest.fixture
def admin(server):
    with server.client(headers={"authorization": "Bearer sk-admin"}) as client:
        yield client


def text(server, model):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="sk-plain", max_retries=0) as api:
        answer = api.completions.create(model=model, **PROMPT)
        assert answer.model == model
        return answer.choices[0].text


def test_an_adapter_is_chosen_by_model_and_listed_with_its_parent(server, admin):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="sk-plain", max_retries=0) as api:
        assert text(server, "start") != text(server, "base")
        chats = [
            api.chat.completions.create(model=model, messages=[{"role": "user", "content": "Hi"}], **sampling)
            for model in ("base", "start")
            for sampling in [{"temperature": 0, "max_tokens": 12}]
        ]
        assert chats[0].choices[0].message.content != chats[1].choices[0].message.content
        answers = [api.responses.create(model=model, input="Hi", temperature=0) for model in ("base", "start")]
        assert answers[0].output_text != answers[1].output_text
        vectors = [api.embeddings.create(model=model, input="Hi").data[0].embedding for model in ("base", "start")]
        assert vectors[0] != vectors[1]
        listed = {model.id: model.model_extra for model in api.models.list()}
        assert (listed["base"]["parent"], listed["start"]["parent"]) == (None, "base")
        assert listed["start"]["root"].endswith("/0")
        with pytest.raises(openai.NotFoundError):
            api.completions.create(model="other", **PROMPT)
    message = {"model": "start", "max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}]}
    assert admin.post("/v1/messages", json=message).json()["model"] == "start"
    page = admin.get("/metrics").text
    assert "vllm:lora_requests_info{" in page and 'max_lora="8"' in page


def test_load_and_unload(server, admin, root):
    base = text(server, "base")
    load = {"lora_name": "new", "lora_path": "1"}
    assert admin.post("/v1/load_lora_adapter", json=load).status_code == 200
    first = text(server, "new")
    assert first not in (base, text(server, "start"))
    for body, param in (
        (load, "lora_name"),
        ({"lora_name": "base", "lora_path": "1"}, "lora_name"),
        ({"lora_name": "a b", "lora_path": "1"}, "lora_name"),
        ({"lora_name": "x", "lora_path": "../.."}, "lora_path"),
        ({"lora_name": "x", "lora_path": str(root)}, "lora_path"),
        ({"lora_name": "x", "lora_path": "large"}, "lora_path"),
        ({"lora_name": "x"}, "lora_path"),
    ):
        assert_error(admin.post("/v1/load_lora_adapter", json=body), 400, param)
    assert_error(admin.post("/v1/unload_lora_adapter", json={"lora_name": "x"}), 404, "lora_name", "model_not_found")
    assert admin.post("/v1/unload_lora_adapter", json={"lora_name": "new"}).status_code == 200
    assert_error(admin.post("/v1/completions", json={"model": "new"} | PROMPT), 404, "model", "model_not_found")
    again = {"lora_name": "new", "lora_path": str(root / "0")}
    assert admin.post("/v1/load_lora_adapter", json=again).status_code == 200
    assert text(server, "new") == text(server, "start") and text(server, "base") == base


@pytest.mark.slow
def test_replicas_that_are_left_load_and_name_adapters(root):
    engine = {
        "data_parallel_size": 2,
        "max_worker_restarts": 0,
        "allow_runtime_lora": True,
        "lora_root": str(root),
        "lora": (f"start={root / '0'}",),
    }
    with RealServer(engine) as live, live.client() as client:
        first, _ = live.driver.replicas
        os.kill(live.call(lambda: first.worker_pid), signal.SIGKILL)
        live.call(lambda: until(lambda: first.health() is not None))
        for path, body in (("load", {"lora_name": "new", "lora_path": "1"}), ("unload", {"lora_name": "start"})):
            assert client.post(f"/v1/{path}_lora_adapter", json=body).status_code == 200
        assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["base", "new"]
        assert client.post("/v1/completions", json={"model": "new"} | PROMPT).status_code == 200


def test_only_an_administrator_and_only_where_it_is_allowed(server, folder):
    load = {"lora_name": "new", "lora_path": "1"}
    with server.client(headers={"authorization": "Bearer sk-plain"}) as client:
        for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
            assert_error(client.post(path, json=load), 403, code="admin_key_required")
    with LiveServer(folder) as live, httpx.Client(base_url=live.url) as client:
        assert client.post("/v1/load_lora_adapter", json=load).status_code == 404


def row_of(family) -> str:
    name = family.name + ("_total" if family.type == "counter" else "")
    labels = {label for sample in family.samples for label in sample.labels} - {"model_name", "engine", "le"}
    shown = ", ".join(f"`{label}`" for label in sorted(labels))
    return f"| `{name}` | {family.type} | {shown} | {family.documentation} |"


def test_the_documents_list_every_metric(server, admin):
    """A server with adapters has every metric. docs/operating.md has a row for each, with the help of its page."""
    assert text(server, "start")
    found = families(admin).values()
    sections = re.split(r"^## ", OPERATING.read_text(encoding="utf-8"), flags=re.MULTILINE)
    (metrics,) = (part for part in sections if part.startswith("Metrics\n"))
    listed = [line for line in metrics.splitlines() if line.startswith("| `")]
    assert listed == [row_of(family) for family in found]

"""/openapi.json is true: live answers, streamed ones too, are what it says, and so are openai-python's own types."""

import json
import re
from pathlib import Path

import httpx
import jsonschema
import openapi_spec_validator
import pytest
from openai.types import Completion, CompletionUsage, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from server.openapi import ANSWERS
from tests.server.live import MODEL, LiveServer, assert_error, chat_body, completion_body, events
from tests.server.raw_requests import wait_until

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"


@pytest.fixture(scope="module")
def document(client):
    return client.get("/openapi.json").json()


def resolve(document, reference):
    return jsonschema.Draft202012Validator({**reference, "components": document["components"]})


def validator(document, path, method="post", status="200", media="application/json", key="schema"):
    return resolve(document, document["paths"][path][method]["responses"][status]["content"][media][key])


def request_validator(document, path):
    return resolve(document, document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"])


def test_the_document_is_openapi(document):
    assert document["openapi"] == "3.2.0"
    openapi_spec_validator.validate(document)
    for name, schema in document["components"]["schemas"].items():
        jsonschema.Draft202012Validator.check_schema(schema)
        assert schema.get("description") != "" and name
    for path, operations in document["paths"].items():
        for operation in operations.values():
            assert "200" in operation["responses"], path
            for response in operation["responses"].values():
                for media in response["content"].values():
                    for schema in (media.get("schema"), media.get("itemSchema"), media.get("x-event-schema")):
                        if schema is not None:
                            resolve(document, schema).is_valid(None)  # every reference leads somewhere
                    assert media.get("schema") or media.get("itemSchema"), path


def test_every_route_says_what_it_answers(server):
    routes = {
        route.path_format
        for route in server.call(lambda: server.app.routes)
        if getattr(route, "include_in_schema", False) and getattr(route, "methods", None)
    } - {"/openapi.json"}
    assert routes <= set(ANSWERS), "add a row to ANSWERS in server/openapi.py"


def test_documents_name_every_described_route():
    root = Path(__file__).parents[2]
    text = "".join((root / name).read_text(encoding="utf-8") for name in ("README.md", "docs/api.md"))
    named = {re.sub(r"{\w+}", "{}", path) for path in re.findall(r"(?<![\w/])/[a-z][\w/{}]*", text)}
    assert {re.sub(r"{\w+}", "{}", path) for path in ANSWERS} <= named


VARIANTS = [
    {},
    {"n": 3},
    {"return_token_ids": True},
    {"truncate_prompt_tokens": 2},
    {"stop": "e"},
    {"stream_options": {"include_usage": True}},
    {"stream_options": {"include_usage": True, "include_obfuscation": True}},
    {"n": 2, "return_token_ids": True, "return_tokens_as_token_ids": True},
    {"return_timings": True},
    {"echo": True},
    {"prompt_logprobs": 1},
]


def typed(answer):
    """Without the nulls of a prompt's first token, which OpenAI sends, too, and its types forget."""
    for choice in answer["choices"]:
        for name in ("token_logprobs", "top_logprobs"):
            if choice["logprobs"] and choice["logprobs"].get(name, [0])[:1] == [None]:
                choice["logprobs"][name] = choice["logprobs"][name][1:]
    return answer


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fields", VARIANTS, ids=str)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_answers_are_as_described(client, document, path, fields, stream):
    if not stream:
        fields = {name: value for name, value in fields.items() if name != "stream_options"}
    if ("echo" in fields and path == CHAT) or ("prompt_logprobs" in fields and stream):
        return
    make = chat_body if path == CHAT else completion_body
    for logprobs in ({}, {"logprobs": True, "top_logprobs": 2} if path == CHAT else {"logprobs": 2}):
        body = make(stream=stream, **fields, **logprobs)
        request_validator(document, path).validate(body)
        response = client.post(path, json=body)
        assert response.status_code == 200, response.text
        if not stream:
            validator(document, path).validate(response.json())
            (ChatCompletion if path == CHAT else Completion).model_validate(typed(response.json()), strict=True)
            continue
        *frames, done = events(response.text)
        assert done == "[DONE]"
        check = validator(document, path, media="text/event-stream", key="x-event-schema")
        for frame in frames:
            check.validate(frame)
            if path == CHAT:
                ChatCompletionChunk.model_validate(frame, strict=True)
            else:  # the type of a chunk is that of the whole, whose last choices alone have a finish_reason
                ended = [choice | {"finish_reason": choice["finish_reason"] or "stop"} for choice in frame["choices"]]
                Completion.model_validate(typed(frame | {"choices": ended}), strict=True)
            if frame.get("usage"):
                CompletionUsage.model_validate(frame["usage"], strict=True)


@pytest.mark.parametrize(
    "path, body",
    [
        ("/tokenize", {"prompt": "x", "return_token_strs": True}),
        ("/tokenize", {"messages": chat_body()["messages"]}),
        ("/detokenize", {"tokens": [97]}),
        ("/v1/responses/input_tokens", {"input": "x", "tools": [{"type": "function", "name": "f"}]}),
        ("/v1/messages/count_tokens", {"model": MODEL, "messages": chat_body()["messages"]}),
    ],
)
def test_other_posts(client, document, path, body):
    request_validator(document, path).validate(body)
    validator(document, path).validate(client.post(path, json=body).json())


@pytest.mark.parametrize("fields", [{}, {"top_logprobs": 2}, {"metadata": {"a": "b"}, "instructions": "x"}], ids=str)
def test_responses(client, document, fields):
    body = {"model": MODEL, "input": "hello", "max_output_tokens": 4, **fields}
    request_validator(document, RESPONSES).validate(body)
    validator(document, RESPONSES).validate(client.post(RESPONSES, json=body).json())
    check = validator(document, RESPONSES, media="text/event-stream", key="x-event-schema")
    named = client.post(RESPONSES, json={**body, "stream": True}).text[:-2].split("\n\n")
    for frame in named:
        check.validate(json.loads(frame.partition("data: ")[2]))
    assert len(named) > 8


def test_messages(client, document):
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    request_validator(document, MESSAGES).validate(body)
    validator(document, MESSAGES).validate(client.post(MESSAGES, json=body).json())
    check = validator(document, MESSAGES, media="text/event-stream", key="x-event-schema")
    for frame in client.post(MESSAGES, json={**body, "stream": True}).text[:-2].split("\n\n"):
        check.validate(json.loads(frame.partition("data: ")[2]))
    wrong = client.post(MESSAGES, json={**body, "model": "other"})
    validator(document, MESSAGES, status="404").validate(wrong.json())


def test_timings(client, document):
    response_id = client.post(CHAT, json=chat_body()).json()["id"]
    validator(document, "/debug/requests/{id}", "get").validate(client.get(f"/debug/requests/{response_id}").json())
    missing = client.get("/debug/requests/nobody")
    assert_error(missing, 404)
    validator(document, "/debug/requests/{id}", "get", "404").validate(missing.json())


GETS = ["/v1/models", "/v1/models/org/fake-model", "/health", "/ready", "/version", "/debug/kv"]


@pytest.mark.parametrize("path", GETS)
def test_gets(client, document, path):
    template = "/v1/models/{model}" if path.startswith("/v1/models/") else path
    answer = client.get(path).json()
    validator(document, template, "get").validate(answer)
    if path.startswith("/v1/models/"):
        Model.model_validate(answer, strict=True)


@pytest.mark.parametrize(
    "method, path, body, status",
    [
        ("post", CHAT, {}, 400),
        ("post", CHAT, chat_body(model="other"), 404),
        ("post", COMPLETIONS, completion_body(prompt="x" * 600), 400),
        ("post", "/tokenize", {"prompt": 1}, 400),
        ("get", "/v1/models/{model}", None, 404),
    ],
)
def test_errors(client, document, method, path, body, status):
    response = client.request(method, path.format(model="other"), json=body)
    assert_error(response, status)
    validator(document, path, method, str(status)).validate(response.json())


def test_what_the_server_refuses_the_schema_refuses(client, document):
    check = request_validator(document, CHAT)
    for fields in ({"n": 0}, {"n": 129}, {"temperature": 3}, {"top_p": 1.5}, {"unheard_of": 1}, {"top_logprobs": 21}):
        body = chat_body(logprobs=True, **fields)
        assert not check.is_valid(body), fields
        assert_error(client.post(CHAT, json=body), 400)
    for fields in ({"user": "x"}, {"store": True}, {"n": None}, {"service_tier": "auto"}, {"tools": None}):
        assert check.is_valid(chat_body(**fields)), fields


def test_every_component_is_used_and_named_without_a_module(document):
    names = document["components"]["schemas"].keys()
    used = set(re.findall('"#/components/schemas/([^"]+)"', json.dumps(document)))
    assert names == used and not [name for name in names if "__" in name]


def test_blocks_that_are_accepted_are_valid(client, document):
    source = {"type": "text", "media_type": "text/plain", "data": "A fox."}
    user = {"role": "user", "content": [{"type": "document", "source": source}]}
    said = {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "b"}]}
    tools = [{"type": "web_search_20250305", "name": "web_search", "max_uses": 8}]
    body = {"model": MODEL, "messages": [user, said, user], "tools": tools, "max_tokens": 1}
    request_validator(document, MESSAGES).validate(body)
    assert client.post(MESSAGES, json=body).status_code == 200


@pytest.mark.parametrize(
    "path, good, bad",
    [
        (CHAT, chat_body(), {"chat_template_kwargs": {"messages": 1}}),
        (CHAT, chat_body(), {"chat_template_kwargs": {"a b": 1}}),
        (CHAT, chat_body(), {"chat_template_kwargs": {"a": "x" * 257}}),
        (CHAT, chat_body(), {"chat_template_kwargs": {f"a{i}": 1 for i in range(17)}}),
        ("/detokenize", {"tokens": [0, 3]}, {"tokens": [3, 10**6]}),
        ("/detokenize", {"tokens": []}, {"tokens": [-1]}),
        ("/v1/embeddings", {"model": MODEL, "input": "a", "truncate_prompt_tokens": -1}, {"truncate_prompt_tokens": 0}),
        ("/v1/embeddings", {"model": MODEL, "input": "a"}, {"truncate_prompt_tokens": 10**6}),
        (
            MESSAGES,
            {"model": MODEL, "messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
            {"stop_sequences": [""]},
        ),
    ],
)
def test_what_is_refused_is_invalid(client, document, path, good, bad):
    check = request_validator(document, path)
    check.validate(good)
    assert client.post(path, json=good).status_code == 200
    assert not check.is_valid(good | bad) and client.post(path, json=good | bad).status_code == 400


def test_a_prompt_may_be_absent_or_null(client, document):
    check = request_validator(document, COMPLETIONS)
    for body in ({"model": MODEL}, {"model": MODEL, "prompt": None}, {"model": MODEL, "prompt": ["", "a"]}):
        check.validate(body)
        assert client.post(COMPLETIONS, json=body).status_code == 200


def test_limits_and_keys_are_those_of_the_server(folder):
    with LiveServer(folder, api_key=("sesame",), max_n=3, max_logprobs=7) as server:
        with server.client(headers={"authorization": "Bearer sesame"}) as client:
            document = client.get("/openapi.json").json()
        schemas = document["components"]["schemas"]
        assert {"minimum": 1, "maximum": 3, "type": "integer"} in schemas["CompletionRequest"]["properties"]["n"][
            "anyOf"
        ]
        assert schemas["CompletionRequest"]["properties"]["logprobs"]["anyOf"][0]["maximum"] == 7
        assert schemas["ChatCompletionRequest"]["properties"]["prompt_logprobs"]["anyOf"][0]["maximum"] == 20
        assert document["components"]["securitySchemes"]["bearer"] == {"type": "http", "scheme": "bearer"}
        with server.client() as client:
            for path, operations in document["paths"].items():
                for method, operation in operations.items():
                    answer = client.request(method, path, json={} if method == "post" else None)
                    assert (answer.status_code == 401) == ("security" in operation), path
                    if answer.status_code == 401:
                        validator(document, path, method, "401").validate(answer.json())


def test_not_ready_is_as_described(folder, document):
    with LiveServer(folder, "--load-seconds", "3", wait=False) as server, server.client() as client:
        answer = client.get("/ready")
        assert answer.status_code == 503
        validator(document, "/ready", "get", "503").validate(answer.json())
        refused = client.post(CHAT, json=chat_body())
        validator(document, CHAT, status="503").validate(refused.json())
        assert int(refused.headers["retry-after"]) >= 1
        early = client.get("/openapi.json").json()
        wait_until(lambda: client.get("/ready").status_code == 200, 20)
        documents = [early, client.get("/openapi.json").json()]
        tokens = [found["components"]["schemas"]["DetokenizeRequest"]["properties"]["tokens"] for found in documents]
        assert ["maximum" in found["items"] for found in tokens] == [False, True]


def test_examples_are_answered(bundled_server):
    document = httpx.get(f"{bundled_server}/openapi.json").json()
    posts = {path: operations["post"] for path, operations in document["paths"].items() if "post" in operations}
    posts = {path: post for path, post in posts.items() if "requestBody" in post}
    assert {CHAT, "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "/tokenize"} <= posts.keys()
    for path, post in posts.items():
        body = post["requestBody"]["content"]["application/json"]["example"]
        assert httpx.post(bundled_server + path, json=body, timeout=60).status_code == 200, path


def test_optional_routes_are_described_where_they_are_switched_on(folder, document, tmp_path):
    load, unload, debug = "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/debug/kv"
    assert debug in document["paths"] and not {load, unload} & document["paths"].keys()
    assert "LoadAdapterRequest" not in document["components"]["schemas"]
    engine = {"allow_runtime_lora": True, "lora_root": str(tmp_path)}
    with LiveServer(folder, debug_kv=False, engine=engine) as server, server.client() as client:
        document = client.get("/openapi.json").json()
        openapi_spec_validator.validate(document)
        assert {load, unload} <= document["paths"].keys() and debug not in document["paths"]
        body = {"lora_name": "sql", "lora_path": "sql"}
        for path, valid, invalid in ((load, body, {"lora_name": "sql"}), (unload, {"lora_name": "sql"}, body)):
            check = request_validator(document, path)
            check.validate(valid)
            assert not check.is_valid(invalid)
            for status, wrong in (("400", invalid), ("404", {**valid, "model": "other"})):
                answer = client.post(path, json=wrong)
                assert_error(answer, int(status))
                validator(document, path, status=status).validate(answer.json())
            assert document["paths"][path]["post"]["responses"]["200"]["content"].keys() == {"text/plain"}


def test_a_key_file_is_in_the_document_too(folder, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("sesame\n")
    keys.chmod(0o600)
    with LiveServer(folder, api_key_file=str(keys)) as server:
        with server.client(headers={"authorization": "Bearer sesame"}) as client:
            document = client.get("/openapi.json").json()
    assert document["components"]["securitySchemes"] and document["paths"][CHAT]["post"]["security"]

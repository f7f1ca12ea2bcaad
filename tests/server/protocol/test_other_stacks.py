"""Requests of other servers' clients: accepted spellings, and unknown names with --ignore-unknown-fields."""

import logging

import pytest

from server.protocol.unknown_fields import MAX_NAME_CHARS, MAX_NAMES
from tests.server.live import MODEL, LiveServer, chat_body, completion_body, requests_of

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HEADER = "x-pageserve-ignored-fields"
TEXT = [{"role": "user", "content": "hello"}]
BODIES = {
    CHAT: {"model": MODEL, "messages": TEXT, "max_tokens": 1},
    COMPLETIONS: {"model": MODEL, "prompt": "hello", "max_tokens": 1},
    "/v1/responses": {"model": MODEL, "input": "hello", "max_output_tokens": 1},
    "/v1/messages": {"model": MODEL, "messages": TEXT, "max_tokens": 1},
    "/v1/messages/count_tokens": {"model": MODEL, "messages": TEXT},
    "/v1/embeddings": {"model": MODEL, "input": "hello"},
    "/tokenize": {"prompt": "hello"},
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


@pytest.fixture(scope="module")
def lenient(folder):
    with LiveServer(folder, ignore_unknown_fields=True) as server:
        yield server


@pytest.fixture
def lenient_client(lenient):
    with lenient.client() as client:
        yield client


@pytest.mark.parametrize("path, make", [(CHAT, chat_body), (COMPLETIONS, completion_body)])
def test_spellings_of_other_servers_are_understood(server, client, monkeypatch, path, make):
    seen = requests_of(server, monkeypatch)
    spelled = {"num_predict": 3, "repeat_penalty": 1.2, "num_ctx": 512, "temperature": 0.5}
    named = {"cache_prompt": False, "session_id": "s"}
    for fields in (spelled | named, {"options": spelled}, {"options": spelled, "num_predict": 3}):
        body = {name: value for name, value in make(**fields).items() if name != "max_tokens"}
        response = client.post(path, json=body)
        assert response.status_code == 200 and response.json()["usage"]["completion_tokens"] == 3, response.text
        assert HEADER not in response.headers
    for request in seen:
        assert (request.params.repetition_penalty, request.params.temperature) == (1.2, 0.5)
    body = {name: value for name, value in make(num_predict=-1).items() if name != "max_tokens"}
    if path == CHAT:
        assert client.post(path, json=body).json()["usage"]["total_tokens"] == 512
        assert client.post(path, json=make(best_of=1, enable_thinking=False)).status_code == 200


@pytest.mark.parametrize("path", BODIES)
def test_unknown_fields_are_a_400_by_default_and_left_out_with_the_option(client, lenient_client, path):
    body = BODIES[path] | {"frobnicate": {"deep": [1]}, "typical_p": 0.3}
    assert client.post(path, json=body).status_code == 400
    response = lenient_client.post(path, json=body)
    assert response.status_code == 200 and response.headers[HEADER] == "frobnicate, typical_p", response.text
    assert HEADER not in lenient_client.post(path, json=BODIES[path]).headers


def test_streams_say_it_too_and_large_bodies(lenient_client):
    response = lenient_client.post(CHAT, json=BODIES[CHAT] | {"stream": True, "frobnicate": 1})
    assert response.status_code == 200 and response.headers[HEADER] == "frobnicate"
    body = BODIES[CHAT] | {"frobnicate": "x" * 300_000}  # parsed in a thread
    assert lenient_client.post(CHAT, json=body).headers[HEADER] == "frobnicate"


@pytest.mark.parametrize(
    ("path", "fields", "names"),
    [
        (CHAT, {"messages": [TEXT[0] | {"x": 1}]}, "x"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]}]}, "x"),
        (CHAT, {"tools": [TOOL | {"x": 1}], "tool_choice": "none"}, "x"),
        (CHAT, {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f", "x": 1}}}, "x"),
        (CHAT, {"response_format": {"type": "text", "x": 1}}, "x"),
        (CHAT, {"options": {"mirostat": 2, "seed": 1}}, "mirostat"),
        ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]}]}, "x"),
        ("/v1/messages", {"messages": [TEXT[0] | {"x": 1}]}, "x"),
        ("/v1/responses", {"input": [{"role": "user", "content": "a", "x": 1}]}, "x"),
        ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a", "x": 1}]}]}, "x"),
        ("/v1/responses", {"text": {"format": {"type": "text"}, "x": 1}}, "x"),
    ],
)
def test_fields_of_parts_of_a_request(client, lenient_client, path, fields, names):
    assert client.post(path, json=BODIES[path] | fields).status_code == 400
    response = lenient_client.post(path, json=BODIES[path] | fields)
    assert response.status_code == 200 and response.headers[HEADER] == names, response.text


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"temperature": "hot"}),
        (CHAT, {"max_new_tokens": 5}),  # another name of what is known
        (CHAT, {"functions": []}),
        (CHAT, {"guided_json": {}}),
        (CHAT, {"input": "hello"}),  # a field of another API
        (CHAT, {"system": "Be brief."}),
        (CHAT, {"web_search_options": {}}),
        (CHAT, {"best_of": 2}),
        ("/v1/responses", {"previous_response_id": "resp_1"}),
        ("/v1/responses", {"messages": TEXT}),
        ("/v1/messages", {"response_format": {"type": "text"}}),
        ("/v1/messages/count_tokens", {"temperature": 0.5}),
    ],
)
def test_what_is_known_and_cannot_be_honoured_stays_a_400(lenient_client, path, fields):
    assert lenient_client.post(path, json=BODIES[path] | fields).status_code == 400


def test_errors_name_what_was_left_out(lenient_client):
    response = lenient_client.post(CHAT, json={"frobnicate": 1} | BODIES[CHAT] | {"temperature": 9})
    assert response.status_code == 400 and response.headers[HEADER] == "frobnicate"


def test_made_up_names_fill_neither_header_nor_log(lenient_client, caplog):
    with caplog.at_level(logging.WARNING):
        for i in range(40):
            names = {f"{'n' * 20}{i}_{j}\u20ac,\r\n {'x' * 500}": j for j in range(400)}
            response = lenient_client.post(CHAT, json=BODIES[CHAT] | names)
            assert response.status_code == 200
            header = response.headers[HEADER]
            assert len(header.split(", ")) == MAX_NAMES + 1 and header.endswith(f"+{400 - MAX_NAMES}")
            assert len(header) < MAX_NAMES * (3 * MAX_NAME_CHARS + 16) and header.isascii() and "\n" not in header
    lines = [record for record in caplog.records if "ignored" in record.getMessage()]
    assert 100 < len(lines) <= 257 and all(len(record.getMessage()) < 300 for record in lines)


def test_each_name_is_logged_once(lenient_client, folder, caplog):
    with LiveServer(folder, ignore_unknown_fields=True) as server, server.client() as client:
        with caplog.at_level(logging.WARNING):
            for _ in range(3):
                client.post(CHAT, json=BODIES[CHAT] | {"frobnicate": 1})
    assert len([record for record in caplog.records if "'frobnicate'" in record.getMessage()]) == 1


def test_the_document_tells_it(client, lenient_client):
    for asked, is_open in ((lenient_client, True), (client, False)):
        document = asked.get("/openapi.json").json()
        schema = document["components"]["schemas"]["ChatCompletionRequest"]
        assert {"num_predict", "repeat_penalty", "num_ctx", "options", "cache_prompt"} <= schema["properties"].keys()
        assert ("additionalProperties" not in schema) == is_open
        for status in ("200", "429"):
            assert (HEADER in document["paths"][CHAT]["post"]["responses"][status].get("headers", {})) == is_open

"""Errors over a socket: bodies that are no request, unknown names, content types, sizes, full queues.

Bad values of fields are in test_bad_input.py.
"""

import itertools
import json
import time

import httpx
import pytest

from tests.server.live import (
    JSON,
    LiveServer,
    assert_error,
    chat_body,
    chat_prompt,
    completion_body,
    expected_text,
)

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def label(value) -> str:
    text = repr(value)
    return text if len(text) < 40 else text[:36] + "..."


def post(client, route, body) -> httpx.Response:
    return client.post(route, content=json.dumps(body), headers=JSON)


@pytest.mark.parametrize(
    "field, route, make",
    [
        ("model", CHAT, chat_body),
        ("messages", CHAT, chat_body),
        ("model", COMPLETIONS, completion_body),
    ],
)
@pytest.mark.parametrize("null", [True, False])
def test_required_fields(client, field, route, make, null):
    body = make()
    del body[field]
    if null:
        body[field] = None
    assert_error(post(client, route, body), 400, field, "missing_required_parameter")


@pytest.mark.parametrize("name, near", [("max_token", "max_tokens"), ("temprature", "temperature"), ("x" * 10_000, "")])
def test_an_unknown_field_is_named_with_the_nearest_one(client, name, near):
    message = assert_error(post(client, COMPLETIONS, completion_body(**{name: 1})), 400, name[:64], "unknown_parameter")
    assert near in message


def test_many_unknown_fields_are_one_short_error(client, victim):
    body = "{" + ",".join(f'"k{i}":0' for i in range(100_000)) + "}"
    assert_error(client.post(CHAT, content=body, headers=JSON), 400, "k0", "unknown_parameter")


@pytest.mark.parametrize("item", ["1,", '"":1,'])
def test_bodies_of_millions_of_values_are_refused_before_they_are_built(client, victim, item):
    assert "too many" in assert_error(client.post(CHAT, content='{"prompt":[' + item * 1_100_000, headers=JSON), 400)


RAW = completion_body()
RAW_TEXT = json.dumps(RAW)[:-1]


@pytest.mark.parametrize(
    "body, param",
    [
        (b"", None),
        (b"{", None),
        (b"[]", None),
        (b"null", None),
        (b'"text"', None),
        (b"\xff\xfe{\x00}\x00", None),
        (RAW_TEXT.encode("utf-16"), None),
        (b"\xef\xbb\xbf{}", None),
        (b'{"prompt": "\xc3"}', None),
        (b'{"prompt": "\xed\xa0\x80"}', None),
        (b'{"prompt": "a\x00b"}', None),
        (b"{'prompt': 1}", None),
        (b'{"a":1,}', None),
        (b"[" * 100_000, None),
        (b'{"a":' * 50_000, None),
        (RAW_TEXT.encode() + b', "metadata": ' + b"[" * 3000 + b"]" * 3000 + b"}", None),
        (RAW_TEXT.encode() + b', "seed": 1, "seed": 2}', "seed"),
        (RAW_TEXT.encode() + b', "prompt": "other"}', "prompt"),
        (RAW_TEXT.encode() + b', "temperature": NaN}', "temperature"),
        (RAW_TEXT.encode() + b', "temperature": -Infinity}', "temperature"),
        (RAW_TEXT.encode() + b', "temperature": 1e999}', "temperature"),
        (RAW_TEXT.encode() + b', "metadata": {"a": [1, NaN]}}', "metadata.a[1]"),
        (RAW_TEXT.encode() + b', "top_k": ' + b"9" * 4000 + b"}", "top_k"),
        (RAW_TEXT.encode() + b', "top_k": -' + b"9" * 5000 + b"}", "top_k"),
        (RAW_TEXT.encode() + b', "temperature": ' + b"9" * 5000 + b"}", "temperature"),
        (RAW_TEXT.encode() + b', "temperature": 1' + b"0" * 5000 + b".5}", "temperature"),
        (RAW_TEXT.encode() + b', "user": "\\ud800"}', "user"),
        (RAW_TEXT.encode() + b', "stop": ["a", "\\uDFFF"]}', "stop[1]"),
        (RAW_TEXT.encode() + b', "metadata": {"k": {"l": "\\ud83d"}}}', "metadata.k.l"),
        (RAW_TEXT.encode() + b', "\\ud800": 1}', "a key"),
        (b'{"model": "\\udc00", "prompt": "a"}', "model"),
    ],
    ids=label,
)
def test_what_json_can_spell_and_no_field_may_hold(client, victim, body, param):
    assert_error(client.post(COMPLETIONS, content=body, headers=JSON), 400, param)


def test_a_lone_surrogate_in_a_message_is_named(client):
    body = json.dumps(chat_body()).replace("hello", "\\ud800").encode()
    assert_error(client.post(CHAT, content=body, headers=JSON), 400, "messages[0].content")


def with_arguments(text):
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": text}}
    turns = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c", "content": "3"}]
    return chat_body(messages=[{"role": "user", "content": "hello"}, *turns])


def test_half_a_surrogate_pair_in_the_arguments_of_a_call_may_come_back(client):
    """A model may have written it."""
    assert client.post(CHAT, json=with_arguments('{"a": "\\ud83e", "\\udc00": 1}')).status_code == 200
    prompt = client.post("/tokenize", json=with_arguments('{"a": "\\ud83e!"}') | {"return_token_strs": True}).json()
    assert "\ufffd!" in bytes(t for t in prompt["tokens"] if t < 256).decode()


@pytest.mark.parametrize("text", ['{"a": NaN}', '{"a": 1e999}', "[1]", "{", '{"a": ' + "[" * 130 + "]" * 130 + "}"])
def test_arguments_of_an_earlier_call_may_be_any_text(client, text):
    for path in (CHAT, "/tokenize"):
        assert client.post(path, json=with_arguments(text)).status_code == 200
    items = [
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": text},
        {"type": "function_call_output", "call_id": "c", "output": "3"},
    ]
    answer = client.post("/v1/responses", json={"model": "alias", "input": items, "max_output_tokens": 4})
    assert answer.status_code == 200, answer.text


def nested_schema(levels):
    schema = {"type": "object"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def test_what_a_prompt_would_show_is_not_nested_without_end(client):
    tool = {"type": "function", "function": {"name": "f", "parameters": nested_schema(100)}}
    assert "128 levels" in assert_error(
        client.post(CHAT, json=chat_body(tools=[tool])), 400, "tools[0].function.parameters"
    )


def test_surrogate_pairs_and_nul_are_text(client):
    body = json.dumps(completion_body(prompt="fox 🦊 NaN \0", echo=True)).encode()
    assert b"\\ud83e" in body and b"\\u0000" in body
    assert client.post(COMPLETIONS, content=body, headers=JSON).json()["choices"][0]["text"].startswith("fox 🦊 NaN \0")


@pytest.mark.parametrize(
    "content_type",
    [
        None,
        "text/plain",
        "application/xml",
        "multipart/form-data; boundary=x",
        "application/json; charset=utf-16",
        "application/json; x=y; charset=latin-1",
        "application/jsonp",
    ],
)
def test_the_content_type_is_json(client, content_type):
    headers = {} if content_type is None else {"content-type": content_type}
    assert_error(client.post(CHAT, content=b"{}", headers=headers), 415)


@pytest.mark.parametrize(
    "content_type",
    [
        "application/json; charset=UTF-8",
        "Application/JSON",
        'application/json;charset="utf-8"',
        "application/json; charset=utf-8; odata=verbose",
        "application/json; profile=x",
    ],
)
def test_spellings_of_json(client, content_type):
    body = json.dumps(completion_body())
    assert client.post(COMPLETIONS, content=body, headers={"content-type": content_type}).status_code == 200


def test_compressed_bodies_are_refused(client):
    assert_error(client.post(CHAT, content=b"x", headers=JSON | {"content-encoding": "gzip"}), 415)


def test_a_body_over_the_limit_is_413_with_and_without_a_length(folder):
    with LiveServer(folder, max_body_bytes=4096) as live, live.client() as client:
        big = json.dumps(completion_body(prediction={"content": "x" * 5000})).encode()
        assert_error(client.post(COMPLETIONS, content=big, headers=JSON), 413, code="body_too_large")
        pieces = (big[i : i + 1000] for i in range(0, len(big), 1000))  # chunked
        assert_error(client.post(COMPLETIONS, content=pieces, headers=JSON), 413, code="body_too_large")
        exact = json.dumps(completion_body(prediction={"content": ""})).encode()
        exact = json.dumps(completion_body(prediction={"content": "x" * (4096 - len(exact))})).encode()
        assert len(exact) == 4096
        assert client.post(COMPLETIONS, content=exact, headers=JSON).status_code == 200


def test_a_client_that_sends_far_too_much_still_sees_why(folder):
    with LiveServer(folder, max_body_bytes=4096) as live, live.client() as client:
        assert_error(client.post(COMPLETIONS, content=b" " * 20_000_000, headers=JSON), 413, code="body_too_large")


def test_a_body_that_never_ends_is_cut_off(folder, monkeypatch):
    monkeypatch.setattr("server.http.body.DISCARD_SECONDS", 0.2)
    with LiveServer(folder, max_body_bytes=1 << 20) as live, live.client() as client:
        start = time.monotonic()
        try:
            assert_error(client.post(COMPLETIONS, content=itertools.repeat(b" " * 65536), headers=JSON), 413)
        except httpx.WriteError:  # the connection was closed while we still wrote
            pass
        assert time.monotonic() - start < 10
        assert client.post(COMPLETIONS, json=completion_body()).status_code == 200


def test_a_prompt_that_is_too_long_gives_both_counts(client):
    """By its characters before it is tokenised where they tell, else by its tokens."""
    for prompt, count in (("word " * 200_000, "1000000"), ([5] * 600, "600")):
        message = assert_error(post(client, COMPLETIONS, completion_body(prompt=prompt)), 400, "prompt")
        assert count in message and "512" in message
        response = post(client, COMPLETIONS, completion_body(prompt=prompt))
        assert response.json()["error"]["code"] == "context_length_exceeded"
    body = chat_body(messages=[{"role": "user", "content": "x" * 10_000}])
    message = assert_error(post(client, CHAT, body), 400, "messages", "context_length_exceeded")
    assert "10000" in message and "512" in message
    body = chat_body(messages=[{"role": "user", "content": "x" * 495}])  # only the template makes it too long
    assert_error(post(client, CHAT, body), 400, "messages", "context_length_exceeded")


def test_prompt_and_max_tokens_together_must_fit(client):
    message = assert_error(
        post(client, COMPLETIONS, completion_body(prompt=[5] * 500, max_tokens=13)), 400, "max_tokens"
    )
    assert "500" in message and "12" in message
    assert post(client, COMPLETIONS, completion_body(prompt=[5] * 500, max_tokens=12)).status_code == 200
    body = chat_body(max_completion_tokens=600)
    assert "max_completion_tokens" in assert_error(post(client, CHAT, body), 400, "max_completion_tokens")


def test_defaults_of_max_tokens(client):
    body = completion_body()
    del body["max_tokens"]
    assert post(client, COMPLETIONS, body).json()["usage"]["completion_tokens"] == 16
    body["prompt"] = [5] * 505
    assert post(client, COMPLETIONS, body).json()["usage"]["completion_tokens"] == 7, "what is left of the context"
    body = chat_body(max_completion_tokens=3)  # wins over max_tokens
    assert post(client, CHAT, body).json()["usage"]["completion_tokens"] == 3
    del body["max_tokens"], body["max_completion_tokens"]
    usage = post(client, CHAT, body).json()["usage"]
    assert usage["total_tokens"] == 512, "a chat runs to the end of the context"


@pytest.mark.parametrize(
    "route, make", [(CHAT, chat_body), (COMPLETIONS, completion_body)], ids=["chat", "completions"]
)
def test_null_is_absent_and_harmless_fields_are_ignored(client, route, make):
    expected = post(client, route, make()).json()["choices"]
    nulls = [
        "n",
        "stream",
        "stream_options",
        "temperature",
        "top_p",
        "presence_penalty",
        "frequency_penalty",
        "logit_bias",
    ]
    nulls += ["stop", "top_k", "min_p", "repetition_penalty", "stop_token_ids", "ignore_eos", "min_tokens", "priority"]
    nulls += [
        "logprobs",
        "tools",
        "tool_choice",
        "response_format",
        "suffix",
        "functions",
        "service_tier",
        "unheard_of",
    ]
    nulls += ["top_logprobs", "max_completion_tokens"] if route == CHAT else ["best_of", "echo"]
    harmless = {"user": "u", "metadata": {"a": "b"}, "store": True, "safety_identifier": "s", "prompt_cache_key": "p"}
    harmless |= {
        "service_tier": "auto",
        "prediction": {"type": "content", "content": "x"},
    }
    if route == CHAT:
        harmless |= {"parallel_tool_calls": True, "tool_choice": "none", "tools": []}
    inert = {"response_format": {"type": "text"}, "suffix": "", "use_beam_search": False, "top_k": -1}
    for fields in (dict.fromkeys(nulls), harmless, inert):
        response = post(client, route, make(**fields))
        assert response.status_code == 200, response.text
        assert response.json()["choices"] == expected


def test_null_in_messages_is_absent(client):
    dumped = {"role": "user", "content": "hello", "name": None, "tool_calls": None, "refusal": None, "annotations": []}
    expected = post(client, CHAT, chat_body()).json()["choices"]
    assert post(client, CHAT, chat_body(messages=[dumped])).json()["choices"] == expected
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    joined = post(client, CHAT, chat_body(messages=[{"role": "user", "content": parts}])).json()
    assert joined["choices"][0]["message"]["content"] == expected_text(chat_prompt("hel\nlo"), 1, 8)


def test_roles_and_the_generation_prompt_reach_the_template(client):
    messages = [{"role": "developer", "content": "d"}, {"role": "user", "content": "u", "name": "ann"}]
    body = chat_body(messages=messages, add_generation_prompt=False)
    prompt = [256, *b"system\nd", 257, *b"\n", 256, *b"user\nu", 257, *b"\n"]
    assert post(client, CHAT, body).json()["choices"][0]["message"]["content"] == expected_text(prompt, 1, 8)


@pytest.mark.parametrize("name", ["other", "", "../../etc/passwd", "a\0b", "org/fake-model/", "x" * 10_000])
def test_an_unknown_model_is_404(client, name):
    assert_error(post(client, CHAT, chat_body(model=name)), 404, "model", "model_not_found")
    assert_error(post(client, COMPLETIONS, completion_body(model=name)), 404, "model", "model_not_found")


@pytest.mark.parametrize("path", ["/v1", "/v1/", "/v1/images", "//v1/models", "/docs", "/redoc", "/V1/models"])
def test_unknown_routes_are_404_in_the_envelope(client, path):
    assert_error(client.get(path), 404)


@pytest.mark.parametrize(
    "path, meant",
    [
        ("/chat/completions", CHAT),
        ("/v1/v1/chat/completions", CHAT),
        (CHAT + "/", CHAT),
        ("/v1//completions", COMPLETIONS),
        ("/v1/tokenize", "/tokenize"),
        ("/models", "/v1/models"),
    ],
)
def test_a_base_url_that_is_nearly_right_is_told_what_is(client, path, meant):
    assert f"did you mean {meant}?" in assert_error(client.post(path, json={}), 404)


@pytest.mark.parametrize(
    "method, path", [("GET", "x"), ("POST", "x"), ("DELETE", "x"), ("GET", "x/messages")], ids=lambda value: value
)
def test_a_stored_chat_completion_is_a_404_that_says_why(client, method, path):
    error = assert_error(client.request(method, f"{CHAT}/{path}"), 404, "completion_id", "completion_not_found")
    assert "stores no chat completions" in error


@pytest.mark.parametrize(
    "method, path", [("GET", CHAT), ("PUT", CHAT), ("DELETE", COMPLETIONS), ("POST", "/v1/models"), ("POST", "/health")]
)
def test_wrong_methods_are_405_with_allow(client, method, path):
    response = client.request(method, path)
    assert_error(response, 405)
    for allowed in response.headers["allow"].split(", "):
        assert client.request(allowed, path).status_code != 405
    assert ("GET" in response.headers["allow"]) == ("HEAD" in response.headers["allow"])


def test_a_template_that_refuses_is_a_400(tmp_path_factory):
    from tests.checkpoints import save_fake_checkpoint

    template = "{{ raise_exception('roles must alternate') }}"
    refusing = save_fake_checkpoint(tmp_path_factory.mktemp("refusing"), chat_template=template)
    with LiveServer(refusing) as live, live.client() as client:
        assert "roles must alternate" in assert_error(post(client, CHAT, chat_body()), 400, "messages")
    bare = save_fake_checkpoint(tmp_path_factory.mktemp("bare"), chat_template=None)
    with LiveServer(bare) as live, live.client() as client:
        assert "--chat-template" in assert_error(post(client, CHAT, chat_body()), 400, "messages")
        assert post(client, COMPLETIONS, completion_body()).status_code == 200


def test_a_full_queue_is_429_with_retry_after(folder):
    options = {"max_queued_requests": 3, "engine": {"max_num_seqs": 1}}
    with LiveServer(folder, "--step-seconds", "0.02", **options) as live, live.client() as client:
        body = completion_body(stream=True, max_tokens=400)
        with client.stream("POST", COMPLETIONS, json=body) as running:
            first = running.iter_bytes()
            next(first)
            with client.stream("POST", COMPLETIONS, json=body), client.stream("POST", COMPLETIONS, json=body):
                response = client.post(COMPLETIONS, json=completion_body(prompt=["a", "b", "c"]))
                assert_error(response, 429)
                assert live.usage()["waiting"] == 2, "all prompts of a request are admitted, or none"
                with client.stream("POST", COMPLETIONS, json=body):
                    response = client.post(COMPLETIONS, json=completion_body())
                    assert_error(response, 429, code="rate_limit_exceeded")
                    assert int(response.headers["retry-after"]) >= 1
        live.wait_idle()


def test_what_no_queue_would_take_is_a_400(folder):
    with LiveServer(folder, max_queued_requests=4) as live, live.client() as client:
        few, many = ["a"] * 4, ["a"] * 6
        for fields, param in (
            ({"prompt": many, "temperature": 0}, "prompt"),
            ({"prompt": few, "n": 2}, "n"),
            ({"prompt": few, "best_of": 3}, "best_of"),
        ):
            message = assert_error(client.post(COMPLETIONS, json=completion_body(**fields)), 400, param)
            assert "--max-queued-requests" in message
        for fields in ({"prompt": few}, {"prompt": few, "n": 2, "temperature": 0}, {"prompt": ["a"] * 2, "n": 3}):
            assert client.post(COMPLETIONS, json=completion_body(**fields)).status_code == 200, fields
        live.wait_idle()


def test_a_bug_is_a_500_without_internals(folder, caplog):
    with LiveServer(folder) as live, live.client() as client:

        def broken(request):
            raise ZeroDivisionError("secret /path/of/this/machine")

        live.driver.generate = broken
        response = client.post(COMPLETIONS, json=completion_body(), headers={"x-request-id": "mine-1"})
        message = assert_error(response, 500, code="internal_error")
        assert "secret" not in response.text and "ZeroDivision" not in response.text
        assert "x-request-id" in message and response.headers["x-request-id"] == "mine-1"
        assert response.headers["x-should-retry"] == "false"
    assert "secret" in caplog.text and "mine-1" in caplog.text, "the log has it"

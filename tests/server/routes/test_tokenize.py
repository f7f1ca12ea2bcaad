"""/tokenize and /detokenize: the ids of a prompt as the generation endpoints count them, and back."""

import threading

import pytest

from tests.server.live import JSON, MODEL, assert_error, chat_body, chat_prompt, completion_body

TEXT = "héllo wörld 🦊"


def tokenize(client, **fields) -> dict:
    response = client.post("/tokenize", json=fields)
    assert response.status_code == 200, response.text
    return response.json()


def test_a_text_and_back(client):
    ids = list(TEXT.encode())
    answer = tokenize(client, model=MODEL, prompt=TEXT)
    assert answer == {"count": len(ids), "max_model_len": 512, "tokens": ids, "token_strs": None}
    assert client.post("/detokenize", json={"model": MODEL, "tokens": ids}).json() == {"prompt": TEXT}


def test_the_model_need_not_be_named(client):
    assert tokenize(client, prompt="ab")["tokens"] == [97, 98]
    assert client.post("/detokenize", json={"tokens": [97, 257, 98]}).json() == {"prompt": "a<|im_end|>b"}
    assert_error(client.post("/tokenize", json={"model": "other", "prompt": "x"}), 404, "model", "model_not_found")
    assert_error(client.post("/detokenize", json={"model": "other", "tokens": []}), 404, "model", "model_not_found")


def test_token_strings_are_the_vocabularys_own(client):
    assert tokenize(client, prompt="a é<|im_end|>", return_token_strs=True)["token_strs"] == [
        *("a", "\u0120", "\u00c3", "\u00a9", "<|im_end|>")
    ]


def test_the_empty_text_has_no_tokens(client):
    assert tokenize(client, prompt="")["count"] == 0
    assert client.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}


@pytest.mark.parametrize("changes", [{}, {"add_generation_prompt": False}, {"temperature": 0.5, "max_tokens": 3}])
def test_a_chat_request_counts_as_the_chat_endpoint_counts_it(client, changes):
    body = chat_body(**changes)
    answer = tokenize(client, **body)
    if "add_generation_prompt" not in changes:
        assert answer["tokens"] == chat_prompt("hello")
    usage = client.post("/v1/chat/completions", json=body).json()["usage"]
    assert answer["count"] == len(answer["tokens"]) == usage["prompt_tokens"]


def test_a_prompt_counts_as_the_completions_endpoint_counts_it(client):
    usage = client.post("/v1/completions", json=completion_body(prompt=TEXT)).json()["usage"]
    assert tokenize(client, prompt=TEXT)["count"] == usage["prompt_tokens"]


def test_wrong_methods_and_bodies(client):
    assert_error(client.get("/tokenize"), 405)
    assert_error(client.post("/detokenize", content=b"[1]", headers=JSON), 400)


def test_the_api_is_described(client):
    schema = client.get("/openapi.json").json()
    body = schema["paths"]["/tokenize"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    names = [option["$ref"].rpartition("/")[2] for option in body["anyOf"]]
    assert names == ["TokenizeTextRequest", "TokenizeChatRequest"]
    assert {*names, "DetokenizeRequest"} <= schema["components"]["schemas"].keys()


def test_a_long_text_does_not_hold_up_the_event_loop(server):
    """The tokenizer's threads encode without the GIL: others run meanwhile."""
    tokenizer = server.driver.tokenizer
    text, ticks, done = "some words " * 40_000, 0, threading.Event()

    def encode() -> None:
        tokenizer.encode(text)
        done.set()

    threading.Thread(target=encode).start()
    while not done.wait(0.001):
        ticks += 1
    assert ticks >= 5, "encoding held the GIL"


def test_a_chat_is_truncated_as_where_it_is_answered(client):
    for limit in (5, -1, 100):
        body = chat_body(truncate_prompt_tokens=limit)
        used = client.post("/v1/chat/completions", json=body).json()["usage"]["prompt_tokens"]
        assert client.post("/tokenize", json=body).json()["count"] == used <= (limit if limit > 0 else 512)

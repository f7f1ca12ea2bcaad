"""use_beam_search and best_of over HTTP."""

import json
import threading

import httpx
import pytest

from engine.outputs import CompletionOutput, TokenLogprobs
from engine.sampling_params import BeamSearchParams
from server.output.collect import Choice
from server.routes.completions import best_choices
from tests.engine.scheduling.beam_loop import expected_hypotheses
from tests.fake_device import EOS_TOKEN_ID
from tests.server.live import LiveServer, assert_error, chat_body, chat_prompt, completion_body
from tests.server.raw_requests import send_raw, wait_until

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ROUTES = pytest.mark.parametrize(
    "route, make", [(COMPLETIONS, completion_body), (CHAT, chat_body)], ids=["text", "chat"]
)


def expected_texts(prompt: list[int], max_tokens=8, **params) -> list[str]:
    params = BeamSearchParams(max_tokens=max_tokens, **params)
    found = expected_hypotheses(prompt, params, max_tokens)
    return [bytes(token for token in ids if token != EOS_TOKEN_ID).decode() for ids, _ in found]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"length_penalty": 0.0, "early_stopping": "never"},
        {"length_penalty": -1, "early_stopping": True, "temperature": 0},
        {"ignore_eos": True, "top_k": -1},
        {"min_tokens": 4, "stop_token_ids": [101, 102, 103], "include_stop_str_in_output": True},
    ],
    ids=str,
)
def test_completions_are_the_hypotheses_best_first(client, server, fields):
    body = completion_body(use_beam_search=True, n=4, **fields)
    answer = client.post(COMPLETIONS, json=body).json()
    params = {name: value for name, value in fields.items() if name not in ("temperature", "top_k")}
    params = {name: tuple(value) if isinstance(value, list) else value for name, value in params.items()}
    assert [choice["text"] for choice in answer["choices"]] == expected_texts(list(b"hello"), beam_width=4, **params)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    found = expected_hypotheses(list(b"hello"), BeamSearchParams(beam_width=4, max_tokens=8, **params), 8)
    ends = {*params.get("stop_token_ids", ()), *([] if "ignore_eos" in params else [EOS_TOKEN_ID])}
    reasons = ["stop" if ids[-1] in ends else "length" for ids, _ in found]
    assert [choice["finish_reason"] for choice in answer["choices"]] == reasons
    server.wait_idle()


def test_chat_several_prompts_and_usage(client):
    answer = client.post(CHAT, json=chat_body(use_beam_search=True, n=3, ignore_eos=True)).json()
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    assert texts == expected_texts(chat_prompt("hello"), beam_width=3, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 3 * 8
    body = completion_body(prompt=["one", "two"], use_beam_search=True, n=2, ignore_eos=True, echo=True)
    answer = client.post(COMPLETIONS, json=body).json()
    wanted = [
        prompt + text
        for prompt in ("one", "two")
        for text in expected_texts(list(prompt.encode()), beam_width=2, ignore_eos=True)
    ]
    assert [choice["text"] for choice in answer["choices"]] == wanted


def test_logprobs_of_the_returned_tokens(client):
    body = completion_body(use_beam_search=True, n=2, ignore_eos=True, logprobs=0)
    answer = client.post(COMPLETIONS, json=body).json()
    params = BeamSearchParams(beam_width=2, ignore_eos=True, max_tokens=8)
    scores = [score for _, score in expected_hypotheses(list(b"hello"), params, 8)]
    assert [sum(c["logprobs"]["token_logprobs"]) / 8 for c in answer["choices"]] == pytest.approx(scores)
    answer = client.post(CHAT, json=chat_body(use_beam_search=True, n=2, logprobs=True)).json()
    assert answer["choices"][0]["logprobs"]["content"]


@ROUTES
@pytest.mark.parametrize(
    "field, value",
    [
        ("stream", True),
        ("temperature", 0.5),
        ("top_p", 0.9),
        ("top_k", 5),
        ("min_p", 0.1),
        ("repetition_penalty", 1.1),
        ("presence_penalty", 0.1),
        ("frequency_penalty", -0.1),
        ("logit_bias", {"5": 1}),
        ("stop", "x"),
        ("length_penalty", 11),
        ("length_penalty", "1"),
        ("early_stopping", "always"),
        ("early_stopping", 1),
        ("n", 129),
        ("min_tokens", 9),
        ("stop_token_ids", list(range(130))),
        ("max_tokens", 0),
    ],
    ids=str,
)
def test_what_beams_cannot_honour_is_named(client, server, route, make, field, value):
    body = make(**{"use_beam_search": True, "n": 2, field: value})
    assert_error(client.post(route, json=body), 400, field)
    server.wait_idle()


def test_fields_of_one_endpoint_that_beams_cannot_honour(client):
    for fields, param in (
        ({"logprobs": 1}, "logprobs"),
        ({"best_of": 3}, "best_of"),
    ):
        assert_error(client.post(COMPLETIONS, json=completion_body(use_beam_search=True, n=2, **fields)), 400, param)
    body = chat_body(use_beam_search=True, n=2, logprobs=True, top_logprobs=1)
    assert_error(client.post(CHAT, json=body), 400, "top_logprobs")
    body = chat_body(use_beam_search=True, n=2, max_completion_tokens=0)
    assert_error(client.post(CHAT, json=body), 400, "max_completion_tokens")


@ROUTES
def test_beam_fields_without_beams(client, route, make):
    for fields, param in (({"length_penalty": 2.0}, "length_penalty"), ({"early_stopping": True}, "early_stopping")):
        assert "use_beam_search" in assert_error(client.post(route, json=make(**fields)), 400, param)
    neutral = {"use_beam_search": False, "length_penalty": 1.0, "early_stopping": False}
    assert (
        client.post(route, json=make(**neutral)).json()["choices"] == client.post(route, json=make()).json()["choices"]
    )


def test_a_search_that_never_fits_gets_its_error_and_others_go_on(folder):
    with LiveServer(folder, engine={"num_blocks": 6, "max_num_seqs": 8}) as live, live.client() as client:
        body = completion_body(use_beam_search=True, n=8, max_tokens=64, ignore_eos=True)
        message = assert_error(client.post(COMPLETIONS, json=body), 400, "n")
        assert "KV cache" in message and "6 blocks" in message
        live.wait_idle()
        body = completion_body(use_beam_search=True, n=9)
        assert "at most 8" in assert_error(client.post(COMPLETIONS, json=body), 400, "n")
        assert client.post(COMPLETIONS, json=completion_body(use_beam_search=True, n=3)).status_code == 200
        live.wait_idle()


def test_a_client_that_leaves_frees_the_whole_group(folder):
    with LiveServer(folder, "--step-seconds", "0.01") as live:
        connection = send_raw(live, completion_body(use_beam_search=True, n=6, max_tokens=400, ignore_eos=True))
        wait_until(lambda: live.usage()["running"] == 6)
        connection.close()
        live.wait_idle()
        assert live.aborts() == 1


def test_draining_ends_a_search_with_an_error(folder):
    with LiveServer(folder, "--step-seconds", "0.02") as live, live.client() as client:
        body = completion_body(use_beam_search=True, n=4, max_tokens=400, ignore_eos=True)

        def drain():
            wait_until(lambda: live.usage()["running"] == 4)
            live.call(lambda: live.driver.drain(0.05))

        thread = threading.Thread(target=drain)
        thread.start()
        response = client.post(COMPLETIONS, json=body)
        thread.join()
        assert_error(response, 500)
        live.wait_idle()


def choice(*logprobs: float) -> Choice:
    made = Choice("", None)
    for logprob in logprobs:
        made.add(CompletionOutput(0, "", (5,), (TokenLogprobs(5, logprob),)))
    return made


def test_the_best_choices_have_the_highest_logprob_per_token_within_their_prompt():
    a, b, c = choice(-1.0, -1.0), choice(-0.5), choice(-0.7, -0.7, -0.7)
    d, e, f = choice(-3.0), choice(-4.0), choice(-2.0, -3.5)
    assert best_choices([a, b, c, d, e, f], 3, 2) == [b, c, f, d]


def test_best_of_returns_the_likeliest_and_counts_all(bundled_server):
    """Against the same samples, all of them, with their logprobs."""
    body = {"model": "bundled", "prompt": "Once upon a time", "max_tokens": 12, "seed": 3, "temperature": 1.5}
    with httpx.Client(base_url=bundled_server, timeout=60) as client:
        body["model"] = client.get("/v1/models").json()["data"][0]["id"]
        every = client.post(COMPLETIONS, json=body | {"n": 5, "logprobs": 0}).json()
        best = client.post(COMPLETIONS, json=body | {"n": 2, "best_of": 5}).json()
        beams = client.post(COMPLETIONS, json=body | {"temperature": 0, "use_beam_search": True, "n": 4}).json()
    assert len(beams["choices"]) == 4
    means = {c["text"]: mean(c["logprobs"]["token_logprobs"]) for c in every["choices"]}
    assert len(means) == 5
    assert [c["text"] for c in best["choices"]] == sorted(means, key=means.get, reverse=True)[:2]
    assert [c["index"] for c in best["choices"]] == [0, 1]
    assert all(c["logprobs"] is None for c in best["choices"])
    assert best["usage"] == every["usage"]


def mean(values):
    return sum(values) / len(values)


@pytest.mark.parametrize(
    "fields",
    [{"best_of": 1, "n": 2}, {"best_of": 0}, {"best_of": 21}, {"best_of": 129}, {"best_of": 2, "stream": True}],
    ids=json.dumps,
)
def test_best_of_out_of_range(client, fields):
    assert_error(client.post(COMPLETIONS, json=completion_body(**fields)), 400, "best_of")


def test_best_of_equal_to_n_may_stream(client):
    response = client.post(COMPLETIONS, json=completion_body(best_of=2, n=2, stream=True))
    assert response.status_code == 200 and response.text.endswith("data: [DONE]\n\n")

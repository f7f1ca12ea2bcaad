"""Predicted outputs of chats: they change how many steps an answer takes, and never the answer."""

import httpx
import pytest

from tests.server.live import JSON, assert_error, chat_body, chat_prompt, events, expected_text

CHAT = "/v1/chat/completions"
ASKED = {"model": "pageserve", "messages": [{"role": "user", "content": "Tell me a story about a fox."}]}


def predicted(text):
    return {"prediction": {"type": "content", "content": text}}


END_TOKENS = ("0", "1", "2")  # of the bundled model: an answer's text skips them, so no prediction could hold them


# These answers have no near ties: a prefix hit changes the last bits of some sums, which could turn one.
@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.9, "seed": 6, "top_p": 0.95}], ids=str)
def test_a_real_server_answers_with_the_same_text_in_fewer_steps(bundled_server, sampling):
    body = ASKED | sampling | {"max_tokens": 120, "ignore_eos": True, "return_timings": True}
    body["logit_bias"] = dict.fromkeys(END_TOKENS, -100)

    def ask(client, **fields):
        answer = client.post(CHAT, json=body | fields).json()
        return answer["choices"][0], answer["usage"], answer["timings"][0]["steps"]

    with httpx.Client(base_url=bundled_server, timeout=60) as client:
        plain, usage, num_steps = ask(client)
        assert "accepted_prediction_tokens" not in usage["completion_tokens_details"]
        text = plain["message"]["content"]
        for _ in range(3):  # the times of steps bound the drafts: after a pause of the machine they may be few
            found, usage, num_with = ask(client, **predicted(text))
            assert found == plain
            details = usage["completion_tokens_details"]
            if details["accepted_prediction_tokens"] > 0.6 * usage["completion_tokens"]:
                break
        assert details["rejected_prediction_tokens"] < 0.5 * usage["completion_tokens"]
        assert 0.6 * usage["completion_tokens"] < details["accepted_prediction_tokens"] <= usage["completion_tokens"]
        assert num_with <= num_steps - details["accepted_prediction_tokens"] < 0.4 * num_steps
        parts = [{"type": "text", "text": part} for part in ("So:", text[len(text) // 3 :])]
        edited, usage, _ = ask(client, **predicted(parts))
        assert edited == plain and usage["completion_tokens_details"]["accepted_prediction_tokens"] > 0
        wrong, usage, _ = ask(client, **predicted("1 2 3 4 5 6 7 8 9 " * 20))
        assert wrong == plain and usage["completion_tokens_details"]["accepted_prediction_tokens"] == 0
        metrics = client.get("/metrics").text
        assert "spec_decode_num_accepted_tokens_total 0.0" not in metrics


OTHER_FIELDS = [{"n": 2, "logprobs": True}, {"stop": ["e"]}, {"tools": []}, {"stream": True}]


@pytest.mark.parametrize("fields", OTHER_FIELDS, ids=str)
def test_any_other_field_goes_with_a_prediction(server, client, fields):
    """OpenAI refuses some of these; here a draft is verified with the same sampler, whatever the fields are."""
    text = expected_text(chat_prompt("hello"), 1, 60)
    body = chat_body(max_tokens=60, **fields)
    if fields.get("stream"):
        body["stream_options"] = {"include_usage": True}
    plain, found = (client.post(CHAT, json=body | extra) for extra in ({}, predicted(text)))
    answers = [events(raw.text)[:-1] if fields.get("stream") else [raw.json()] for raw in (plain, found)]
    usages = [answer[-1]["usage"]["completion_tokens_details"] for answer in answers]
    assert "accepted_prediction_tokens" not in usages[0]
    assert usages[1]["accepted_prediction_tokens"] > (0 if "stop" in fields else 20)
    assert usages[1]["accepted_prediction_tokens"] <= answers[1][-1]["usage"]["completion_tokens"]
    texts = [
        [(choice["index"], (choice.get("message") or choice["delta"]).get("content")) for choice in chunk["choices"]]
        for answer in answers
        for chunk in answer
    ]
    half = len(texts) // 2
    if fields.get("stream"):
        assert "".join(choices[0][1] or "" for choices in texts if choices) == 2 * text
    else:
        assert texts[:half] == texts[half:]
    server.wait_idle()


@pytest.mark.parametrize("length", range(49, 59, 3))
def test_predicted_tokens_behind_the_end_were_not_accepted(client, length):
    """The prediction lacks the first 20 tokens, and a draft may go on behind the stop."""
    text = expected_text(chat_prompt("hello"), 1, 100)
    body = chat_body(max_tokens=100, stop=[text[length - 5 : length]], **predicted(text[20:]))
    usage = client.post(CHAT, json=body).json()["usage"]
    accepted = usage["completion_tokens_details"]["accepted_prediction_tokens"]
    assert 0 < accepted <= usage["completion_tokens"] - 20 <= length - 20


def test_a_prediction_longer_than_the_context_is_cut(client):
    text = expected_text(chat_prompt("hello"), 1, 60)
    answer = client.post(CHAT, json=chat_body(max_tokens=60, **predicted(text + "x" * 100_000))).json()
    assert answer["choices"][0]["message"]["content"] == text
    assert answer["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 20


@pytest.mark.parametrize(
    ("prediction", "param"),
    [
        ("x", "prediction"),
        ({}, "prediction.type"),
        ({"type": "content"}, "prediction.content"),
        ({"type": "text", "content": "x"}, "prediction.type"),
        ({"type": "content", "content": 5}, "prediction.content"),
        ({"type": "content", "content": [{"type": "image_url"}]}, "prediction.content[0].type"),
        ({"type": "content", "content": "x", "weight": 1}, "prediction.weight"),
    ],
    ids=str,
)
def test_a_malformed_prediction_is_refused(client, prediction, param):
    assert_error(client.post(CHAT, json=chat_body(prediction=prediction)), 400, param)


def test_a_completion_takes_the_field_as_a_hint(client):
    body = {"model": "org/fake-model", "prompt": "hello", "max_tokens": 4, **predicted("hello")}
    assert client.post("/v1/completions", json=body, headers=JSON).status_code == 200

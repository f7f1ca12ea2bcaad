"""The official Python client, which parses answers into its own types, against a live server.

Every answer, error and stream frame is held strictly against those types as it passes (tests/openai_types.py).
"""

import asyncio
import json
import time
from typing import Literal

import httpx
import openai
import pydantic
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamEvent

from tests.openai_types import CheckedAsyncTransport, CheckedTransport, Checks
from tests.server.live import MODEL, LiveServer, chat_prompt, expected_text

MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def api(server):
    checks = Checks()
    http = httpx.Client(transport=CheckedTransport(checks))
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, http_client=http) as api:
        yield api
    assert checks.answers > 10 and checks.frames > 10 and checks.errors > 5


@pytest.fixture
async def async_api(server):
    checks = Checks()
    http = httpx.AsyncClient(transport=CheckedAsyncTransport(checks))
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, http_client=http) as api:
        yield api
    assert checks.answers + checks.frames > 0


def one_user(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


def test_chat(api):
    chat = api.chat.completions.create(model=MODEL, messages=one_user("hello"), seed=1, max_completion_tokens=8)
    assert chat.id.startswith("chatcmpl-") and chat.object == "chat.completion" and chat.system_fingerprint
    (choice,) = chat.choices
    assert choice.message.role == "assistant" and choice.message.refusal is None
    assert choice.message.content == expected_text(chat_prompt("hello"), 1, 8)
    assert choice.finish_reason == "length" and choice.logprobs is None
    assert chat.usage.total_tokens == chat.usage.prompt_tokens + 8


def test_a_conversation_goes_on_with_what_the_client_got(api):
    first = api.chat.completions.create(model=MODEL, messages=MESSAGES, max_completion_tokens=4)
    reply = first.choices[0].message.model_dump()
    again = api.chat.completions.create(
        model=MODEL, messages=[*MESSAGES, reply, *one_user("more")], max_completion_tokens=4
    )
    assert again.usage.prompt_tokens > first.usage.prompt_tokens


def test_streamed_chat_with_usage_and_logprobs(api):
    stream = api.chat.completions.create(
        model=MODEL,
        messages=one_user("hello"),
        seed=1,
        max_tokens=8,
        stream=True,
        stream_options={"include_usage": True},
        logprobs=True,
        top_logprobs=1,
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == expected_text(chat_prompt("hello"), 1, 8)
    tokens = [
        t for chunk in chunks if chunk.choices and chunk.choices[0].logprobs for t in chunk.choices[0].logprobs.content
    ]
    assert bytes(b for token in tokens for b in token.bytes).decode() == text
    assert all(len(token.top_logprobs) >= 1 for token in tokens)
    assert chunks[-1].usage.completion_tokens == 8 and chunks[-1].choices == []
    assert [chunk.choices[0].finish_reason for chunk in chunks[-2:-1]] == ["length"]


def test_the_stream_helper_assembles_a_completion(api):
    text = expected_text(chat_prompt("hello"), 1, 20)
    messages = one_user("hello")
    with api.chat.completions.stream(model=MODEL, messages=messages, seed=1, max_tokens=20, stop=text[9:]) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert final.choices[0].message.content == "".join(deltas) == text[:9]


@pytest.mark.parametrize(
    "prompt, expected",
    [("hi", ["hi"]), (["hi", "yo"], ["hi", "yo"]), ([104, 105], ["hi"]), ([[104, 105], [121, 111]], ["hi", "yo"])],
)
def test_completions_of_every_kind_of_prompt(api, prompt, expected):
    completion = api.completions.create(model=MODEL, prompt=prompt, seed=1, max_tokens=6, n=2, logprobs=1)
    assert [choice.index for choice in completion.choices] == list(range(2 * len(expected)))
    texts = [expected_text(text.encode(), 1, 6, i) for text in expected for i in (0, 1)]
    assert [choice.text for choice in completion.choices] == texts
    for choice in completion.choices:
        assert choice.logprobs.text_offset == list(range(6))
        assert "".join(choice.logprobs.tokens) == choice.text
        assert all(
            token in top for token, top in zip(choice.logprobs.tokens, choice.logprobs.top_logprobs, strict=True)
        )
    assert completion.usage.completion_tokens == 12 * len(expected)


def test_vllms_extensions_through_extra_body(api):
    extra = {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "ignore_eos": True, "min_tokens": 2, "priority": 1}
    extra |= {"stop_token_ids": [9], "include_stop_str_in_output": True, "skip_special_tokens": False}
    completion = api.completions.create(model=MODEL, prompt="hi", max_tokens=4, seed=1, extra_body=extra)
    assert completion.choices[0].text == expected_text(b"hi", 1, 4)


def test_a_stop_token_is_named(api):
    text = expected_text(b"hi", 1, 30)
    stop = text[4]
    extra = {"stop_token_ids": [ord(stop)]}
    choice = api.completions.create(model=MODEL, prompt="hi", max_tokens=30, seed=1, extra_body=extra).choices[0]
    assert choice.text == text[: text.index(stop)]
    assert choice.finish_reason == "stop" and choice.stop_reason == ord(stop)


def test_the_end_of_sequence_is_stop_and_its_token_is_not_shown(folder):
    with LiveServer(folder, "--eos-every", "9") as live:
        with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none") as api:
            completion = api.completions.create(model=MODEL, prompt="hi", max_tokens=400, seed=1, logprobs=0)
            (choice,) = completion.choices
            assert choice.finish_reason == "stop" and choice.stop_reason is None
            assert "".join(choice.logprobs.tokens) == choice.text and "<|" not in choice.text
            assert completion.usage.completion_tokens == len(choice.text) + 1, "the end token was generated, too"
            stream = api.completions.create(model=MODEL, prompt="hi", max_tokens=400, seed=1, stream=True)
            assert "".join(chunk.choices[0].text for chunk in stream) == choice.text


@pytest.mark.parametrize(
    "fields, error, param",
    [
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"model": "other"}, openai.NotFoundError, "model"),
        ({"messages": []}, openai.BadRequestError, "messages"),
        ({"tools": [{"type": "custom"}]}, openai.BadRequestError, "tools[0].custom"),
        ({"tools": [{"type": "other"}]}, openai.BadRequestError, "tools[0].type"),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
def test_errors_are_typed(api, fields, error, param, stream):
    request = {"model": MODEL, "messages": one_user("x"), "stream": stream} | fields
    with pytest.raises(error) as caught:
        api.chat.completions.create(**request)
    assert caught.value.param == param and caught.value.type == "invalid_request_error"
    assert caught.value.request_id and caught.value.body["message"]


def test_an_error_in_a_stream_is_raised(folder):
    third = expected_text(chat_prompt("hello"), 1, 3).encode()[-1]
    with LiveServer(folder, "--fail-on-token", str(third)) as live:
        with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as api:
            stream = api.chat.completions.create(model=MODEL, messages=one_user("hello"), seed=1, stream=True)
            with pytest.raises(openai.APIError):
                for _ in stream:
                    pass


def test_models(api):
    assert [model.id for model in api.models.list()] == [MODEL, "alias"]
    assert api.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        api.models.retrieve("none")


async def test_many_streams_at_once(async_api, server):
    async def one(i: int) -> str:
        stream = await async_api.chat.completions.create(
            model=MODEL, messages=one_user(f"user {i}"), seed=i, max_tokens=20, stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    texts = await asyncio.gather(*(one(i) for i in range(40)))
    assert texts == [expected_text(chat_prompt(f"user {i}"), i, 20) for i in range(40)]
    server.wait_idle()


async def test_closing_a_stream_ends_the_request(folder):
    with LiveServer(folder, "--step-seconds", "0.01") as live:
        async with openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="none") as api:
            stream = await api.chat.completions.create(
                model=MODEL, messages=one_user("hello"), max_tokens=400, stream=True
            )
            async for _ in stream:
                break
            await stream.close()
            await asyncio.to_thread(live.wait_idle)
            assert live.aborts() == 1


# The client's other ways to ask.


def test_the_raw_response_has_headers_and_parses(api):
    raw = api.chat.completions.with_raw_response.create(
        model=MODEL, messages=one_user("hello"), max_tokens=2, extra_headers={"x-request-id": "mine-1"}
    )
    assert raw.status_code == 200 and raw.headers["content-type"] == "application/json"
    assert raw.request_id == raw.parse()._request_id == "mine-1" and raw.parse().choices[0].message.content


def test_the_streaming_response_gives_lines_as_they_come(api):
    with api.completions.with_streaming_response.create(
        model=MODEL, prompt="hi", seed=1, max_tokens=3, stream=True
    ) as raw:
        assert raw.headers["content-type"] == "text/event-stream; charset=utf-8"
        lines = [line for line in raw.iter_lines() if line]
    assert lines[-1] == "data: [DONE]" and all(line.startswith("data: {") for line in lines[:-1])
    with api.completions.with_streaming_response.create(model=MODEL, prompt="hi", seed=1, max_tokens=3) as raw:
        assert raw.parse().choices[0].text == expected_text(b"hi", 1, 3)


def test_every_event_of_the_stream_helper(api):
    """Deltas, logprobs and their ends in order, with snapshots that grow. (Where a text ends by its length, the helper
    raises, hence the stop string.)"""
    text = expected_text(chat_prompt("hello"), 1, 20)
    with api.chat.completions.stream(
        model=MODEL,
        messages=one_user("hello"),
        seed=1,
        max_tokens=20,
        stop=text[6:],
        logprobs=True,
        top_logprobs=1,
        stream_options={"include_usage": True},
    ) as stream:
        events: list[ChatCompletionStreamEvent] = list(stream)
        final = stream.get_final_completion()
    kinds = [event.type for event in events]
    assert set(kinds) == {
        "chunk",
        "content.delta",
        "content.done",
        "logprobs.content.delta",
        "logprobs.content.done",
    }
    assert kinds.index("content.done") > max(i for i, kind in enumerate(kinds) if kind == "content.delta")
    snapshots = [event.snapshot for event in events if event.type == "content.delta"]
    assert snapshots == sorted(snapshots, key=len) and snapshots[-1] == final.choices[0].message.content
    assert final.choices[0].message.content == text[:6] and final.choices[0].finish_reason == "stop"
    assert "".join(token.token for token in final.choices[0].logprobs.content) == text[:6]
    assert final.usage.completion_tokens == 20


def test_the_stream_helper_with_samples(api):
    texts = [expected_text(chat_prompt("hello"), 1, 20, i) for i in range(3)]
    with api.chat.completions.stream(
        model=MODEL, messages=one_user("hello"), seed=1, max_tokens=20, n=3, stop=[text[5:] for text in texts]
    ) as stream:
        final = stream.get_final_completion()
    assert [choice.message.content for choice in final.choices] == [text[:5] for text in texts]
    assert [choice.index for choice in final.choices] == [0, 1, 2]


async def test_the_async_client_does_all_of_it(async_api):
    long = expected_text(chat_prompt("hello"), 1, 20)
    chat = await async_api.chat.completions.create(model=MODEL, messages=one_user("hello"), seed=1, max_tokens=4)
    assert chat.choices[0].message.content == expected_text(chat_prompt("hello"), 1, 4)
    stream = await async_api.completions.create(model=MODEL, prompt="hi", seed=1, max_tokens=4, stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == expected_text(b"hi", 1, 4)
    async with async_api.chat.completions.stream(
        model=MODEL, messages=one_user("hello"), seed=1, max_tokens=20, stop=long[4:]
    ) as events:
        async for _ in events:
            pass
        final = await events.get_final_completion()
    assert final.choices[0].message.content == chat.choices[0].message.content
    async with async_api.chat.completions.with_streaming_response.create(
        model=MODEL, messages=one_user("hello"), seed=1, max_tokens=4
    ) as raw:
        assert (await raw.parse()).choices[0].message.content == chat.choices[0].message.content
    raw = await async_api.models.with_raw_response.retrieve(MODEL)
    assert raw.parse().id == MODEL
    assert [model.id async for model in await async_api.models.list()] == [MODEL, "alias"]
    embedded = await async_api.embeddings.create(model=MODEL, input=["a", "b"])
    assert [row.index for row in embedded.data] == [0, 1]
    with pytest.raises(openai.BadRequestError, match="temperature"):
        await async_api.chat.completions.create(model=MODEL, messages=one_user("x"), temperature=3)


@pytest.fixture(scope="module")
def model_api(bundled_server):
    """With the bundled model, which can be held to a schema."""
    checks = Checks()
    http = httpx.Client(transport=CheckedTransport(checks))
    with openai.OpenAI(base_url=f"{bundled_server}/v1", api_key="none", max_retries=0, http_client=http) as api:
        yield api
    assert checks.answers + checks.frames > 0


class Colour(pydantic.BaseModel):
    fox: Literal["red", "grey"]


def test_parse_gives_an_object_of_the_callers_class(model_api):
    chat = model_api.chat.completions.parse(
        model="pageserve", messages=one_user("What colour is the fox?"), response_format=Colour, max_tokens=60, seed=1
    )
    message = chat.choices[0].message
    assert isinstance(message.parsed, Colour) and json.loads(message.content)["fox"] == message.parsed.fox
    assert chat.choices[0].finish_reason == "stop"


def test_a_streamed_parse(model_api):
    with model_api.chat.completions.stream(
        model="pageserve", messages=one_user("What colour is the fox?"), response_format=Colour, max_tokens=60, seed=1
    ) as stream:
        for event in stream:
            if event.type == "content.done":
                assert isinstance(event.parsed, Colour)
        assert stream.get_final_completion().choices[0].message.parsed.fox in ("red", "grey")


def test_a_parse_that_is_cut_says_so(model_api):
    with pytest.raises(openai.LengthFinishReasonError):
        model_api.chat.completions.parse(
            model="pageserve", messages=one_user("fox"), response_format=Colour, max_tokens=2, seed=1
        )


# When things go wrong.


def test_a_deadline_of_the_client_ends_the_request(folder):
    with LiveServer(folder, "--step-seconds", "0.05") as live:
        with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0, timeout=0.5) as api:
            with pytest.raises(openai.APITimeoutError):
                api.completions.create(model=MODEL, prompt="hi", max_tokens=400)
            live.wait_idle()
            assert live.aborts() == 1


def test_the_client_waits_as_long_as_a_429_says_and_then_gets_its_answer(folder):
    with LiveServer(folder, requests_per_minute=60) as live:
        with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as api:
            with pytest.raises(openai.RateLimitError) as caught:
                for _ in range(200):
                    api.completions.create(model=MODEL, prompt="hi", max_tokens=1)
            assert caught.value.code == "rate_limit_exceeded"
            seconds = int(caught.value.response.headers["retry-after"])
            assert 1 <= seconds <= 5
            patient = api.with_options(max_retries=3).completions.with_raw_response
            for _ in range(5):  # a second may just have ended
                start = time.monotonic()
                again = patient.create(model=MODEL, prompt="hi", max_tokens=1)
                if again.retries_taken:
                    break
            assert again.retries_taken == 1 and time.monotonic() - start > 0.9
            assert again.parse().usage.completion_tokens == 1


def test_a_wrong_key_is_an_authentication_error(folder):
    with LiveServer(folder, api_key=("right",)) as live:
        with openai.OpenAI(base_url=f"{live.url}/v1", api_key="wrong", max_retries=0) as api:
            with pytest.raises(openai.AuthenticationError) as caught:
                api.models.list()
            assert caught.value.code == "invalid_api_key"
            assert api.with_options(api_key="right").models.list().data

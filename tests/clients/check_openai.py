"""openai-python against a live server with the bundled model."""

import asyncio
import json
import re
import time
from typing import Literal

import httpx
import openai
import pydantic
import pytest

from tests.clients.conftest import KEY, LIMITED_KEY, MODEL, TOOL, URL

HELLO = [{"role": "user", "content": "Tell me a story about a fox."}]
WORDS = {"model": MODEL, "prompt": "Once upon a time", "temperature": 0}


@pytest.fixture(scope="module")
def api(http):
    return openai.OpenAI(base_url=URL, api_key=KEY, max_retries=0, http_client=http)


@pytest.fixture
def async_api(async_http):
    return openai.AsyncOpenAI(base_url=URL, api_key=KEY, max_retries=0, http_client=async_http)


def chat(api, **fields):
    return api.chat.completions.create(**{"model": MODEL, "messages": HELLO, "max_tokens": 12, "seed": 1} | fields)


def content(stream) -> dict[int, str]:
    texts: dict[int, str] = {}
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
    return texts


def test_chat(api):
    answer = chat(api)
    assert answer.choices[0].message.content and answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("temperature", [0, 1])
def test_streams_say_what_answers_say(api, n, temperature):
    whole = chat(api, n=n, temperature=temperature)
    streamed = content(chat(api, n=n, temperature=temperature, stream=True))
    assert streamed == {choice.index: choice.message.content for choice in whole.choices} and len(streamed) == n


def test_usage_in_a_stream(api):
    *chunks, last = chat(api, n=2, stream=True, stream_options={"include_usage": True})
    assert last.choices == [] and last.usage.completion_tokens == 24
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)


@pytest.mark.parametrize("stream", [False, True])
def test_stop(api, stream):
    said = api.completions.create(**WORDS, max_tokens=20).choices[0].text
    stop = said[7:10]
    answer = api.completions.create(**WORDS, max_tokens=20, stop=[stop, "never said"], stream=stream)
    parts = [part.choices[0] for part in (answer if stream else [answer])]
    assert "".join(part.text for part in parts) == said[: said.index(stop)]
    assert parts[-1].finish_reason == "stop"


@pytest.mark.parametrize("stop", [None, []])
def test_no_stop(api, stop):
    assert api.completions.create(**WORDS, max_tokens=5, stop=stop).usage.completion_tokens == 5


def test_chat_logprobs(api):
    choice = chat(api, logprobs=True, top_logprobs=3, temperature=0).choices[0]
    assert len(choice.logprobs.content) == 12
    assert bytes(b for token in choice.logprobs.content for b in token.bytes).decode() == choice.message.content
    for token in choice.logprobs.content:
        assert len(token.top_logprobs) == 3 and token.logprob == max(top.logprob for top in token.top_logprobs)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_completion_logprobs(api, stream, echo, n):
    answer = api.completions.create(**WORDS, max_tokens=6, logprobs=2, echo=echo, n=n, stream=stream)
    texts, offsets, tokens = {}, {}, {}
    for part in answer if stream else [answer]:
        for choice in part.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            if choice.logprobs:
                offsets.setdefault(choice.index, []).extend(choice.logprobs.text_offset)
                tokens.setdefault(choice.index, []).extend(choice.logprobs.tokens)
    assert set(texts) == set(range(n))
    for index, text in texts.items():
        assert text.startswith("Once upon a time") == echo and "".join(tokens[index]) == text
        starts = [len("".join(tokens[index][:i])) for i in range(len(tokens[index]))]
        assert offsets[index] == starts


def test_prompts_times_samples(api):
    answer = api.completions.create(model=MODEL, prompt=["One", "Two"], n=2, best_of=3, max_tokens=3, seed=1)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage.completion_tokens == 18, "all that were generated are counted"


def test_a_prompt_of_ids_is_the_prompt_of_its_text(api):
    found = httpx.post(
        URL.removesuffix("/v1") + "/tokenize",
        json={"prompt": WORDS["prompt"]},
        headers={"authorization": f"Bearer {KEY}"},
    )
    text = api.completions.create(**WORDS, max_tokens=5)
    ids = api.completions.create(**WORDS | {"prompt": found.json()["tokens"]}, max_tokens=5)
    assert ids.choices[0].text == text.choices[0].text


def test_seeds(api):
    first, again, other = (chat(api, seed=seed, temperature=1.5, max_tokens=20) for seed in (1, 1, 2))
    assert first.choices[0].message.content == again.choices[0].message.content != other.choices[0].message.content
    assert first.system_fingerprint == other.system_fingerprint != ""


def test_the_newer_limit_wins(api):
    assert chat(api, max_tokens=9, max_completion_tokens=3).usage.completion_tokens == 3


def test_harmless_fields(api):
    answer = chat(api, user="u", metadata={"a": "b"}, store=True, service_tier="auto", temperature=0)
    assert answer.service_tier == "default"
    assert answer.choices[0].message.content == chat(api, temperature=0).choices[0].message.content


SURE = {"max_tokens": 200, "seed": 1}  # so that line breaks, of which a form allows some, do not use up the length


class Colour(pydantic.BaseModel):
    fox: Literal["red", "grey"]


def test_parse(api):
    answer = api.chat.completions.parse(model=MODEL, messages=HELLO, response_format=Colour, **SURE)
    assert isinstance(answer.choices[0].message.parsed, Colour)


def test_streamed_parse(api):
    with api.chat.completions.stream(model=MODEL, messages=HELLO, response_format=Colour, **SURE) as stream:
        assert {"chunk", "content.delta", "content.done"} <= {event.type for event in stream}
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Colour)


def test_json_object(api):
    answer = chat(api, response_format={"type": "json_object"}, max_tokens=300, temperature=0)
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(answer.choices[0].message.content), dict)
    else:
        assert answer.choices[0].message.content.lstrip().startswith("{")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
@pytest.mark.parametrize("stream", [False, True])
def test_tools(api, choice, stream):
    answer = chat(api, tools=[TOOL], tool_choice=choice, max_tokens=80, stream=stream)
    if stream:
        pieces = [call for part in answer for c in part.choices for call in c.delta.tool_calls or ()]
        name, arguments = pieces[0].function.name, "".join(piece.function.arguments or "" for piece in pieces)
        assert pieces[0].id and all(piece.id is None for piece in pieces[1:])
    else:
        (call,) = answer.choices[0].message.tool_calls[:1]
        name, arguments = call.function.name, call.function.arguments
        assert answer.choices[0].finish_reason == "tool_calls"
    assert name == "weather" and json.loads(arguments)["town"] in ("Rome", "Oslo")


@pytest.mark.parametrize("dumped", [False, True])
def test_answers_go_back_as_they_came(api, dumped):
    def as_sent(part):
        return part.model_dump() if dumped else part

    made = chat(api, tools=[TOOL], tool_choice="required", max_tokens=200).choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": "Rain."} for call in made.tool_calls]
    said = chat(api, messages=[*HELLO, as_sent(made), *results], tools=[TOOL]).choices[0].message
    assert chat(api, messages=[*HELLO, as_sent(made), *results, as_sent(said), *HELLO]).choices

    tool = {"type": "function", "strict": True, **TOOL["function"]}
    fields = {"model": MODEL, "tools": [tool], "max_output_tokens": 200}
    output = api.responses.create(input=HELLO, tool_choice="required", **fields).output
    results = [{"type": "function_call_output", "call_id": call.call_id, "output": "Rain."} for call in output]
    sent = [*HELLO, *map(as_sent, output), *results]
    said = api.responses.create(input=sent, tool_choice="none", **fields)
    assert said.output_text and said.usage.input_tokens > 30
    assert api.responses.create(input=[*sent, *map(as_sent, said.output), *HELLO], **fields).output


def test_calls_of_every_kind_in_responses(api):
    """Custom tools with a grammar, tools of a namespace and those that the client runs, streamed and sent back."""
    lines = {"type": "grammar", "syntax": "lark", "definition": 'start: "go" LF /[a-c]{1,3}/\n%import common.LF'}
    run = {"type": "custom", "name": "run", "description": "runs lines", "format": lines}
    inside = {"type": "namespace", "name": "more", "description": "more tools", "tools": [run]}
    tools = [run, inside, {"type": "local_shell"}, {"type": "apply_patch"}, {"type": "web_search"}]
    fields = {"model": MODEL, "tools": tools, "max_output_tokens": 300, "parallel_tool_calls": False}
    for choice in (run, {**run, "namespace": "more"}):
        picked = {name: part for name, part in choice.items() if name in ("type", "name", "namespace")}
        events = [*api.responses.create(input=HELLO, tool_choice=picked, stream=True, **fields)]
        text = "".join(event.delta for event in events if event.type == "response.custom_tool_call_input.delta")
        (call,) = events[-1].response.output
        assert (
            call.input == text and re.fullmatch(r"go\n[a-c]{1,3}", text) and call.namespace == choice.get("namespace")
        )
        result = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "went"}
        assert api.responses.create(input=[*HELLO, call, result], tool_choice="none", **fields).output_text
    raw = api.responses.with_raw_response.create(input=HELLO, tool_choice={"type": "apply_patch"}, **fields)
    assert raw.headers["x-pageserve-left-out"] == "web_search"
    assert raw.parse().output[0].type in ("apply_patch_call", "function_call"), "of which the latter was cut"


def test_the_stream_helper_of_responses(api):
    form = {"text_format": Colour, "max_output_tokens": 200}
    with api.responses.stream(model=MODEL, input=HELLO, **form) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert final.output_text == text and final.output_parsed == Colour.model_validate_json(text)
    assert api.responses.parse(model=MODEL, input=HELLO, **form).output_parsed.fox in ("red", "grey")


@pytest.mark.parametrize("given", ["a", ["a", "b"], [5, 6], [[5], [6, 7]]])
def test_embeddings(api, given):
    api.embeddings.create(model=MODEL, input=given)  # the last bits of bf16 differ where the prefix cache has the input
    plain = api.embeddings.create(model=MODEL, input=given, encoding_format="float")
    default = api.embeddings.create(model=MODEL, input=given)
    assert [row.embedding for row in plain.data] == [pytest.approx(row.embedding) for row in default.data]
    assert api.embeddings.create(model=MODEL, input=given, dimensions=4).data[0].embedding[3]


def test_models(api):
    assert [model.id for model in api.models.list()] == [MODEL]
    assert api.models.retrieve(MODEL).object == "model"


@pytest.mark.parametrize(
    "fields, error, param",
    [
        ({"temperature": 2.5}, openai.BadRequestError, "temperature"),
        ({"n": 129}, openai.BadRequestError, "n"),
        ({"top_logprobs": 3}, openai.BadRequestError, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, openai.BadRequestError, "top_logprobs"),
        ({"stop": list("abcde")}, openai.BadRequestError, "stop"),
        ({"logit_bias": {"5": 101}}, openai.BadRequestError, "logit_bias"),
        ({"max_tokens": 10**6}, openai.BadRequestError, "max_tokens"),
        ({"model": "gpt-4o"}, openai.NotFoundError, "model"),
        ({"messages": [{"role": "robot", "content": "x"}]}, openai.BadRequestError, "messages[0].role"),
        ({"stream_options": {"include_usage": True}}, openai.BadRequestError, "stream_options"),
        ({"response_format": {"type": "json_schema"}}, openai.BadRequestError, "response_format"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors(api, fields, error, param, stream):
    if stream and "stream_options" in fields:
        fields = {"stream_options": {"include_usage": 1}}
        param = "stream_options.include_usage"
    with pytest.raises(error) as caught:
        api.chat.completions.create(**{"model": MODEL, "messages": HELLO, "stream": stream} | fields)
    assert caught.value.param == param and caught.value.type == "invalid_request_error"
    assert caught.value.request_id and caught.value.message


def test_a_wrong_key(api):
    with pytest.raises(openai.AuthenticationError) as caught:
        api.with_options(api_key="wrong").models.list()
    assert caught.value.code == "invalid_api_key"


def test_retries_wait_for_retry_after(api):
    limited = api.with_options(api_key=LIMITED_KEY)
    with pytest.raises(openai.RateLimitError) as caught:
        for _ in range(200):
            limited.completions.create(**WORDS, max_tokens=1)
    assert int(caught.value.response.headers["retry-after"]) >= 1 and caught.value.type == "rate_limit_error"
    patient = limited.with_options(max_retries=3).completions.with_raw_response
    for _ in range(5):  # a second may just have ended
        start = time.monotonic()
        answer = patient.create(**WORDS, max_tokens=1)
        if answer.retries_taken:
            break
    assert answer.parse().choices and answer.retries_taken == 1 and time.monotonic() - start > 0.9


def test_a_timeout(api):
    with pytest.raises(openai.APITimeoutError):
        api.with_options(timeout=0.02).completions.create(**WORDS, max_tokens=1500, extra_body={"ignore_eos": True})


def test_a_stream_that_is_closed_ends_its_request(api):
    stream = chat(api, stream=True, max_tokens=1500, extra_body={"ignore_eos": True})
    response_id = next(iter(stream)).id
    stream.close()
    report = httpx.get(
        URL.removesuffix("/v1") + f"/debug/requests/{response_id}", headers={"authorization": f"Bearer {KEY}"}
    )
    assert report.status_code == 200
    running = None
    for _ in range(200):
        metrics = httpx.get(URL.removesuffix("/v1") + "/metrics", headers={"authorization": f"Bearer {KEY}"}).text
        rows = [row for row in metrics.splitlines() if row.startswith("vllm:num_requests_running")]
        running = float(rows[0].split()[-1])
        if running == 0:
            break
        time.sleep(0.05)
    assert running == 0


def test_raw_and_streaming_responses(api):
    raw = api.chat.completions.with_raw_response.create(model=MODEL, messages=HELLO, max_tokens=2)
    assert raw.headers["x-request-id"] == raw.parse()._request_id
    with api.completions.with_streaming_response.create(**WORDS, max_tokens=2, stream=True) as raw:
        lines = [line for line in raw.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"


async def test_many_at_once(async_api):
    async def one(seed: int, stream: bool) -> str:
        # Not from the far tail, where the last digits, which differ with the batch, decide between neighbours.
        answer = await chat(async_api, seed=seed, temperature=1, top_p=0.9, stream=stream)
        if not stream:
            return answer.choices[0].message.content
        return "".join([c.delta.content or "" async for part in answer for c in part.choices])

    texts = await asyncio.gather(*(one(i % 8, i >= 8) for i in range(16)))
    assert texts[:8] == texts[8:] and len(set(texts)) > 4


async def test_async_helpers(async_api):
    answer = await async_api.chat.completions.parse(model=MODEL, messages=HELLO, response_format=Colour, **SURE)
    assert answer.choices[0].message.parsed.fox in ("red", "grey")
    async with async_api.chat.completions.stream(
        model=MODEL, messages=HELLO, response_format=Colour, max_tokens=60
    ) as stream:
        async for _ in stream:
            pass
        assert (await stream.get_final_completion()).choices[0].message.parsed
    assert (await async_api.embeddings.create(model=MODEL, input="a")).data[0].embedding
    assert [model.id async for model in await async_api.models.list()] == [MODEL]
    with pytest.raises(openai.NotFoundError):
        await async_api.models.retrieve("none")

"""response_format and structured_outputs through the OpenAI client, on the bundled model."""

import json
import re
import threading
import time
from enum import Enum

import httpx
import jsonschema
import pytest
from openai import BadRequestError, OpenAI
from pydantic import BaseModel, Field

from server.protocol import ChatCompletionRequest, parse_request

MODEL = "pageserve"
MESSAGES = [{"role": "user", "content": "Tell me about a fox, as JSON."}]


class Colour(str, Enum):
    RED = "red"
    WHITE = "white"


class Den(BaseModel, extra="forbid"):
    place: str = Field(max_length=8)
    entrances: int = Field(ge=1, le=9)


class Fox(BaseModel, extra="forbid"):
    name: str = Field(max_length=8)
    colour: Colour
    age: int | None = Field(ge=0, le=30)
    dens: list[Den] = Field(max_length=1)


SCHEMA = Fox.model_json_schema()


@pytest.fixture(scope="module")
def client(bundled_server):
    with OpenAI(base_url=f"{bundled_server}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def chat(client, **fields):
    return client.chat.completions.create(**({"model": MODEL, "messages": MESSAGES, "max_tokens": 400} | fields))


def json_schema(schema=SCHEMA, **more):
    return {"type": "json_schema", "json_schema": {"name": "fox", "schema": schema, **more}}


def complete(client, output, **fields):
    fields = {"model": MODEL, "prompt": "A fox", "max_tokens": 60, "seed": 1} | fields
    return client.completions.create(**fields, extra_body={"structured_outputs": output})


def test_parse_with_a_pydantic_model(client):
    completion = client.chat.completions.parse(
        model=MODEL, messages=MESSAGES, response_format=Fox, max_tokens=600, seed=2, n=2
    )
    assert len(completion.choices) == 2
    for choice in completion.choices:
        assert isinstance(choice.message.parsed, Fox) and choice.message.refusal is None
        assert choice.finish_reason == "stop"


def test_stream_with_a_pydantic_model(client):
    with client.chat.completions.stream(
        model=MODEL, messages=MESSAGES, response_format=Fox, max_tokens=600, seed=3
    ) as stream:
        events = [event.type for event in stream]
        completion = stream.get_final_completion()
    assert isinstance(completion.choices[0].message.parsed, Fox)
    assert events.count("content.done") == 1 and "content.delta" in events


@pytest.mark.parametrize("strict", [True, False, None])
def test_json_schema(client, strict):
    response = chat(client, response_format=json_schema(strict=strict, description="a fox"), seed=4)
    jsonschema.validate(json.loads(response.choices[0].message.content), SCHEMA)


def test_streamed_pieces_are_the_whole(client):
    whole = chat(client, response_format=json_schema(Den.model_json_schema()), seed=5).choices[0]
    chunks = list(chat(client, response_format=json_schema(Den.model_json_schema()), seed=5, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.message.content
    assert chunks[-1].choices[0].finish_reason == whole.finish_reason == "stop"


def test_json_object(client):
    response = chat(client, response_format={"type": "json_object"}, seed=6, max_tokens=120)
    choice = response.choices[0]
    assert choice.message.content.startswith("{")
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content), dict)


def test_what_is_cut_says_so(client):
    choice = chat(client, response_format=json_schema(), max_tokens=4).choices[0]
    assert choice.finish_reason == "length" and choice.message.content.startswith("{")


@pytest.mark.parametrize("keywords", [{"pattern": "^[a-z]+$"}, {"format": "email"}, {"format": "duration"}], ids=str)
def test_a_string_with_a_pattern_or_format_ends_in_time(client, keywords):
    schema = {"type": "object", "properties": {"a": {"type": "string", **keywords}}, "required": ["a"]}
    schema["additionalProperties"] = False
    for seed in range(6):
        fields = {"response_format": json_schema(schema, strict=True), "temperature": 1.5, "seed": seed}
        choice = chat(client, **fields, max_tokens=40).choices[0]
        assert choice.finish_reason == "stop" and json.loads(choice.message.content)["a"]


def test_plain_text_is_plain(client):
    plain = chat(client, temperature=0, max_tokens=8).choices[0].message.content
    text = chat(client, temperature=0, max_tokens=8, response_format={"type": "text"}).choices[0].message.content
    assert text == plain


@pytest.mark.parametrize(
    "output, expected",
    [
        ({"regex": "[a-z]{3,8} [0-9]{2}"}, "[a-z]{3,8} [0-9]{2}"),
        ({"choice": ["red fox", "grey wolf"]}, "red fox|grey wolf"),
        ({"grammar": 'start: ("fox" | "wolf") "!"'}, "(fox|wolf)!"),
        ({"json": {"enum": [1, 2]}}, "1|2"),
        ({"json": '{"type": "boolean"}'}, "true|false"),
        ({"json_object": True, "regex": None}, r"\{.*"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_structured_outputs(client, output, expected):
    choices = complete(client, output, n=2).choices
    assert len(choices) == 2
    for choice in choices:
        assert re.fullmatch(expected, choice.text, re.DOTALL)


def test_structured_outputs_in_a_chat(client):
    response = chat(client, extra_body={"structured_outputs": {"choice": ["yes", "no"]}}, n=3, logprobs=True)
    assert {choice.message.content for choice in response.choices} <= {"yes", "no"}
    assert all(entry.logprob <= 0 for choice in response.choices for entry in choice.logprobs.content)


def test_the_client_gets_its_own_error(client):
    with pytest.raises(BadRequestError) as caught:
        complete(client, {"regex": "("})
    assert caught.value.param == "structured_outputs" and "unclosed group" in str(caught.value)


def test_a_flood_of_costly_grammars_leaves_streams_alone(client, bundled_server):
    """Each is new and takes a while to compile; a stream beside them goes on, with the same text."""
    body = {"model": MODEL, "prompt": "A fox", "max_tokens": 100, "temperature": 0}
    alone = client.completions.create(**body).choices[0].text
    statuses = []

    def flood(number):
        names = {f"p{number}_{i}": {"type": "string"} for i in range(600)}
        schema = {"type": "object", "properties": names}
        with httpx.Client(base_url=bundled_server, timeout=120) as http:
            fields = {"model": MODEL, "prompt": "x", "max_tokens": 2, "structured_outputs": {"json": schema}}
            statuses.append(http.post("/v1/completions", json=fields).status_code)

    threads = [threading.Thread(target=flood, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    pieces, gaps, last = [], [], time.monotonic()
    for chunk in client.completions.create(**body, stream=True):
        pieces.append(chunk.choices[0].text)
        gaps.append(time.monotonic() - last)
        last = time.monotonic()
    for thread in threads:
        thread.join()
    assert "".join(pieces) == alone
    assert set(statuses) == {200}
    assert sorted(gaps)[len(gaps) // 2] < 1.0


def test_the_parsed_request_holds_what_crosses_to_the_engine():
    body = {"model": MODEL, "messages": MESSAGES, "response_format": json_schema(strict=True)}
    output = parse_request(ChatCompletionRequest, body).structured_output
    assert output.kind == "json_schema" and json.loads(output.text) == SCHEMA and not output.lenient
    assert list(json.loads(output.text)["properties"]) == list(SCHEMA["properties"]), "in the order of the schema"
    lenient = parse_request(ChatCompletionRequest, body | {"response_format": json_schema()}).structured_output
    assert lenient.lenient


def test_openapi_describes_the_fields(bundled_server):
    schemas = httpx.get(f"{bundled_server}/openapi.json").json()["components"]["schemas"]
    fields = schemas["ChatCompletionRequest"]["properties"]
    assert "JsonSchemaResponse" in json.dumps(fields["response_format"])
    assert set(schemas["StructuredOutputs"]["properties"]) == {"json", "regex", "choice", "grammar", "json_object"}

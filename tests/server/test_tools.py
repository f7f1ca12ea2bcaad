"""Tools through openai-python, with the bundled model: what it is forced to call, in whole answers and streams."""

import json
import re

import httpx
import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

from engine.checkpoint.locate import resolve_model
from engine.config import EngineConfig
from engine.text.tokenizer import Tokenizer
from server.protocol import answers as described
from tests.server.conftest import serving
from tests.server.tools.requests import TOOLS, WEATHER, custom, function

CHAT = "/v1/chat/completions"
QUESTION = [{"role": "user", "content": "What is the weather in Paris?"}]
NAMED = {"type": "function", "function": {"name": "get_weather"}}


@pytest.fixture(scope="module")
def ask(bundled_server):
    client = openai.OpenAI(base_url=f"{bundled_server}/v1", api_key="none", max_retries=0)

    def ask(**fields):
        defaults = {"model": "pageserve", "messages": QUESTION, "tools": TOOLS, "max_tokens": 120, "seed": 3}
        return client.chat.completions.create(**defaults | fields)

    ask.client = client
    return ask


def without_ids(calls):
    return [(call.function.name, call.function.arguments) for call in calls]


@pytest.mark.parametrize("choice", ["required", NAMED])
@pytest.mark.parametrize("seed", range(3))
def test_forced_calls_obey_the_schema(ask, choice, seed):
    answer = ask(tool_choice=choice, seed=seed, parallel_tool_calls=False, temperature=1.3)
    (choice_,) = answer.choices
    assert choice_.finish_reason == "tool_calls" and choice_.message.content is None
    (call,) = choice_.message.tool_calls
    assert call.id.startswith("call_") and call.type == "function"
    arguments = json.loads(call.function.arguments)
    if call.function.name == "get_weather":
        jsonschema.validate(arguments, WEATHER)
    else:
        assert (call.function.name, arguments) == ("now", {}) and choice == "required"
    described.ChatCompletion.model_validate(answer.to_dict())


@pytest.mark.parametrize("fields", [{"tool_choice": NAMED}, {"tool_choice": "required", "n": 2}, {}], ids=str)
def test_a_stream_adds_up_to_the_answer(ask, fields):
    whole = ask(**fields)
    with ask.client.chat.completions.stream(
        **{"model": "pageserve", "messages": QUESTION, "tools": TOOLS, "max_tokens": 120, "seed": 3}
        | {"stream_options": {"include_usage": True}}
        | fields
    ) as stream:
        for event in stream:
            if event.type == "chunk":
                described.ChatCompletionChunk.model_validate(event.chunk.to_dict())
        streamed = stream.get_final_completion()
    assert streamed.usage == whole.usage
    for ours, theirs in zip(whole.choices, streamed.choices, strict=True):
        assert ours.finish_reason == theirs.finish_reason
        assert ours.message.content == theirs.message.content
        assert without_ids(ours.message.tool_calls or []) == without_ids(theirs.message.tool_calls or [])


def test_allowed_tools(ask):
    subset = {"mode": "required", "tools": [{"type": "function", "function": {"name": "now"}}]}
    answer = ask(tool_choice={"type": "allowed_tools", "allowed_tools": subset})
    assert {name for name, _ in without_ids(answer.choices[0].message.tool_calls)} == {"now"}


def test_a_cut_call_is_what_there_is(ask):
    whole = ask(tool_choice=NAMED).choices[0].message.tool_calls[0].function
    cut = ask(tool_choice=NAMED, max_tokens=45).choices[0]
    assert cut.finish_reason == "length"
    assert whole.arguments.startswith(cut.message.tool_calls[0].function.arguments)
    assert len(whole.arguments) > len(cut.message.tool_calls[0].function.arguments)


def test_no_part_of_a_marker_is_content_where_only_calls_may_come(ask):
    for choice in (NAMED, "required"):
        for length in (1, 3, 6, 9):  # within the marker, and behind it
            cut = ask(tool_choice=choice, max_tokens=length).choices[0]
            assert (cut.finish_reason, cut.message.content, cut.message.tool_calls) == ("length", None, None)
            chunks = ask(tool_choice=choice, max_tokens=length, stream=True)
            assert not any(chunk.choices[0].delta.content for chunk in chunks)


def test_logprobs_and_token_ids_are_those_of_all_tokens(ask):
    fields = {"tool_choice": NAMED, "logprobs": True, "extra_body": {"return_token_ids": True}}
    choice = ask(**fields).choices[0]
    text = b"".join(bytes(token.bytes) for token in choice.logprobs.content).decode()
    assert text.startswith('<tool_call>\n{"name": "get_weather", "arguments": ') and text.endswith("</tool_call>")
    chunks = [chunk.choices[0] for chunk in ask(stream=True, **fields)]
    ids = [token_id for chunk in chunks for token_id in getattr(chunk, "token_ids", [])]
    assert ids == choice.token_ids
    entries = [entry for chunk in chunks if chunk.logprobs for entry in chunk.logprobs.content]
    assert entries == choice.logprobs.content


def test_text_that_must_be_json_or_a_call(ask):
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    form = {"type": "json_schema", "json_schema": {"name": "f", "schema": schema | {"additionalProperties": False}}}
    for seed in range(3):
        choice = ask(response_format=form, seed=seed).choices[0]
        if choice.message.tool_calls:
            assert choice.finish_reason == "tool_calls"
            assert all(json.loads(call.function.arguments) is not None for call in choice.message.tool_calls)
        else:
            jsonschema.validate(json.loads(choice.message.content), schema)


def test_no_tool_is_offered_with_none(ask):
    assert ask(tool_choice="none").to_dict()["choices"] == ask(tools=openai.NOT_GIVEN).to_dict()["choices"]


def test_an_agent(ask):
    """Calls, answers of tools and the question after them, as clients send them back."""
    messages = list(QUESTION)
    for _ in range(2):
        message = ask(messages=messages, tool_choice=NAMED).choices[0].message
        messages.append(message)
        messages += [
            {"role": "tool", "tool_call_id": call.id, "content": '{"sky": "blue"}'} for call in message.tool_calls
        ]
    assert ask(messages=messages).choices[0].finish_reason in ("stop", "length", "tool_calls")
    history = ask.client.post(
        "/../tokenize",
        body={"messages": [m if isinstance(m, dict) else m.to_dict() for m in messages], "tools": TOOLS},
        cast_to=object,
    )
    text = ask.client.post("/../detokenize", body={"tokens": history["tokens"]}, cast_to=object)["prompt"]
    assert text.count('<tool_call>\n{"name": "get_weather", "arguments": {"city"') == 2
    assert text.count('<tool_response>\n{"sky": "blue"}\n</tool_response>') == 2
    assert '"description": "the weather of some days"' in text.partition("<|im_end|>")[0]


def test_parse_with_a_pydantic_tool(ask):
    class Move(BaseModel):
        """Go there."""

        steps: int = Field(ge=0, le=99)
        fast: bool

    completion = ask.client.chat.completions.parse(
        model="pageserve",
        messages=QUESTION,
        tools=[openai.pydantic_function_tool(Move)],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=120,
    )
    (call,) = completion.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Move)


def test_the_other_api_calls_tools(ask):
    tool = {"type": "function", "name": "get_weather", "parameters": WEATHER, "strict": True}
    asked = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False, "max_output_tokens": 120}
    response = ask.client.responses.create(model="pageserve", input="Weather?", **asked)
    assert [item.type for item in response.output] == ["function_call"]
    jsonschema.validate(json.loads(response.output[0].arguments), WEATHER)


def test_a_call_that_a_stop_token_ends_is_incomplete(ask):
    tokenizer = Tokenizer(resolve_model(EngineConfig()))
    ends = [i for i in range(tokenizer.vocab_size) if "}" in tokenizer.token_text(i)]
    tokenizer.close()
    tool = {"type": "function", "name": "get_weather", "parameters": WEATHER}
    asked = {
        "tools": [tool],
        "tool_choice": "required",
        "max_output_tokens": 200,
        "extra_body": {"stop_token_ids": ends},
    }
    response = ask.client.responses.create(model="pageserve", input="Weather?", **asked)
    assert [(item.type, item.status) for item in response.output] == [("function_call", "incomplete")]
    assert "}" not in response.output[0].arguments


def test_a_schema_that_cannot_be_obeyed_is_named(ask):
    for parameters, strict, place in (
        ({"type": "object", "properties": {"a": {"type": "strin"}}}, False, ""),
        ({"patternProperties": {"(": {}}}, True, ".patternProperties['(']"),
    ):
        with pytest.raises(openai.BadRequestError) as failed:
            ask(tools=[TOOLS[0], function("a", parameters, strict=strict)], tool_choice="required")
        assert failed.value.param == f"tools[1].function.parameters{place}"


@pytest.fixture(scope="module", params=["mistral_v11", "qwen3_coder"])
def other_format(request):
    """A client of a server whose model is made to write the newer formats."""
    with serving("--tool-call-format", request.param) as url:
        yield request.param, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def test_newer_formats_are_forced_and_read_the_same_way(other_format):
    name, client = other_format
    asked = {"model": "pageserve", "messages": QUESTION, "tools": TOOLS, "max_tokens": 200, "seed": 3}
    for choice in ("required", NAMED):
        whole = client.chat.completions.create(**asked, tool_choice=choice).choices[0]
        with client.chat.completions.stream(**asked, tool_choice=choice) as stream:
            streamed = stream.get_final_completion().choices[0]
        assert whole.finish_reason == streamed.finish_reason == "tool_calls" and whole.message.content is None
        assert without_ids(whole.message.tool_calls) == without_ids(streamed.message.tool_calls)
        for called, arguments in without_ids(whole.message.tool_calls):
            assert called == "now" or jsonschema.validate(json.loads(arguments), WEATHER) is None
    history = [*QUESTION, whole.message]
    history += [{"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in whole.message.tool_calls]
    assert client.chat.completions.create(**asked | {"messages": history}).choices[0].message
    if name == "qwen3_coder":
        parameters = {"properties": {"day": {"type": "string", "format": "date"}}}
        for tools in ([function("f", parameters, strict=True)], [TOOLS[0], function("f", parameters, strict=True)]):
            with pytest.raises(openai.BadRequestError, match="format cannot be enforced") as failed:
                client.chat.completions.create(**asked | {"tools": tools}, tool_choice="required")
            assert failed.value.param == f"tools[{len(tools) - 1}].function.parameters.properties.day"
        tool = {"type": "function", "name": "f", "parameters": parameters, "strict": True}
        with pytest.raises(openai.BadRequestError) as failed:
            client.responses.create(model="pageserve", input="x", tools=[tool], tool_choice="required")
        assert failed.value.param == "tools[0].parameters.properties.day"
        tool = {"name": "f", "input_schema": parameters, "strict": True}
        body = {"model": "pageserve", "messages": QUESTION, "tools": [tool], "max_tokens": 9}
        answer = httpx.post(f"{client.base_url}messages", json=body | {"tool_choice": {"type": "any"}})
        assert "tools[0].input_schema.properties.day: format" in answer.json()["error"]["message"]


LINES = 'start: "do:" LF line+\nline: "+" /[a-z]{1,3}/ LF\n%import common.LF\n'
ASKED_CUSTOM = [
    (custom("run", "lark", LINES), {"type": "custom", "custom": {"name": "run"}}, r"do:\n(\+[a-z]{1,3}\n)+"),
    (custom("run", "regex", r'"[a-c]{2}"\n'), "required", r'"[a-c]{2}"\n'),
]


@pytest.mark.parametrize("tool, choice, form", ASKED_CUSTOM, ids=("lark", "regex"))
def test_a_custom_tool_is_called_with_the_text_that_its_grammar_allows(ask, tool, choice, form):
    fields = {"tools": [tool, TOOLS[1]] if choice != "required" else [tool], "tool_choice": choice, "max_tokens": 400}
    inputs = []
    for seed in range(4):
        answer = ask(**fields, seed=seed, temperature=1.2, parallel_tool_calls=False)
        described.ChatCompletion.model_validate(answer.to_dict())
        (call,) = answer.choices[0].message.tool_calls
        assert call.type == "custom" and call.custom.name == "run"
        if answer.choices[0].finish_reason == "tool_calls":
            assert re.fullmatch(form, call.custom.input), call.custom.input
            inputs.append(call)
    assert inputs, "all of them were cut"
    chunks = list(ask(**fields, seed=seed, temperature=1.2, parallel_tool_calls=False, stream=True))
    deltas = [chunk.choices[0].delta.tool_calls[0] for chunk in chunks if chunk.choices[0].delta.tool_calls]
    assert deltas[0].to_dict() | {"id": ""} == {
        "index": 0, "id": "", "type": "custom", "custom": {"name": "run", "input": ""}
    }  # fmt: skip
    assert "".join(delta.to_dict()["custom"]["input"] for delta in deltas) == call.custom.input
    for chunk in chunks:
        described.ChatCompletionChunk.model_validate(chunk.to_dict())
    history = [*QUESTION, answer.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "done"}]
    assert ask(**fields | {"messages": history, "tool_choice": "none", "max_tokens": 3}).choices[0].message.content

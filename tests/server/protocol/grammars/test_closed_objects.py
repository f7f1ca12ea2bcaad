"""Which objects of a schema are closed: those that list all they can have, where nothing composes them."""

import json

import jsonschema
import openai
import pytest

from server.protocol.grammars.closed_objects import MAX_DEPTH, closed, closed_arguments

NAME = {"properties": {"name": {"type": "string"}}}
CLOSED = {**NAME, "additionalProperties": False}


def nested(depth: int) -> dict:
    return {"items": nested(depth - 1)} if depth else NAME


@pytest.mark.parametrize(
    "schema, becomes",
    [
        (NAME, CLOSED),
        ({**NAME, "required": ["name"]}, {**CLOSED, "required": ["name"]}),
        (
            {"properties": {"a": NAME, "b": True}},
            {"properties": {"a": CLOSED, "b": True}, "additionalProperties": False},
        ),
        ({"items": NAME}, {"items": CLOSED}),
        ({"prefixItems": [NAME, {}]}, {"prefixItems": [CLOSED, {}]}),
        ({"$ref": "#/$defs/n", "$defs": {"n": NAME}}, {"$ref": "#/$defs/n", "$defs": {"n": CLOSED}}),
        ({"anyOf": [NAME, {"type": "null"}]}, {"anyOf": [CLOSED, {"type": "null"}]}),
        ({"additionalProperties": NAME}, {"additionalProperties": CLOSED}),
    ],
)
def test_closed(schema, becomes):
    before = json.dumps(schema)
    assert closed(schema) == becomes
    assert json.dumps(schema) == before, "the schema of the caller is left alone"


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {"properties": {}},
        {**NAME, "additionalProperties": True},
        {**NAME, "additionalProperties": {"type": "integer"}},
        {**NAME, "required": ["other"]},
        {**NAME, "minProperties": 2},
        {**NAME, "patternProperties": {"^x": {}}},
        {"allOf": [NAME, {"properties": {"age": {"type": "integer"}}}]},
        {
            "oneOf": [
                {**NAME, "required": ["name"]},
                {"properties": {"name": {}, "age": {}}, "required": ["name", "age"]},
            ]
        },
        {**NAME, "anyOf": [{"properties": {"age": {}}}]},
        {"required": ["age"], "anyOf": [NAME]},
        {**NAME, "$ref": "#/$defs/more", "$defs": {"more": {}}},
        {"properties": {"a": NAME, "b": {"not": {}}}},
        {"const": NAME},
        {"enum": [NAME], "default": NAME, "examples": [NAME]},
        nested(MAX_DEPTH + 1),
    ],
    ids=str,
)
def test_left_open(schema):
    assert closed(schema) == schema


NONE = {"type": "object", "properties": {}}


@pytest.mark.parametrize("schema", [NONE, {**NONE, "required": []}, {"properties": {}, "$defs": {"n": NAME}}])
def test_arguments_without_properties_are_none(schema):
    assert closed_arguments(schema)["additionalProperties"] is False


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {**NONE, "required": ["name"]},
        {**NONE, "additionalProperties": True},
        {**NONE, "minProperties": 1},
        {**NONE, "patternProperties": {"^x": {}}},
        {**NONE, "anyOf": [NAME]},
    ],
    ids=str,
)
def test_arguments_left_open(schema):
    assert closed_arguments(schema) == closed(schema)


@pytest.mark.parametrize("field", ["response_format", "structured_outputs", "structured_outputs as text", "tools"])
def test_an_answer_has_what_the_schema_lists_and_ends(bundled_server, field):
    """Open, all but a few of these would be cut: the model goes on with properties of its own making."""
    grade = {"type": "object", "properties": {"grade": {"enum": ["a", "b"]}, "year": {"enum": [1, 2]}}}
    function = {"name": "f", "parameters": grade}
    asked = {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": grade}},
        "structured_outputs": {"json": grade},
        "structured_outputs as text": {"json": json.dumps(grade)},
        "tools": [{"type": "function", "function": function}],
    }[field]
    forced = {"tool_choice": "required", "parallel_tool_calls": False} if field == "tools" else {}
    with openai.OpenAI(base_url=f"{bundled_server}/v1", api_key="none", max_retries=0) as api:
        answer = api.chat.completions.create(
            model="pageserve",
            messages=[{"role": "user", "content": "Which grade?"}],
            n=8,
            max_tokens=80,
            seed=1,
            extra_body={field.split()[0]: asked, **forced},
        )
    assert len(answer.choices) == 8
    for choice in answer.choices:
        assert choice.finish_reason in ("stop", "tool_calls")
        text = choice.message.tool_calls[0].function.arguments if field == "tools" else choice.message.content
        jsonschema.validate(json.loads(text), {**grade, "additionalProperties": False})


def test_a_forced_call_of_a_function_without_arguments_has_none(bundled_server):
    """Open, one of these calls in 25 has names that the model made up, with which the client's code fails."""
    tool = {"type": "function", "function": {"name": "now", "description": "d", "parameters": NONE}}
    with openai.OpenAI(base_url=f"{bundled_server}/v1", api_key="none", max_retries=0) as api:
        answer = api.chat.completions.create(
            model="pageserve",
            messages=[{"role": "user", "content": "Hi"}],
            tools=[tool],
            tool_choice={"type": "function", "function": {"name": "now"}},
            n=100,
            max_tokens=80,
            seed=1,
        )
    calls = [call for choice in answer.choices for call in choice.message.tool_calls]
    assert len(calls) == 100 and all(json.loads(call.function.arguments) == {} for call in calls)

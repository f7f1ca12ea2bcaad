"""Schemas with values that no grammar can enforce, as MCP servers and the Vercel AI SDK send them, on every route."""

import json

import httpx
import pytest

MODEL = "pageserve"
ZOD_EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
MAIL = {
    "type": "object",
    "properties": {
        "email": {"type": "string", "format": "email", "pattern": ZOD_EMAIL},
        "n": {"type": "integer", "minimum": -9223372036854775808, "maximum": 9},
        "note": {"type": "string", "maxLength": 9007199254740991},
        "score": {"type": "number", "minimum": -3.4028234663852886e38},
    },
    "required": ["n"],
    "additionalProperties": False,
}
TRUE_OR_FALSE = {"type": "object", "properties": {"now": {"type": "boolean"}}, "required": ["now"]}
USER = [{"role": "user", "content": "hi"}]
CHAT, COMPLETIONS, MESSAGES, RESPONSES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/messages",
    "/v1/responses",
)
BODIES = {
    CHAT: {"messages": USER, "max_tokens": 60},
    COMPLETIONS: {"prompt": "hi", "max_tokens": 60},
    MESSAGES: {"messages": USER, "max_tokens": 60},
    RESPONSES: {"input": "hi", "max_output_tokens": 60},
}
CHOICES = [{"tool_choice": "required"}, {"parallel_tool_calls": False}]
ANTHROPIC_CHOICES = [
    {"tool_choice": {"type": "any"}},
    {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
]


def function(name, parameters, strict=False):
    return {"type": "function", "function": {"name": name, "parameters": parameters, "strict": strict}}


def flat_function(name, parameters, strict=False):
    return {"type": "function", "name": name, "parameters": parameters, "strict": strict}


def response_format(schema, **more):
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "mail", "schema": schema, **more}}}


OK = function("ok", TRUE_OR_FALSE)
LENIENT = [
    *[(CHAT, {"tools": [OK, function("mail", MAIL)], **choice}) for choice in CHOICES],
    (CHAT, {"tools": [function("ok", TRUE_OR_FALSE, strict=True), function("mail", MAIL)]}),
    (CHAT, {"tools": [function("mail", MAIL)], **response_format(MAIL)}),
    (CHAT, response_format(MAIL)),
    (CHAT, response_format(MAIL, strict=False)),
    (COMPLETIONS, response_format(MAIL)),
    *[(RESPONSES, {"tools": [flat_function("mail", MAIL)], **choice}) for choice in CHOICES],
    (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "mail", "schema": MAIL}}}),
    *[(MESSAGES, {"tools": [{"name": "mail", "input_schema": MAIL}], **choice}) for choice in ANTHROPIC_CHOICES],
]
WHERE = "properties.email.pattern"
STRICT = [
    (CHAT, {"tools": [OK, function("mail", MAIL, strict=True)]}, f"tools[1].function.parameters.{WHERE}"),
    (CHAT, response_format(MAIL, strict=True), f"response_format.json_schema.schema.{WHERE}"),
    (
        CHAT,
        {"tools": [OK], **response_format(MAIL, strict=True)},
        f"response_format.json_schema.schema.{WHERE}",
    ),
    (COMPLETIONS, {"structured_outputs": {"json": MAIL}}, f"structured_outputs.json.{WHERE}"),
    (RESPONSES, {"tools": [flat_function("mail", MAIL, strict=True)]}, f"tools[0].parameters.{WHERE}"),
    (
        RESPONSES,
        {"text": {"format": {"type": "json_schema", "name": "mail", "schema": MAIL, "strict": True}}},
        f"text.format.schema.{WHERE}",
    ),
    (
        MESSAGES,
        {"tools": [{"name": "mail", "input_schema": MAIL, "strict": True}]},
        f"tools[0].input_schema.{WHERE}",
    ),
    (
        MESSAGES,
        {"output_config": {"format": {"type": "json_schema", "schema": MAIL}}},
        f"output_config.format.schema.{WHERE}",
    ),
]


@pytest.fixture(scope="module")
def post(bundled_server):
    with httpx.Client(base_url=bundled_server, timeout=120) as http:
        yield lambda path, fields: http.post(path, json={"model": MODEL, **BODIES[path], **fields})


@pytest.mark.parametrize("path, fields", LENIENT, ids=lambda value: value if isinstance(value, str) else "")
def test_without_strict_such_values_are_ignored(post, path, fields):
    response = post(path, fields)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("path, fields, param", STRICT, ids=lambda value: value if isinstance(value, str) else "")
def test_with_strict_the_error_names_the_place(post, path, fields, param):
    response = post(path, fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error.get("param", param) == param and error["message"].startswith(f"{param}: ")
    assert f"$.{WHERE}: look-around" in error["message"] and "function" not in error["message"].removeprefix(param)
    assert len(response.content) < 700


def test_the_rest_of_the_schema_holds(post):
    mail = {"type": "string", "pattern": ZOD_EMAIL, "maxLength": 4}
    schema = MAIL | {"properties": MAIL["properties"] | {"email": mail}, "required": ["email", "n"]}
    choices = []
    for seed in range(4):
        fields = response_format(schema) | {"temperature": 1.5, "seed": seed, "max_tokens": 200}
        [choice] = post(CHAT, fields).json()["choices"]
        choices.append(choice)
    assert [choice["finish_reason"] for choice in choices] == ["stop"] * 4
    for choice in choices:
        value = json.loads(choice["message"]["content"])
        assert value.keys() <= MAIL["properties"].keys() and type(value["n"]) is int and value["n"] <= 9
        assert len(value["email"]) <= 4


@pytest.mark.parametrize("pattern", [r"^\p{L}+$", r"^(?<y>\d{4})$"])
@pytest.mark.parametrize("strict", [False, True])
def test_response_format_takes_the_patterns_that_tools_take(post, pattern, strict):
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": pattern}}, "required": ["a"]}
    for fields in (
        response_format(schema, strict=strict),
        {"tools": [function("f", schema, strict)], "tool_choice": "required"},
    ):
        response = post(CHAT, fields)
        assert response.status_code == 200, response.text


def test_overlapping_alternatives_are_sent_to_any_of(post):
    schema = {"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}
    error = post(CHAT, response_format(schema, strict=True)).json()["error"]
    assert error["param"] == "response_format.json_schema.schema.oneOf" and "use anyOf" in error["message"]
    assert post(CHAT, response_format(schema)).status_code == 200

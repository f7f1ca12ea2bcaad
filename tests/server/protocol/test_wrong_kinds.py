"""Every value of rich requests, replaced by one of another kind: a 400 or an answer, never a 500."""

import copy
import json

import pytest

from tests.server.in_process import InProcessClient
from tests.server.live import JSON, MODEL, LiveServer

FUNCTION = {"name": "f", "description": "", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CHAT = {
    "max_tokens": 2,
    "messages": [
        {"role": "system", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": "a"},
        {"role": "user", "content": "a"},
    ],
    "tools": [{"type": "function", "function": FUNCTION}],
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "boolean"}}},
    "stream_options": {"include_usage": True},
    "stream": True,
    "logit_bias": {"5": 1},
    "chat_template_kwargs": {"a": 1},
}
RESPONSE = {
    "max_output_tokens": 2,
    "instructions": "a",
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "a"}], "encrypted_content": None},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "a"}]},
        {"type": "custom_tool_call", "call_id": "d", "name": "g", "input": "a"},
        {"type": "custom_tool_call_output", "call_id": "d", "output": "a"},
        {"role": "user", "content": "a"},
    ],
    "tools": [
        {"type": "function", **FUNCTION},
        {"type": "custom", "name": "g", "format": {"type": "grammar", "syntax": "regex", "definition": "a"}},
        {"type": "namespace", "name": "n", "description": "", "tools": [{"type": "function", **FUNCTION}]},
        {"type": "web_search"},
    ],
    "tool_choice": {"type": "function", "name": "f"},
    "text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "boolean"}}},
    "reasoning": {"effort": "low"},
    "include": ["reasoning.encrypted_content"],
}
MESSAGE = {
    "max_tokens": 2,
    "system": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}}]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "a"}]}],
        },
    ],
    "tools": [{"name": "f", "description": "", "input_schema": FUNCTION["parameters"], "defer_loading": False}],
    "tool_choice": {"type": "tool", "name": "f"},
    "thinking": {"type": "disabled"},
    "context_management": {
        "edits": [
            {"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 1}},
            {"type": "clear_tool_uses_20250919", "trigger": {"type": "input_tokens", "value": 9}, "keep": None},
        ]
    },
    "metadata": {"user_id": "a"},
}
COMPLETION = {"prompt": ["a"], "max_tokens": 2, "structured_outputs": {"json": {"type": "boolean"}}, "stop": ["b"]}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [CHAT["tools"][0]]}}
ALLOWED["allowed_tools"]["tools"] = [{"type": "function", "function": {"name": "f"}}]
RESPONSES_ALLOWED = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]}
BODIES = {
    "chat": ("/v1/chat/completions", CHAT),
    "chat with allowed tools": ("/v1/chat/completions", CHAT | {"tool_choice": ALLOWED, "response_format": None}),
    "response": ("/v1/responses", RESPONSE),
    "response with allowed tools": ("/v1/responses", RESPONSE | {"tool_choice": RESPONSES_ALLOWED}),
    "message": ("/v1/messages", MESSAGE),
    "completion": ("/v1/completions", COMPLETION),
}
OTHERS = (None, 1.5, "x", [{}], {"type": {}})


@pytest.fixture(scope="module")
def client(folder):
    with LiveServer(folder, "--max-model-len", "4096", engine={"num_blocks": 1024}) as live:
        yield InProcessClient(live)


def places(value, path=()):
    """The path of each value in a body."""
    for key, child in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield (*path, key)
        yield from places(child, (*path, key))


def changed(body, path, value):
    """A copy of `body` with `value` at `path`."""
    found = place = copy.deepcopy(body)
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return found


def post(client, path, body):
    return client.post(path, json.dumps({"model": MODEL} | body), JSON)


@pytest.mark.parametrize("name", BODIES)
def test_a_value_of_another_kind_is_answered_or_refused(client, name):
    path, body = BODIES[name]
    assert (response := post(client, path, body)).status_code == 200, response.text
    changing = [place for place in places(body) if "allowed" not in name or place[0] == "tool_choice"]
    for place in changing:
        for other in OTHERS:
            response = post(client, path, changed(body, place, other))
            assert response.status_code in (200, 400), (place, other, response.text)
            assert response.status_code == 200 or response.json()["error"]["message"]

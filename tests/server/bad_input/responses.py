"""Bad fields of /v1/responses."""

from tests.server.bad_input.table import LONG, Bad, rows

FUNCTION = {"type": "function", "name": "f"}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
CUSTOM = {"type": "custom", "name": "c"}
CUSTOM_CALL = {"type": "custom_tool_call", "call_id": "c", "name": "c", "input": "x"}
LARK = {"type": "grammar", "syntax": "lark", "definition": 'start: "a"'}
NAMESPACE = {"type": "namespace", "name": "n", "description": "more of them", "tools": [FUNCTION]}
WEB_SEARCH = {"type": "web_search", "external_web_access": True}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "x"}
TOOL = {
    "type": "function",
    "name": "find",
    "description": "finds animals",
    "parameters": {
        "type": "object",
        "properties": {"animal": {"enum": ["fox", "cat"]}},
        "required": ["animal"],
        "additionalProperties": False,
    },
}

# (fields, place that the error names)
STORE = [
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"background": True}, "background"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
]
LACKS = [{"context_management": [{"type": "compaction"}]}, {"moderation": {}}]
FIELDS = [
    ({"input": None}, "input"),
    ({"input": 1}, "input"),
    ({"input": []}, "input"),
    ({"input": ["x"]}, "input[0]"),
    ({"input": [{"content": "x"}]}, "input[0].type"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": "x", "extra": 1}]}, "input[0].extra"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
    ({"input": [{"type": "unheard_of", "id": 5}]}, "input[0].type"),
    ({"input": [CUSTOM_CALL | {"input": 5}]}, "input[0].input"),
    ({"input": [CALL | {"namespace": ""}]}, "input[0].namespace"),
    ({"input": [{"type": "local_shell_call", "call_id": "c", "action": "ls"}]}, "input[0].action"),
    ({"input": [{"type": "shell_call", "action": {}}]}, "input[0].id"),
    ({"input": [{"type": "shell_call_output", "call_id": "c", "output": 5}]}, "input[0].output"),
    ({"input": [{"type": "additional_tools", "tools": 5}]}, "input[0].tools"),
    ({"input": [{"type": "additional_tools", "tools": [FUNCTION, {"type": "x"}]}]}, "input[0].tools[1].type"),
    ({"input": [{"type": "additional_tools", "tools": [FUNCTION | {"x": 1}]}]}, "input[0].tools[0].x"),
    ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
    ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
    ({"input": [CALL | {"arguments": {}}]}, "input[0].arguments"),
    ({"input": [CALL | {"name": ""}]}, "input[0].name"),
    ({"input": [CALL | {"call_id": "c" * 257}]}, "input[0].call_id"),
    ({"input": [CALL | {"caller": {"type": "program", "caller_id": "p"}}]}, "input[0].caller"),
    ({"input": [CALL | {"id": 5}]}, "input[0].id"),
    ({"input": [CALL] * 129}, "input", "input has more than 128 calls in one turn: leave some out."),
    ({"input": [CALL, OUTPUT | {"status": "done"}]}, "input[1].status"),
    ({"input": [{"role": "assistant", "content": "x", "phase": 1}]}, "input[0].phase"),
    ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": 5}]}, "input[0].encrypted_content"),
    ({"input": [{"type": "reasoning", "summary": [{"type": "x"}]}]}, "input[0].summary[0]"),
    ({"instructions": ["x"]}, "instructions"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": 600}, "max_output_tokens"),
    ({"max_tokens": 5}, "max_tokens"),
    ({"n": 2}, "n"),
    ({"temperature": 2.5}, "temperature"),
    ({"top_p": 2}, "top_p"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"include": ["everything"]}, "include[0]"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": 1}}}}, "text.format"),
    ({"text": {"verbosity": "loud"}}, "text.verbosity"),
    ({"tools": [{"type": "unheard_of", "x": 1}]}, "tools[0].type"),
    ({"tools": [{"x": 1}]}, "tools[0].type"),
    ({"tools": ["web_search"]}, "tools[0]"),
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    (
        {"tools": [{"type": "shell", "environment": {"type": "local", "skills": [{}]}}]},
        "tools[0].environment.skills",
    ),
    ({"tools": [{"type": "custom", "name": "c", "format": {"type": "x"}}]}, "tools[0].format.type"),
    ({"tools": [FUNCTION, CUSTOM | {"format": LARK | {"definition": "start: <a>"}}]}, "tools[1].format.definition"),
    ({"tools": [NAMESPACE | {"tools": [FUNCTION, {"type": "shell"}]}]}, "tools[0].tools[1].type"),
    ({"tools": [NAMESPACE | {"tools": [FUNCTION, FUNCTION]}]}, "tools[0].tools[1].name"),
    (
        {"tools": [NAMESPACE | {"tools": [FUNCTION | {"parameters": {"type": "array"}}]}]},
        "tools[0].tools[0].parameters.type",
    ),
    ({"tools": [NAMESPACE | {"tools": [FUNCTION | {"name": f"f{i}"} for i in range(1024)]}, FUNCTION]}, "tools"),
    ({"tools": [FUNCTION | {"name": "x" * 129}]}, "tools[0].name"),
    ({"tools": [WEB_SEARCH], "tool_choice": "required"}, "tool_choice"),
    ({"tools": [FUNCTION, WEB_SEARCH], "tool_choice": {"type": "web_search_preview"}}, "tool_choice"),
    ({"tools": [FUNCTION, WEB_SEARCH], "tool_choice": {"type": "mcp", "server_label": "x"}}, "tool_choice"),
    ({"tools": [FUNCTION], "tool_choice": {"type": "unheard_of"}}, "tool_choice.type"),
    ({"tools": [FUNCTION], "tool_choice": {"type": "custom", "name": "f"}}, "tool_choice"),
    ({"tools": [FUNCTION], "tool_choice": {"type": "shell", "name": "f"}}, "tool_choice.name"),
    (
        {
            "tools": [FUNCTION],
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [FUNCTION, {"type": "namespace", "name": "n"}],
            },
        },
        "tool_choice.tools[1]",
    ),
    ({"client_metadata": {"a": 1}}, "client_metadata.a"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "name": "f", "strict": True}}, "tool_choice.strict"),
    (
        {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [FUNCTION | {"x": 1}]}},
        "tool_choice.tools[0].x",
    ),
    ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [FUNCTION], "x": 1}}, "tool_choice.x"),
    ({"max_tool_calls": 0}, "max_tool_calls"),
    ({"reasoning": {"summary": "long"}}, "reasoning.summary"),
    ({"reasoning": {"context": "none"}}, "reasoning.context"),
    ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
    ({"truncation": "middle"}, "truncation"),
    ({"metadata": {"a": 1}}, "metadata.a"),
    ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
    ({"service_tier": "first"}, "service_tier"),
    ({"stream_options": {}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": True}}, "stream_options.include_usage"),
    ({"unheard_of": 1}, "unheard_of"),
]

TOOL_ROWS = [
    ({"tools": [TOOL, TOOL]}, "tools[1].name"),
    ({"tools": [TOOL | {"name": "a b"}]}, "tools[0].name"),
    ({"tools": [TOOL | {"parameters": {"type": "array"}}]}, "tools[0].parameters.type"),
    ({"tools": [TOOL | {"strict": "yes"}]}, "tools[0].strict"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice.name"),
    ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice.tools"),
]

RESPONSES = [
    *[Bad(fields, param, "this server stores nothing") for fields, param in STORE],
    *[Bad(fields, code="unsupported_value") for fields in LACKS],
    *rows(FIELDS),
    *rows(TOOL_ROWS),
    *[Bad({field: LONG}, field) for field in ("user", "safety_identifier", "prompt_cache_key")],
]
